"""The training loop. It yields records and prints nothing."""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from os import PathLike
from typing import Any

import numpy as np

from smallmind import safetensors
from smallmind.config import (
    OBSERVING,
    InputError,
    Precision,
    RunConfig,
    TrainingConfig,
    __version__,
)
from smallmind.memory.tracker import peak_resident_bytes, resident_bytes
from smallmind.nn.recompute import CheckpointManager
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.schedule import Schedule, schedule
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import Checkpoint, new_directory
from smallmind.training.clock import StepClock
from smallmind.training.diagnostics import checked_update, instrument, not_finite
from smallmind.training.distillation import Distillation
from smallmind.training.evaluation import evaluate_parts
from smallmind.training.profiler import TrainingProfiler
from smallmind.training.records import (
    EarlyStopRecord,
    EvaluationRecord,
    OverflowRecord,
    Record,
    RollbackRecord,
    RunProgress,
    SaveRecord,
    StepRecord,
)
from smallmind.training.saving import SaveFailedRecord, saved_steps
from smallmind.training.spikes import SNAPSHOT_EVERY, Spikes, without_snapshot


class _Stopped(Exception):
    """The run is to end, in the middle of an evaluation."""


class Training:
    """Trains model on text, whose last tenth is held out.

    Batches of batch_size windows of block_size tokens are drawn by seed. With distillation the
    model learns from its teacher too, and the loss of a step is that of Distillation. InputError
    where the text is shorter than a window or has characters that the tokenizer does not know, or
    the teacher is none for this model.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        text: str,
        block_size: int | None = None,
        batch_size: int = 12,
        seed: int = 1337,
        distillation: Distillation | None = None,
    ) -> None:
        run = RunConfig(batch_size=batch_size, seed=seed)
        self.model = model
        self.tokenizer = tokenizer
        block_size = model.config.block_size if block_size is None else block_size
        if block_size > model.config.block_size:
            raise InputError(
                f"block_size={block_size} must be at most the model's, {model.config.block_size}"
            )
        if tokenizer.vocab_size > model.config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model only "
                f"vocab_size={model.config.vocab_size}"
            )
        self.dataset = Dataset(tokenizer.encode(text), block_size, run.batch_size, run.seed)
        self.distillation = distillation
        if distillation:
            distillation.prepare(model, self.dataset)
        # Those of the last run.
        self.progress = RunProgress()
        self.config = TrainingConfig().with_min_lr()
        self.optimizer = AdamW(model)
        self.schedule: Schedule = schedule(self.config)
        self.scaler: LossScaler | None = None  # where it was in float16
        self.spikes = Spikes(self.config.max_rollbacks)
        self._stopping = False
        self.profiler = TrainingProfiler()  # of those that enable_diagnostics measures

    def steps(
        self,
        config: TrainingConfig,
        checkpoint: Checkpoint | None = None,
        until: int | None = None,
    ) -> Generator[Record, None, None]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        From checkpoint on, where it is given, as if the run had never been broken off. A SaveRecord
        is yielded when it is time to save one. The caller may stop whenever it likes; with `until`
        the run is stopped after that step.

        With `check_gradient_health` there is a HealthRecord at the first step and every
        `diagnostic_interval` steps; with `enable_diagnostics`, a report in `profiler`.

        A loss that spikes takes the run back to a state from before it, at half the learning rate
        and without that batch; there is a RollbackRecord.

        FloatingPointError where `max_rollbacks` did not help, where the gradient alone is not
        finite, or in float16 where no scale of the loss keeps it finite; the weights are then those
        before that step. InputError where the checkpoint is another run's.
        """
        self._begin(self.with_step_count(config).with_min_lr())
        if checkpoint:
            self._restore(checkpoint)
        rows = self.dataset.batch_size
        rows = min(rows, self.dataset.epoch_windows) if config.epochs else rows
        shape, pool = (rows, self.dataset.block_size), self.model.workspace.pool
        with (
            pool.borrow(shape, np.int32) as ids,
            pool.borrow(shape, np.int32) as targets,
            instrument(self.model, config, self.profiler),
        ):
            yield from self._steps((ids, targets), until)

    def with_step_count(self, config: TrainingConfig) -> TrainingConfig:
        """The same with the number of steps that its epochs come to, where it has some."""
        if not config.epochs:
            return config
        a_time = self.dataset.epoch_steps(config.grad_accum_steps)
        return dataclasses.replace(config, steps=config.epochs * a_time)

    def stop(self) -> None:
        """Ends the run that is under way after the batch that it is in; from any thread."""
        self._stopping = True

    def checkpoint(self) -> Checkpoint:
        """Everything that this run goes on from. The next step changes its tensors."""
        model, optimizer, config = self.model, self.optimizer, dataclasses.asdict(self.config)
        tensors = {f"model.{name}": value for name, value in model.parameters.items()}
        tensors |= {"optimizer.m": optimizer.m, "optimizer.v": optimizer.v}
        state = {
            "progress": dataclasses.asdict(self.progress),
            "optimizer": {"steps": optimizer.steps},
            "schedule": self.schedule.state(),
            "scaler": self.scaler and self.scaler.state(),
            "spikes": self.spikes.state(),
            "passes": model.passes,
            "config": {name: value for name, value in config.items() if name not in OBSERVING},
            "model": dataclasses.asdict(model.config),
            "data": {"batch_size": self.dataset.batch_size, "seed": self.dataset.seed},
            "tokenizer": self.tokenizer.state(),
            "teacher": self.distillation and self.distillation.settings(),
            "temperature": self.distillation and self.distillation.state(),
            "smallmind": __version__,
        }
        return self.spikes.with_snapshot(Checkpoint(self.progress.step, tensors, state))

    def _begin(self, config: TrainingConfig) -> None:
        model = self.model
        self.config, self.progress, self._stopping = config, RunProgress(), False
        self.optimizer = AdamW(
            model, config.learning_rate, (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        model.use_checkpointing(
            CheckpointManager.of(config.recompute, model.config.n_layer, config.checkpoint_interval)
        )
        model.micro_batch_size = config.micro_batch_size
        model.use_precision(config.requested_precision)
        self.scaler = LossScaler() if model.precision == Precision.FLOAT16 else None
        self.schedule = schedule(config)
        self.spikes = Spikes(config.max_rollbacks)
        model.zero_gradients()

    def _restore(self, checkpoint: Checkpoint) -> None:
        place, here = f"the checkpoint of step {checkpoint.step}", self.checkpoint()
        now, good = without_snapshot(checkpoint)
        for key in ("model", "data", "tokenizer", "config", "teacher"):
            if safetensors.to_json(now.state.get(key)) != safetensors.to_json(here.state[key]):
                raise InputError(f"{place} has another {key}")
        for saved in (now, good or now):
            if {name: value.shape for name, value in saved.tensors.items()} != {
                name: value.shape for name, value in here.tensors.items()
            }:
                raise InputError(f"{place} has other tensors")
        try:
            self._load(now)
            self.spikes.load_state(now.state["spikes"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{place} lacks {error}") from None
        if good:
            self.spikes.keep(good)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Becomes what checkpoint is, of this run; what is known of spikes stays."""
        state, model = checkpoint.state, self.model
        here, _ = without_snapshot(self.checkpoint())
        for name, value in here.tensors.items():
            value[...] = checkpoint.tensors[name]
        model.flat.refresh()
        model.passes = int(state["passes"])
        self.optimizer.steps = int(state["optimizer"]["steps"])
        self.schedule.load_state(state["schedule"])
        if self.scaler:
            self.scaler.load_state(state["scaler"])
        if self.distillation:
            self.distillation.load_state(state["temperature"])
        progress = RunProgress(**state["progress"])
        self.progress = dataclasses.replace(progress, seconds=dict(progress.seconds))

    def _steps(self, batch: Batch, until: int | None) -> Iterator[Record]:
        config, optimizer = self.config, self.optimizer
        last = config.steps if until is None else min(until, config.steps)
        clock = StepClock(self.progress)
        self._saved = self.progress.step
        if self._is_evaluation_due():  # the run was broken off in the middle of it
            yield from self._after_step(clock)
        if not self.spikes.good:
            self.spikes.keep(self.checkpoint())
        while (progress := self.progress).step < last and not progress.ended:
            step = progress.step + 1
            if step in self.spikes.skipped:
                progress.step = step
                yield from self._after_step(clock)
                continue
            loss = self._accumulate(step, config.grad_accum_steps, batch)
            if loss is None:
                break
            if self._is_broken(loss):
                yield from self._roll_back(step, loss)
                clock.restart(self.progress)
                continue
            windows = self.dataset.windows_of(step, config.grad_accum_steps, config.epochs > 0)
            rate = self.schedule.lr(step - 1) * self.spikes.lr_factor
            optimizer.learning_rate = rate
            with checked_update(self.model, config, step, rate, batch, self.scaler) as health:
                norm = self._update()
            if self.distillation and norm is not None:
                self.distillation.step(rate)
            progress.step = step
            clock.count(windows)
            yield from health
            if norm is None:
                assert self.scaler
                yield OverflowRecord(step, self.scaler.scale)
            else:
                self.spikes.observe(loss)
                progress.clipped += 0 < config.max_grad_norm < norm
                if step % config.log_every == 0 or step in (1, config.steps):
                    seconds, windows_per_second = clock.since_last()
                    yield StepRecord(
                        step=step, loss=loss, lr=rate, grad_norm=norm,
                        tokens_per_second=windows_per_second * self.dataset.block_size,
                        elapsed_seconds=progress.seconds["total"], step_ms=1000 * seconds,
                        windows=windows, precision=self.model.precision.value,
                        loss_scale=self.scaler.scale if self.scaler else 1.0,
                        clip_share=progress.clipped / optimizer.steps, memory=resident_bytes(),
                        peak_memory=peak_resident_bytes(),
                    )  # fmt: skip
            yield from self._after_step(clock)
        progress = self.progress
        is_end = progress.ended or progress.step >= config.steps
        if is_end and (broken := self.spikes.keep(self.checkpoint())):
            raise FloatingPointError(f"{broken} has NaN or Inf after step {progress.step}")
        if progress.step > self._saved:
            yield SaveRecord(progress.step)

    def _after_step(self, clock: StepClock) -> Iterator[Record]:
        """Evaluates, keeps and saves, each where it is time to."""
        with clock.evaluating():
            yield from self._evaluation()
        if self._is_evaluation_due():  # and was broken off
            return
        progress, step = self.progress, self.progress.step
        best = progress.best_step == progress.evaluated == step
        save_every = self.config.save_every
        save = best or bool(save_every and step % save_every == 0)
        # What a run is resumed from is what it may go back to: it would do so to the same state.
        if save or step % SNAPSHOT_EVERY == 0:
            self.spikes.keep(self.checkpoint())
        if save:
            self._saved = step
            yield SaveRecord(step, best)

    def _is_evaluation_due(self) -> bool:
        config, step = self.config, self.progress.step
        if not step or not config.val_every or self.progress.evaluated == step:
            return False
        return step % config.val_every == 0 or step == config.steps

    def _evaluation(self) -> Iterator[Record]:
        """Evaluates where it is time to, and says what follows from it."""
        config, progress, step = self.config, self.progress, self.progress.step
        record = self.evaluate(step, config.val_batches) if self._is_evaluation_due() else None
        if record is None:
            return
        self.schedule.observe(record.val_loss)
        progress.evaluated = step
        best = progress.best_loss
        lower = best is None or record.val_loss < best - config.early_stopping_min_delta
        progress.waited = 0 if lower else progress.waited + 1
        if math.isfinite(record.val_loss) and (best is None or record.val_loss < best):
            progress.best_loss, progress.best_step = record.val_loss, step
        yield record
        if 0 < config.early_stopping_patience <= progress.waited and progress.best_loss is not None:
            progress.ended = True
            yield EarlyStopRecord(step, progress.best_step, progress.best_loss)

    def _is_broken(self, loss: float) -> bool:
        """Whether no update is to follow from a loss."""
        if self.config.max_rollbacks:
            return self.spikes.is_spike(loss)
        return not math.isfinite(loss) and not self.scaler  # which skips the update by itself

    def _roll_back(self, step: int, loss: float) -> Iterator[Record]:
        """Back to the last good state, without what was added to the gradients."""
        self.model.zero_gradients()
        average, seconds = self.spikes.average, self.progress.seconds
        try:
            good = self.spikes.go_back(step, loss, is_last=step == self.config.steps)
        except FloatingPointError as error:
            rate = self.config.learning_rate
            raise FloatingPointError(f"{error}: lower the learning rate, now {rate}") from None
        self._load(good)
        self.progress.seconds = seconds
        finite = loss if math.isfinite(loss) else None
        yield RollbackRecord(good.step, step, finite, average, self.spikes.lr_factor)

    def _update(self) -> float | None:
        """-> the norm of the gradient; None where it overflowed, and only the scale has changed."""
        scaler, optimizer = self.scaler, self.optimizer
        scale = scaler.scale if scaler else 1.0
        norm_limit, limit = self.config.max_grad_norm or None, self.config.max_grad_value or None
        try:
            norm = optimizer.step(norm_limit, scale, limit)
        except FloatingPointError:
            if scaler is None:
                raise
            scaler.update(overflowed=True)
            if scaler.is_lost:
                named = not_finite(self.model)
                # Squares leave float32 before what is squared does.
                first = named[0].name if named else "the norm of all gradients"
                raise FloatingPointError(
                    f"{scaler.skips} gradients in a row overflowed float16, down to a loss scale "
                    f"of {scaler.scale:g}; {first} was the first: lower the "
                    "learning rate, or take precision bfloat16 or float32"
                ) from None
            self.model.zero_gradients()
            return None
        if scaler:
            scaler.update(overflowed=False)
        return norm

    def train(self, steps: int, **settings: float | str) -> list[Record]:
        """Trains for `steps` with TrainingConfig's other fields as keywords -> all records."""
        config = TrainingConfig(steps=steps, **settings)  # type: ignore[arg-type]
        return [record for record in self.steps(config) if not isinstance(record, SaveRecord)]

    def train_optimized(
        self,
        steps: int | None = None,
        learning_rate: float | None = None,
        log_every: int | None = None,
        save_every: int | None = None,
        checkpoint_dir: str | PathLike[str] | None = None,
        config: TrainingConfig | None = None,
        grad_accum_steps: int | None = None,
        warmup_steps: int | None = None,
        val_every: int | None = None,
        val_batches: int | None = None,
        min_lr: float | None = None,
        on_record: Callable[[Record | SaveFailedRecord], object] | None = None,
    ) -> list[Record | SaveFailedRecord]:
        """Trains as config says, and where they are given as the other arguments say -> records.

        `checkpoint_dir` gets a directory `checkpoints`, for `training.checkpoint.newest`; without
        it none are saved. on_record is told of each record at once. InputError where checkpoints
        are there already; OSError where the last one cannot be saved.
        """
        given = {
            "steps": steps, "learning_rate": learning_rate, "log_every": log_every,
            "save_every": save_every, "grad_accum_steps": grad_accum_steps,
            "warmup_steps": warmup_steps, "val_every": val_every, "val_batches": val_batches,
            "min_lr": min_lr,
        }  # fmt: skip
        changes: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        config = config or TrainingConfig()
        if config.min_lr == config.learning_rate / 10:
            changes.setdefault("min_lr", None)  # a tenth of whatever the peak is
        config = dataclasses.replace(config, **changes)
        if checkpoint_dir is None:
            records: Iterator[Record | SaveFailedRecord] = self.steps(config)
        else:
            records = saved_steps(self, config, new_directory(checkpoint_dir))
        kept: list[Record | SaveFailedRecord] = []
        for record in records:
            if not isinstance(record, SaveRecord):
                kept.append(record)
                if on_record:
                    on_record(record)
        return kept

    def evaluate(self, step: int, batches: int) -> EvaluationRecord | None:
        """`batches` fixed batches of both parts, or for 0 all that is held out; None: stopped."""
        with self.model.workspace.profile("Evaluate"), suppress(_Stopped):
            return evaluate_parts(
                step, self.model, self.dataset, self._characters_a_token, batches, self._check_stop
            )
        return None

    @functools.cached_property
    def _characters_a_token(self) -> float:
        held_out = self.dataset.held_out
        return max(1, len(self.tokenizer.decode(held_out))) / len(held_out)

    def _check_stop(self) -> None:
        if self._stopping:
            raise _Stopped

    def _accumulate(self, step: int, batches: int, batch: Batch | None = None) -> float | None:
        """Adds the gradients of the step's batches, drawn into batch -> their mean loss.

        Each counts by its windows: all together are one large batch. None, and nothing is changed,
        where the run is stopped before all are in.
        """
        dataset, by_epoch = self.dataset, self.config.epochs > 0
        scale = self.scaler.scale if self.scaler else 1.0
        windows = dataset.windows_of(step, batches, by_epoch)
        total, passes = 0.0, self.model.passes
        if self.distillation:
            self.distillation.zero_gradient()  # that of a step that was stopped, or overflowed
        for number in range((step - 1) * batches, step * batches):
            if self._stopping:
                self.model.zero_gradients()
                self.model.passes = passes
                return None
            with self.model.workspace.profile("GetBatch"):
                if by_epoch:
                    ids, targets = dataset.epoch_batch(number, batches, batch)
                else:
                    ids, targets = dataset.batch(number, batch)
            if len(ids):  # the last update of an epoch may need fewer of them
                share = len(ids) / windows
                total += share * self._loss_and_gradients(number, ids, targets, scale, share)
        return total

    def _loss_and_gradients(
        self, number: int, ids: np.ndarray, targets: np.ndarray, scale: float, share: float
    ) -> float:
        """Adds scale times the share that a batch has in the gradients -> its loss."""
        if not self.distillation:
            return self.model.loss_and_gradients(ids, targets, scale * share)
        if self.config.epochs:
            starts = self.dataset.epoch_starts(number, self.config.grad_accum_steps)
        else:
            starts = self.dataset.starts(number)
        return self.distillation.loss_and_gradients(
            self.model, ids, targets, scale * share, share, starts
        )

"""The training loop. It yields records and prints nothing."""

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
from smallmind.nn.recompute import CheckpointManager
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.schedule import Schedule, schedule
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import Checkpoint
from smallmind.training.diagnostics import HealthRecord, checked_update, not_finite, watched
from smallmind.training.distillation import Distillation
from smallmind.training.profiler import TrainingProfiler


@dataclass(frozen=True)
class StepRecord:
    """One update: loss in nats a token, norm of the gradient before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    elapsed_seconds: float


@dataclass(frozen=True)
class OverflowRecord:
    """A step whose gradient was too large for float16: no update, and a smaller loss scale."""

    step: int
    loss_scale: float


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean losses in nats a token over fixed windows of the training and of the held-out part."""

    step: int
    train_loss: float
    val_loss: float


@dataclass(frozen=True)
class SaveRecord:
    """The moment to save `Training.checkpoint()`; as the best one too, where its loss is."""

    step: int
    best: bool = False


@dataclass(frozen=True)
class EarlyStopRecord:
    """The end of a run whose loss on the held-out part no longer falls."""

    step: int
    best_step: int
    best_loss: float


Record = (
    StepRecord | EvaluationRecord | OverflowRecord | HealthRecord | SaveRecord | EarlyStopRecord
)


@dataclass
class Progress:
    """Where a run is, fit for JSON."""

    step: int = 0  # updates so far, those that overflowed included
    evaluated: int = 0  # the step of the last evaluation
    best_loss: float | None = None  # of all evaluations, on the held-out part
    best_step: int = 0
    waited: int = 0  # evaluations since one that was lower by early_stopping_min_delta
    ended: bool = False  # by early stopping
    seconds: float = 0.0  # of all steps and evaluations


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
        self.progress = Progress()
        self.config = TrainingConfig()
        self.optimizer = AdamW(model)
        self.schedule: Schedule = schedule(self.config)
        self.scaler: LossScaler | None = None  # where it was in float16
        self._stopping = False
        self.profiler = TrainingProfiler()  # of those that enable_diagnostics measures

    def steps(
        self,
        config: TrainingConfig,
        checkpoint: Checkpoint | None = None,
        until: int | None = None,
    ) -> Iterator[Record]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        From checkpoint on, where it is given, as if the run had never been broken off. A SaveRecord
        is yielded when it is time to save one. The caller may stop whenever it likes; with `until`
        the run is stopped after that step.

        With `check_gradient_health` there is a HealthRecord at the first step and every
        `diagnostic_interval` steps; with `enable_diagnostics`, a report in `profiler`.

        FloatingPointError where the loss is not finite, or in float16 where no scale of it keeps
        the gradient finite; the weights are then those before that step. InputError where the
        checkpoint is another run's.
        """
        self._begin(config)
        if checkpoint:
            self._restore(checkpoint)
        shape, pool = (self.dataset.batch_size, self.dataset.block_size), self.model.workspace.pool
        with (
            pool.borrow(shape, np.int32) as ids,
            pool.borrow(shape, np.int32) as targets,
            watched(self.model, config, self.profiler),
        ):
            yield from self._steps((ids, targets), until)

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
            "passes": model.passes,
            "config": {name: value for name, value in config.items() if name not in OBSERVING},
            "model": dataclasses.asdict(model.config),
            "data": {"batch_size": self.dataset.batch_size, "seed": self.dataset.seed},
            "tokenizer": self.tokenizer.state(),
            "teacher": self.distillation and self.distillation.settings(),
            "temperature": self.distillation and self.distillation.state(),
            "smallmind": __version__,
        }
        return Checkpoint(self.progress.step, tensors, state)

    def _begin(self, config: TrainingConfig) -> None:
        model = self.model
        self.config, self.progress, self._stopping = config, Progress(), False
        self.optimizer = AdamW(
            model, config.learning_rate, (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )  # fmt: skip
        model.use_checkpointing(
            CheckpointManager.of(config.recompute, model.config.n_layer, config.checkpoint_interval)
        )
        model.windows_at_once = config.windows_at_once
        model.use_precision(config.storage)
        self.scaler = LossScaler() if model.precision == Precision.FLOAT16 else None
        self.schedule = schedule(config)
        model.zero_gradients()

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, state, model = checkpoint.tensors, checkpoint.state, self.model
        here = self.checkpoint()
        for key in ("model", "data", "tokenizer", "config", "teacher"):
            if safetensors.to_json(state.get(key)) != safetensors.to_json(here.state[key]):
                raise InputError(f"the checkpoint of step {checkpoint.step} has another {key}")
        if {name: value.shape for name, value in tensors.items()} != {
            name: value.shape for name, value in here.tensors.items()
        }:
            raise InputError(f"the checkpoint of step {checkpoint.step} has other tensors")
        for name, value in here.tensors.items():
            value[...] = tensors[name]
        model.flat.refresh()
        try:
            model.passes = int(state["passes"])
            self.optimizer.steps = int(state["optimizer"]["steps"])
            self.schedule.load_state(state["schedule"])
            if self.scaler:
                self.scaler.load_state(state["scaler"])
            if self.distillation:
                self.distillation.load_state(state["temperature"])
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the checkpoint of step {checkpoint.step} lacks {error}") from None

    def _steps(self, batch: Batch, until: int | None) -> Iterator[Record]:
        config, progress, optimizer = self.config, self.progress, self.optimizer
        last = config.steps if until is None else min(until, config.steps)
        tokens_per_step = batch[0].size * config.grad_accum_steps
        start = time.perf_counter() - progress.seconds
        last_time = time.perf_counter()
        last_step = saved = progress.step
        yield from self._evaluation()  # a run may have been broken off in the middle of it
        while progress.step < last and not progress.ended:
            step = progress.step + 1
            loss = self._accumulate(step, config.grad_accum_steps, batch)
            if loss is None:
                break
            if not math.isfinite(loss) and not self.scaler:
                raise FloatingPointError(
                    f"the loss became {loss} at step {step}: lower the learning rate, "
                    f"now {config.learning_rate}"
                )
            rate = optimizer.learning_rate = self.schedule.lr(step - 1)
            with checked_update(self.model, config, step, rate, batch, self.scaler) as health:
                norm = self._update(config.max_grad_norm or None)
            if self.distillation and norm is not None:
                self.distillation.step(rate, config.grad_accum_steps)
            progress.step = step
            now = time.perf_counter()
            progress.seconds = now - start
            yield from health
            if norm is None:
                assert self.scaler
                yield OverflowRecord(step, self.scaler.scale)
            elif step % config.log_every == 0 or step in (1, config.steps):
                seconds = now - last_time  # none, where the clock was set back
                speed = (step - last_step) * tokens_per_step / seconds if seconds > 0 else 0.0
                yield StepRecord(step, loss, rate, norm, speed, progress.seconds)
                last_time, last_step = now, step
            before = time.perf_counter()
            yield from self._evaluation()
            last_time += time.perf_counter() - before
            best = progress.best_step == progress.evaluated == step
            if best or (config.save_every and step % config.save_every == 0):
                yield SaveRecord(step, best)
                saved = step
        if progress.step > saved:
            yield SaveRecord(progress.step)

    def _evaluation(self) -> Iterator[Record]:
        """Evaluates where it is time to, and says what follows from it."""
        config, progress, step = self.config, self.progress, self.progress.step
        is_due = config.val_every and (step % config.val_every == 0 or step == config.steps)
        if not step or not is_due or progress.evaluated == step:
            return
        record = self.evaluate(step, config.val_batches)
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

    def _update(self, max_grad_norm: float | None) -> float | None:
        """-> the norm of the gradient; None where it overflowed, and only the scale has changed."""
        scaler, optimizer = self.scaler, self.optimizer
        if scaler is None:
            return optimizer.step(max_grad_norm)
        try:
            norm = optimizer.step(max_grad_norm, scaler.scale)
        except FloatingPointError:
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
        scaler.update(overflowed=False)
        return norm

    def train(self, steps: int, **settings: float | str) -> list[Record]:
        """Trains for `steps` with TrainingConfig's other fields as keywords -> all records."""
        config = TrainingConfig(steps=steps, **settings)  # type: ignore[arg-type]
        return [record for record in self.steps(config) if not isinstance(record, SaveRecord)]

    def evaluate(self, step: int, batches: int) -> EvaluationRecord | None:
        """Mean losses over `batches` fixed batches of each part; None where the run is stopped."""
        means = []
        with self.model.workspace.profile("Evaluate"):
            for part in ("train", "held_out"):
                total = 0.0
                for i in range(batches):
                    if self._stopping:
                        return None
                    total += self.model.loss(*self.dataset.evaluation_batch(part, i))
                means.append(total / batches)
        return EvaluationRecord(step, *means)

    def _accumulate(self, step: int, batches: int, batch: Batch | None = None) -> float | None:
        """Adds the gradients of the step's batches, drawn into batch -> their mean loss.

        None, and nothing is changed, where the run is stopped before all are in.
        """
        scale = (self.scaler.scale if self.scaler else 1.0) / batches
        total, passes = 0.0, self.model.passes
        if self.distillation:
            self.distillation.zero_gradient()  # that of a step that was stopped, or overflowed
        for i in range(batches):
            if self._stopping:
                self.model.zero_gradients()
                self.model.passes = passes
                return None
            with self.model.workspace.profile("GetBatch"):
                ids, targets = self.dataset.batch((step - 1) * batches + i, batch)
            total += self._loss_and_gradients((step - 1) * batches + i, ids, targets, scale)
        return total / batches

    def _loss_and_gradients(
        self, number: int, ids: np.ndarray, targets: np.ndarray, scale: float
    ) -> float:
        """Adds the gradients of scale times the loss of a batch -> the loss."""
        if not self.distillation:
            return self.model.loss_and_gradients(ids, targets, scale)
        starts = self.dataset.starts(number)
        return self.distillation.loss_and_gradients(self.model, ids, targets, scale, starts)

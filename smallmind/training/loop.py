"""The training loop. It yields records and prints nothing."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import activity
from smallmind.checks import InputError, check_field, check_type
from smallmind.config import ModelConfig, Precision, TrainingConfig
from smallmind.memory.tracker import peak_resident_bytes, resident_bytes
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.optimizer import Optimizer
from smallmind.optim.schedule import Schedule
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.samplers import Epochs, Sampler, make_sampler
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import BackgroundSaver, Saver, new_directory, newest
from smallmind.training.clock import StepClock
from smallmind.training.distillation import Distillation
from smallmind.training.evaluation import count_evaluation, evaluate_parts, evaluation_is_due
from smallmind.training.health import checked_update, instrument
from smallmind.training.live_state import LiveState, saved_precision
from smallmind.training.profiler import TrainingProfiler
from smallmind.training.progress import progress_line
from smallmind.training.records import (
    EvaluationRecord,
    InstructionSetRecord,
    OverflowRecord,
    Record,
    RollbackRecord,
    RunProgress,
    SaveFailedRecord,
    StepRecord,
)
from smallmind.training.spikes import Spikes
from smallmind.training.state import RunState, Snapshot, StateCopy
from smallmind.training.step import (
    accumulate_gradients,
    fatal_reason,
    make_objective,
    set_up,
    update,
)

SNAPSHOT_EVERY = 100  # steps
FAR = 1000  # times max_grad_norm: there AdamW's epsilon begins to count beside clipped gradients


class Stopped(Exception):
    """Raised to end the run before its next batch."""


class Training:
    """Trains a model on data: `Training(model, tokenizer, text)` or `Training(model, data=data)`.

    A text is divided by Dataset, which holds out its last tenth; batch_size windows of block_size
    tokens are drawn by seed. With distillation the model also learns from a teacher, and steps
    minimise the loss of Distillation. Every snapshot_every steps the state is copied in memory, to
    return to if the loss spikes.

    InputError if the text is shorter than a window or has characters that the tokenizer does not
    know, or if the teacher does not fit the model.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer | None = None,
        text: str | None = None,
        block_size: int | None = None,
        batch_size: int = 12,
        seed: int = 1337,
        distillation: Distillation | None = None,
        *,
        data: Dataset | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        check_type("model", model, TransformerModel)
        check_type("tokenizer", tokenizer, Tokenizer, None)
        check_type("text", text, str, None)
        check_type("distillation", distillation, Distillation, None)
        check_type("data", data, Dataset, None)
        check_type("snapshot_every", snapshot_every, numbers.Integral)
        if data is None:
            if tokenizer is None or text is None:
                raise InputError("give a tokenizer and a text, or data")
            if block_size is None:
                block_size = model.config.block_size
            block_size = check_field(ModelConfig, "block_size", block_size)
            _check_fit(model, block_size, tokenizer)
            data = Dataset.from_text(text, tokenizer, block_size, batch_size, seed)
        if data.tokenizer is None:
            raise InputError("the data has no tokenizer; build the Dataset with one")
        _check_fit(model, data.block_size, data.tokenizer)
        self.model = model
        self.data = data
        self.tokenizer: Tokenizer = data.tokenizer
        model.tokenizer_state = data.tokenizer.state()
        self.distillation = distillation
        if distillation:
            distillation.prepare(model, data)
        self.snapshot_every = snapshot_every
        self.profiler = TrainingProfiler()  # used with enable_diagnostics
        self._run = self._new_run(TrainingConfig())
        self.on_step: Callable[[int], object] | None = None  # called before each step
        self._stopping = False
        self._saved = 0  # step of the last save

    def __repr__(self) -> str:
        return f"<Training: step {self.progress.step:,} of {self.config.steps:,} on {self.data!r}>"

    @property
    def dataset(self) -> Dataset:
        """The same as `data`, which is the newer name."""
        return self.data

    # State of the current run, or of the last one.

    @property
    def config(self) -> TrainingConfig:
        return self._run.config

    @property
    def progress(self) -> RunProgress:
        return self._run.progress

    @property
    def optimizer(self) -> Optimizer:
        return self._run.optimizer

    @property
    def schedule(self) -> Schedule:
        return self._run.schedule

    @property
    def scaler(self) -> LossScaler | None:
        """None unless the run is in float16."""
        return self._run.scaler

    @property
    def spikes(self) -> Spikes:
        return self._run.spikes

    def steps(
        self,
        config: TrainingConfig,
        state: RunState | None = None,
        until: int | None = None,
        saver: Saver | None = None,
    ) -> Generator[Record, None, None]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        With a state, the run resumes there and continues bit for bit. A saver gets the state
        whenever a save is due, and at the end. The caller may stop at any record; with `until` the
        run stops after that step.

        With `check_gradient_health` there is a HealthRecord at the first step and every
        `diagnostic_interval` steps; with `enable_diagnostics`, a report in `profiler`.

        After a loss spike the run continues from an earlier state, at half the learning rate and
        without that batch, and yields a RollbackRecord.

        FloatingPointError if `max_rollbacks` rollbacks did not help, if only the gradient is not
        finite, or in float16 if no loss scale keeps it finite; the weights are then those from
        before that step. InputError if the state belongs to another run.
        """
        check_type("config", config, TrainingConfig)
        check_type("state", state, RunState, None)
        check_type("until", until, numbers.Integral, None)
        self._begin(config, state)
        if state:
            self.load_state(state)
            saved, here = state.state.get("instruction_set"), self.model.instruction_set
            if isinstance(saved, str) and saved != here:
                yield InstructionSetRecord(state.step, saved, here)
            state = None  # its arrays are not needed during the run
        sampler = self._sampler()
        shape, pool = (sampler.max_batch_size, self.data.block_size), self.model.workspace.pool
        with (
            pool.borrow(shape, np.int32) as ids,
            pool.borrow(shape, np.int32) as targets,
            instrument(self.model, self.config, self.profiler),
        ):
            buffers = Batch(ids, targets, np.empty(0, np.int64))
            yield from self._steps(sampler, buffers, until, saver)

    def with_step_count(self, config: TrainingConfig) -> TrainingConfig:
        """The config with the number of steps that its epochs take, if it has any."""
        if not config.epochs:
            return config
        steps = Epochs(self.data, config.grad_accum_steps).steps
        return dataclasses.replace(config, steps=config.epochs * steps)

    def stop(self) -> None:
        """Ends the current run before its next batch; may be called from any thread."""
        self._stopping = True

    def check_stop(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stopping:
            raise Stopped

    def state(self) -> RunState:
        """Everything that a resumed run needs. Its tensors are live: the next step changes them."""
        return self._run.capture_all()

    def load_state(self, state: RunState) -> None:
        """Restores a state of the current run. InputError if it belongs to another run."""
        self._run.resume(state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the model and the run at the end of the block, whatever was trained in it."""
        model, run = self.model, self._run
        precision, recompute = model.precision, model.recompute_plan
        micro_batch_size = model.micro_batch_size
        before = StateCopy().take(run.capture_model())
        self._run = self._new_run(run.config)
        try:
            yield
        finally:
            self._run = run
            model.micro_batch_size = micro_batch_size
            model.use_recompute(recompute)
            model.use_precision(precision)
            run.load_model(before)
            self._clear_gradients()

    def evaluate(self, step: int, batches: int) -> EvaluationRecord | None:
        """Evaluates `batches` batches per part, or with 0 all held-out text; None if stopped."""
        profile = self.model.workspace.profile
        phrase = f"Evaluating after step {step}"
        with activity.doing(phrase, usual=True), profile("Evaluate"), suppress(Stopped):
            return evaluate_parts(step, self.model, self.data, batches, self.check_stop)
        return None

    def train(self, steps: int, progress: bool = False, **settings: float | str) -> list[Record]:
        """Trains for `steps` with other fields of TrainingConfig as keywords -> all records.

        With `progress`, a line on standard error shows step, loss, speed and time left.
        """
        config = TrainingConfig(steps=steps, **settings)  # type: ignore[arg-type]
        if not progress:
            return list(self.steps(config))
        records = []
        with progress_line(self.with_step_count(config).steps) as line:
            self.on_step = line.start
            for record in self.steps(config):
                records.append(record)
                line.show(record)
        self.on_step = None
        return records

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
        on_record: Callable[[Record], object] | None = None,
        resume: bool = False,
    ) -> list[Record]:
        """Trains as config says, overridden by the other arguments -> all records.

        Checkpoints are saved to `checkpoint_dir/checkpoints`, for `training.checkpoint.newest`;
        without `checkpoint_dir` nothing is saved. `on_record` gets each record at once. With
        `resume` training continues from the newest checkpoint there, if there is one; without it,
        InputError if the directory already holds checkpoints. OSError if the last one cannot be
        saved.
        """
        check_type("config", config, TrainingConfig, None)
        check_type("checkpoint_dir", checkpoint_dir, str, PathLike, None)
        check_type("on_record", on_record, Callable, None)  # type: ignore[arg-type]
        given: dict[str, Any] = {
            "steps": steps,
            "learning_rate": learning_rate,
            "log_every": log_every,
            "save_every": save_every,
            "grad_accum_steps": grad_accum_steps,
            "warmup_steps": warmup_steps,
            "val_every": val_every,
            "val_batches": val_batches,
            "min_lr": min_lr,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        config = dataclasses.replace(config or TrainingConfig(), **changes)
        records = []
        with ExitStack() as stack:
            saver = state = None
            if checkpoint_dir is not None:
                state = self._newest(checkpoint_dir) if resume else None
                directory = Path(checkpoint_dir) if state else new_directory(checkpoint_dir)
                saver = stack.enter_context(BackgroundSaver(directory, config.keep))
            for record in self.steps(config, state, saver=saver):
                records.append(record)
                if on_record:
                    on_record(record)
        return records

    def _newest(self, directory: str | PathLike[str]) -> RunState | None:
        """The newest checkpoint there, None if there is none. InputError if all are damaged."""
        state, skipped = newest(directory)
        if skipped and not state:
            raise InputError(f"no checkpoint in {directory} is sound: {skipped[0][1]}")
        return state

    def _new_run(self, config: TrainingConfig) -> LiveState:
        return LiveState(config, self.model, self.data, self.distillation)

    def _begin(self, config: TrainingConfig, state: RunState | None = None) -> None:
        """Sets up the model and a new run for a config, and resolves its open settings.

        The precision AUTO is that of the state which the run resumes, or suits the CPU.
        """
        config = self.with_step_count(config).with_min_lr()
        precision = config.requested_precision
        if precision == Precision.AUTO and state:
            precision = saved_precision(state)
        set_up(self.model, config, precision)
        self._run = self._new_run(config)
        self._stopping = False
        self._clear_gradients()

    def _sampler(self) -> Sampler:
        stride = self.distillation.stride if self.distillation else 1
        return make_sampler(self.data, self.config.epochs, self.config.grad_accum_steps, stride)

    def _clear_gradients(self) -> None:
        self.model.zero_gradients()
        if self.distillation:
            self.distillation.zero_gradient()

    def _steps(
        self, sampler: Sampler, buffers: Batch, until: int | None, saver: Saver | None
    ) -> Iterator[Record]:
        run, config = self._run, self.config
        objective = make_objective(self.model, self.distillation)
        last = config.steps if until is None else min(until, config.steps)
        clock = StepClock(run.progress)
        self._saved = run.progress.step
        if evaluation_is_due(config, run.progress):  # the run was stopped during it
            yield from self._after_step(clock, saver)
        if not run.spikes.good:
            self._keep_state(saver)
        while run.progress.step < last and not run.progress.ended:
            step, passes = run.progress.step + 1, self.model.passes
            if step in run.spikes.skipped:
                run.progress.step = step
                yield from self._after_step(clock, saver)
                continue
            if self.on_step:
                self.on_step(step)
            try:
                loss = accumulate_gradients(
                    self.model, sampler, step, objective, run.loss_scale, buffers, self.check_stop
                )
            except Stopped:
                self._clear_gradients()
                self.model.passes = passes
                break
            if self._is_broken(loss):
                yield self._roll_back(step, loss)
                clock.restart(run.progress)
                continue
            # To train on several processes, sum model.flat.grad over them here.
            yield from self._update(step, loss, sampler.windows_in_step(step), buffers, clock)
            yield from self._after_step(clock, saver)
        yield from self._finish(saver)

    def _update(
        self, step: int, loss: float, windows: int, buffers: Batch, clock: StepClock
    ) -> Iterator[Record]:
        """Updates the parameters from their gradients, and reports the step."""
        run, config, progress = self._run, self.config, self.progress
        rate = run.schedule.lr(step - 1) * run.spikes.lr_factor
        run.optimizer.learning_rate = rate
        ids_targets = buffers.ids, buffers.targets
        with checked_update(self.model, config, step, rate, ids_targets, run.scaler) as health:
            norm = update(run)
        if reason := fatal_reason(run, norm):
            raise FloatingPointError(reason)
        progress.step = step
        is_updated = math.isfinite(norm)
        if is_updated and self.distillation:
            self.distillation.step(rate)
        if not is_updated:
            self._clear_gradients()
        clock.count(windows)
        yield from health
        if not is_updated:
            yield OverflowRecord(step, run.loss_scale)
            return
        run.spikes.observe(loss)
        limit = config.max_grad_norm
        progress.clipped += 0 < limit < norm
        progress.far_clipped += 0 < FAR * limit < norm
        if step % config.log_every and step not in (1, config.steps):
            return
        seconds, windows_per_second = clock.since_last()
        yield StepRecord(
            step=step,
            loss=loss,
            lr=rate,
            grad_norm=norm,
            tokens_per_second=windows_per_second * self.data.block_size,
            elapsed_seconds=progress.seconds["total"],
            step_ms=1000 * seconds,
            windows=windows,
            precision=self.model.precision.value,
            loss_scale=run.loss_scale,
            clip_share=progress.clipped / run.optimizer.steps,
            memory=resident_bytes(),
            peak_memory=peak_resident_bytes(),
        )

    def _after_step(self, clock: StepClock, saver: Saver | None) -> Iterator[Record]:
        """Evaluates, takes a snapshot and saves, each if it is due."""
        config, progress = self.config, self.progress
        with clock.evaluating():
            yield from self._evaluation()
        if evaluation_is_due(config, progress):  # it was stopped
            return
        step = progress.step
        best = progress.best_step == progress.evaluated == step
        is_save_due = best or bool(config.save_every and step % config.save_every == 0)
        # A run that resumes from a saved state has it as its snapshot, so this run needs it too.
        broken = None
        if is_save_due or step % self.snapshot_every == 0:
            broken = self._keep_state(saver)
        if is_save_due and saver and broken:
            yield SaveFailedRecord(step, f"{broken} has NaN or Inf: the last checkpoint stays")
        elif is_save_due and saver:
            yield from self._save(saver, best)

    def _evaluation(self) -> Iterator[Record]:
        """Evaluates if due -> the record, and another one if the run ends."""
        config, progress = self.config, self.progress
        if not evaluation_is_due(config, progress):
            return
        if record := self.evaluate(progress.step, config.val_batches):
            self.schedule.observe(record.val_loss)
            end = count_evaluation(config, progress, record)
            yield record
            if end:
                yield end

    def _is_broken(self, loss: float) -> bool:
        """Whether a loss must not lead to an update."""
        if self.config.max_rollbacks:
            return self.spikes.is_spike(loss)
        return not math.isfinite(loss) and not self.scaler  # a scaler skips the update itself

    def _roll_back(self, step: int, loss: float) -> RollbackRecord:
        """Restores the last good state after the loss of a step."""
        run = self._run
        self._clear_gradients()
        average, seconds = run.spikes.average, run.progress.seconds
        factor = run.spikes.lr_factor
        try:
            good = run.spikes.roll_back(step, loss, is_last=step == self.config.steps)
        except FloatingPointError as error:
            rate, peak = run.schedule.lr(step - 1) * factor, self.config.learning_rate * factor
            raise FloatingPointError(
                f"{error}: lower the learning rate, which was {rate:.3g} at that step, with a peak "
                f"of {peak:.3g}"
            ) from None
        run.load(good)
        run.progress.seconds = seconds
        spike_loss = loss if math.isfinite(loss) else None
        factor = run.spikes.lr_factor
        next_rate = run.schedule.lr(good.step) * factor
        return RollbackRecord(good.step, step, spike_loss, average, factor, next_rate)

    def _keep_state(self, saver: Saver | None) -> str | None:
        """Takes a snapshot, unless a tensor is not finite -> the name of the first such tensor."""
        if not self.config.max_rollbacks:
            return None
        # A saver may still write the last snapshot, or fail and try it again later.
        failure = saver.wait() if saver else None
        return self._run.spikes.keep(self._run.capture(), overwrite=failure is None)

    def _save(self, saver: Saver, best: bool) -> Iterator[Record]:
        """Saves the state, from the snapshot if that has just been taken."""
        step, good = self.progress.step, self.spikes.good
        self._saved = step
        state = good if good and good.step == step else self.state()
        if failure := saver.save(state, best):
            yield SaveFailedRecord(step, str(failure))

    def _finish(self, saver: Saver | None) -> Iterator[Record]:
        """Saves the last state, unless it is saved already."""
        progress, good = self.progress, self.spikes.good
        is_end = progress.ended or progress.step >= self.config.steps
        is_kept = good is not None and good.step == progress.step
        if is_end and not is_kept and (broken := self._keep_state(saver)):
            raise FloatingPointError(f"{broken} has NaN or Inf after step {progress.step}")
        if saver and progress.step > self._saved:
            state = self.state()
            self._saved = state.step
            # Nothing changes the state while this waits, so it is saved without a copy.
            failure = saver.save(Snapshot(state.step, state.tensors, state.state), False)
            if failure:
                yield SaveFailedRecord(state.step, str(failure))
            if saver.wait():
                saver.save(state, False)  # with a copy, to be tried again later
        elif saver:
            saver.wait()


def _check_fit(model: TransformerModel, block_size: int, tokenizer: Tokenizer) -> None:
    """InputError if the windows are too long or the tokens too many for the model."""
    if block_size > model.config.block_size:
        raise InputError(
            f"block_size={block_size} must be at most the model's, {model.config.block_size}"
        )
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"vocab_size={model.config.vocab_size}"
        )

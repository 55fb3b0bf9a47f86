"""Training as the library offers it: a model, its data, and a run at a time. Prints nothing."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind import parts
from smallmind.checks import InputError, check_field, check_type, suggesting
from smallmind.console.signals import Stopped, stopping_on_interrupt
from smallmind.files.lock import RunLock
from smallmind.losses.cross_entropy import CrossEntropy
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.optimizer import Optimizer, make_optimizer
from smallmind.optim.schedule import Schedule
from smallmind.parallel.gradient_sum import adding
from smallmind.parallel.group import ALONE, Group
from smallmind.parallel.shards import check_processes
from smallmind.settings.config import ModelConfig, Precision, TrainingConfig
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import count_steps, make_sampler
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.after_save import AfterSave
from smallmind.training.anomaly import detect_anomaly
from smallmind.training.checkpoint import (
    CHECKPOINTS,
    BackgroundSaver,
    Saver,
    clear_stale,
    exist,
    newest,
)
from smallmind.training.evaluation import Evaluation, Evaluations
from smallmind.training.gradients import computing, set_up
from smallmind.training.live_state import LiveState, saved_precision
from smallmind.training.loop import Loop
from smallmind.training.operations import Operations, Usage, usage_of
from smallmind.training.profiler import TrainingProfiler
from smallmind.training.progress import follow, showing_progress
from smallmind.training.records import InstructionSetRecord, Record, RunProgress
from smallmind.training.spikes import Spikes
from smallmind.training.state import RunState, StateCopy
from smallmind.training.step_threads import choosing_threads

SNAPSHOT_EVERY = 100  # steps
MAX_STEPS = 2**40  # of a run whose length may change


@suggesting(names=parts.LOSSES)
class Training:
    """Trains a model on data: `Training(model, tokenizer, text)` or `Training(model, data=data)`.

    A text is divided by Dataset, which holds out its last tenth; batch_size windows of block_size
    tokens are drawn by seed. Steps minimise the cross-entropy, or another loss, which may bring its
    data; one in `parts.LOSSES` may also be an argument by its name there. Every snapshot_every
    steps the state is copied in memory, to return to if the loss spikes. Each of the processes of
    a group calls the same methods of its own training, and all of them reach the same weights.

    InputError if the text is shorter than a window or has characters that the tokenizer does not
    know, or if the loss does not fit the model.
    """

    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer | None = None,
        text: str | None = None,
        block_size: int | None = None,
        batch_size: int = 12,
        seed: int = 1337,
        loss: Loss | None = None,
        *,
        data: Dataset | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        group: Group = ALONE,
        **named: Loss | None,
    ) -> None:
        check_type("model", model, TransformerModel).check_trains()
        check_type("tokenizer", tokenizer, Tokenizer, None)
        check_type("text", text, str, None)
        for name, value in named.items():
            if name not in parts.LOSSES:
                raise TypeError(f"unknown argument {name!r}")
            check_type(name, value, parts.load(parts.LOSSES, name), None)
            loss = loss if value is None else value
        check_type("loss", loss, Loss, None)
        self.loss = CrossEntropy() if loss is None else loss
        check_type("data", data, Dataset, None)
        check_type("snapshot_every", snapshot_every, numbers.Integral)
        if data is None and tokenizer and not text:
            data = self.loss.dataset(tokenizer, batch_size, seed)
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
        _check_fit(model, data.block_size // self.loss.sequences, data.tokenizer)
        self.model = model
        self.data = data
        self.tokenizer: Tokenizer = data.tokenizer
        model.tokenizer_digest = data.tokenizer.digest
        self.loss.prepare(model, data)
        self.snapshot_every = snapshot_every
        # Nothing else here knows the group.
        self._group, self.processes = group, group.size
        self.together = group.together  # each computes something, all have the results
        self.evaluations = Evaluations(
            model, data, self.loss, group.divide, group.is_first, self.check_stop
        )
        self.profiler = TrainingProfiler()  # used with enable_diagnostics
        self._run = _new_run(self, TrainingConfig())
        self.on_step: Callable[[int, str], object] | None = None  # see Loop
        self.counts_operations = True  # what steps use of the machine is in their records
        self.usage: Usage | None = None  # what the steps of the last call of `steps` have used
        self._stopping = False
        self._begun_in: Path | None = None  # where `train` saves its last run

    def __repr__(self) -> str:
        return f"<Training: step {self.progress.step:,} of {self.config.steps:,} on {self.data!r}>"

    @property
    def dataset(self) -> Dataset:
        """Returns `data`, its newer name."""
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
        refit: Callable[[], int | None] | None = None,
    ) -> Generator[Record, None, None]:
        """Trains step by step, yielding a record every `log_every` steps and at each evaluation.

        With a state, the run resumes there and continues bit for bit. A saver gets the state
        whenever a save is due, and at the end. The caller may stop at any record; with `until` the
        run stops after that step. `refit` is called before each step of a run by minutes that is
        trained for the first time, and returns another length for the run, if that is to change.

        With `check_gradient_health` there is a HealthRecord at the first step and every
        `diagnostic_interval` steps; with `enable_diagnostics`, a report in `profiler`.

        After a loss spike the run continues from an earlier state, at half the learning rate and
        without that batch, and yields a RollbackRecord.

        FloatingPointError if `max_rollbacks` rollbacks did not help, if only the gradient is not
        finite, or in float16 if no loss scale keeps it finite; the weights are then those from
        before that step. InputError if the state belongs to another run. If a batch cannot be read,
        the saver gets the state before it, and then comes the error.
        """
        check_type("config", config, TrainingConfig)
        check_type("state", state, RunState, None)
        check_type("until", until, numbers.Integral, None)
        self._stopping = False
        return self._steps(config, state, until, saver, refit)

    def _steps(
        self,
        config: TrainingConfig,
        state: RunState | None,
        until: int | None,
        saver: Saver | None,
        refit: Callable[[], int | None] | None,
    ) -> Generator[Record, None, None]:
        self._group.together(lambda: _begin(self, config, state))  # all of them do, or none
        if state:
            saved, here = state.state.get("instruction_set"), self.model.instruction_set
            if isinstance(saved, str) and saved != here:
                yield InstructionSetRecord(state.step, saved, here)
        state = None  # its arrays are not needed during the run
        config = self.config  # with everything in it resolved
        end = math.inf if until is None else until
        last = min(end, MAX_STEPS if config.lengths else config.steps)
        stride = max(self.data.stride, self.loss.stride)
        sampler = make_sampler(self.data, config, stride)
        self.usage = Usage(Operations(0, 0, 0, 0), None)
        if self.counts_operations:
            share = self.data.learned_share
            self.usage = usage_of(self.model, config, self.loss, share, self.processes)
        with ExitStack() as stack:
            gradient_sum = stack.enter_context(
                adding(self.model, config.shards, config.rounds_sums, self._group)
            )
            gradients = stack.enter_context(
                computing(self._run, sampler, gradient_sum, int(last), self.check_stop)
            )
            if config.enable_diagnostics:
                stack.enter_context(self.profiler.watch(self.model))
            if config.detect_anomaly:
                stack.enter_context(detect_anomaly(self.model))
            threads = stack.enter_context(choosing_threads(self.model, self.processes))
            loop = Loop(
                self._run,
                gradients,
                threads,
                saver,
                self.snapshot_every,
                self.evaluations,
                self.on_step,
                self.usage,
                refit,
            )
            yield from loop.records(end)

    def stop(self) -> None:
        """Ends the current run before its next batch; may be called from any thread."""
        self._stopping = True

    def check_stop(self) -> None:
        if self._stopping:
            raise Stopped

    def state(self) -> RunState:
        """Returns all that a resumed run needs. The next step changes its tensors."""
        return self._run.capture_all()

    def load_state(self, state: RunState) -> None:
        """Restores a state of the current run. InputError if it belongs to another run."""
        self._run.resume(state)

    @contextmanager
    def preserved(self, config: TrainingConfig | None = None) -> Iterator[None]:
        """Restores the model and the run at the end of the block, whatever was trained in it.

        With a config, the block begins with a new run of it, and no stop from before counts.
        """
        model, run = self.model, self._run
        precision, recompute, frozen = model.precision, model.recompute_plan, model.frozen
        products = model.products
        micro_batch_size = model.micro_batch_size
        before = StateCopy().take(run.capture_model())
        self._run = _new_run(self, run.config)
        try:
            if config:
                self._stopping = False
                _begin(self, config)
            yield
        finally:
            self._run = run
            model.micro_batch_size = micro_batch_size
            model.use_recompute(recompute)
            model.freeze(frozen)
            model.use_precision(precision)
            model.use_products(products)
            run.load_model(before)
            self._run.clear_gradients()

    def evaluate_held_out(self) -> Evaluation | None:
        """Evaluates the whole held-out part, as at the end of a run; None if it was stopped."""
        return self.evaluations.evaluate_held_out()

    def sample(self, tokens: int | None = None) -> str:
        """Writes a text, the same for the same weights; empty unless it is the first process."""
        return self.evaluations.sample(tokens)

    @suggesting(TrainingConfig)
    def train(
        self,
        steps: int | None = None,
        learning_rate: float | None = None,
        log_every: int | None = None,
        save_every: int | None = None,
        checkpoint_dir: str | PathLike[str] | None = None,
        config: TrainingConfig | None = None,
        *,
        resume: bool = False,
        after_save: str | None = None,
        on_record: Callable[[Record], object] | None = None,
        progress: bool | None = None,
        **settings: float | str | None,
    ) -> list[Record]:
        """Trains as config says, overridden by the other arguments -> all records.

        `settings` are other fields of TrainingConfig; None leaves one as it is.

        Checkpoints are saved to `checkpoint_dir/checkpoints`, for `smallmind.load(checkpoint_dir)`;
        without `checkpoint_dir` nothing is saved. With it, Ctrl-C ends the run after the step that
        it is in, and saves that. With `resume` training continues from the newest checkpoint there,
        if there is one; without it, InputError if the directory already holds checkpoints, or if
        another run is using it. InputError, too, for `resume` after an exception before the first
        checkpoint: the model is no longer the one that the run began with. OSError if the last
        checkpoint cannot be saved.

        `after_save` is a command that runs after each save, as `AfterSave` takes it.

        `on_record` gets each record at once. With `progress`, by default on a terminal and in a
        notebook, a line on standard error shows step, loss, speed and time left; with False nothing
        is shown.
        """
        check_type("config", config, TrainingConfig, None)
        check_type("checkpoint_dir", checkpoint_dir, str, PathLike, None)
        check_type("after_save", after_save, str, None)
        check_type("on_record", on_record, Callable, None)  # type: ignore[arg-type]
        fields = dict(
            steps=steps,
            learning_rate=learning_rate,
            log_every=log_every,
            save_every=save_every,
            **settings,
        )
        changes: dict[str, Any] = {name: x for name, x in fields.items() if x is not None}
        config = dataclasses.replace(config or TrainingConfig(), **changes)
        length = count_steps(config, self.data).steps
        with ExitStack() as stack:
            saver = state = None
            if checkpoint_dir is not None:
                directory = Path(checkpoint_dir)
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunLock(directory))
                clear_stale(directory)
                state, skipped = newest(directory) if resume else (None, [])
                if skipped and not state:
                    raise InputError(f"no checkpoint in {directory} is intact: {skipped[0][1]}")
                if not state:
                    if exist(directory):
                        raise InputError(
                            f"{directory / CHECKPOINTS} holds checkpoints of another run; choose "
                            "another directory, or resume=True to continue that run"
                        )
                    _check_fresh(self, directory.resolve(), resume)
                    self._begun_in = directory.resolve()
                command = AfterSave(after_save) if after_save else None
                saving = BackgroundSaver(directory, config.keep, config.compress, command)
                saver = stack.enter_context(saving)
                stack.enter_context(stopping_on_interrupt(lambda: _interrupt(self)))
            line = stack.enter_context(showing_progress(progress))
            return follow(self.steps(config, state, saver=saver), self, line, length, on_record)

    @suggesting()
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
        """Calls `train`, with the positional arguments of earlier versions."""
        return self.train(
            steps,
            learning_rate,
            log_every,
            save_every,
            checkpoint_dir,
            config,
            grad_accum_steps=grad_accum_steps,
            warmup_steps=warmup_steps,
            val_every=val_every,
            val_batches=val_batches,
            min_lr=min_lr,
            on_record=on_record,
            resume=resume,
        )


def _interrupt(training: Training) -> None:
    """Stops it, or raises KeyboardInterrupt if no step has been trained that could be saved."""
    if not training.progress.step:
        raise KeyboardInterrupt
    training.stop()


def _check_fresh(training: Training, directory: Path, resume: bool) -> None:
    """Raises InputError for a run that resumes from nothing, with weights that it has changed."""
    if resume and directory == training._begun_in and training.optimizer.steps:
        raise InputError(
            f"the run was interrupted before its first checkpoint in {directory}: build a new "
            f"model and Training to start over, or leave out resume=True to start another run "
            f"from its weights, at step {training.progress.step}"
        )


def _new_run(training: Training, config: TrainingConfig) -> LiveState:
    optimizer = make_optimizer(training.model, config, training._group)
    return LiveState(config, training.model, training.data, training.loss, optimizer)


def _begin(training: Training, config: TrainingConfig, state: RunState | None = None) -> None:
    """Sets up the model and a new run for a config, and resolves its open settings.

    The precision AUTO is that of the state which the run resumes, or suits the CPU.
    """
    config = count_steps(config, training.data).with_min_lr()
    precision = config.requested_precision
    if precision == Precision.AUTO and state:
        precision = saved_precision(state)
    set_up(training.model, config, precision)
    training.loss.begin(config)
    passes = training._run.passes  # so that another run drops other elements
    training._run = run = _new_run(training, config)
    run.passes = passes
    check_processes(training.processes, config, training.loss.one_process)
    run.clear_gradients()
    if state:
        run.resume(state)


def _check_fit(model: TransformerModel, block_size: int, tokenizer: Tokenizer) -> None:
    """Raises InputError if the windows are too long or the tokens too many for the model."""
    if block_size > model.config.block_size:
        raise InputError(
            f"block_size={block_size} must be at most the model's, {model.config.block_size}"
        )
    if tokenizer.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"vocab_size={model.config.vocab_size}"
        )

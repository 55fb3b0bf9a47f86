"""The life of one training of a run: timed, built, trained step by step, saved at its end."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from smallmind.checks import InputError
from smallmind.console.activity import clock
from smallmind.console.signals import stopping_on_interrupt
from smallmind.forecast import pace
from smallmind.forecast.threads import use_threads
from smallmind.memory.tracker import MemoryTracker
from smallmind.runs import assembly
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import MODEL
from smallmind.runs.parallel import Leader
from smallmind.runs.saved import RunFiles
from smallmind.settings.config import TrainingConfig
from smallmind.training import checkpoint
from smallmind.training.after_save import AfterSave
from smallmind.training.answers import MIN_QUESTIONS
from smallmind.training.checkpoint import BackgroundSaver
from smallmind.training.clock import StepClock
from smallmind.training.energy import EnergyMeter
from smallmind.training.evaluation import Evaluation, evaluating_seconds
from smallmind.training.operations import copy_rates
from smallmind.training.progress import OnRecord, follow, showing_progress
from smallmind.training.records import (
    AnswersRecord,
    FailureRecord,
    FileWarningRecord,
    FinalRecord,
    Record,
    RunProgress,
    SampleRecord,
)
from smallmind.training.training import Training


class Ended(NamedTuple):
    """The results of a training; None before its end, and `asked` unless it has questions."""

    final: Evaluation | None = None  # on the whole held-out part
    asked: AnswersRecord | None = None
    sample: str | None = None


class Session:
    """The life of a run's training: timed, built, trained, stopped and built again.

    `ended` is how it ended last, `energy` what it took, `pace` and `deadline` (in activity.clock's
    seconds) are those of a run by minutes. Other processes may follow it; see `runs.parallel`.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.leader = Leader()  # of the processes that train it
        self.ended = Ended()
        self.energy: EnergyMeter | None = None
        self.memory: MemoryTracker | None = None  # of a profile
        self.pace: pace.Pace | None = None
        self.deadline: float | None = None
        self._training: Training | None = None
        self._is_used = False  # the training is no longer as it was built
        self._is_stopping = False  # as soon as the training that is going can
        self._asking = 0.0  # seconds for questions before the first step

    def join(self, leader: Leader) -> None:
        """Trains with the other processes that follow a leader: this one."""
        self.leader = leader

    @property
    def training(self) -> Training:
        """The training as `Run.training`."""
        if self._training is None:
            self._training = self._build()
        return self._training

    @property
    def has_trained(self) -> bool:
        """True once a step has been trained that could be saved."""
        return self._training is not None and self._training.progress.step > 0

    def stop(self) -> None:
        """Ends training after the current batch and saves everything; from any thread."""
        self._is_stopping = True
        if self._training:
            self._training.stop()

    def train(
        self, on_record: OnRecord | None, progress: bool | None, after_save: str | None
    ) -> list[Record]:
        """Trains to the end or an interrupt -> the records. Arguments as `Run.train`."""
        self._start()
        with showing_progress(progress) as line:
            if not self._time_steps():
                return []
            records, steps = self._steps(after_save), self.files.settings.training.steps
            with stopping_on_interrupt(self._interrupt), closing(records):
                return follow(records, self.training, line, steps, on_record)

    def fit_steps(self, end: float) -> tuple[pace.Pace, float] | None:
        """Sets the number of steps so that the run ends at `end`, in activity.clock's seconds.

        It ends sooner after MAX_PASSES over the text. Times a few steps, without effect -> the pace
        measured, and the seconds left then; None if it was stopped and still awaits timing.
        InputError if not even one step fits.
        """
        self._start()
        return self._fit_steps(end)

    def steps(self, after_save: str | None = None) -> Generator[Record, None, Ended]:
        """Yields each record once it is written -> how it ended. Arguments and errors as `Run`."""
        self._start()
        return self._steps(after_save)

    def fresh_training(self) -> Training:
        """Returns the training as it is built: with nothing that an earlier one has changed.

        An interrupt may have left any of it, such as the weights, between two states.
        """
        before = self._training
        hooks = (before.on_step, before.profiler) if before else None
        if self._is_used:
            before = self._training = None  # two models may not fit in memory
        training = self.training
        self._is_used = True
        if hooks:
            training.on_step, training.profiler = hooks
        return training

    def _start(self) -> None:
        self._asking, self._is_stopping = 0.0, False

    def _build(self) -> Training:
        files, settings = self.files, self.files.settings
        training = assembly.build_training(
            settings, files.data, files.tokenizer(), files.initial(), self.leader.new_training
        )
        checkpoint.check_size(training.state())
        self.leader.share(settings, files.source, training)
        if training.loss.digest:
            self._check_loss(training.loss.digest)
        return training

    def _check_loss(self, digest: str) -> None:
        files = self.files
        if files.config.teacher_sha256 not in (None, digest):
            models = files.settings.loss[1].models.items()
            names = " or ".join(f"the {role} {path}" for role, path in models)
            raise InputError(f"{names} has changed since the run was created; restore it")
        if files.config.teacher_sha256 is None:
            files.save_config(teacher_sha256=digest)

    def _fit_steps(self, end: float) -> tuple[pace.Pace, float] | None:
        files, training = self.files, self.fresh_training()
        config, seconds = files.settings.training, end - clock()
        self.leader.announce("measure", config, seconds)
        if files.config.limits_evaluations:
            config, self._asking = pace.fit_evaluations(training, config, seconds)
        measured = pace.measure(training, config, seconds, files.path)
        self._is_used = False  # measuring has restored it
        if measured is None or self._is_stopping:
            return None
        left = end - clock()
        fitted = pace.fit_steps(config, measured, left, pace.most_steps(config, training.data))
        timing = {"seconds": end - clock(), **dataclasses.asdict(measured)}
        self.pace, self.deadline = measured, end
        self._save(fitted.fitted_to(fitted.steps), awaits_timing=False, timing=timing)
        return measured, left

    def _save(self, config: TrainingConfig, **changes: Any) -> None:
        """Saves the config of the training, and other fields of config.json that change."""
        settings = dataclasses.replace(self.files.settings, training=config)
        self.files.save_config(settings, **changes)

    def _refitting(self) -> Callable[[], int | None] | None:
        """Returns what fits the length of a run by minutes again; None in any other."""
        files, timing = self.files, self.files.config.timing or {}
        names = [field.name for field in dataclasses.fields(pace.Pace)]
        if not files.settings.training.lengths or not timing.keys() >= {"seconds", *names}:
            return None
        measured = self.pace = self.pace or pace.Pace(*(timing[name] for name in names))
        refit: Callable[[], int | None] | None = None

        def decide() -> int | None:
            """Fits the length, and writes it to the run before the next step follows it."""
            nonlocal refit
            if refit is None:  # the training has its state by now
                left = timing["seconds"] - self.training.progress.seconds["total"]
                self.deadline = self.deadline or clock() + left
                refit = pace.refitting(self.training, measured, self.deadline)
            if (steps := refit()) is None:
                return None
            step = self.training.progress.step
            try:
                self._save(files.settings.training.fitted_to(steps, step))
            except OSError:  # a full disk: the length stays
                return None
            return steps

        return decide

    def _steps(self, after_save: str | None) -> Generator[Record, None, Ended]:
        files = self.files
        files.lock()
        try:
            if not self._time_steps():
                return self.ended
            self.ended = Ended()
            training, config = self.fresh_training(), files.settings.training
            use_threads(files.settings.run)
            energy = self.energy = EnergyMeter()
            if config.enable_diagnostics:
                self.memory = MemoryTracker()
                self.memory.snapshot("Before training")
            newest = files.begin()
            yield from self._warnings(newest.step if newest else 0)
            # Only a model that the run starts from may know an answer.
            asks = newest is None and self._asking and files.settings.run.init_from
            if asks and (asked := training.evaluations.ask(0, MIN_QUESTIONS)):
                self._log(asked)
                yield asked
            refit = self._refitting()
            command = AfterSave(after_save) if after_save else None
            saving = BackgroundSaver(files.path, config.keep, config.compress, command)
            with saving as saver:
                self.leader.announce("steps", config, state=newest)
                records = training.steps(config, newest, saver=saver, refit=refit)
                del newest
                if self._is_stopping:  # since before there was a training to stop
                    training.stop()
                try:
                    for record in records:
                        self._keep(record)
                        energy.update()
                        yield record
                        yield from self._warnings(record.step)
                except GeneratorExit:  # the caller has left the loop
                    training.stop()
                    for record in records:
                        self._keep(record)
            if training.usage and training.usage.updates:
                self._log(training.usage.record(training.progress.step))
            if used := energy.record(training.progress.step):
                self._log(used)
            if self.memory:
                memory = self.memory.snapshot("After training")
                # Only now: their arrays take more memory than a small run.
                rates = copy_rates() if training.model.backend == "numba" else {}
                files.directory.save_profile(training.profiler.rows(), memory, rates)
            self.ended = save_ending(training, files.directory, self._note_model, self.leader)
            return self.ended
        except FloatingPointError as error:
            self._log(FailureRecord(self.training.progress.step, str(error)))
            raise
        finally:
            files.unlock()

    def _time_steps(self) -> bool:
        """Times a few steps if the run awaits that -> False if it was stopped meanwhile."""
        files, minutes = self.files, self.files.settings.run.minutes
        if not files.config.awaits_timing:
            return True
        if minutes:
            return self._fit_steps(clock() + 60 * minutes) is not None
        training = self.fresh_training()
        config, self._asking = pace.fit_evaluations(training, files.settings.training)
        self._is_used = False  # timing has changed nothing
        self._save(config, awaits_timing=False)
        return True

    def _interrupt(self) -> None:
        """Ends training, or raises KeyboardInterrupt while no step could be saved."""
        if not self.has_trained:
            raise KeyboardInterrupt
        self.stop()

    def _warnings(self, step: int) -> Iterator[Record]:
        """Reports and logs what happened to the files, each once per run. Restores the config."""
        directory = self.files.directory
        directory.restore_config(self.files.config)
        for problem in directory.problems:
            if problem not in directory.reported:
                directory.reported.add(problem)
                record = FileWarningRecord(step, problem)
                self._log(record)
                yield record
        directory.problems.clear()

    def _note_model(self, digest: str) -> None:
        """Saves the digest of the next model beside that of the last: a killed run leaves one."""
        known = self.files.config.sha256
        self.files.save_config(sha256={**known, MODEL: [*known.get(MODEL, ())[-1:], digest]})

    def _keep(self, record: Record) -> None:
        if isinstance(record, SampleRecord):
            self.files.directory.save_sample(record.step, record.text)
        else:
            self._log(record)

    def _log(self, record: Record) -> None:
        self.files.directory.log(record, self.training.progress.seconds["total"])


def _seconds_for_questions(progress: RunProgress) -> float:
    """Returns the time for questions at the end of a run, after its steps and its evaluations."""
    evaluating = ("evaluations", "last evaluation", "final evaluation")
    others = sum(seconds for kind, seconds in progress.seconds.items() if kind != "total")
    spent = sum(progress.seconds.get(kind, 0.0) for kind in evaluating)
    return evaluating_seconds(progress.seconds["total"] - others) - spent


def save_ending(
    training: Training,
    directory: RunDirectory,
    note_model: Callable[[str], object],
    leader: Leader,
) -> Ended:
    """Saves the model, and of a run that has ended its final evaluation, its answers and a sample.

    `note_model` gets the digest of the model before it is there. -> these three; none of them if
    the run has not ended, or was stopped during the evaluation.
    """
    step, final, asked = training.progress.step, None, None
    has_ended = training.progress.ended or step >= training.config.steps
    if step or has_ended:
        directory.save_model(training.model, training.tokenizer, step, note_model)
    if has_ended:
        with StepClock(training.progress).counting("final evaluation"):
            leader.announce("evaluate_held_out", training.config)
            final = training.evaluate_held_out()
    if final:
        scores = final.loss, final.perplexity, final.bits_per_character, final.bits_per_byte
        record = FinalRecord(step, *scores, final.accuracy)
        directory.log(record, training.progress.seconds["total"])
        with StepClock(training.progress).counting("questions"):
            asked = training.evaluations.ask(
                step, seconds=_seconds_for_questions(training.progress)
            )
        if asked:
            directory.log(asked, training.progress.seconds["total"])
    directory.flush()
    if final is None:
        return Ended()
    # Last: a run with a sample is finished.
    sample = training.sample()
    directory.save_sample(step, sample)
    return Ended(final, asked, sample)

"""The life of one training of a run: timed, built, trained step by step, saved at its end."""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from smallmind.checks import InputError, count_of
from smallmind.console.activity import clock
from smallmind.console.signals import stopping_on_interrupt
from smallmind.forecast import pace
from smallmind.forecast.threads import use_threads
from smallmind.memory.tracker import MemoryTracker
from smallmind.runs.chat_recipe import evaluated_in_time
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import MODEL
from smallmind.runs.parallel import Leader
from smallmind.runs.saved import SavedRun
from smallmind.text.samplers import Epochs
from smallmind.training.after_save import AfterSave
from smallmind.training.answers import FEWEST_ASKED
from smallmind.training.checkpoint import BackgroundSaver
from smallmind.training.clock import StepClock
from smallmind.training.energy import EnergyMeter
from smallmind.training.evaluation import Evaluation, evaluating_seconds
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
from smallmind.training.state import RunState, reopened
from smallmind.training.training import Training


class Session:
    """One training of a run, from its lock to its ending.

    `Run` makes one for each of its methods that train. What outlives it is in the run: the
    training as it is then, the final evaluation and the sample.
    """

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        self.directory = run.directory
        self._asking = 0.0  # seconds for questions before the first step
        run.is_stopping = False

    def train(self, on_record: OnRecord | None, progress: bool | None) -> list[Record]:
        """Trains to the end or an interrupt -> the records. Arguments as `Run.train`."""
        with showing_progress(progress) as line:
            if not self._time_steps():
                return []
            records, steps = self.steps(), self.run.settings.training.steps
            with stopping_on_interrupt(self._interrupt), closing(records):
                return follow(records, self.run.training, line, steps, on_record)

    def fit_steps(self, end: float) -> tuple[pace.Pace, float] | None:
        """Sets the number of steps. Arguments, result and errors as `Run.fit_steps`."""
        run, training, config = self.run, fresh_training(self.run), self.run.settings.training
        seconds = end - clock()
        run.leader.announce("measure", config, seconds)
        if run.config.limits_evaluations:
            config, self._asking = evaluated_in_time(training, config, seconds)
        measured = pace.measure(training, config, seconds, run.path)
        run.is_used = False  # measuring has restored it
        if measured is None or run.is_stopping:
            return None
        left = end - clock()
        fitted = pace.fit_steps(config, measured, left, pace.most_steps(config, training.data))
        fitted = fitted.fitted_to(fitted.steps)
        run.settings = dataclasses.replace(run.settings, training=fitted)
        run.pace, run.deadline = measured, end
        timing = {"seconds": end - clock(), **dataclasses.asdict(measured)}
        run.save_config(awaits_timing=False, timing=timing)
        return measured, left

    def _refitting(self) -> Callable[[], int | None] | None:
        """Returns what fits the length of a run by minutes again; None in any other."""
        run, timing = self.run, self.run.config.timing or {}
        names = [field.name for field in dataclasses.fields(pace.Pace)]
        if not run.settings.training.lengths or not timing.keys() >= {"seconds", *names}:
            return None
        measured = run.pace = run.pace or pace.Pace(*(timing[name] for name in names))
        refit: Callable[[], int | None] | None = None

        def decide() -> int | None:
            """Fits the length, and writes it to the run before the next step follows it."""
            nonlocal refit
            if refit is None:  # the training has its state by now
                left = timing["seconds"] - run.training.progress.seconds["total"]
                run.deadline = run.deadline or clock() + left
                refit = pace.refitting(run.training, measured, run.deadline)
            steps, before = refit(), run.settings
            if steps is not None:
                fitted = before.training.fitted_to(steps, run.training.progress.step)
                try:
                    run.settings = dataclasses.replace(before, training=fitted)
                    run.save_config()
                except OSError:  # a full disk: the length stays
                    run.settings, run.config = before, run.config._replace(settings=before)
                    return None
            return steps

        return decide

    def steps(self) -> Generator[Record, None, None]:
        """Yields each record once it is written. Errors as `Run.steps`."""
        run = self.run
        run.lock()
        try:
            if not self._time_steps():
                return
            run.final = run.asked = run.sample = None
            training, config = fresh_training(run), run.settings.training
            use_threads(run.settings.run)
            run.energy, tracker = EnergyMeter(), None
            if config.enable_diagnostics:
                tracker = MemoryTracker()
            newest = self._begin()
            yield from self._warnings(newest.step if newest else 0)
            if newest is None and (asked := self._ask_before(training)):
                self._log(asked)
                yield asked
            refit = self._refitting()
            after_save = AfterSave(run.after_save) if run.after_save else None
            saving = BackgroundSaver(run.path, config.keep, config.compress, after_save)
            with saving as saver:
                run.leader.announce("steps", config, state=newest)
                records = training.steps(config, newest, saver=saver, refit=refit)
                del newest
                if run.is_stopping:  # since before there was a training to stop
                    training.stop()
                try:
                    for record in records:
                        self._keep(record)
                        run.energy.update()
                        yield record
                        yield from self._warnings(record.step)
                except GeneratorExit:  # the caller has left the loop
                    training.stop()
                    for record in records:
                        self._keep(record)
                finally:
                    run.kept_newest = None  # training has saved newer ones
            if training.usage and training.usage.updates:
                self._log(training.usage.record(training.progress.step))
            if used := run.energy.record(training.progress.step):
                self._log(used)
            if tracker:
                memory = tracker.snapshot("After training")
                self.directory.save_profile(training.profiler.rows(), memory)
            run.final, run.asked, run.sample = save_ending(
                training, self.directory, self._note_model, run.leader
            )
        except FloatingPointError as error:
            self._log(FailureRecord(run.training.progress.step, str(error)))
            raise
        finally:
            run.unlock()

    def _begin(self) -> RunState | None:
        """Prepares the files for what is trained from here on -> the state that it starts from."""
        run, newest = self.run, self.run.newest()
        run.kept_newest = None
        if run.is_extended:  # written only now: another process could have trained the run
            self.directory.save_config(run.config)
            run.is_extended = False
        if newest and newest.step <= run.config.extended_after:
            newest = reopened(newest)
        step = newest.step if newest else 0
        self.directory.cut_metrics(step)
        self.directory.cut_samples(step)
        if run.settings.run.tensorboard:
            self.directory.begin_events(step)
        return newest

    def _time_steps(self) -> bool:
        """Times a few steps if the run awaits that -> False if it was stopped meanwhile."""
        run, minutes = self.run, self.run.settings.run.minutes
        if not run.awaits_timing:
            return True
        if minutes:
            return self.fit_steps(clock() + 60 * minutes) is not None
        config, self._asking = evaluated_in_time(fresh_training(run), run.settings.training)
        run.is_used = False  # timing has changed nothing
        run.settings = dataclasses.replace(run.settings, training=config)
        run.save_config(awaits_timing=False)
        return True

    def _ask_before(self, training: Training) -> AnswersRecord | None:
        """Asks a few questions before the first step, if that takes a small part of the run.

        Only a model that the run starts from may know an answer.
        """
        if not (self._asking and self.run.settings.run.init_from):
            return None
        return training.evaluations.ask(0, FEWEST_ASKED)

    def _interrupt(self) -> None:
        """Stops, or raises KeyboardInterrupt while no step has been trained that could be saved."""
        training = self.run.__dict__.get("training")
        if not (training and training.progress.step):
            raise KeyboardInterrupt
        self.run.stop()

    def _warnings(self, step: int) -> Iterator[Record]:
        """Reports and logs what happened to the files, each once per run. Restores the config."""
        self.directory.restore_config(self.run.config)
        for problem in self.directory.problems:
            if problem not in self.directory.reported:
                self.directory.reported.add(problem)
                record = FileWarningRecord(step, problem)
                self._log(record)
                yield record
        self.directory.problems.clear()

    def _note_model(self, digest: str) -> None:
        """Saves the digest of the model that is about to be written, beside that of the last one.

        A process that is killed in between leaves one of the two.
        """
        known = self.run.config.sha256
        self.run.save_config(sha256={**known, MODEL: [*known.get(MODEL, ())[-1:], digest]})

    def _keep(self, record: Record) -> None:
        if isinstance(record, SampleRecord):
            self.directory.save_sample(record.step, record.text)
        else:
            self._log(record)

    def _log(self, record: Record) -> None:
        self.directory.log(record, self.run.training.progress.seconds["total"])


def fresh_training(run: SavedRun) -> Training:
    """The training as it is built: a session begins with nothing that another has changed.

    An interrupt may have left any of it, such as the weights, between two states.
    """
    before = run.__dict__.get("training")
    hooks = (before.on_step, before.profiler) if before else None
    if run.is_used:
        before = None  # two models may not fit in memory
        run.__dict__.pop("training", None)
    training = run.training
    run.is_used = True
    if hooks:
        training.on_step, training.profiler = hooks
    return training


def lengthen(run: SavedRun, steps: int | None, epochs: int | None) -> None:
    """Gives a run another length. Arguments and errors as `Run.extend`."""
    newest, config = run.newest(), run.settings.training
    reached = newest.step if newest else 0
    if (epochs is None) == bool(config.epochs):
        name = "epochs" if config.epochs else "steps"
        raise InputError(f"the length of this run is counted in {name}: give {name}")
    length: dict[str, int | None] = {"steps": steps}
    if epochs is not None:
        per_epoch = Epochs(run.data, config.grad_accum_steps).steps
        length = {"epochs": epochs, "steps": epochs * per_epoch}
    changed = run.settings.replace(**length, lengths=None)
    if changed.training.steps <= reached:
        shown = ", ".join(f"{name}={value}" for name, value in length.items())
        raise InputError(
            f"{shown}: the run has trained {count_of(reached, 'step')} already; give more"
        )
    run.settings = changed
    run.config = run.config._replace(
        settings=run.config.settings.replace(**length, lengths=None),
        extended_after=reached,
        awaits_timing=False,
    )
    run.is_extended = True


def _seconds_for_questions(progress: RunProgress) -> float:
    """The time for questions at the end of a run, after its steps and its evaluations."""
    evaluating = ("evaluations", "last evaluation", "final evaluation")
    apart = sum(seconds for kind, seconds in progress.seconds.items() if kind != "total")
    spent = sum(progress.seconds.get(kind, 0.0) for kind in evaluating)
    return evaluating_seconds(progress.seconds["total"] - apart) - spent


def save_ending(
    training: Training,
    directory: RunDirectory,
    note_model: Callable[[str], object] | None = None,
    leader: Leader | None = None,
) -> tuple[Evaluation | None, AnswersRecord | None, str | None]:
    """Saves the model, and of a run that has ended its final evaluation, its answers and a sample.

    `note_model` gets the digest of the model before it is there. -> these three. None of them if
    the run has not ended, or was stopped during the evaluation.
    """
    step, final, asked = training.progress.step, None, None
    has_ended = training.progress.ended or step >= training.config.steps
    if step or has_ended:
        directory.save_model(training.model, training.tokenizer, step, note_model)
    if has_ended:
        with StepClock(training.progress).apart("final evaluation"):
            if leader:
                leader.announce("evaluate_held_out", training.config)
            final = training.evaluate_held_out()
    if final:
        scores = final.loss, final.perplexity, final.bits_per_character, final.bits_per_byte
        record = FinalRecord(step, *scores, final.accuracy)
        directory.log(record, training.progress.seconds["total"])
        with StepClock(training.progress).apart("questions"):
            asked = training.evaluations.ask(
                step, seconds=_seconds_for_questions(training.progress)
            )
        if asked:
            directory.log(asked, training.progress.seconds["total"])
    directory.flush()
    if final is None:
        return None, None, None
    # Last: a run with a sample is finished.
    sample = training.sample()
    directory.save_sample(step, sample)
    return final, asked, sample

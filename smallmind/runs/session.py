"""A run on disk as an object: create, train, interrupt, resume, load, evaluate, verify.

    import smallmind

    run = smallmind.Run.create(text="book.txt", steps=500, n_layer=2)
    run.train()
    model, tokenizer = run.load("best")
    print(smallmind.generate(model, tokenizer, "The "))

Nothing here prints. The command line is a caller of this class.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console.activity import clock
from smallmind.corpus.preparation import Encoding
from smallmind.exchange.format import check_export, export
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.ranks import ALONE, Ranks
from smallmind.runs import assembly, importing, loading, pace, summary
from smallmind.runs.budget import fit_recipe
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.ending import save_ending
from smallmind.runs.files import (
    CONFIG,
    RUNS,
    TEXT,
    Text,
    default_directory,
    is_literal,
    name_of,
    paths_of,
)
from smallmind.runs.history import history_of
from smallmind.runs.interrupt import stopping_on_interrupt
from smallmind.runs.metrics import MetricsTable, read_metrics
from smallmind.runs.ranks import lead
from smallmind.runs.source import (
    TOKENS,
    Source,
    TextSource,
    read_source,
    reread_source,
)
from smallmind.runs.threads import choose_threads
from smallmind.runs.verification import Verdict, verify_run
from smallmind.settings.config import NEUTRAL, RunConfig
from smallmind.settings.settings import Settings
from smallmind.settings.sources import with_recipe
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import Epochs
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint, evaluation
from smallmind.training.checkpoint import BackgroundSaver
from smallmind.training.evaluation import Evaluation
from smallmind.training.progress import ProgressLine, follow, showing_progress
from smallmind.training.records import FailureRecord, FileWarningRecord, Record, SampleRecord
from smallmind.training.state import RunState, reopened
from smallmind.training.training import SAMPLE_TOKENS, Training

CHANGEABLE = ("threads", *NEUTRAL)  # settings that do not affect the result

# Settings by which a text is read and becomes tokens.
OF_TEXT = (
    "text_field",
    "text_separator",
    "text_encoding",
    "tokenizer",
    "bpe_vocab_size",
    "bpe_split",
    "init_from",
)

OnRecord = Callable[[Any], object]


class Run:
    """A run of training and its directory.

    `Run.create` starts a new one, `Run.open` opens an existing one. `path` is the directory,
    `settings` are the resolved settings. At the end of training `final` is the evaluation on the
    whole held-out part and `sample` a text that the model wrote. A notebook shows how far it is,
    and its losses as a picture.
    """

    def __init__(self, directory: RunDirectory, config: SavedConfig) -> None:
        self.path = directory.path
        self.settings = config.settings.replace(out=str(directory.path))
        self.directory = directory
        self.ranks: Ranks = ALONE  # that train it; this one is rank 0
        self.final: Evaluation | None = None
        self.sample: str | None = None
        self.pace: pace.Pace | None = None  # as `fit_steps` has measured it
        self.passed_over: list[str] = []  # newer runs, and why `unfinished` did not choose them
        self.skipped_checkpoints: list[tuple[Path, str]] = []  # damaged ones, and why
        self._config = config
        self._newest: RunState | None = None  # once read, until training uses it
        self._warned: set[str] = set()  # problems of files that have been reported
        self._is_extended = False  # and config.json does not say so yet
        self._is_used = False  # `training` is no longer as it was built
        self._stopping = False  # by the session that is going

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self._state()}>"

    def _repr_html_(self) -> str:
        metrics, has_text = self._metrics_so_far(), not self._config.imported
        title = f"Run {self.path}: {self._state()}"
        table = summary.table_of(title, self.settings, has_text, metrics)
        return table.html() + (summary.image(metrics.losses_svg()) if metrics else "")

    def _repr_svg_(self) -> str | None:
        metrics = self._metrics_so_far()
        return metrics._repr_svg_() if metrics else None

    def _metrics_so_far(self) -> MetricsTable | None:
        with suppress(InputError):
            return self.metrics()
        return None

    def _state(self) -> str:
        """How far the run is, from what is on disk, in a few words."""
        if self._config.imported:
            return f"imported from {self._config.imported}"
        if self.awaits_timing:
            return f"not timed yet, to train for {self.settings.run.minutes:g} minutes"
        steps, saved = self.settings.training.steps, checkpoint.peek(self.path)
        if saved is None:
            return f"no checkpoint yet, {steps:,} steps to train"
        progress = saved.state.get("progress")
        has_stopped = isinstance(progress, dict) and bool(progress.get("ended"))
        ended_early = has_stopped and saved.step > self._config.extended_after
        if not (ended_early or saved.step >= steps):
            return f"saved at step {saved.step:,} of {steps:,}"
        if not self._is_complete(saved.step):
            return f"interrupted at its end, after step {saved.step:,} of {steps:,}"
        if ended_early:
            return f"ended early after step {saved.step:,} of {steps:,}"
        return f"finished, {steps:,} steps"

    @classmethod
    def create(
        cls,
        settings: Settings | None = None,
        text: Text = None,
        *,
        out: str | PathLike[str] | None = None,
        recipe: str | None = None,
        **fields: Any,
    ) -> "Run":
        """A new run, whose directory `out` then holds its resolved settings.

        `fields` override `settings`, or without them those of a recipe, by default that of the
        command line, as in `Run.create(text="book.txt", n_layer=2, steps=500)`.
        `text` is a path or several, of files, folders or patterns, or the text itself (a string
        with a line break or of more than 1000 characters), which is written to text.txt in the
        directory; without it the model learns from built-in stories. `out` is by default
        runs/<date>-<text>.

        The directory is locked until the run has been trained, or the object is gone.

        InputError if a setting is unknown or out of range, the text cannot be read or is too
        short, or the directory already holds a run or checkpoints. Then nothing is left behind.
        """
        check_type("settings", settings, Settings, None)
        check_type("recipe", recipe, str, None)
        check_type("text", text, str, PathLike, list, tuple, None)
        check_type("out", out, str, PathLike, None)
        if settings and recipe:
            raise InputError(f"recipe={recipe!r} would change nothing: settings has every setting")
        if settings:
            settings = settings.replace(**fields)
        given = {name: fields[name] for name in OF_TEXT if name in fields}
        run_config = settings.run if settings else RunConfig(**given)
        initial = assembly.read_initial(run_config)
        literal = str(text) if is_literal(text) else None
        given_out = out or (settings.run.out if settings else fields.get("out"))
        if given_out:  # before a long text is read
            RunDirectory(Path(given_out)).check_free(literal)
        cache = Path(given_out or default_directory("")).parent / TOKENS
        source = read_source(
            run_config.text if text is None else text,
            run_config,
            assembly.encoding_of(run_config, initial),
            cache,
        )
        if settings is None and fields.get("minutes"):
            settings = Settings.from_fields(fit_recipe(fields, source.characters, recipe))
        elif settings is None:
            settings = Settings.from_fields(with_recipe(fields, recipe))
        if out is not None:
            settings = settings.replace(out=str(out))
        if text is not None and literal is None:
            settings = settings.replace(text=tuple(map(str, paths_of(text))))
        settings, data, initial_sha256 = assembly.prepare(settings, source, initial)
        path = Path(out or settings.run.out or default_directory(source.name))
        if literal is not None:
            settings = settings.replace(text=str(path / TEXT))
        settings = assembly.absolute_paths(settings.replace(out=str(path)))
        config = SavedConfig(
            settings,
            source.sha256,
            initial_sha256=initial_sha256,
            awaits_timing=bool(settings.run.minutes),
        )
        directory = RunDirectory.create(path, literal)
        try:
            if data.tokenizer:
                directory.save_tokenizer(data.tokenizer)
            directory.save_config(config)
            run = cls(directory, config)
            # Otherwise the cached properties would read and encode the text again.
            run.__dict__["source"] = source
            run.__dict__["data"] = data
        except BaseException:
            directory.discard()
            raise
        return run

    @classmethod
    def import_model(
        cls,
        source: str | PathLike[str],
        out: str | PathLike[str] | None = None,
        block_size: int | None = None,
    ) -> "Run":
        """A model of another program as a run, which generates and evaluates.

        `source` is a directory of transformers, with safetensors, or a GGUF file; `out` is by
        default runs/<date>-<name>. `block_size` shortens the context of a model with rope. To
        train it on, create a run with init_from. InputError if the model is malformed or not known
        here, or the directory is in use.
        """
        check_type("source", source, str, PathLike)
        check_type("out", out, str, PathLike, None)
        place = None if out is None else Path(out)
        return cls(*importing.import_model(Path(source), place, block_size))

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> "Run":
        """The run in a directory. InputError if there is none."""
        check_type("directory", directory, str, PathLike)
        opened = RunDirectory(Path(directory))
        config = opened.load_config()
        recorded, own = config.settings.run.text, opened.path / TEXT
        is_own = isinstance(recorded, str) and Path(recorded).name == TEXT
        if is_own and own.is_file():  # wherever it was created
            settings = config.settings.replace(text=str(own.resolve()))
            config = config._replace(settings=settings)
        return cls(opened, config)

    @classmethod
    def unfinished(cls, parent: str | PathLike[str] = RUNS) -> "Run":
        """The newest run below parent that can be resumed, locked. InputError if there is none.

        That is one that has not ended, is not in use by another process, and has not failed in a
        way that would repeat itself. `passed_over` says which newer ones are.
        """
        configs = sorted(Path(parent).glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
        passed_over: list[str] = []
        for config in reversed(configs):
            try:
                run = cls.open(config.parent)
            except InputError:  # not a run that this version can resume
                continue
            try:
                run.lock()
                if failure := run.directory.failure():
                    raise InputError(f"{run.path} has failed: {failure}")
                if not run.is_finished:
                    run.passed_over = passed_over
                    return run
            except InputError as error:
                passed_over.append(str(error))
            run.unlock()
        reasons = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise InputError(f"{parent} holds no unfinished run; name the directory of one{reasons}")

    @property
    def name(self) -> str:
        """A short name for the text."""
        return name_of(self.settings.run.text)

    @functools.cached_property
    def source(self) -> Source:
        """The text, or its tokens. InputError if it has changed."""
        if self._config.imported:
            raise InputError(
                f"{self.path} was imported and has no text of its own: name one, as in smallmind "
                f"evaluate {self.path} TEXT or smallmind train TEXT --init-from {self.path}"
            )
        tokenizer, run = self._saved_tokenizer(), self.settings.run
        # Earlier versions kept no tokenizer before the first checkpoint.
        encoding = self._encoding(tokenizer) if tokenizer else assembly.encoding_of(run)
        try:
            source = reread_source(run, encoding, self._config.text_sha256, self._cache)
        except InputError as error:
            raise InputError(
                f"{error}; if the text of the run has moved, say where it is: smallmind train "
                f"--resume {self.path} PATH"
            ) from None
        if source is None:
            raise InputError(
                f"{self.name} has changed since the run was created; restore the text as it was"
            )
        return source

    @property
    def text(self) -> str:
        """The text. InputError if it is no longer the one that the run was created with."""
        if not isinstance(self.source, TextSource):
            raise InputError("the text of this run is not in memory; its tokens are in `data`")
        return self.source.text

    def _encoding(self, tokenizer: Tokenizer) -> Encoding:
        """How texts are encoded for the model of this run."""
        return Encoding(tokenizer, chosen_separator=self.settings.run.text_separator)

    @property
    def _cache(self) -> Path:
        """Where texts that are large for the memory are kept as tokens."""
        return self.path.resolve().parent / TOKENS

    def move_text(self, text: Text) -> None:
        """The text is at other paths from now on. InputError if it is not the run's own."""
        before = self.settings
        self.__dict__.pop("source", None)
        self.settings = assembly.absolute_paths(
            before.replace(text=tuple(map(str, paths_of(text))))
        )
        try:
            self.check_text()
        except InputError:
            self.settings = before
            raise
        self._save_config()

    def check_text(self) -> None:
        """InputError if the text has changed since the run was created, or cannot be read."""
        assert self.source

    def is_own(self, source: Source) -> bool:
        """Whether a text is the one that the run was created with."""
        return source.sha256 == self._config.text_sha256

    def newest(self) -> RunState | None:
        """The newest sound checkpoint; None if nothing has been saved yet.

        Damaged ones are skipped and listed in `skipped_checkpoints`. InputError if all are damaged.
        """
        newest = self._read_newest()
        if self.skipped_checkpoints and not newest:
            raise InputError(
                f"no checkpoint in {self.path} is sound: restore one from a copy, or remove them "
                "all to start the run again"
            )
        return newest

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended by itself, and its final model and its sample are saved."""
        if self._config.imported:
            return True
        newest = self.newest()
        return newest is not None and self.has_ended and self._is_complete(newest.step)

    @property
    def has_ended(self) -> bool:
        """Whether no step is left to train; what comes after the last one may be missing."""
        newest = self.newest()
        if newest is None:
            return False
        progress = newest.state.get("progress")
        if not isinstance(progress, dict):
            raise InputError(f"the checkpoint of step {newest.step} lacks its progress")
        stopped_early = bool(progress.get("ended")) and newest.step > self._config.extended_after
        return stopped_early or newest.step >= self.settings.training.steps

    def _is_complete(self, step: int) -> bool:
        """Whether all is saved that comes after the last step."""
        # The sample comes last: without it, other things may be missing too.
        return self.directory.has_model() and self.directory.has_sample(step)

    @functools.cached_property
    def data(self) -> Dataset:
        """The encoded text, read on first use. InputError as for `text`."""
        return assembly.make_dataset(self.settings, self.source, self._tokenizer())

    @functools.cached_property
    def training(self) -> Training:
        """Model, data and teacher, built on first use; the state is loaded when training starts.

        InputError if the text or the teacher has changed, or the run could not be saved.
        """
        data, tokenizer = self.data, self._tokenizer()
        training = assembly.build_training(
            self.settings, data, tokenizer, self._initial(), self.ranks
        )
        checkpoint.check_size(training.state())
        lead(self.ranks, self.settings, self.source, training)
        if training.distillation:
            self._check_teacher(training.distillation.digest)
        return training

    @property
    def awaits_timing(self) -> bool:
        """Whether the number of steps is still to follow from the setting `minutes`."""
        return self._config.awaits_timing

    def fit_steps(self, end: float) -> tuple[pace.Pace, float] | None:
        """Sets the number of steps so that the run ends at `end`, in activity.clock's seconds.

        It ends sooner than that after MAX_PASSES over the text. Times a few steps, which have no
        effect -> the pace measured, and the seconds that were left then. None if it was stopped:
        then the run still awaits timing. InputError if not even one step fits.
        """
        self._stopping = False
        return self._fit_steps(end)

    def _fit_steps(self, end: float) -> tuple[pace.Pace, float] | None:
        training = self._fresh_training()
        config, now = self.settings.training, clock()
        measured = pace.measure(training, config, end - now, self.path, SAMPLE_TOKENS)
        self._is_used = False  # measuring has restored it
        if measured is None or self._stopping:
            return None
        left = end - clock()
        fitted = pace.fit_steps(config, measured, left, pace.most_steps(config, training.data))
        self.settings = dataclasses.replace(self.settings, training=fitted)
        self._config = self._config._replace(awaits_timing=False)
        self._save_config()
        self.pace = measured
        return measured, left

    @suggesting()
    def train(
        self, on_record: OnRecord | None = None, progress: bool | None = None
    ) -> list[Record]:
        """Trains a new run to its end -> all records; `on_record` gets each of them at once.

        With `progress`, by default on a terminal and in a notebook, a line on standard error shows
        step, loss, speed and time left; with False nothing is shown, not even compiling.

        Ctrl-C ends training after the current batch and saves everything, for `resume`. Before the
        first step has ended, or a second time, it raises KeyboardInterrupt, and the run resumes
        from its last checkpoint. With the setting `minutes`, a few steps are timed first; a run
        that is ended before that is timed when it resumes.
        InputError if the run has been trained already, or another process is training it; OSError
        if the last checkpoint cannot be saved; FloatingPointError if the loss diverges and rolling
        back does not help.
        """
        self.lock()
        try:
            newest = self.newest()
            if newest:
                raise InputError(
                    f"{self.path} has been trained to step {newest.step} already: resume it"
                )
            with showing_progress(progress) as line:
                return self._train(on_record, line)
        finally:
            self.unlock()

    def resume(
        self, on_record: OnRecord | None = None, progress: bool | None = None, **changes: Any
    ) -> list[Record]:
        """Continues from the newest checkpoint, bit for bit as if never interrupted -> new records.

        Starts over if there is no checkpoint; returns no records if the run is finished. If only
        the end is missing, such as the sample, it comes now. `changes` are those that `change`
        allows, and `steps` or `epochs`, as in `extend`. `progress` and errors as in
        `train`.
        """
        length = {name: changes.pop(name) for name in ("steps", "epochs") if name in changes}
        self.change(**changes)
        self.lock()
        try:
            if length:
                self.extend(**length)
            if self.is_finished:
                return []
            with showing_progress(progress) as line:
                return self._train(on_record, line)
        finally:
            self.unlock()

    def change(self, **fields: Any) -> None:
        """Changes settings that do not affect the result, those in CHANGEABLE.

        InputError for any other, and for more threads than this machine runs.
        """
        for name in fields:
            if name not in CHANGEABLE:
                raise InputError(
                    f"{name} is fixed when a run is created; you can change {', '.join(CHANGEABLE)}"
                )
        self.settings = self.settings.replace(**fields)
        if fields.get("threads"):
            choose_threads(self.settings.run)  # else it might come from a larger machine

    def lock(self) -> None:
        """Keeps other processes from training the run, until `unlock` or the end of training.

        InputError naming the process that is training it.
        """
        if self.directory.lock():
            self._newest = None  # another process may have saved a newer one since

    def unlock(self) -> None:
        """Lets other processes train the run."""
        self.directory.unlock()

    def extend(self, steps: int | None = None, epochs: int | None = None) -> None:
        """Gives the run another length, in steps or in the epochs that it was created with.

        It takes effect when the run resumes, also if early stopping had ended it. The learning rate
        is then that of a run of the new length. InputError unless that is more than the steps
        trained already.
        """
        newest, config = self.newest(), self.settings.training
        reached = newest.step if newest else 0
        if (epochs is None) == bool(config.epochs):
            name = "epochs" if config.epochs else "steps"
            raise InputError(f"the length of this run is counted in {name}: give {name}")
        length: dict[str, int | None] = {"steps": steps}
        if epochs is not None:
            per_epoch = Epochs(self.data, config.grad_accum_steps).steps
            length = {"epochs": epochs, "steps": epochs * per_epoch}
        changed = self.settings.replace(**length)
        if changed.training.steps <= reached:
            shown = ", ".join(f"{name}={value}" for name, value in length.items())
            raise InputError(f"{shown}: the run has trained {reached} steps already; give more")
        self.settings = changed
        self._config = self._config._replace(
            settings=self._config.settings.replace(**length),
            extended_after=reached,
            awaits_timing=False,
        )
        self._is_extended = True

    def stop(self) -> None:
        """Ends training after the current batch and saves everything; from any thread."""
        self._stopping = True
        if training := self.__dict__.get("training"):
            training.stop()

    def steps(self) -> Generator[Record, None, None]:
        """Trains from the newest checkpoint, or the start, and yields each record.

        Logs records, saves checkpoints in the background, and at the end the model, the loss on
        the whole held-out part and a sample, all with the directory locked. With the setting
        `minutes`, a few steps are timed first. After `stop`, or when the caller leaves the loop,
        everything is saved as it is then. Errors as in `train`.
        """
        self._stopping = False
        return self._steps()

    def _steps(self) -> Generator[Record, None, None]:
        self.lock()
        try:
            if not self._time_steps():
                return
            self.final = self.sample = None
            training, config = self._fresh_training(), self.settings.training
            assembly.use_threads(self.settings.run)
            newest, self._newest = self.newest(), None
            if self._is_extended:  # written only now: another process could have trained the run
                self.directory.save_config(self._config)
                self._is_extended = False
            if newest and newest.step <= self._config.extended_after:
                newest = reopened(newest)
            step = newest.step if newest else 0
            self.directory.cut_metrics(step)
            self.directory.cut_samples(step)
            if self.settings.run.tensorboard:
                self.directory.begin_events(step)
            yield from self._warnings(step)
            with BackgroundSaver(self.path, config.keep) as saver:
                records = training.steps(config, newest, saver=saver)
                del newest
                if self._stopping:  # since before there was a training to stop
                    training.stop()
                try:
                    for record in records:
                        self._keep(record)
                        yield record
                        yield from self._warnings(record.step)
                except GeneratorExit:  # the caller has left the loop
                    training.stop()
                    for record in records:
                        self._keep(record)
                finally:
                    self._newest = None  # training has saved newer ones
            if config.enable_diagnostics:
                self.directory.save_profile(training.profiler.rows())
            self.final, self.sample = save_ending(training, self.directory)
        except FloatingPointError as error:
            self._log(FailureRecord(self.training.progress.step, str(error)))
            raise
        finally:
            self.unlock()

    def load(
        self, checkpoint: int | str | None = None, backend: str = "numba"
    ) -> tuple[TransformerModel, Tokenizer]:
        """The model and tokenizer at a checkpoint: "newest", "best" or the number of a step.

        Without it, the final model, or the newest checkpoint if the run has not ended yet. The
        run may be going. InputError if there is no such checkpoint.
        """
        return loading.load(self.path, backend, checkpoint)

    def evaluate(
        self, text: str | PathLike[str] | None = None, checkpoint: int | str | None = None
    ) -> Evaluation:
        """How well the model that `load(checkpoint)` returns predicts a text.

        `text` is a path or a text as in `create`, and all of it counts. Without it, or if it is the
        run's own text, only the held-out part counts.
        """
        model, tokenizer = self.load(checkpoint)
        if text is not None:
            source = read_source(text, self.settings.run, self._encoding(tokenizer), self._cache)
            if not self.is_own(source):
                return evaluation.evaluate_tokens(model, tokenizer, source.tokens(tokenizer))
        return evaluation.evaluate_held_out(model, self.data)

    def export(
        self,
        path: str | PathLike[str],
        to: str = "hf",
        type: str | None = None,
        checkpoint: int | str | None = None,
    ) -> None:
        """Writes the model that `load(checkpoint)` returns for other programs.

        As `smallmind.export`, and with how it was trained.
        """
        check_export(Path(check_type("path", path, str, PathLike)), to, type)
        found = loading.find(self.path, checkpoint)
        model, tokenizer = found.load("numpy")
        export(model, tokenizer, path, to, type, self.path.resolve().name, self.history(found.name))

    def history(self, checkpoint: str) -> dict[str, str]:
        """How a model of this run was trained: what -> how much, for its card."""
        return history_of(self.path, self._config, checkpoint)

    def metrics(self) -> MetricsTable:
        """The metrics, one row per step. InputError if nothing has been logged yet."""
        return read_metrics(self.path)

    def verify(
        self, digests_only: bool = False, on_record: OnRecord | None = None
    ) -> list[Verdict]:
        """Checks every checkpoint, and that retraining from each reproduces the next.

        `digests_only` leaves out the retraining. `on_record` gets every Verdict at once, and the
        records of the retraining. InputError if nothing has been saved yet.
        """
        if digests_only:
            findings = verify_run(self.path)
        else:
            # The run may come from another machine.
            self.change(threads=None)
            findings = verify_run(self.path, self._fresh_training(), self.settings.training)
        verdicts = []
        for finding in findings:
            if on_record:
                on_record(finding)
            if isinstance(finding, Verdict):
                verdicts.append(finding)
        if not verdicts:
            raise InputError(f"{self.path} holds no checkpoint yet; resume the run first")
        return verdicts

    def discard_untrained(self) -> None:
        """Removes the files of a new run that nobody has trained yet, and its directory.

        Leaves those that another process has written or is using; unlocks the directory.
        """
        if "training" in self.__dict__ and self.training.progress.step > 0:
            self.unlock()
        else:
            self.directory.discard_untrained()

    def _warnings(self, step: int) -> Iterator[Record]:
        """What happened to the files, each once per run; logged too. Restores the config."""
        self.directory.restore_config(self._config)
        for problem in self.directory.problems:
            if problem not in self._warned:
                self._warned.add(problem)
                record = FileWarningRecord(step, problem)
                self._log(record)
                yield record
        self.directory.problems.clear()

    def _keep(self, record: Record) -> None:
        """Writes a record to the file that it belongs to."""
        if isinstance(record, SampleRecord):
            self.directory.save_sample(record.step, record.text)
        else:
            self._log(record)

    def _log(self, record: Record) -> None:
        self.directory.log(record, self.training.progress.seconds["total"])

    def _read_newest(self) -> RunState | None:
        if self._newest is None:
            self._newest, self.skipped_checkpoints = checkpoint.newest(self.path)
        return self._newest

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the newest checkpoint, or else that of the directory.

        A run that an earlier version created has none before its first checkpoint: it is made from
        the text.
        """
        return self._saved_tokenizer() or assembly.fit_tokenizer(
            self.settings, self.source, self._initial()
        )

    def _saved_tokenizer(self) -> Tokenizer | None:
        newest = self._read_newest()
        if newest and "tokenizer" in newest.state:
            return loading.tokenizer_of(newest)
        return self.directory.load_tokenizer()

    def _initial(self) -> assembly.Initial | None:
        """The weights that the run starts from, unless it has a checkpoint by now."""
        initial = None if self._read_newest() else assembly.read_initial(self.settings.run)
        if initial and initial.sha256 != self._config.initial_sha256:
            raise InputError(
                f"{self.settings.run.init_from} has changed since the run was created; start a "
                "new run"
            )
        return initial

    def _fresh_training(self) -> Training:
        """The training as it is built: a session begins with nothing that another has changed.

        An interrupt may have left any of it, such as the weights, between two states.
        """
        before = self.__dict__.get("training")
        hooks = (before.on_step, before.profiler) if before else None
        if self._is_used:
            before = None  # two models may not fit in memory
            self.__dict__.pop("training", None)
        training = self.training
        self._is_used = True
        if hooks:
            training.on_step, training.profiler = hooks
        return training

    def _interrupt(self) -> None:
        """Stops, or raises KeyboardInterrupt while no step has been trained that could be saved."""
        training = self.__dict__.get("training")
        if not (training and training.progress.step):
            raise KeyboardInterrupt
        self.stop()

    def _time_steps(self) -> bool:
        """Times a few steps if the run awaits that -> False if it was stopped meanwhile."""
        minutes = self.settings.run.minutes
        if not (self.awaits_timing and minutes):
            return True
        return self._fit_steps(clock() + 60 * minutes) is not None

    def _train(self, on_record: OnRecord | None, line: ProgressLine | None) -> list[Record]:
        records = self.steps()
        if not self._time_steps():
            return []
        steps = self.settings.training.steps
        with stopping_on_interrupt(self._interrupt), closing(records):
            return follow(records, self.training, line, steps, on_record)

    def _check_teacher(self, digest: str) -> None:
        if self._config.teacher_sha256 not in (None, digest):
            raise InputError(
                f"the teacher {self.settings.distillation.teacher} has changed since the run was "
                "created; restore it"
            )
        if self._config.teacher_sha256 is None:
            self._config = self._config._replace(teacher_sha256=digest)
            self._save_config()

    def _save_config(self) -> None:
        self._config = self._config._replace(settings=self.settings)
        self.directory.save_config(self._config)

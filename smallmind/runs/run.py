"""A run on disk as an object: create, train, interrupt, resume, load, evaluate, verify.

Nothing here prints. The command line is a caller of this class.
"""

from collections.abc import Generator
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind import parts
from smallmind.checks import InputError, check_type, suggesting
from smallmind.exchange.format import check_export, export, export_adapter
from smallmind.exchange.published import as_learned
from smallmind.forecast.pace import Pace
from smallmind.forecast.threads import choose_threads
from smallmind.runs import creating, loading, summary
from smallmind.runs.files import CONFIG, RUNS, Text
from smallmind.runs.saved import SavedRun
from smallmind.runs.serving import Served
from smallmind.runs.session import Session, fresh_training, lengthen
from smallmind.runs.verification import Verdict, verify_run
from smallmind.settings.config import NEUTRAL
from smallmind.settings.settings import Settings
from smallmind.settings.sources import Choices
from smallmind.training.progress import OnRecord
from smallmind.training.records import Record

CHANGEABLE = ("threads", *NEUTRAL)  # settings that do not affect the result


class Run(SavedRun):
    """A run of training and its directory.

    `Run.create` starts a new one, `Run.open` opens an existing one. `path` is the directory,
    `settings` are the resolved settings. At the end `final` is the evaluation on the whole held-out
    part and `sample` a text that the model wrote. A notebook shows its state and its losses.
    `after_save` may be set to a command that runs after each save, as `train --after-save`.
    """

    passed_over: tuple[str, ...] = ()  # newer runs, and why `unfinished` did not choose them

    def __repr__(self) -> str:
        return f"<Run {self.path}: {summary.state_of(self)}>"

    def _repr_html_(self) -> str:
        return summary.html_of(self)

    def _repr_svg_(self) -> str | None:
        metrics = summary.metrics_so_far(self)
        return metrics._repr_svg_() if metrics else None

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
        command line, as in `Run.create(text="book.txt", n_layer=2, steps=500)`. `size`, `arch` and
        `preset` name several fields at once, as there; fields override them.
        `text` is a path or several, of files, folders or patterns, or the text itself (a string
        with a line break or of more than 1000 characters), which is written to text.txt in the
        directory; without it the model learns from built-in stories. `out` is by default
        runs/<date>-<text>.

        The directory is locked until the run has been trained, or the object is gone. InputError if
        a setting is unknown or out of range, the text cannot be read or is too short, or the
        directory already holds a run or checkpoints. Then nothing is left behind.
        """
        return cls.of(creating.choices_of(settings, recipe, fields), text, out)

    @classmethod
    def of(
        cls, choices: Choices, text: Text = None, out: str | PathLike[str] | None = None
    ) -> "Run":
        """A new run of what has been chosen. Other arguments and errors as `create`."""
        directory, config, prepared = creating.create(choices, text, out)
        run = cls(directory, config)
        run.source, run.data = prepared.source, prepared.data  # read and encoded already
        return run

    @classmethod
    def import_model(
        cls,
        source: str | PathLike[str],
        out: str | PathLike[str] | None = None,
        block_size: int | None = None,
        base: str | PathLike[str] | None = None,
    ) -> "Run":
        """A model of another program as a run, which generates and evaluates.

        `source` is a directory of transformers, with safetensors, or a GGUF file; `out` is by
        default runs/<date>-<name>. `block_size` shortens the context, unless the model has learned
        its positions. To train it on, create a run with init_from. Of a directory of PEFT the
        adapter is imported, for the model at `base`. InputError if the model is malformed or not
        known here, or the directory is in use.
        """
        return cls(*creating.import_model(source, out, block_size, base))

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
                    run.passed_over = tuple(passed_over)
                    return run
            except InputError as error:
                passed_over.append(str(error))
            run.unlock()
        reasons = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise InputError(f"{parent} holds no unfinished run; name the directory of one{reasons}")

    @suggesting()
    def train(
        self, on_record: OnRecord | None = None, progress: bool | None = None
    ) -> list[Record]:
        """Trains a new run to its end -> all records; `on_record` gets each of them at once.

        With `progress`, by default on a terminal and in a notebook, a line on standard error shows
        step, loss, speed and time left; with False nothing is shown, not even compiling.

        Ctrl-C ends training after the current batch and saves everything, for `resume`. Before the
        first step has ended, or a second time, it raises KeyboardInterrupt, and the run resumes
        from its last checkpoint. With the setting `minutes`, a few steps are timed first, also when
        a run resumes that ended before. InputError if the run has been trained already, or another
        process is training it; OSError if the last checkpoint cannot be saved; FloatingPointError
        if the loss diverges and rolling back does not help.
        """
        self.lock()
        try:
            if newest := self.newest():
                raise InputError(
                    f"{self.path} has been trained to step {newest.step} already: resume it"
                )
            return Session(self).train(on_record, progress)
        finally:
            self.unlock()

    def resume(
        self, on_record: OnRecord | None = None, progress: bool | None = None, **changes: Any
    ) -> list[Record]:
        """Continues from the newest checkpoint, bit for bit as if never interrupted -> new records.

        Starts over without a checkpoint; returns no records if the run is finished. If only the end
        is missing, such as the sample, it comes now. `changes` are those that `change` allows, and
        `steps` or `epochs`, as in `extend`. `progress` and errors as in `train`.
        """
        length = {name: changes.pop(name) for name in ("steps", "epochs") if name in changes}
        self.change(**changes)
        self.lock()
        try:
            if length:
                self.extend(**length)
            return [] if self.is_finished else Session(self).train(on_record, progress)
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
        if fields.get("threads"):
            fields = {"adapt_threads": False, **fields}
        self.settings = self.settings.replace(**fields)
        if fields.get("threads"):
            choose_threads(self.settings.run)  # else it might come from a larger machine

    def extend(self, steps: int | None = None, epochs: int | None = None) -> None:
        """Gives the run another length, in steps or in the epochs that it was created with.

        It takes effect when the run resumes, also after early stopping, with the learning rate of a
        run of the new length. InputError unless that is more than the steps trained already.
        """
        lengthen(self, steps, epochs)

    def fit_steps(self, end: float) -> tuple[Pace, float] | None:
        """Sets the number of steps so that the run ends at `end`, in activity.clock's seconds.

        It ends sooner after MAX_PASSES over the text. Times a few steps, without effect -> the pace
        measured, and the seconds left then; None if it was stopped and still awaits timing.
        InputError if not even one step fits.
        """
        return Session(self).fit_steps(end)

    def steps(self) -> Generator[Record, None, None]:
        """Trains from the newest checkpoint, or the start, and yields each record.

        Logs records, saves checkpoints in the background, and at the end the model, the loss on
        the whole held-out part and a sample, all with the directory locked. With the setting
        `minutes`, a few steps are timed first. After `stop`, or when the caller leaves the loop,
        everything is saved as it is then. Errors as in `train`.
        """
        return Session(self).steps()

    def export(
        self,
        path: str | PathLike[str],
        to: str = "hf",
        type: str | None = None,
        checkpoint: int | str | None = None,
    ) -> None:
        """Exports what `load(checkpoint)` returns, as `smallmind.export`, with its history.

        Of an adapter alone, with `to` "peft", a directory of that package, or "gguf-adapter".
        """
        check_export(Path(check_type("path", path, str, PathLike)), to, type)
        found = loading.find(self.path, checkpoint)
        if to in parts.ADAPTER_FORMATS:
            return export_adapter(found.adapter(), path, to)
        model, tokenizer = found.load("numpy")
        if self.settings.run.chat:
            tokenizer = as_learned(tokenizer)
        history = summary.history_of(self, found.name)
        export(model, tokenizer, path, to, type, self.path.resolve().name, history)

    def serve(self, port: int | None = None, precision: str | None = None) -> Served:
        """Serves the page and OpenAI's API of the run, beside this program -> where.

        As the last expression of a cell, a notebook shows the page in a frame, if its browser is on
        this machine. `port` is by default any free one; `precision` as in `load`. Needs what
        `pip install "smallmind[serve]"` installs. InputError if the server does not start.
        """
        return Served(self.path, port, precision)

    def verify(
        self, digests_only: bool = False, on_record: OnRecord | None = None
    ) -> list[Verdict]:
        """Checks model, tokenizer and every checkpoint, and that retraining reproduces the next.

        `digests_only` leaves out the retraining. `on_record` gets every Verdict at once, and the
        records of the retraining. InputError if nothing has been saved yet.
        """
        training = None
        if not (digests_only or self.config.imported):
            self.change(threads=None)  # the run may come from another machine
            training = fresh_training(self)
        return verify_run(
            self.path,
            self.config.sha256,
            training,
            self.settings.training,
            on_record,
            is_imported=bool(self.config.imported),
        )

    def discard_untrained(self) -> None:
        """Removes the files of a new run that nobody has trained yet, and its directory.

        Leaves those that another process has written or is using; unlocks the directory.
        """
        if "training" in self.__dict__ and self.training.progress.step > 0:
            self.unlock()
        else:
            self.directory.discard_untrained()

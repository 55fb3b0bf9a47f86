"""A run on disk as an object: create, train, interrupt, resume, load, evaluate, verify.

Nothing here prints. The command line is a caller of this class.
"""

from collections.abc import Generator, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self, Unpack

from smallmind import parts
from smallmind.checks import InputError, check_type, suggesting
from smallmind.corpus.preparation import Encoding
from smallmind.exchange.format import check_export, export, export_adapter
from smallmind.exchange.published import as_learned
from smallmind.exchange.stored import StoredModel, find, load
from smallmind.forecast.threads import choose_threads
from smallmind.nn.transformer import TransformerModel
from smallmind.runs import creating, summary
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import CONFIG, RUNS, TASKS, Text
from smallmind.runs.metrics import MetricsTable, read_metrics
from smallmind.runs.precisions import COMPARED, PrecisionTable, losses_of
from smallmind.runs.saved import RunFiles
from smallmind.runs.serving import Served
from smallmind.runs.session import Ended, Session
from smallmind.runs.source import read_source, recognising
from smallmind.runs.verification import Verdict, verify_run
from smallmind.settings.config import NEUTRAL, ModelConfig
from smallmind.settings.rules import Choices
from smallmind.settings.run_fields import RecipeName, RunFields
from smallmind.settings.settings import Settings
from smallmind.tasks.results import TaskResult
from smallmind.tasks.task import evaluate_task
from smallmind.text.dataset import Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.evaluation import Evaluation, evaluate_held_out, evaluate_tokens
from smallmind.training.progress import OnRecord
from smallmind.training.records import Record
from smallmind.training.state import RunState
from smallmind.training.training import Training

CHANGEABLE = ("threads", *NEUTRAL)  # settings that do not affect the result


class Run:
    """A run of training and its directory.

    `Run.create` starts a new one, `Run.open` opens an existing one. `path` is the directory,
    `settings` are the resolved settings. At the end `final` is the evaluation on the whole held-out
    part and `sample` a text that the model wrote. A notebook shows its state and its losses.
    `after_save` may be set to a command that runs after each save, as `train --after-save`.
    """

    def __init__(self, files: RunFiles, passed_over: Sequence[str] = ()) -> None:
        self.files = files
        self.session = Session(files)
        self.path = files.path
        self.directory = files.directory
        self.after_save: str | None = None
        self.passed_over = passed_over  # newer runs, and why `unfinished` did not choose them

    def __repr__(self) -> str:
        return f"<Run {self.path}: {summary.state_of(self.files)}>"

    def _repr_html_(self) -> str:
        return summary.html_of(self.files)

    def _repr_svg_(self) -> str | None:
        metrics = summary.metrics_so_far(self.path)
        return metrics._repr_svg_() if metrics else None

    @classmethod
    def create(
        cls,
        settings: Settings | None = None,
        text: Text = None,
        *,
        out: str | PathLike[str] | None = None,
        recipe: RecipeName | None = None,
        **fields: Unpack[RunFields],
    ) -> "Run":
        """Creates a run, whose directory `out` then holds its resolved settings.

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
        return cls.of(creating.choices_of(settings, recipe, dict(fields)), text, out)

    @classmethod
    def of(
        cls, choices: Choices, text: Text = None, out: str | PathLike[str] | None = None
    ) -> "Run":
        """Creates a run of what has been chosen. Other arguments and errors as `create`."""
        directory, config, prepared = creating.create(choices, text, out)
        return cls(RunFiles(directory, config, prepared.source, prepared.data))

    @classmethod
    def import_model(
        cls,
        source: str | PathLike[str],
        out: str | PathLike[str] | None = None,
        block_size: int | None = None,
        base: str | PathLike[str] | None = None,
    ) -> "Run":
        """Imports a model of another program as a run, which generates and evaluates.

        `source` is a directory of transformers, with safetensors, or a GGUF file; `out` is by
        default runs/<date>-<name>. `block_size` shortens the context, unless the model has learned
        its positions. To train it on, create a run with init_from. Of a directory of PEFT the
        adapter is imported, for the model at `base`. InputError if the model is malformed or not
        known here, or the directory is in use.
        """
        return cls(RunFiles(*creating.import_model(source, out, block_size, base)))

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> Self:
        """Opens the run in a directory. InputError if there is none."""
        opened = RunDirectory(Path(check_type("directory", directory, str, PathLike)))
        return cls(RunFiles(opened, opened.load_config()))

    @classmethod
    def unfinished(cls, parent: str | PathLike[str] = RUNS) -> "Run":
        """Opens the newest run below parent that can be resumed, locked. InputError without one.

        That is one that has not ended, is not in use by another process, and has not failed in a
        way that would repeat itself. `passed_over` says which newer ones are.
        """
        configs = sorted(Path(parent).glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
        passed_over: list[str] = []
        for config in reversed(configs):
            try:
                opened = RunDirectory(config.parent)
                run = cls(RunFiles(opened, opened.load_config()), passed_over)
            except InputError:  # not a run that this version can resume
                continue
            try:
                run.lock()
                if failure := run.directory.failure():
                    raise InputError(f"{run.path} has failed: {failure}")
                if not run.is_finished:
                    return run
            except InputError as error:
                passed_over.append(str(error))
            run.unlock()
        reasons = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise InputError(f"no unfinished run in {parent}; give the directory of one{reasons}")

    @property
    def settings(self) -> Settings:
        return self.files.settings

    @property
    def data(self) -> Dataset:
        """The encoded text, read on first use. InputError if it has changed."""
        return self.files.data

    @property
    def training(self) -> Training:
        """Model, data and loss, built on first use; the state is loaded when training starts.

        InputError if the text or a model of the loss has changed, or the run could not be saved.
        """
        return self.session.training

    @property
    def final(self) -> Evaluation | None:
        """The evaluation on the whole held-out part, once the run has been trained to its end."""
        return self.session.ended.final

    @property
    def sample(self) -> str | None:
        """A text that the model wrote at the end."""
        return self.session.ended.sample

    @property
    def is_finished(self) -> bool:
        """True once the run has ended by itself, and its final model and its sample are saved."""
        return self.files.is_finished

    def newest(self) -> RunState | None:
        """Reads the newest sound checkpoint. Result and errors as `RunFiles.newest`."""
        return self.files.newest()

    def metrics(self) -> MetricsTable:
        """Reads the metrics, one row per step. InputError if nothing has been logged yet."""
        return read_metrics(self.path)

    def load(
        self, checkpoint: int | str | None = None, backend: str = "numba"
    ) -> tuple[TransformerModel, Tokenizer]:
        """Loads model and tokenizer at a checkpoint: "newest", "best" or the number of a step.

        Without it, the final model, or the newest checkpoint if the run has not ended yet. The
        run may be going. InputError if there is no such checkpoint.
        """
        return load(self.path, backend, checkpoint)

    def evaluate(
        self, text: str | PathLike[str] | None = None, checkpoint: int | str | None = None
    ) -> Evaluation:
        """Measures how well the model that `load(checkpoint)` returns predicts a text.

        `text` is a path or a text as in `create`, and all of it counts. Without it, or if it is the
        run's own text, only the held-out part counts.
        """
        model, tokenizer = self.load(checkpoint)
        if text is not None:
            run = recognising(self.settings.run)
            source = read_source(text, run, Encoding.of_run(run, tokenizer), self.files.cache)
            if source.sha256 != self.files.config.text_sha256:
                if whole := source.whole(tokenizer, model.config.block_size):
                    return evaluate_held_out(model, whole)
                return evaluate_tokens(model, tokenizer, source.tokens(tokenizer))
        return evaluate_held_out(model, self.data)

    def compare_precisions(
        self, precisions: Iterable[str] = COMPARED, checkpoint: int | str | None = None
    ) -> PrecisionTable:
        """Measures the held-out loss with weights in each precision, and their bytes.

        Of the model that `load(checkpoint)` returns. The run keeps the table for its report.
        """
        found = find(self.path, checkpoint)
        losses = losses_of(found, lambda model: evaluate_held_out(model, self.data), precisions)
        compared = PrecisionTable(found.name, tuple(losses))
        compared.save(self.path)
        return compared

    def evaluate_task(
        self,
        kind: str,
        path: str | PathLike[str],
        group_by: str | None = None,
        skip_unknown: bool = False,
        checkpoint: int | str | None = None,
        precision: str = "float32",
    ) -> TaskResult:
        """Measures how well the model that `load(checkpoint)` returns does on a file of items.

        They are "pairs", "choices" or "exact" answers, with the fields in `smallmind guide
        evaluating`, in groups by the field `group_by`. Items with characters that the model does
        not know are refused, or skipped. The run keeps the result for its report and for `compare`.
        InputError if the file is damaged or has no items.
        """
        found = find(self.path, checkpoint)
        loaded = found.load(precision=precision)
        result = evaluate_task(*loaded, kind, path, group_by, skip_unknown, found.name)
        result.keep(self.path / TASKS)
        return result

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
            return self.session.train(on_record, progress, self.after_save)
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
            if self.is_finished:
                return []
            return self.session.train(on_record, progress, self.after_save)
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
        self.files.change(**fields)
        if fields.get("threads"):
            choose_threads(self.settings.run)  # else it might come from a larger machine

    def extend(self, steps: int | None = None, epochs: int | None = None) -> None:
        """Gives the run another length, in steps or in the epochs that it was created with.

        It takes effect when the run resumes, also after early stopping, with the learning rate of a
        run of the new length. InputError unless that is more than the steps trained already.
        """
        self.files.extend(steps, epochs)

    def steps(self) -> Generator[Record, None, Ended]:
        """Trains from the newest checkpoint, or the start, and yields each record.

        Logs records, saves checkpoints in the background, and at the end the model, the loss on
        the whole held-out part and a sample, all with the directory locked. With the setting
        `minutes`, a few steps are timed first. After `stop`, or when the caller leaves the loop,
        everything is saved as it is then. Errors as in `train`.
        """
        return self.session.steps(self.after_save)

    def stop(self) -> None:
        """Ends training after the current batch and saves everything; from any thread."""
        self.session.stop()

    def lock(self) -> None:
        """Keeps other processes from training the run. Ends and errors as `RunFiles.lock`."""
        self.files.lock()

    def unlock(self) -> None:
        """Lets other processes train the run."""
        self.files.unlock()

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
        export_stored(find(self.path, checkpoint), self, path, to, type, self.path)

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
        if not (digests_only or self.files.config.imported):
            self.change(threads=None)  # the run may come from another machine
            training = self.session.fresh_training()
        return verify_run(
            self.path,
            self.files.config.sha256,
            training,
            self.settings.training,
            on_record,
            is_imported=bool(self.files.config.imported),
        )

    def discard_untrained(self) -> None:
        """Removes the files of a new run that nobody has trained yet, and its directory.

        Leaves those that another process has written or is using; unlocks the directory.
        """
        if self.session.has_trained:
            self.unlock()
        else:
            self.directory.discard_untrained()


def export_stored(
    found: StoredModel,
    run: Run | None,
    path: str | PathLike[str],
    to: str,
    type: str | None,
    source: Path,
) -> ModelConfig:
    """Exports a model on disk, with the history of its run if it has one -> its config."""
    if to in parts.ADAPTER_FORMATS:
        adapter = found.adapter()
        export_adapter(adapter, path, to)
        return adapter.config
    model, tokenizer = found.load("numpy")
    if run and run.settings.run.chat:
        tokenizer = as_learned(tokenizer)
    name = source.resolve().name if source.is_dir() else source.stem
    history = summary.history_of(run.files, found.name) if run else {}
    export(model, tokenizer, path, to, type, name, history)
    return model.config

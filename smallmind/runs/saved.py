"""A run as its directory holds it, and what has been read and built from that."""

import functools
from collections.abc import Iterable
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, Self

from smallmind.checks import InputError, check_type
from smallmind.corpus.preparation import Encoding
from smallmind.forecast.pace import Pace
from smallmind.nn.transformer import TransformerModel
from smallmind.runs import assembly, loading
from smallmind.runs.creating import with_paths
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import TASKS, TOKENIZER, Text, name_of
from smallmind.runs.metrics import MetricsTable, read_metrics
from smallmind.runs.parallel import Leader
from smallmind.runs.precisions import COMPARED, PrecisionTable, losses_of
from smallmind.runs.source import (
    TOKENS,
    ConversationSource,
    Source,
    TextSource,
    read_source,
    recognising,
    reread_source,
)
from smallmind.tasks.results import TaskResult
from smallmind.tasks.task import evaluate_task
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.energy import EnergyMeter
from smallmind.training.evaluation import Evaluation, evaluate_held_out, evaluate_tokens
from smallmind.training.records import AnswersRecord
from smallmind.training.state import RunState
from smallmind.training.training import Training


class SavedRun:
    """The settings, the text, the checkpoints and the training of a run, each read on first use.

    `Run` adds what is done with them, and a `Session` trains.
    """

    def __init__(self, directory: RunDirectory, config: SavedConfig) -> None:
        self.path = directory.path
        self.settings = config.settings.replace(out=str(directory.path))
        self.directory = directory
        self.config = config
        self._cache = self.path.resolve().parent / TOKENS  # of texts that are large for the memory
        self.leader = Leader()  # of the processes that train it
        self.final: Evaluation | None = None
        self.asked: AnswersRecord | None = None  # the held-out questions, at the end
        self.sample: str | None = None
        self.energy: EnergyMeter | None = None  # of the last session
        self.pace: Pace | None = None  # as `fit_steps` has measured it
        self.deadline: float | None = None  # of a run by minutes, in activity.clock's seconds
        self.skipped_checkpoints: list[tuple[Path, str]] = []  # damaged ones, and why
        self.is_extended = False  # and config.json does not say so yet
        self.is_used = False  # `training` is no longer as it was built
        self.after_save: str | None = None  # a command, as `AfterSave` takes it; never saved
        self.is_stopping = False  # as soon as the session that is going can
        self.kept_newest: RunState | None = None  # until training uses it

    @classmethod
    def open(cls, directory: str | PathLike[str]) -> Self:
        """The run in a directory. InputError if there is none."""
        opened = RunDirectory(Path(check_type("directory", directory, str, PathLike)))
        return cls(opened, opened.load_config())

    @property
    def name(self) -> str:
        run = self.settings.run
        return name_of(run.text, bool(run.chat))

    @functools.cached_property
    def source(self) -> Source:
        """The text, or its tokens. InputError if it has changed."""
        if self.config.imported:
            raise InputError(
                f"{self.path} was imported and has no text of its own: name one, as in smallmind "
                f"evaluate {self.path} TEXT or smallmind train TEXT --init-from {self.path}"
            )
        run, sha256 = self.settings.run, self.config.text_sha256
        # Earlier versions kept no tokenizer before the first checkpoint.
        saved = self._saved_tokenizer()
        encoding = Encoding.of_run(run, saved and self._as_encoded(saved))
        source = reread_source(self.path, run, encoding, sha256, self._cache)
        if isinstance(source, ConversationSource) and self.config.template_time:
            source.now = datetime.fromisoformat(self.config.template_time)
        return source

    @property
    def text(self) -> str:
        """The text. InputError if it is no longer the one that the run was created with."""
        if not isinstance(self.source, TextSource):
            raise InputError("the text of this run is not in memory; its tokens are in `data`")
        return self.source.text

    def move_text(self, text: Text) -> None:
        """The text is at other paths from now on. InputError if it is not the run's own."""
        before = self.settings
        self.__dict__.pop("source", None)
        self.settings = with_paths(before, text, before.run.out)
        try:
            self.check_text()
        except InputError:
            self.settings = before
            raise
        self.save_config()

    def check_text(self) -> None:
        """InputError if the text has changed since the run was created, or cannot be read."""
        assert self.source

    @functools.cached_property
    def data(self) -> Dataset:
        """The encoded text, read on first use. InputError as for `text`."""
        T, run = self.settings.model.block_size, self.settings.run
        tokenizer = self._tokenizer()
        data = self.source.dataset(self._as_encoded(tokenizer), T, run)
        if isinstance(data, PackedDataset) and not self.config.packs_evenly:
            data = data.filled_first()
        data.tokenizer = tokenizer
        return data

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

    def ended_early(self, saved: RunState) -> bool:
        """Tells whether early stopping ended the run at a checkpoint, and nothing extended it."""
        progress = saved.state.get("progress")
        has_ended = isinstance(progress, dict) and bool(progress.get("ended"))
        return has_ended and saved.step > self.config.extended_after

    @property
    def has_ended(self) -> bool:
        """True if no step is left to train; what comes after the last one may be missing."""
        newest = self.newest()
        if newest is None:
            return False
        if not isinstance(newest.state.get("progress"), dict):
            raise InputError(f"the checkpoint of step {newest.step} lacks its progress")
        return self.ended_early(newest) or newest.step >= self.settings.training.steps

    @property
    def is_finished(self) -> bool:
        """True once the run has ended by itself, and its final model and its sample are saved."""
        if self.config.imported:
            return True
        newest = self.newest()
        return newest is not None and self.has_ended and self.directory.is_complete(newest.step)

    @property
    def awaits_timing(self) -> bool:
        """True while steps are still to follow from `minutes`, or evaluations from their time."""
        return self.config.awaits_timing

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
            run = recognising(self.settings.run)
            source = read_source(text, run, Encoding.of_run(run, tokenizer), self._cache)
            if source.sha256 != self.config.text_sha256:
                if isinstance(source, ConversationSource):
                    whole = source.whole(tokenizer, model.config.block_size)
                    return evaluate_held_out(model, whole)
                return evaluate_tokens(model, tokenizer, source.tokens(tokenizer))
        return evaluate_held_out(model, self.data)

    def compare_precisions(
        self, precisions: Iterable[str] = COMPARED, checkpoint: int | str | None = None
    ) -> PrecisionTable:
        """The loss on the held-out text with weights in each precision, and their bytes.

        Of the model that `load(checkpoint)` returns. The run keeps the table for its report.
        """
        found = loading.find(self.path, checkpoint)
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
        """How well the model that `load(checkpoint)` returns does on a file of items.

        They are "pairs", "choices" or "exact" answers, with the fields in `smallmind guide
        evaluating`, in groups by the field `group_by`. Items with characters that the model does
        not know are refused, or skipped. The run keeps the result for its report and for `compare`.
        InputError if the file is damaged or has no items.
        """
        found = loading.find(self.path, checkpoint)
        loaded = found.load(precision=precision)
        result = evaluate_task(*loaded, kind, path, group_by, skip_unknown, found.name)
        result.keep(self.path / TASKS)
        return result

    def metrics(self) -> MetricsTable:
        """The metrics, one row per step. InputError if nothing has been logged yet."""
        return read_metrics(self.path)

    @functools.cached_property
    def training(self) -> Training:
        """Model, data and loss, built on first use; the state is loaded when training starts.

        InputError if the text or a model of the loss has changed, or the run could not be saved.
        """
        data, tokenizer = self.data, self._tokenizer()
        training = assembly.build_training(
            self.settings, data, tokenizer, self._initial(), self.leader.new_training
        )
        checkpoint.check_size(training.state())
        self.leader.share(self.settings, self.source, training)
        if training.loss.digest:
            self._check_loss(training.loss.digest)
        return training

    def stop(self) -> None:
        """Ends training after the current batch and saves everything; from any thread."""
        self.is_stopping = True
        if training := self.__dict__.get("training"):
            training.stop()

    def lock(self) -> None:
        """Keeps other processes from training the run, until `unlock` or the end of training.

        InputError naming the process that is training it.
        """
        if self.directory.lock():
            self.kept_newest = None  # another process may have saved a newer one since

    def unlock(self) -> None:
        self.directory.unlock()

    def save_config(self, **changes: Any) -> None:
        """Saves the settings, and other fields of config.json that change."""
        self.config = self.config._replace(settings=self.settings, **changes)
        self.directory.save_config(self.config)

    def _read_newest(self) -> RunState | None:
        if self.kept_newest is None:
            self.kept_newest, self.skipped_checkpoints = checkpoint.newest(self.path)
        return self.kept_newest

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of the newest checkpoint, or else that of the directory.

        A run of an earlier version has none before its first checkpoint: it is made from the text.
        """
        if saved := self._saved_tokenizer():
            return saved
        run, initial = self.settings.run, self._initial()
        encoding = Encoding.of_run(run, initial.tokenizer if initial else None)
        return assembly.fit_tokenizer(run, self.source, encoding, initial)

    def _saved_tokenizer(self) -> Tokenizer | None:
        newest = self._read_newest()
        if newest and "tokenizer" in newest.state:
            return loading.tokenizer_of(newest)
        return self.directory.load_tokenizer()

    def _as_encoded(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer as it encodes the text of the run, which may not begin as others do."""
        published = dict(tokenizer.published)
        if self.config.begins_texts or not published.pop(TOKENIZER, None):
            return tokenizer
        return tokenizer.with_published(published)

    def _initial(self) -> assembly.Initial | None:
        """The weights that the run starts from, unless it has a checkpoint with all of them."""
        if self._read_newest() and not self.settings.training.adapter:
            return None
        return assembly.Initial.read(self.settings.run, self.config.initial_sha256)

    def _check_loss(self, digest: str) -> None:
        if self.config.teacher_sha256 not in (None, digest):
            models = self.settings.loss[1].models.items()
            names = " or ".join(f"the {role} {path}" for role, path in models)
            raise InputError(f"{names} has changed since the run was created; restore it")
        if self.config.teacher_sha256 is None:
            self.save_config(teacher_sha256=digest)

"""The files of a run, and what has been read from them."""

from datetime import datetime
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, count_of
from smallmind.corpus.preparation import Encoding
from smallmind.losses.preference_settings import PLAIN
from smallmind.runs import assembly
from smallmind.runs.creating import with_paths
from smallmind.runs.directory import RunDirectory, SavedConfig
from smallmind.runs.files import TOKENIZER, Text, name_of
from smallmind.runs.loading import tokenizer_of
from smallmind.runs.source import TOKENS, Source, for_rewards, reading_for, reread_source
from smallmind.settings.settings import Settings
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import Epochs
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.training.state import RunState, reopened


class RunFiles:
    """The settings, the text and the checkpoints of a run in its directory.

    The text and the newest checkpoint are read on first use. `settings` may have changes that
    config.json, which is `config`, has not.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: SavedConfig,
        source: Source | None = None,
        data: Dataset | None = None,
    ) -> None:
        self.path = directory.path
        self.directory = directory
        self.config = config
        self.settings = config.settings.replace(out=str(directory.path))
        # Texts that are large for the memory have their tokens there.
        self.cache = self.path.resolve().parent / TOKENS
        self.skipped_checkpoints: list[tuple[Path, str]] = []  # damaged ones, and why
        self._source, self._data = source, data
        self._newest: RunState | None = None  # until training uses it
        self._is_extended = False  # and config.json does not say so yet

    @property
    def name(self) -> str:
        """A short name of the text."""
        return name_of(self.settings.run.text, bool(self.settings.run.chat))

    @property
    def source(self) -> Source:
        """The text, or its tokens. InputError if it has changed."""
        if self._source is None:
            self._source = self._read_source()
        return self._source

    @property
    def data(self) -> Dataset:
        """The encoded text. InputError as for `source`."""
        if self._data is None:
            T, run = self.settings.model.block_size, self.settings.run
            tokenizer = self.tokenizer()
            data = self.source.dataset(self._as_encoded(tokenizer), T, run)
            if isinstance(data, PackedDataset) and not self.config.packs_evenly:
                data = data.filled_first()
            data.tokenizer = tokenizer
            self._data = data
        return self._data

    def move_text(self, text: Text) -> None:
        """Notes other paths of the text. InputError if it is not the run's own."""
        before, self._source = self.settings, None
        self.settings = with_paths(before, text, before.run.out)
        try:
            self.check_text()
        except InputError:
            self.settings = before
            raise
        self.save_config()

    def check_text(self) -> None:
        """Raises InputError if the text has changed since the run was created."""
        assert self.source

    def newest(self) -> RunState | None:
        """Reads the newest sound checkpoint, or None. InputError if all are damaged."""
        newest = self._read_newest()
        if self.skipped_checkpoints and not newest:
            raise InputError(
                f"no checkpoint in {self.path} is intact: restore one from a copy, or remove them "
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

    def lock(self) -> None:
        """Keeps other processes from training the run. InputError naming one that trains it."""
        if self.directory.lock():
            self._newest = None  # another process may have saved a newer one since

    def unlock(self) -> None:
        """Lets other processes train the run."""
        self._newest = None
        self.directory.unlock()

    def change(self, **fields: Any) -> None:
        """Changes settings, which the next `save_config` saves."""
        self.settings = self.settings.replace(**fields)

    def save_config(self, settings: Settings | None = None, **changes: Any) -> None:
        """Saves the settings, and other fields of config.json that change; or changes nothing."""
        config = self.config._replace(settings=settings or self.settings, **changes)
        self.directory.save_config(config)
        self.settings, self.config = config.settings, config

    def extend(self, steps: int | None, epochs: int | None) -> None:
        """Gives the run another length. Arguments and errors as `Run.extend`."""
        newest, config = self.newest(), self.settings.training
        reached = newest.step if newest else 0
        if (epochs is None) == bool(config.epochs):
            name = "epochs" if config.epochs else "steps"
            raise InputError(f"the length of this run is set in {name}: give {name}")
        length: dict[str, int | None] = {"steps": steps}
        if epochs is not None:
            per_epoch = Epochs(self.data, config.grad_accum_steps).steps
            length = {"epochs": epochs, "steps": epochs * per_epoch}
        changed = self.settings.replace(**length, lengths=None)
        if changed.training.steps <= reached:
            shown = ", ".join(f"{name}={value}" for name, value in length.items())
            raise InputError(
                f"{shown}: the run has trained {count_of(reached, 'step')} already; give more"
            )
        self.settings = changed
        self.config = self.config._replace(
            settings=self.config.settings.replace(**length, lengths=None),
            extended_after=reached,
            awaits_timing=False,
        )
        self._is_extended = True

    def begin(self) -> RunState | None:
        """Prepares them for what is trained from here on -> the state that it starts from."""
        newest, self._newest = self.newest(), None
        if self._is_extended:  # written only now: another process could have trained the run
            self.directory.save_config(self.config)
            self._is_extended = False
        if newest and newest.step <= self.config.extended_after:
            newest = reopened(newest)
        step = newest.step if newest else 0
        self.directory.cut_metrics(step)
        self.directory.cut_samples(step)
        if self.settings.run.tensorboard:
            self.directory.begin_events(step)
        return newest

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the newest checkpoint, or else that of the directory.

        A run of an earlier version has none before its first checkpoint: it is made from the text.
        """
        if saved := self._saved_tokenizer():
            return saved
        run, initial = self.settings.run, self.initial()
        encoding = Encoding.of_run(run, initial.tokenizer if initial else None)
        return assembly.fit_tokenizer(run, self.source, encoding, initial)

    def initial(self) -> assembly.Initial | None:
        """Finds the weights that the run starts from; None if a checkpoint has all of them."""
        if self._read_newest() and not self.settings.training.adapter:
            return None
        return assembly.Initial.read(self.settings.run, self.config.initial_sha256)

    def _read_source(self) -> Source:
        if self.config.imported:
            raise InputError(
                f"{self.path} was imported and has no text of its own: give one, as in smallmind "
                f"evaluate {self.path} TEXT or smallmind train TEXT --init-from {self.path}"
            )
        run, sha256 = self.settings.run, self.config.text_sha256
        loss = reading_for(self.settings) or PLAIN
        # Earlier versions kept no tokenizer before the first checkpoint.
        saved = self._saved_tokenizer()
        encoding = Encoding.of_run(run, saved and self._as_encoded(saved))
        source = reread_source(self.path, run, encoding, sha256, self.cache, loss)
        source = for_rewards(source, self.settings.rewards)
        if source.now and self.config.template_time:
            source.now = datetime.fromisoformat(self.config.template_time)
        return source

    def _read_newest(self) -> RunState | None:
        if self._newest is None:
            self._newest, self.skipped_checkpoints = checkpoint.newest(self.path)
        return self._newest

    def _saved_tokenizer(self) -> Tokenizer | None:
        newest = self._read_newest()
        if newest and "tokenizer" in newest.state:
            return tokenizer_of(newest)
        return self.directory.load_tokenizer()

    def _as_encoded(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer as it encodes the run's text, which may not begin as others do."""
        published = dict(tokenizer.published)
        if self.config.begins_texts or not published.pop(TOKENIZER, None):
            return tokenizer
        return tokenizer.with_published(published)

"""The models that a server has: found by name, loaded when they are first asked for."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from smallmind.exchange.stored import find
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.files import model_in
from smallmind.runs.loading import precision_of
from smallmind.serve.engine import Engine, ModelQueue, prompt_part
from smallmind.text.chat import ChatFormat
from smallmind.text.templates import format_of, stopping, with_template_args
from smallmind.text.tokenizer import Tokenizer
from smallmind.training import checkpoint
from smallmind.views.listing import find_runs
from smallmind.views.run_view import RunView
from smallmind.writing.decoder import Decoder

MAX_LOADED = 4  # models in memory at a time, unless more are in use
LIST_SECONDS = 2.0  # for which the list of runs is not read again


class Loaded(NamedTuple):
    """A model in memory."""

    model: TransformerModel
    tokenizer: Tokenizer
    template: ChatFormat | None  # None: it was not trained on conversations
    line: ModelQueue
    name: str  # such as "the newest checkpoint, step 250"
    version: tuple[float, ...]  # of its files: another one is loaded again


class ServedModel:
    """A model by name, loaded or not."""

    def __init__(self, id: str, path: Path, is_run: bool) -> None:
        self.id, self.path, self.is_run = id, path, is_run
        self.loaded: Loaded | None = None
        self.used = 0.0
        self.loading = asyncio.Lock()
        self._described: tuple[tuple[float, ...], dict[str, Any]] | None = None

    def described(self) -> dict[str, Any]:
        """Describes the model, read without its weights. InputError if they are damaged."""
        loaded, version = self.loaded, self.version()
        if self._described and self._described[0] == version:
            return self._described[1]
        found = find(self.path)
        config, tokenizer, step = found.config, found.tokenizer(), found.step
        if step is None and self.is_run:
            step = RunView(self.path, fields=()).step
        described = {
            "kind": "completion" if format_of(tokenizer) is None else "chat",
            "step": step,
            "parameters": declare_parameters(config).count,
            "block_size": config.block_size,
            "layers": config.n_layer,
            "heads": config.n_head,
            "tokenizer": tokenizer.kind,
            "opening": tokenizer.opening,
            "state": loaded.name if loaded else found.name,
        }
        self._described = version, described
        return described

    def version(self) -> tuple[float, ...]:
        """Returns the times of the files that its newest weights are in."""
        if not self.is_run:
            return ()
        newest, model = checkpoint.peek(self.path), model_in(self.path)
        return (newest.step if newest else -1, model.stat().st_mtime if model else 0)


class Models:
    """The models of a server: those that are named, and the runs of a folder, also new ones."""

    def __init__(
        self,
        engine: Engine,
        paths: Sequence[Path],
        folder: Path | None,
        precision: str | None,
        slots: int,
        context: int | None = None,
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.engine, self.folder, self.template_args = engine, folder, template_args
        self.precision, self.slots, self.context = precision, slots, context
        self._entries: dict[str, ServedModel] = {}
        self._listed = -LIST_SECONDS
        for path in paths:
            self._add(path)

    def _add(self, path: Path) -> None:
        resolved = path.resolve()
        if any(entry.path.resolve() == resolved for entry in self._entries.values()):
            return
        name = path.name if path.is_dir() else path.stem
        name, number = name or resolved.name, 2
        while (id := name if number == 2 else f"{name}-{number - 1}") in self._entries:
            number += 1
        self._entries[id] = ServedModel(id, path, RunView(path, fields=()).is_run)

    def entries(self) -> list[ServedModel]:
        """Returns all of them, with the runs that have begun meanwhile."""
        if self.folder and time.monotonic() - self._listed > LIST_SECONDS and self.folder.is_dir():
            for view in find_runs(self.folder):
                if model_in(view.path) or checkpoint.peek(view.path):
                    self._add(view.path)
            self._listed = time.monotonic()
        return list(self._entries.values())

    def runs(self) -> list[RunView]:
        """Returns the runs of the folder and those that are named, without curves."""
        named = [x.path for x in self._entries.values() if x.is_run]
        views = {view.path.resolve(): view for view in (RunView(p, fields=()) for p in named)}
        if self.folder and self.folder.is_dir():
            views |= {view.path.resolve(): view for view in find_runs(self.folder)}
        return sorted(views.values(), key=lambda view: -view.created)

    async def loaded(self, entry: ServedModel) -> Loaded:
        """-> the model in memory; again if its run has gone on and nobody is served by the old one.

        InputError if it cannot be read.
        """
        async with entry.loading:
            version = entry.version()
            old = entry.loaded
            if old and (old.version == version or not old.line.is_idle):
                entry.used = time.monotonic()
                return old
            loaded = await self.engine.run_beside(lambda: self._load(entry, version))
            if old:
                self._unload(entry)
            entry.loaded, entry.used = loaded, time.monotonic()
            self.engine.add(loaded.line)
            self._unload_idle(entry)
            return loaded

    def _load(self, entry: ServedModel, version: tuple[float, ...]) -> Loaded:
        found = find(entry.path)
        model, tokenizer = found.load(precision=self.precision or precision_of(entry.path))
        tokenizer = stopping(with_template_args(tokenizer, self.template_args, checks=False))
        context = model.config.block_size
        length = min(context, self.context or context)
        part = prompt_part(model.flat.count)
        decoder = Decoder(model, tokenizer, self.slots, length, part)
        return Loaded(
            model, tokenizer, format_of(tokenizer), ModelQueue(decoder), found.name, version
        )

    def _unload(self, entry: ServedModel) -> None:
        assert entry.loaded
        self.engine.remove(entry.loaded.line)
        entry.loaded.line.decoder.close()
        entry.loaded = None

    def _unload_idle(self, needed: ServedModel) -> None:
        """Unloads those that have not been used for longest, down to MAX_LOADED."""
        held = [entry for entry in self._entries.values() if entry.loaded and entry is not needed]
        idle = [entry for entry in held if entry.loaded and entry.loaded.line.is_idle]
        for entry in sorted(idle, key=lambda entry: entry.used)[: len(held) + 1 - MAX_LOADED]:
            self._unload(entry)

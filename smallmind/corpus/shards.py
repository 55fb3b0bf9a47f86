"""A corpus as shards: files of tokens of a fixed size, and an index with their digests.

The shards are files with llm.c's header: train_000000.bin, ... for training, held_out_000000.bin,
... for evaluation. index.json describes a complete directory; until it is complete, progress.json
says how far it is. Both have a format number. `ShardWriter` writes them.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

from smallmind.checks import InputError, shown_value, whole
from smallmind.console import activity
from smallmind.corpus.token_files import MappedTokens, TokenFile, dtype_for
from smallmind.files import durable, safetensors

INDEX, PROGRESS, PLAN = "index.json", "progress.json", "plan.json"
FORMATS = {INDEX: 1, PROGRESS: 2, PLAN: 1}
PARTS = ("train", "held_out")
DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
# Beside one of these; index.json alone could be anybody's.
FILES_BESIDE = ("tokenizer.json", "train_000000.bin", "held_out_000000.bin")
REMEDY = "restore it, or remove the directory and prepare it again"
TOKEN_COUNT = "a number of tokens"
BYTES_PER_READ = 2**20  # bytes of a file that are digested at once


def holds_tokens(directory: str | PathLike[str]) -> bool:
    """Returns True if a directory holds shards, finished or not."""
    is_named = any(os.path.isfile(os.path.join(directory, name)) for name in (INDEX, PROGRESS))
    return is_named and any(os.path.isfile(os.path.join(directory, name)) for name in FILES_BESIDE)


class Shard(NamedTuple):
    """A finished file of tokens."""

    name: str
    tokens: int
    sha256: str


class ShardRecipe(NamedTuple):
    """Everything that must stay the same from the first shard to the last."""

    vocab_size: int
    tokenizer_digest: str
    shard_tokens: int  # in every shard of a part but the last


class WrittenPart(NamedTuple):
    """How far the training or held-out part is written."""

    shards: tuple[Shard, ...] = ()
    tokens: int = 0  # in the file of the shard that is being filled
    sha256: str = hashlib.sha256().hexdigest()  # of these


class Index(NamedTuple):
    """The contents of a complete directory."""

    recipe: ShardRecipe
    parts: Mapping[str, WrittenPart]
    state: dict[str, Any]  # whatever the caller of the writer gave

    def write(self, directory: Path) -> None:
        """Writes index.json. OSError if the disk refuses it."""
        shards = {name: self.parts[name].shards for name in PARTS}
        fields = {
            "dtype": dtype_for(self.recipe.vocab_size).name,
            **self.recipe._asdict(),
            "tokens": {name: sum(shard.tokens for shard in shards[name]) for name in PARTS},
            "shards": {name: [shard._asdict() for shard in shards[name]] for name in PARTS},
            "state": self.state,
        }
        write_record(directory / INDEX, fields)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads index.json. FileNotFoundError if there is none, InputError if it is damaged."""
        with read_record(directory / INDEX) as fields:
            parts = {name: WrittenPart(_shards(fields["shards"][name], name)) for name in PARTS}
            state = fields["state"]
            if not isinstance(state, dict):
                raise ValueError("its state is not a JSON object")
            return cls(_recipe(fields), parts, state)


class ResumePoint(NamedTuple):
    """Where an unfinished writer can resume."""

    recipe: ShardRecipe
    parts: Mapping[str, WrittenPart]
    position: Any  # JSON, of the caller: all tokens before it have been written

    def write(self, directory: Path) -> None:
        """Writes progress.json. OSError if the disk refuses it."""
        parts = {
            name: {**part._asdict(), "shards": [shard._asdict() for shard in part.shards]}
            for name, part in self.parts.items()
        }
        fields = {**self.recipe._asdict(), "position": self.position, "parts": parts}
        write_record(directory / PROGRESS, fields)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads progress.json. FileNotFoundError if there is none, InputError if it is damaged."""
        with read_record(directory / PROGRESS) as fields:
            parts = {name: _part(fields["parts"][name], name) for name in PARTS}
            return cls(_recipe(fields), parts, fields["position"])


class Shards:
    """A complete directory: its index, and the tokens of both parts."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.index = index
        self.train = self._tokens(index.parts["train"].shards)
        self.held_out = self._tokens(index.parts["held_out"].shards)

    def __repr__(self) -> str:
        return (
            f"<Shards {self.directory}: {len(self.train):,} training and "
            f"{len(self.held_out):,} held-out tokens>"
        )

    def verify(self) -> None:
        """Reads everything. InputError naming the first shard that is not what was written."""
        verify(self.directory, self.index.parts)

    def _tokens(self, shards: tuple[Shard, ...]) -> MappedTokens:
        dtype, files = dtype_for(self.index.recipe.vocab_size), []
        for shard in shards:
            if not (self.directory / shard.name).exists():
                raise InputError(f"{self.directory / shard.name} is missing; {REMEDY}")
            file = TokenFile(self.directory / shard.name)
            files.append(file)
            if len(file) != shard.tokens or file.dtype != dtype:
                raise InputError(
                    f"{file.path} has {len(file):,} tokens of {file.dtype.name}, not "
                    f"{shard.tokens:,} of {dtype.name} as {INDEX} says; {REMEDY}"
                )
        return MappedTokens(files)


def open_shards(directory: str | PathLike[str]) -> Shards:
    """Returns the shards in a directory. InputError if it is not complete, or sizes differ."""
    directory = Path(directory)
    try:
        return Shards(directory, Index.read(directory))
    except FileNotFoundError:
        if (directory / PROGRESS).exists():
            raise InputError(
                f"{directory} is not finished: run `smallmind prepare ... --out {directory}` "
                "again, as before, to finish it"
            ) from None
        raise InputError(f"{directory} is not a directory of shards: it has no {INDEX}") from None


def verify(directory: Path, parts: Mapping[str, WrittenPart]) -> None:
    """Reads all finished shards. InputError naming the first that is not what was written."""
    shards = [shard for part in parts.values() for shard in part.shards]
    usual = sum(shard.tokens for shard in shards) < activity.LARGE
    with activity.doing(f"Verifying {directory}", usual):
        for shard in activity.parts(shards):
            path = directory / shard.name
            if digest(path).hexdigest() != shard.sha256:
                raise InputError(damaged(path))


def damaged(path: Path) -> str:
    """Returns the message about a file that differs from what was written."""
    return f"{path} does not match its SHA-256: it is damaged or was changed; {REMEDY}"


def digest(path: Path, start: int = 0, nbytes: int | None = None) -> "hashlib._Hash":
    """-> the SHA-256 of a file, or of nbytes from start on. InputError if it cannot be read."""
    sha = hashlib.sha256()
    try:
        with durable.open_regular(path, follow=False) as file:
            count = os.fstat(file.fileno()).st_size if nbytes is None else nbytes
            file.seek(start)
            for done in activity.parts(range(0, count, BYTES_PER_READ)):
                sha.update(file.read(min(BYTES_PER_READ, count - done)))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {REMEDY}") from None
    except ValueError as error:
        raise InputError(f"cannot read {path}: {error}; {REMEDY}") from None
    return sha


@contextmanager
def read_record(path: Path) -> Iterator[dict[str, Any]]:
    """Reads a JSON object; errors about its fields within the block name the file."""
    try:
        with durable.open_regular(path, follow=False) as file:
            fields = safetensors.from_json(file.read())
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        if fields["format"] != (known := FORMATS[path.name]):
            raise InputError(
                f"{path} has format {shown_value(fields['format'])}; this version reads {known}: "
                "remove the directory and prepare it again, or use the version that wrote it"
            )
        yield fields
    except (FileNotFoundError, InputError):
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path} was not written by smallmind: {reason}; restore it, or choose another "
            "directory"
        ) from None


def write_record(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes a JSON object with the format of the file. OSError if the disk refuses it."""
    fields = {"format": FORMATS[path.name], **fields}
    durable.write(path, [safetensors.to_json(fields).encode() + b"\n"])


def _recipe(fields: dict[str, Any]) -> ShardRecipe:
    recipe = ShardRecipe(*(fields[name] for name in ShardRecipe._fields))
    whole(recipe.vocab_size, 1, TOKEN_COUNT)
    whole(recipe.shard_tokens, 1, TOKEN_COUNT)
    if not isinstance(recipe.tokenizer_digest, str):
        raise ValueError("its tokenizer_digest is not a string")
    return recipe


def _part(fields: dict[str, Any], part: str) -> WrittenPart:
    shards, tokens = _shards(fields["shards"], part), whole(fields["tokens"], 0, TOKEN_COUNT)
    return WrittenPart(shards, tokens, _digits(fields["sha256"]))


def _shards(described: Any, part: str) -> tuple[Shard, ...]:
    shards = tuple(
        Shard(s["name"], whole(s["tokens"], 1, TOKEN_COUNT), _digits(s["sha256"]))
        for s in described
    )
    for number, shard in enumerate(shards):
        # A name is also a path: one from elsewhere could lead out of the directory.
        if shard.name != shard_name(part, number):
            raise ValueError(f"shard {number} of {part} is named {shown_value(shard.name)}")
    return shards


def shard_name(part: str, number: int) -> str:
    """Returns the name of a part's shard, from 0."""
    return f"{part}_{number:06}.bin"


def _digits(value: Any) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{shown_value(value)} is not a SHA-256")
    return value

"""Writing a corpus as shards, which can be resumed after a kill.

progress.json records what is there and from which position the caller resumes: at the beginning,
after each finished shard, and when the caller asks for it. Everything else is a leftover, which the
next writer removes.

Tokens of a part, training or held-out, are appended to the file of their shard, behind a header for
a full one. What comes after the tokens that the last record describes is cut off again.
"""

import errno
import hashlib
import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.corpus.shards import (
    INDEX,
    PARTS,
    PROGRESS,
    Index,
    ResumePoint,
    Shard,
    ShardRecipe,
    WrittenPart,
    damaged,
    digest,
    shard_name,
    verify,
)
from smallmind.corpus.token_files import HEADER_BYTES, dtype_for, encode_header
from smallmind.files import durable, safetensors
from smallmind.files.lock import RunLock
from smallmind.text.ids import check_ids

MAX_WRITE = 2**20  # tokens that are written at once
SHARD_NAME = re.compile(r"(?:train|held_out)_[0-9]{6,}\.bin", re.ASCII)
# The header has 32 bits for the tokens of a shard, and ids are int32 in memory.
MAX_COUNTS = {"shard_tokens": 2**31 - 1, "vocab_size": 2**31}


class ShardWriter:
    """Writes the shards of a corpus: `with ShardWriter(...) as writer: writer.append(ids)`.

    At the end of the block the index is written and the directory is complete; after an exception
    it can be continued by a writer with the same arguments. Such a writer begins at `position`: the
    caller must append again what came after it.

    InputError if the directory is complete, in use, was begun with other arguments, is damaged, or
    holds other files; OSError if the disk refuses something, which loses nothing that was recorded.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        vocab_size: int,
        tokenizer_digest: str,
        shard_tokens: int,
    ) -> None:
        self.directory = Path(directory)
        self.state: dict[str, Any] = {}  # goes into the index; may be changed until the end
        self._recipe = ShardRecipe(
            check_count("vocab_size", vocab_size),
            check_type("tokenizer_digest", tokenizer_digest, str),
            check_count("shard_tokens", shard_tokens),
        )
        make_directory(self.directory)
        self._lock = RunLock(self.directory)
        self._parts: dict[str, PartWriter] = {}
        self._is_usable = True
        try:
            with self._explaining():
                self._recorded = self._marked = self._open()
        except BaseException:
            self._close()
            raise

    @property
    def position(self) -> Any:
        """The last position that was given, by an earlier writer if by none so far; else None."""
        return self._marked.position

    def append(self, ids: Any, position: Any = None, held_out: bool = False) -> None:
        """Adds ids (n,) to the training or held-out part.

        `position` is a JSON value from which the caller can resume after these ids, if it can: it
        is recorded once a shard is finished. InputError for an id outside the vocabulary.
        """
        ids = check_ids("ids", ids, self._recipe.vocab_size) if len(ids) else np.empty(0, np.int32)
        if ids.ndim != 1:
            raise InputError(f"ids has shape {ids.shape}; it must have one dimension")
        if position is not None:  # as it will be read back; TypeError or ValueError if not JSON
            position = safetensors.from_json(safetensors.to_json(position))
        with self._changing():
            self._parts["held_out" if held_out else "train"].append(ids)
            if position is not None:
                self._marked = ResumePoint(self._recipe, self._written(), position)
                recorded = self._recorded.parts
                if any(len(self._parts[p].shards) > len(recorded[p].shards) for p in PARTS):
                    self._record()

    def commit(self) -> None:
        """Records the last position, so that it survives even a power failure."""
        with self._changing():
            self._record()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._changing():
                    self._finish()
        finally:
            if not (self.directory / INDEX).exists():
                self._leave_resumable()
            self._close()

    def _open(self) -> ResumePoint:
        """Makes the directory ready for more -> where to resume."""
        if os.path.lexists(self.directory / INDEX):
            self._refuse_complete()
        try:
            progress = ResumePoint.read(self.directory)
        except FileNotFoundError:
            check_own(self.directory)
            progress = ResumePoint(self._recipe, dict.fromkeys(PARTS, WrittenPart()), None)
            progress.write(self.directory)
        for name, found, wanted in zip(
            ShardRecipe._fields, progress.recipe, self._recipe, strict=True
        ):
            if found != wanted:
                raise InputError(
                    f"{self.directory} was started with {name}={found!r}, not {wanted!r}; choose "
                    "another directory, or remove it to start over"
                )
        parts = progress.parts
        remove_leftovers(self.directory, described(parts))
        verify(self.directory, parts)
        for name, part in parts.items():
            self._parts[name] = PartWriter(self.directory, name, self._recipe, part)
        return progress

    def _refuse_complete(self) -> NoReturn:
        index = Index.read(self.directory)
        # The writer may have been killed before it had removed these.
        remove_leftovers(self.directory, described(index.parts))
        with suppress(FileNotFoundError):
            durable.remove(self.directory / PROGRESS)
        raise InputError(f"{self.directory} is complete; choose another directory to write to")

    def _written(self) -> dict[str, WrittenPart]:
        return {name: part.progress() for name, part in self._parts.items()}

    def _record(self) -> None:
        if self._marked is self._recorded:
            return
        # If this fails, it is not tried again: an fsync that has failed may succeed the next time,
        # without the pages that the system has dropped.
        marked, self._marked = self._marked, self._recorded
        for part in self._parts.values():
            part.sync()
        marked.write(self.directory)
        self._recorded = self._marked = marked

    def _finish(self) -> None:
        self._record()
        for part in self._parts.values():
            part.finish_shard()
            part.sync()
        Index(self._recipe, self._written(), self.state).write(self.directory)
        with suppress(OSError):  # an index makes it meaningless
            durable.remove(self.directory / PROGRESS)

    def _leave_resumable(self) -> None:
        """Records the last position, as far as the disk allows, and removes the rest."""
        with suppress(OSError):
            self._record()
        for part in self._parts.values():
            part.close()
        with suppress(OSError, InputError):
            # Not self._recorded: a write that failed may have replaced the record nevertheless.
            on_disk = ResumePoint.read(self.directory)
            remove_leftovers(self.directory, described(on_disk.parts))

    def _close(self) -> None:
        self._is_usable = False
        for part in self._parts.values():
            part.close()
        self._lock.release()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lets nothing more be written after an exception in the block: some may be missing."""
        if not self._is_usable:
            raise ValueError("this writer has ended or failed; make a new one, which resumes it")
        self._is_usable = False
        with self._explaining():
            yield
        self._is_usable = True

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Adds to errors of a full disk within the block what to do."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            advice = "make room and start again: it resumes where the last record says"
            raise OSError(error.errno, f"{error.strerror}; {advice}", error.filename) from None


class PartWriter:
    """Writes the shards of a part, after `progress`. OSError, InputError if that is not there."""

    def __init__(
        self, directory: Path, part: str, recipe: ShardRecipe, progress: WrittenPart
    ) -> None:
        self.directory = directory
        self.part = part
        self.shards = list(progress.shards)
        self.tokens = progress.tokens  # in the file of the shard that is being filled
        self._shard_tokens = recipe.shard_tokens
        self._dtype = dtype_for(recipe.vocab_size)
        self._sha = hashlib.sha256()  # of these tokens
        self._files: dict[int, int] = {}  # those that may not be synced, by number of their shard
        self._names_synced = True
        if self.tokens:
            self._reopen(progress.sha256)

    def append(self, ids: np.ndarray) -> None:
        """Writes ids (n,), which must be in the vocabulary; shards are finished on the way."""
        while len(ids):
            piece = ids[: min(self._shard_tokens - self.tokens, MAX_WRITE)].astype(self._dtype)
            ids = ids[len(piece) :]
            with durable.naming(self._path(len(self.shards))):
                durable.write_all(self._file(), piece.view(np.uint8).data)
            self._sha.update(piece.data)
            self.tokens += len(piece)
            if self.tokens == self._shard_tokens:
                self.finish_shard()
            activity.tick()

    def finish_shard(self) -> None:
        """Ends the current shard, however many tokens it has."""
        if not self.tokens:
            return
        path = self._path(len(self.shards))
        if self.tokens < self._shard_tokens:
            with durable.naming(path):
                header = encode_header(self._dtype, self.tokens)
                durable.files.overwrite(self._file(), memoryview(header))
        self.shards.append(Shard(path.name, self.tokens, digest(path).hexdigest()))
        self.tokens, self._sha = 0, hashlib.sha256()

    def progress(self) -> WrittenPart:
        """Returns how far the part is written."""
        return WrittenPart(tuple(self.shards), self.tokens, self._sha.hexdigest())

    def sync(self) -> None:
        """Makes all that was appended survive a power failure."""
        for number in list(self._files):
            with durable.naming(self._path(number)):
                durable.files.fsync(self._files[number])
                if not self._names_synced:
                    durable.files.fsync_directory(self.directory)
                    self._names_synced = True
            if number < len(self.shards):
                os.close(self._files.pop(number))

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _path(self, number: int) -> Path:
        return self.directory / shard_name(self.part, number)

    def _file(self) -> int:
        """Returns the file of the shard that is being filled, which is made if it is new."""
        number = len(self.shards)
        if number not in self._files:
            self._files[number] = durable.files.create(self._path(number))
            self._names_synced = False
            header = encode_header(self._dtype, self._shard_tokens)
            durable.write_all(self._files[number], memoryview(header))
        return self._files[number]

    def _reopen(self, sha256: str) -> None:
        """Opens the file of the last shard again, and cuts off what came after the record."""
        number, nbytes = len(self.shards), self.tokens * self._dtype.itemsize
        path = self._path(number)
        self._sha = digest(path, HEADER_BYTES, nbytes)
        if self._sha.hexdigest() != sha256:
            raise InputError(damaged(path))
        with durable.naming(path):
            way = os.O_WRONLY | durable.flags("O_NOFOLLOW", "O_BINARY")
            file = self._files[number] = os.open(path, way)
            os.ftruncate(file, HEADER_BYTES + nbytes)
            header = encode_header(self._dtype, self._shard_tokens)
            durable.files.overwrite(file, memoryview(header))


def written(directory: Path) -> list[str]:
    """Returns the files in a directory that writers of shards make, temporary ones included."""
    names = []
    for name in sorted(os.listdir(directory)):
        match = durable.TEMPORARY.fullmatch(name)
        target = match[1] if match else name
        if SHARD_NAME.fullmatch(target) or (match and target in (INDEX, PROGRESS)):
            names.append(name)
    return names


def check_own(directory: Path, records: Container[str] = ()) -> None:
    """Raises InputError for visible files that neither a writer nor its caller (`records`) made."""
    names = [name for name in sorted(os.listdir(directory)) if not name.startswith(".")]
    reason = f"but no {PROGRESS} of a preparation"
    if PROGRESS in names:
        ours = {PROGRESS, *written(directory)}
        names = [name for name in names if name not in ours and name not in records]
        reason = "which its preparation has not written"
    if names:
        raise InputError(
            f"{directory} already holds {names[0]}, {reason}; choose another directory, new or "
            "empty"
        )


def described(parts: Mapping[str, WrittenPart]) -> set[str]:
    """Returns the files of shards, finished or not, that a record describes."""
    return {
        shard_name(name, number)
        for name, part in parts.items()
        for number in range(len(part.shards) + (part.tokens > 0))
    }


def remove_leftovers(directory: Path, known: set[str]) -> None:
    """Removes what writers have made but for these files; the lock must be held."""
    # The record may not be synced yet; the one before it, which a power failure would bring back,
    # describes files that are removed here.
    with durable.naming(directory):
        durable.files.fsync_directory(directory)
    for name in written(directory):
        if name not in known:
            durable.remove(directory / name)


def check_count(name: str, value: int) -> int:
    """Returns value, of one of MAX_COUNTS. InputError if no directory can have as many."""
    if not 1 <= check_type(name, value, int) <= MAX_COUNTS[name]:
        raise InputError(f"{name}={value} must be at least 1 and at most {MAX_COUNTS[name]}")
    return value


def make_directory(directory: Path) -> None:
    """Makes a directory and its parents. InputError if nothing can be written to it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        durable.make_directory(directory)
    except OSError as error:
        raise InputError(f"cannot make {directory}: {error.strerror}") from None
    if not directory.is_dir():
        raise InputError(f"cannot make {directory}: it is a file; choose another directory")
    if not os.access(directory, os.W_OK):
        raise InputError(f"cannot write to {directory}; choose another directory")

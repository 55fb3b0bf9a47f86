"""The shards of one part of a corpus, training or held-out, while they are written.

Tokens are appended to a file of their own, train_000003.partial. Once it holds a whole shard it is
copied to train_000003.bin, behind a header, and removed when the record of progress says so. Until
then both are there: whatever the last record describes can be restored.
"""

import hashlib
import os
import re
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.corpus.shard_index import (
    INDEX,
    PIECE,
    PROGRESS,
    PartProgress,
    Recipe,
    Shard,
    damaged,
    digest,
    shard_name,
)
from smallmind.corpus.token_files import dtype_for, encode_header
from smallmind.files import durable

CHUNK = 2**20  # tokens that are written at once
OURS = re.compile(r"(?:train|held_out)_[0-9]{6,}\.(?:bin|partial)", re.ASCII)


class PartWriter:
    """Writes the shards of a part, resuming after `progress`.

    OSError naming the file if the disk refuses something, InputError if what progress describes is
    not there.
    """

    def __init__(self, directory: Path, part: str, recipe: Recipe, progress: PartProgress) -> None:
        self.directory = directory
        self.part = part
        self.shards = list(progress.shards)
        self.tokens = progress.tokens  # in the file of the shard that is being filled
        self._shard_tokens = recipe.shard_tokens
        self._dtype = dtype_for(recipe.vocab_size)
        self._sha = hashlib.sha256()  # of these tokens
        self._files: dict[int, int] = {}  # the partial files by number of their shard
        self._names_synced = True
        if self.tokens:
            self._reopen(progress.sha256)

    def append(self, ids: np.ndarray) -> None:
        """Writes ids (n,), which must be in the vocabulary; shards are finished on the way."""
        while len(ids):
            piece = ids[: min(self._shard_tokens - self.tokens, CHUNK)].astype(self._dtype)
            ids = ids[len(piece) :]
            with durable.naming(self._partial(len(self.shards))):
                self._write(piece.view(np.uint8).data)
            self._sha.update(piece.data)
            self.tokens += len(piece)
            if self.tokens == self._shard_tokens:
                self.finish_shard()
            activity.tick()

    def finish_shard(self) -> None:
        """Ends the current shard, however many tokens it has."""
        if not self.tokens:
            return
        name, sha = shard_name(self.part, len(self.shards)), hashlib.sha256()
        durable.write(self.directory / name, self._contents(sha))
        self.shards.append(Shard(name, self.tokens, sha.hexdigest()))
        self.tokens, self._sha = 0, hashlib.sha256()

    def progress(self) -> PartProgress:
        """The part's progress."""
        return PartProgress(tuple(self.shards), self.tokens, self._sha.hexdigest())

    def sync(self, progress: PartProgress) -> None:
        """After this, all that progress describes survives a power failure."""
        if not progress.tokens:
            return
        number = len(progress.shards)
        with durable.naming(self._partial(number)):
            durable.files.fsync(self._files[number])
            if not self._names_synced:
                durable.files.fsync_directory(self.directory)
                self._names_synced = True

    def remove_copied(self, shards: int) -> None:
        """Removes the partial files of the first `shards` shards."""
        for number in [number for number in self._files if number < shards]:
            os.close(self._files.pop(number))
            with suppress(OSError):  # the next writer removes it
                durable.remove(self._partial(number))

    def close(self) -> None:
        """Closes all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _partial(self, number: int) -> Path:
        return self.directory / partial_name(self.part, number)

    def _write(self, rest: memoryview) -> None:
        number = len(self.shards)
        if number not in self._files:
            self._files[number] = durable.files.create(self._partial(number))
            self._names_synced = False
        while rest:
            written = durable.files.write(self._files[number], rest[: durable.MAX_WRITE])
            rest = rest[written:]

    def _contents(self, sha: "hashlib._Hash") -> Iterator[bytes]:
        """The bytes of the current shard, which are added to sha."""
        header = encode_header(self._dtype, self.tokens)
        sha.update(header)
        yield header
        path, rest = self._partial(len(self.shards)), self.tokens * self._dtype.itemsize
        with durable.open_regular(path, follow=False) as file:
            while rest and (piece := file.read(min(PIECE, rest))):
                sha.update(piece)
                rest -= len(piece)
                yield piece
                activity.tick()
        if rest:
            raise InputError(f"{path} was truncated while it was written")

    def _reopen(self, sha256: str) -> None:
        """Opens the partial file again; what was written to it after the record is overwritten."""
        number, nbytes = len(self.shards), self.tokens * self._dtype.itemsize
        path = self._partial(number)
        self._sha = digest(path, nbytes)
        if self._sha.hexdigest() != sha256:
            raise InputError(damaged(path))
        flags = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        with durable.naming(path):
            file = self._files[number] = os.open(path, flags)
            os.lseek(file, nbytes, os.SEEK_SET)


def partial_name(part: str, number: int) -> str:
    """The name of the file in which a shard is collected."""
    return f"{part}_{number:06}.partial"


def written(directory: Path) -> list[str]:
    """The files in a directory that writers of shards make, temporary ones included."""
    names = []
    for name in sorted(os.listdir(directory)):
        match = durable.TEMPORARY.fullmatch(name)
        target = match[1] if match else name
        if OURS.fullmatch(target) or (match and target in (INDEX, PROGRESS)):
            names.append(name)
    return names


def check_own(directory: Path, records: Container[str] = ()) -> None:
    """InputError if a directory holds files that no writer has made there, but for hidden ones.

    `records` are those that its caller writes beside progress.json.
    """
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


def described(parts: dict[str, PartProgress]) -> set[str]:
    """The files of shards, finished or not, that a record describes."""
    unfinished = {name: len(part.shards) for name, part in parts.items() if part.tokens}
    return {shard.name for part in parts.values() for shard in part.shards} | {
        partial_name(name, number) for name, number in unfinished.items()
    }


def remove_leftovers(directory: Path, kept: set[str]) -> None:
    """Removes what writers have made but for these files; the lock must be held."""
    # The record may not be synced yet; the one before it, which a power failure would bring back,
    # describes files that are removed here.
    with durable.naming(directory):
        durable.files.fsync_directory(directory)
    for name in written(directory):
        if name not in kept:
            durable.remove(directory / name)

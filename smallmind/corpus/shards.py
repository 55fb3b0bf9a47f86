"""A corpus as shards: files of tokens of a fixed size, and an index with their digests.

The shards are files with llm.c's header: train_000000.bin, ... for training, held_out_000000.bin,
... for evaluation. `ShardWriter` writes them.
"""

from os import PathLike
from pathlib import Path

from smallmind.checks import InputError
from smallmind.corpus.mapped_tokens import MappedTokens
from smallmind.corpus.shard_index import INDEX, PROGRESS, REMEDY, Index, Shard, verify
from smallmind.corpus.token_files import TokenFile, dtype_for


class Shards:
    """A complete directory: its index, and the tokens of both parts."""

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory = directory
        self.index = index
        self.train = self._tokens(index.train)
        self.held_out = self._tokens(index.held_out)

    def __repr__(self) -> str:
        return (
            f"<Shards {self.directory}: {len(self.train):,} training and "
            f"{len(self.held_out):,} held-out tokens>"
        )

    def verify(self) -> None:
        """Reads everything. InputError naming the first shard that is not what was written."""
        verify(self.directory, self.index.parts())

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
    """The shards in a directory; sizes are checked, and digests only by `verify`.

    InputError if it is not complete, or a file is missing or has another size.
    """
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

"""A few short documents that are prepared in small pieces, in several shards of both parts."""

from pathlib import Path

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.corpus.reading import Limits
from smallmind.text import bpe

SHARD_TOKENS = 150


def write_texts(root):
    """Documents, the last of which are held out -> their folder."""
    folder = Path(root) / "texts"
    if not folder.exists():
        folder.mkdir(parents=True)
        for i in range(11):
            text = f"story {i}: the cat's 🐈 sat on mat {i}\r\n" + "purr " * (i % 3)
            (folder / f"{i:02}.txt").write_bytes(text.encode())
    return folder


def prepare_texts(directory):
    """Prepares the documents beside the directory in it, as one that was killed would have been."""
    bpe.CHUNK = 40
    corpus = Corpus(write_texts(directory.parent), limits=Limits(piece=40))
    prepare(corpus, directory, Encoding("bpe", {"vocab_size": 270}), SHARD_TOKENS)

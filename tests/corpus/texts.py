"""A few short documents or conversations that are prepared in small pieces, in several shards."""

import json
from pathlib import Path

from smallmind.corpus import preparation
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.corpus.reading import Limits
from smallmind.text import bpe
from tests.corpus.reading import written

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


def write_conversations(root):
    """Conversations and a plain text -> their folder."""
    folder = Path(root) / "conversations"
    pairs = [{"question": f"Who has {i}?", "answer": "Tom 🐈" * (i % 3 + 1)} for i in range(14)]
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "gpt", "content": "purr"}]
    if not folder.exists():
        written(folder / "a.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
        written(folder / "b.txt", "the cat's 🐈 sat on the mat")
        written(folder / "c.jsonl", json.dumps({"messages": messages * 2}) + "\n")
    return folder


def prepare_conversations(directory):
    """Prepares the conversations beside the directory in it, like prepare_texts."""
    preparation.TOKENS_PER_APPEND = 100
    corpus = Corpus(write_conversations(directory.parent), limits=Limits(piece=40))
    prepare(corpus, directory, Encoding("byte"), SHARD_TOKENS)

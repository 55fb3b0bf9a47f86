"""Helpers for the tests of this folder: reading paths to the end, and asserting refusals."""

import json

from smallmind.corpus.corpus import Corpus
from smallmind.corpus.reading import Limits
from tests.programs import refusal


def corpus(paths, piece=None, **settings):
    """A corpus, if need be with pieces of another size."""
    if piece:
        settings["limits"] = Limits(piece=piece)
    return Corpus(paths, **settings)


def documents(source):
    """The documents of a corpus, or of paths."""
    source = source if isinstance(source, Corpus) else Corpus(source)
    texts, parts = [], []
    for piece in source.pieces():
        assert piece.text
        parts.append(piece.text)
        if piece.ends:
            texts.append("".join(parts))
            parts.clear()
    assert not parts, "the last document has no end"
    return texts


def conversations(source):
    """The conversations of a corpus, or of paths: each as its turns, a role and a text."""
    source = source if isinstance(source, Corpus) else Corpus(source)
    found, texts = [], []
    for piece in source.pieces():
        if piece.turns:
            found.append([turn[:2] for turn in piece.turns])
            continue
        texts.append(piece.text)
        if piece.ends:
            found.append([("", "".join(texts))])
            texts = []
    assert not texts, "the last document has no end"
    return found


def refused(paths, **settings):
    """The one-line message with which paths are refused."""
    message = refusal(lambda: list(corpus(paths, **settings).pieces()))
    assert message.isprintable()
    return message


def written(path, data):
    """Writes data to path, and returns path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def skipped(corpus, folder):
    """Name of a file in the folder -> why it was skipped."""
    return {path.removeprefix(f"{folder}/"): reason for path, reason in corpus.report.skipped}


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values)

"""The text of a run, from wherever it comes."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError, check_type
from smallmind.config import RunConfig
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.finding import WILDCARDS
from smallmind.corpus.reading import Report
from smallmind.corpus.source import kind_of
from smallmind.text.dataset import HELD_OUT, read_text
from smallmind.text.stories import built_in_text

MAX_PATH_CHARACTERS = 1000  # a longer string is a text
LEAST_HELD_OUT, MOST_HELD_OUT = 0.05, 0.2  # share of a text, as whole documents

Text = str | PathLike[str] | Sequence[str | PathLike[str]] | None


class Source(NamedTuple):
    """A text and a short name for it."""

    text: str
    name: str
    held_out: int = 0  # characters of documents at its end; 0: the last tenth of its tokens
    report: Report | None = None  # if it was read from several files, or others than plain text


def read_source(text: Text, run: RunConfig | None = None, separator: str = "\n") -> Source:
    """Paths, a text itself, or None for the built-in stories -> the text and its name.

    A string with a line break, or of more than 1000 characters, is a text itself. Documents are
    joined by the separator; `run` says how they are encoded and where records have their text.
    InputError if there is no text, or a file cannot be read.
    """
    if text is None:
        return Source(built_in_text(), "stories")
    if is_literal(text):
        return Source(str(text), "text")
    paths = paths_of(text)
    field, encoding = (run.text_field, run.text_encoding) if run else (None, None)
    if len(paths) == 1 and not field and not encoding and is_plain(paths[0]):
        return Source(read_text(str(paths[0])), name_of(text))
    corpus = Corpus(paths, field, encoding)
    documents = list(corpus.documents())
    held_out = whole_documents(list(map(len, documents)), len(separator))
    return Source(separator.join(documents), name_of(text), held_out, corpus.report)


def reread_source(run: RunConfig, separator: str, is_own: Callable[[str], bool]) -> Source | None:
    """The text that a run was created with, from where it was; None if it has changed.

    `is_own` says whether a text is that one. InputError as for `read_source`.
    """
    source = read_source(run.text, run, separator)
    if is_own(source.text):
        return source
    if isinstance(run.text, str) and source.report:
        with suppress(InputError):
            # Earlier versions read every file as plain text.
            plain = Source(read_text(run.text), source.name)
            return plain if is_own(plain.text) else None
    return None


def paths_of(text: Text) -> list[str | PathLike[str]]:
    """The paths that name a text; none for built-in stories."""
    if text is None:
        return []
    paths = [text] if isinstance(text, str | PathLike) else list(text)
    for path in paths:
        check_type("text", path, str, PathLike)
    return paths


def name_of(text: Text) -> str:
    """A short name for the text of some paths: that of the first."""
    paths = paths_of(text)
    return Path(paths[0]).stem if paths else "stories"


def is_literal(text: Text) -> bool:
    """Whether a string is a text itself rather than the path of one."""
    return isinstance(text, str) and ("\n" in text or len(text) > MAX_PATH_CHARACTERS)


def is_plain(path: str | PathLike[str]) -> bool:
    """Whether a path is that of one file whose name does not say that it is anything but text."""
    is_glob = any(mark in str(path) for mark in WILDCARDS) and not os.path.exists(path)
    return kind_of(Path(path).name) == "text" and not os.path.isdir(path) and not is_glob


def whole_documents(lengths: Sequence[int], separator: int = 0) -> int:
    """The lengths of documents -> how many characters at the end are held out, as whole documents.

    As near to a tenth as they allow; 0 if that is less than a twentieth or more than a fifth.
    """
    total = sum(lengths) + separator * max(0, len(lengths) - 1)
    ends: Iterable[int] = itertools.accumulate(
        reversed(lengths[1:]), lambda a, b: a + separator + b
    )
    best = min(ends, key=lambda held_out: abs(held_out - HELD_OUT * total), default=0)
    return best if LEAST_HELD_OUT * total <= best <= MOST_HELD_OUT * total else 0

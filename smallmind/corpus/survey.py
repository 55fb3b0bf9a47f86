"""Surveys a text before it is encoded: how long it is, what is held out."""

import hashlib
import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.corpus.entry import Piece
from smallmind.text.chat import ASSISTANT, SYSTEM, TEXT, USER, Conversation, Located, Turn
from smallmind.text.dataset import HELD_OUT
from smallmind.text.tokenizer import batched

MIN_HELD_OUT, MAX_HELD_OUT = 0.05, 0.2  # share of a text, as whole documents
MAX_STARTS = 1 << 20  # of documents, that are remembered
BEGINNING_CHARACTERS = 200  # characters
MAX_DOCUMENT = 1 << 22  # characters of a plain document among conversations
CODE_POINTS = 0x110000
ENCODE = json.JSONEncoder(ensure_ascii=False).encode


def conversations(pieces: Iterable[Piece]) -> Iterator[Conversation]:
    """Documents in pieces -> each as a conversation; a plain one is a single turn.

    A plain one of more than MAX_DOCUMENT characters becomes several: each is held in memory.
    """
    texts: list[str] = []
    length = 0
    for piece in pieces:
        if piece.turns:
            located = Located(piece.turns)
            located.where = piece.where
            yield located
            continue
        texts.append(piece.text)
        length += len(piece.text)
        if piece.ends or length > MAX_DOCUMENT:
            text = "".join(texts)
            last = length if piece.ends else length // MAX_DOCUMENT * MAX_DOCUMENT
            for start in range(0, last, MAX_DOCUMENT):
                yield (Turn(TEXT, text[start : min(last, start + MAX_DOCUMENT)]),)
            texts, length = [text[last:]], length - last


def texts_of(conversations: Iterable[Conversation]) -> Iterator[str]:
    """-> the texts of turns from which tokens are learned, each below its role, as templates do."""
    return (f"{turn.role}\n{turn.text}\n{turn.more}" for turns in conversations for turn in turns)


class DocumentStarts:
    """Where the documents of a text begin, but for the first, in characters.

    Of more than MAX_STARTS only every second, fourth, ... is remembered.
    """

    def __init__(self) -> None:
        self._starts = array("q")
        self._count, self._stride = 0, 1

    def add(self, start: int) -> None:
        """Adds the beginning of a document after all others."""
        if self._count % self._stride == 0:
            self._starts.append(start)
        self._count += 1
        if len(self._starts) > MAX_STARTS:
            self._starts = self._starts[::2]
            self._stride *= 2

    def held_out(self, characters: int) -> int:
        """-> the characters of whole documents to hold out, about a tenth; 0 if none fit."""
        if not self._starts:
            return 0
        held_out = characters - np.array(self._starts)[::-1]
        best = int(held_out[np.argmin(np.abs(held_out - HELD_OUT * characters))])
        return best if MIN_HELD_OUT * characters <= best <= MAX_HELD_OUT * characters else 0


class CorpusPlan(NamedTuple):
    """All facts known before the first token is written."""

    characters: int
    nbytes: int  # in UTF-8
    held_out: int  # characters of whole documents at the end; 0: the last tenth of the tokens
    sha256: str  # of the UTF-8
    beginning: str
    separator: str  # of documents
    train_tokens: int = 0  # if tokens are held out
    conversations: int = 0  # 0: a text; else held_out counts conversations, not characters
    thoughts: int = 0  # turns that have one


def joined(
    pieces: Iterable[Piece], separator: str, starts: DocumentStarts | None = None
) -> Iterator[str]:
    """Pieces of documents -> those of one text, which has the separator between documents."""
    characters, text, is_between = 0, "", False
    for piece in pieces:
        if is_between:
            text += separator
            if starts:
                starts.add(characters + len(text))
        if text:
            yield text
            characters += len(text)
        text, is_between = piece.text, piece.ends
    if text:
        yield text


def survey(pieces: Iterable[Piece], separator: str) -> tuple[CorpusPlan, str]:
    """Reads the documents whose pieces these are, once -> the plan, the characters, sorted."""
    starts, sha = DocumentStarts(), hashlib.sha256()
    beginning, texts = "", joined(pieces, separator, starts)
    while len(beginning) < BEGINNING_CHARACTERS and (text := next(texts, "")):
        beginning += text
    characters, nbytes, distinct = _counted(itertools.chain([beginning], texts), sha)
    beginning, held_out = beginning[:BEGINNING_CHARACTERS], starts.held_out(characters)
    plan = CorpusPlan(characters, nbytes, held_out, sha.hexdigest(), beginning, separator)
    return plan, distinct


def survey_conversations(conversations: Iterable[Conversation]) -> tuple[CorpusPlan, str]:
    """Reads conversations once -> the plan, the characters of their turns, sorted."""
    sha = hashlib.sha256()
    count = thoughts = 0

    def texts() -> Iterator[str]:
        nonlocal count, thoughts
        for conversation in hashed(conversations, sha):
            count += 1
            for turn in conversation:
                thoughts += bool(turn.thought)
                yield turn.text
                yield turn.more

    characters, nbytes, distinct = _counted(texts())
    counts = characters, nbytes, held_out_of(count)
    plan = CorpusPlan(*counts, sha.hexdigest(), "", "", conversations=count, thoughts=thoughts)
    return plan, distinct


def _counted(texts: Iterable[str], sha: "hashlib._Hash | None" = None) -> tuple[int, int, str]:
    """-> how many characters and bytes texts have, and which characters; `sha` hashes them."""
    seen, characters, nbytes = np.zeros(CODE_POINTS, bool), 0, 0
    for text in batched(texts):
        data = text.encode()
        if sha:
            sha.update(data)
        characters, nbytes = characters + len(text), nbytes + len(data)
        seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    return characters, nbytes, "".join(map(chr, np.flatnonzero(seen)))


def parted(conversation: Conversation) -> list[Conversation]:
    """Divides the only conversation there is before questions, as its last tenth is held out."""
    system = conversation[: conversation[0].role == SYSTEM]
    before = itertools.pairwise(turn.role for turn in conversation)
    begins = [0, *(i for i, roles in enumerate(before, 1) if roles == (ASSISTANT, USER))]
    begins = begins[:: math.ceil(HELD_OUT * len(begins))]
    ends = [*begins[1:], len(conversation)]
    return [
        (*(system if begin else ()), *conversation[begin:end])
        for begin, end in zip(begins, ends, strict=True)
    ]


def held_out_of(conversations: int) -> int:
    """-> how many conversations, at their end, are held out. InputError if there is only one."""
    if conversations < 2:
        raise InputError(
            "there is only one conversation: training needs two or more, as the last tenth of them "
            "is held out"
        )
    return max(1, round(HELD_OUT * conversations))


def hashed(conversations: Iterable[Conversation], sha: "hashlib._Hash") -> Iterator[Conversation]:
    """Yields the conversations, each of which is added to `sha`: its digest identifies them."""
    for conversation in conversations:
        # Fields that say nothing are left out: digests are those of versions without them.
        said = [
            turn[: 5 if turn.more else 2 if turn.learned and not turn.thought else 4]
            for turn in conversation
        ]
        sha.update(ENCODE(said).encode())
        yield conversation

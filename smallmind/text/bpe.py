"""Learning byte-pair merges from texts, and encoding texts with them, on several threads.

Threads take chunks of a text that end where a word ends by every pattern, so that the result does
not depend on where they end.
"""

import re
import threading
import unicodedata
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.files.encoding import encoded
from smallmind.kernels.bpe import encode, merges, words
from smallmind.kernels.bpe.characters import character_classes
from smallmind.kernels.bpe.encode import Chain, Memory, Merges, Whole
from smallmind.kernels.bpe.merges import Corpus, Pairs
from smallmind.kernels.bpe.split import Pattern
from smallmind.kernels.bpe.words import Words
from smallmind.kernels.codegen.cpus import cores

CHUNK = 1 << 20  # characters
MIN_PAIRS = 2  # times that a pair occurs before it is worth a token
# A word ends between a letter or number and one of these. Others may be letters in a later version
# of Unicode than Python's.
BORDER = re.compile(r"(?<=[^\W_])[\s!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1f]")
NO_TOKEN = -1
END = 2**30  # after each of many texts: no token has this number
MAX_JOINED = 4  # characters that NFC makes one of

Result = TypeVar("Result")


class Chunk(NamedTuple):
    """Texts one after another."""

    data: np.ndarray  # uint8, UTF-8
    stops: np.ndarray  # int64 (S,), where each text ends
    following: np.ndarray  # int32 (S,), the token after it, or NO_TOKEN


class Special(NamedTuple):
    """Tokens that texts are divided at: whatever is around them, they are found first.

    The text between those in `raw` is normalized, to NFC if `joins` says so, and then divided at
    those in `late`.
    """

    raw: dict[str, int]
    late: dict[str, int]
    joins: bool

    @classmethod
    def of(
        cls, tokens: Mapping[str, int], late: Collection[str] = (), joins: bool = False
    ) -> "Special":
        """Returns all tokens, of which these are late."""
        made = cls({}, {}, joins)
        for content, token in tokens.items():
            if content in late:
                made.late[made.normalize(content)] = token
            else:
                made.raw[content] = token
        return made

    def normalize(self, text: str) -> str:
        """Text between tokens in `raw` -> what becomes tokens."""
        return unicodedata.normalize("NFC", text) if self.joins else text

    def longest(self) -> int:
        """Returns the most characters of a text that become one of them; 1 if there is none."""
        late = max(map(len, self.late), default=1)
        return max(max(map(len, self.raw), default=1), late * MAX_JOINED if self.joins else late)

    def is_cut(self, text: str, end: int) -> bool:
        """Returns True if a special token begins before the end of a word and reaches beyond it."""
        if _is_cut(text, end, self.raw):
            return True
        if not self.late:
            return False
        reach = self.longest()
        # Nothing joins the sign after a word to the word.
        before = self.normalize(text[max(0, end - reach) : end])
        return _is_cut(before + self.normalize(text[end : end + reach]), len(before), self.late)


def _is_cut(text: str, end: int, tokens: Iterable[str]) -> bool:
    return any(s in text[max(0, end - len(s) + 1) : end + len(s) - 1] for s in tokens)


def cut(texts: Iterable[str], special: Special) -> Iterator[str]:
    """Texts, one after another -> the same in chunks of about CHUNK characters of whole words."""
    waiting: list[str] = []
    size, enough = 0, 2 * CHUNK
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size < enough:
            continue
        joined, start = "".join(waiting), 0
        while len(joined) - start > CHUNK and (end := _border(joined, start + CHUNK, special)):
            yield joined[start:end]
            start = end
        waiting = [joined[start:]]
        size = len(waiting[0])
        enough = 2 * max(CHUNK, size)  # where no word ends, not each time all of it once more
    if size:
        yield "".join(waiting)


def _border(text: str, begin: int, special: Special) -> int:
    """-> the first place from begin on where a word ends, outside of special tokens; 0: none."""
    # The end of the text may become a special token once more of it has been read.
    for found in BORDER.finditer(text, begin, max(0, len(text) - special.longest() + 2)):
        if not special.is_cut(text, found.start()):
            return found.start()
    return 0


def _chunks(texts: Iterable[str], special: Special) -> Iterator[Chunk]:
    """Yields each text, divided at its special tokens."""
    offset = 0
    for text in texts:
        pieces, following = [], []
        for start, piece, token in _pieces(text, special):
            pieces.append(encoded(piece, 0, len(piece), offset=offset + start))
            following.append(token)
        stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        data = np.frombuffer(b"".join(pieces), np.uint8)
        yield Chunk(data, stops, np.array(following, np.int32))
        offset += len(text)


def _pieces(text: str, special: Special) -> Iterator[tuple[int, str, int]]:
    """-> where pieces of a text begin, each normalized, and the token after it, or NO_TOKEN."""
    for start, piece, token in _divided(text, special.raw):
        if not (special.joins or special.late):
            yield start, piece, token
            continue
        for begin, part, late in _divided(special.normalize(piece), special.late):
            yield start + begin, part, token if late == NO_TOKEN else late


def _divided(text: str, tokens: dict[str, int]) -> Iterator[tuple[int, str, int]]:
    """-> where pieces of a text begin, each, and the token after it: NO_TOKEN after the last."""
    start = 0
    if tokens:
        longest_first = sorted(tokens, key=len, reverse=True)
        for found in re.finditer("|".join(map(re.escape, longest_first)), text):
            yield start, text[start : found.start()], tokens[found[0]]
            start = found.end()
    yield start, text[start:], NO_TOKEN


def learn_merges(
    texts: Iterable[str], special: Special, pattern: Pattern, tokens: np.ndarray, most: int
) -> np.ndarray:
    """Learns at most this many merges from texts -> (M, 2) int32; their tokens are 256, 257, ...

    Special tokens are no part of words. tokens (256,) int32 are those of the bytes. Fewer merges if
    no pair of tokens occurs twice.
    """
    counted = _count(_chunks(cut(texts, special), special), pattern)
    n = int(counted.size[0])
    starts = counted.starts[: n + 1]
    corpus = Corpus(
        tokens[counted.letters[: starts[n]]],
        starts[:n],
        np.diff(starts).astype(np.int32),
        counted.counts[:n],
    )
    pairs = Pairs.empty(1 << 12, 1 << 12).with_room(len(corpus.tokens))
    merges.count_pairs(pairs, corpus)
    learned = np.empty((most, 2), np.int32)
    for i in activity.parts(range(most)):
        pair = merges.next_pair(pairs, MIN_PAIRS)
        if pair == merges.NONE:
            return learned[:i]
        pairs = pairs.with_room(merges.most_changes(pairs, corpus, pair))
        learned[i] = pairs.lefts[pair], pairs.rights[pair]
        merges.merge_pair(pairs, corpus, pair, 256 + i)
    return learned


def _count(chunks: Iterable[Chunk], pattern: Pattern) -> Words:
    """Returns the words of texts and how often they occur, in any order."""
    classes = character_classes()
    local = threading.local()
    counted: list[list[Words]] = []

    def count(chunk: Chunk) -> None:
        if not hasattr(local, "words"):
            local.words = [Words.empty(1 << 10, 1 << 14)]
            counted.append(local.words)
        start = 0
        while (
            start := words.count_words(
                local.words[0], chunk.data, chunk.stops, start, classes, pattern
            )
        ) < len(chunk.data):
            local.words[0] = local.words[0].grown()

    for _ in _on_threads(count, chunks):
        pass
    total = counted.pop()[0] if counted else Words.empty(1 << 10, 1 << 14)
    while counted:  # each is freed once it has been added
        total = _added(total, counted.pop()[0])
    return total


def _added(total: Words, some: Words) -> Words:
    """Returns the words of both, counted together."""
    n, done = int(some.size[0]), 0
    while done < n:
        done += words.insert(total, some.letters, some.starts[done : n + 1], some.counts[done:n])
        if done < n:
            total = total.grown()
    return total


def encode_chunks(
    texts: Iterable[str], pattern: Pattern, table: Merges, whole: Whole, special: Special
) -> Iterator[np.ndarray]:
    """Texts, as `cut` makes them -> the tokens of each, int32. InputError where a byte has none."""
    return _on_threads(_encoder(pattern, table, whole), _chunks(texts, special))


def _encoder(pattern: Pattern, table: Merges, whole: Whole) -> Callable[[Chunk], np.ndarray]:
    """Returns what encodes a chunk, on any thread."""
    classes = character_classes()
    lacks = table.bytes < 0
    is_complete = not lacks.any()
    local = threading.local()

    def run(chunk: Chunk) -> np.ndarray:
        n = len(chunk.data)
        if not hasattr(local, "memory"):
            local.memory, local.chain = Memory.empty(), Chain.empty(n)
        if len(local.chain.tokens) < n:
            local.chain = Chain.empty(n)
        ids = np.empty(n + len(chunk.stops), np.int32)
        count = encode.encode(
            ids, *chunk, classes, pattern, table, whole, local.memory, local.chain
        )
        if not is_complete and NO_TOKEN in ids[:count]:
            first = int(np.argmax(lacks[chunk.data]))
            near = chunk.data[max(0, first - 3) : first + 4].tobytes().decode("utf-8", "ignore")
            unknown = next(character for character in near if lacks[list(character.encode())].any())
            raise InputError(
                f"the tokenizer has no token for the character {unknown!r}; remove it from the text"
            )
        return ids[:count].copy()

    return run


def encode_each(
    texts: Sequence[str], pattern: Pattern, table: Merges, whole: Whole, special: Special
) -> list[np.ndarray]:
    """Texts -> the tokens of each, int32, without special tokens: they are one chunk of many."""
    if not texts:
        return []
    pieces = [special.normalize(text) for text in texts]
    data = [encoded(piece, 0, len(piece)) for piece in pieces]
    stops = np.cumsum([len(piece) for piece in data], dtype=np.int64)
    chunk = Chunk(
        np.frombuffer(b"".join(data), np.uint8), stops, np.full(len(stops), END, np.int32)
    )
    ids = _encoder(pattern, table, whole)(chunk)
    ends = np.flatnonzero(ids == END)
    return [
        ids[start:end]
        for start, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True)
    ]


def _on_threads(function: Callable[[Chunk], Result], chunks: Iterable[Chunk]) -> Iterator[Result]:
    """Yields function(chunk) for each chunk, in their order, on as many threads as there are cores.

    The first one here, as it may compile kernels. Only as many chunks are made as threads take.
    """
    remaining = iter(chunks)
    for chunk in remaining:
        yield function(chunk)
        break
    waiting: deque[Future[Result]] = deque()
    threads = cores()
    with ThreadPoolExecutor(threads) as pool:
        for chunk in remaining:
            activity.tick()
            waiting.append(pool.submit(function, chunk))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

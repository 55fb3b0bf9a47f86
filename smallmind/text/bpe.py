"""Learning byte-pair merges from texts, and encoding texts with them, on several threads.

Threads take chunks of a text that end where a word ends by every pattern, so that the result does
not depend on where they end.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from smallmind import activity
from smallmind.kernels.bpe import encode, merges, words
from smallmind.kernels.bpe.characters import character_classes
from smallmind.kernels.bpe.encode import Chain, Memory, Merges
from smallmind.kernels.bpe.merges import Corpus, Pairs
from smallmind.kernels.bpe.split import Pattern
from smallmind.kernels.bpe.words import Words
from smallmind.kernels.codegen.threads import cores
from smallmind.text.encoding import encoded

CHUNK = 1 << 20  # characters
LEAST = 2  # times that a pair occurs before it is worth a token
# A word ends between a letter or number and one of these. Others may be letters in a later version
# of Unicode than Python's.
BORDER = re.compile(r"(?<=[^\W_])[\s!-/:-@\[-`{-~\u3001\u3002\uff01\uff0c\uff1f]")
NONE = -1

Result = TypeVar("Result")


class Chunk(NamedTuple):
    """Texts one after another."""

    data: np.ndarray  # uint8, UTF-8
    stops: np.ndarray  # int64 (S,), where each text ends
    following: np.ndarray  # int32 (S,), the token after it, or NONE


def cut(texts: Iterable[str], special: dict[str, int]) -> Iterator[str]:
    """Texts, one after another -> the same text in chunks of about CHUNK characters.

    They end where a word ends, and never within a special token: each can be encoded by itself.
    """
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


def _border(text: str, begin: int, special: dict[str, int]) -> int:
    """The first place from begin on where a word ends, outside of special tokens; 0: none."""
    # What the text ends with may become a special token once more of it has been read.
    longest = max(map(len, special), default=1)
    for found in BORDER.finditer(text, begin, max(0, len(text) - longest + 2)):
        end = found.start()
        if not any(s in text[max(0, end - len(s) + 1) : end + len(s) - 1] for s in special):
            return end
    return 0


def _chunks(texts: Iterable[str], special: dict[str, int]) -> Iterator[Chunk]:
    """Each text, divided at its special tokens."""
    offset = 0
    for text in texts:
        pieces, following = [], []
        for start, stop, token in _pieces(text, special):
            pieces.append(encoded(text, start, stop, offset=offset))
            following.append(token)
        stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        data = np.frombuffer(b"".join(pieces), np.uint8)
        yield Chunk(data, stops, np.array(following, np.int32))
        offset += len(text)


def _pieces(text: str, special: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """-> starts and ends of pieces of a text, with the special token after each, or NONE."""
    start = 0
    if special:
        longest_first = sorted(special, key=len, reverse=True)
        for found in re.finditer("|".join(map(re.escape, longest_first)), text):
            yield start, found.start(), special[found[0]]
            start = found.end()
    if start < len(text):
        yield start, len(text), NONE


def learn_merges(
    texts: Iterable[str], special: dict[str, int], pattern: Pattern, tokens: np.ndarray, most: int
) -> np.ndarray:
    """Learns at most so many merges from texts -> (M, 2) int32; their tokens are 256, 257, ...

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
        pair = merges.next_pair(pairs, LEAST)
        if pair == merges.NONE:
            return learned[:i]
        pairs = pairs.with_room(merges.most_changes(pairs, corpus, pair))
        learned[i] = pairs.lefts[pair], pairs.rights[pair]
        merges.merge_pair(pairs, corpus, pair, 256 + i)
    return learned


def _count(given: Iterable[Chunk], pattern: Pattern) -> Words:
    """The words of texts and how often they occur, in any order."""
    classes = character_classes()
    own = threading.local()
    counted: list[list[Words]] = []

    def count(chunk: Chunk) -> None:
        if not hasattr(own, "words"):
            own.words = [Words.empty(1 << 10, 1 << 14)]
            counted.append(own.words)
        start = 0
        while (
            start := words.count_words(
                own.words[0], chunk.data, chunk.stops, start, classes, pattern
            )
        ) < len(chunk.data):
            own.words[0] = own.words[0].grown()

    for _ in _on_threads(count, given):
        pass
    total = counted.pop()[0] if counted else Words.empty(1 << 10, 1 << 14)
    while counted:  # each is freed once it has been added
        total = _added(total, counted.pop()[0])
    return total


def _added(total: Words, some: Words) -> Words:
    """The words of both, counted together."""
    n, done = int(some.size[0]), 0
    while done < n:
        done += words.insert(total, some.letters, some.starts[done : n + 1], some.counts[done:n])
        if done < n:
            total = total.grown()
    return total


def encode_chunks(
    texts: Iterable[str], pattern: Pattern, table: Merges, special: dict[str, int]
) -> Iterator[np.ndarray]:
    """Texts, as `cut` makes them -> the tokens of each, int32."""
    classes = character_classes()
    own = threading.local()

    def run(chunk: Chunk) -> np.ndarray:
        n = len(chunk.data)
        if not hasattr(own, "memory"):
            own.memory, own.chain = Memory.empty(), Chain.empty(n)
        if len(own.chain.tokens) < n:
            own.chain = Chain.empty(n)
        ids = np.empty(n + len(chunk.stops), np.int32)
        count = encode.encode(ids, *chunk, classes, pattern, table, own.memory, own.chain)
        return ids[:count].copy()

    return _on_threads(run, _chunks(texts, special))


def _on_threads(function: Callable[[Chunk], Result], given: Iterable[Chunk]) -> Iterator[Result]:
    """function(chunk) for each chunk, in their order, on as many threads as there are cores.

    The first one here, as it may compile kernels. Only as many chunks are made as threads take.
    """
    remaining = iter(given)
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

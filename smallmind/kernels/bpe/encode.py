"""Encoding: in each word the merges that were learned first are made first, the leftmost before
others. Words that are tokens whatever the merges, and words that have been seen, are looked up.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from smallmind.kernels.bpe.split import word_end
from smallmind.kernels.bpe.words import FREE, Words, add_word, insert, pair_slot, slot_of
from smallmind.kernels.codegen.jit import called_jit, inline_jit, short_jit, threaded_jit

NONE = -1
GONE = -2  # the token of a place that has been merged into the one before
MAX_WORDS, MAX_LETTERS = 1 << 15, 1 << 20  # that a memory holds before it forgets all


class Merges(NamedTuple):
    """Merges in the order in which they are made: lefts[i] and rights[i] become results[i]."""

    slots: np.ndarray  # int32 (a power of two,) -> a merge
    lefts: np.ndarray  # int32 (M,)
    rights: np.ndarray  # int32 (M,)
    results: np.ndarray  # int32 (M,)
    bytes: np.ndarray  # int32 (256,), the token of each byte, NONE if it has none

    @classmethod
    def of(
        cls, lefts: np.ndarray, rights: np.ndarray, results: np.ndarray, of_bytes: np.ndarray
    ) -> "Merges":
        """Returns the merges, with hash slots for them."""
        slots = np.full(2 << len(lefts).bit_length(), FREE, np.int32)
        merges = cls(slots, lefts, rights, results, of_bytes)
        fill_merges(merges)
        return merges


class Whole(NamedTuple):
    """Words that are a token whatever the merges: the i-th is tokens[i]."""

    words: Words
    tokens: np.ndarray  # int32 (W,)

    @classmethod
    def of(cls, tokens: Mapping[bytes, int]) -> "Whole":
        """Builds the table of these words."""
        words = Words.empty(1 << len(tokens).bit_length(), sum(map(len, tokens)))
        if tokens:
            letters = np.frombuffer(bytearray().join(tokens), np.uint8)
            starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
            insert(words, letters, starts, np.zeros(len(tokens), np.int64))
        return cls(words, np.array(list(tokens.values()), np.int32))


class Memory(NamedTuple):
    """Words that have been encoded: the tokens of the i-th are tokens[ends[i] : ends[i + 1]].

    Of one thread. The tokens of a word are at most as many as its letters.
    """

    words: Words
    ends: np.ndarray  # int64 (W + 1,)
    tokens: np.ndarray  # int32

    @classmethod
    def empty(cls) -> "Memory":
        """Returns room for MAX_WORDS words of MAX_LETTERS bytes together."""
        return cls(
            Words.empty(MAX_WORDS, MAX_LETTERS),
            np.zeros(MAX_WORDS + 1, np.int64),
            np.empty(MAX_LETTERS, np.int32),
        )


class Chain(NamedTuple):
    """The places of a word, linked, and a heap of the merges that are possible in it."""

    tokens: np.ndarray  # int32 (n,), GONE where there is none
    before: np.ndarray  # int32 (n,)
    after: np.ndarray  # int32 (n,)
    heap: np.ndarray  # int64 (3 n,): merge << 32 | place
    size: np.ndarray  # int64 (1,), of the heap

    @classmethod
    def empty(cls, n: int) -> "Chain":
        """Returns room for words of at most n bytes."""
        return cls(
            tokens=np.empty(n, np.int32),
            before=np.empty(n, np.int32),
            after=np.empty(n, np.int32),
            heap=np.empty(3 * n, np.int64),
            size=np.zeros(1, np.int64),
        )


@called_jit
def fill_merges(merges):
    """Writes the slots of all merges, which are free; of equal pairs the first one counts."""
    for merge in range(len(merges.lefts)):
        left, right = merges.lefts[merge], merges.rights[merge]
        slot = pair_slot(merges.slots, merges.lefts, merges.rights, left, right)
        if merges.slots[slot] == FREE:
            merges.slots[slot] = merge


@short_jit
def _push(chain, merges, place):
    """Adds the merge of a place with the one after it, if there is one."""
    following = chain.after[place]
    if following == NONE:
        return
    left, right = chain.tokens[place], chain.tokens[following]
    merge = np.int64(
        merges.slots[pair_slot(merges.slots, merges.lefts, merges.rights, left, right)]
    )
    if merge == FREE:
        return
    entry = merge << 32 | np.int64(place)
    i = chain.size[0]
    chain.size[0] = i + 1
    while i > 0 and entry < chain.heap[(i - 1) // 2]:
        chain.heap[i] = chain.heap[(i - 1) // 2]
        i = (i - 1) // 2
    chain.heap[i] = entry


@short_jit
def _pop(chain):
    """-> the first of the merges, and where; removes it from the heap."""
    first = chain.heap[0]
    size = chain.size[0] - 1
    chain.size[0] = size
    entry, i = chain.heap[size], np.int64(0)
    while 2 * i + 1 < size:
        child = 2 * i + 1
        if child + 1 < size and chain.heap[child + 1] < chain.heap[child]:
            child += 1
        if entry <= chain.heap[child]:
            break
        chain.heap[i] = chain.heap[child]
        i = child
    chain.heap[i] = entry
    return first >> 32, first & 0xFFFFFFFF


@inline_jit
def _is_possible(chain, merges, merge, place):
    """Returns True if the merge still applies to the token at this place and the next."""
    if chain.tokens[place] != merges.lefts[merge]:
        return False
    following = chain.after[place]
    return following != NONE and chain.tokens[following] == merges.rights[merge]


@short_jit
def _token_of(whole, data, start, stop):
    """Returns the token that data[start:stop] is whatever the merges, or NONE."""
    if not whole.words.size[0]:
        return np.int64(NONE)
    word = np.int64(whole.words.slots[slot_of(whole.words, data, start, stop)])
    return np.int64(NONE) if word < 0 else np.int64(whole.tokens[word])


@short_jit
def _encode_word(ids, chain, merges, data, start, stop):
    """data[start:stop] -> how many tokens it has. Writes them to the start of ids."""
    n = stop - start
    for i in range(n):
        chain.tokens[i] = merges.bytes[data[start + i]]
        chain.before[i], chain.after[i] = i - 1, i + 1 if i + 1 < n else NONE
    chain.size[0] = 0
    for i in range(n):
        _push(chain, merges, i)
    while chain.size[0]:
        merge, place = _pop(chain)
        if _is_possible(chain, merges, merge, place):
            gone = chain.after[place]
            chain.tokens[place], chain.tokens[gone] = merges.results[merge], GONE
            following = chain.after[gone]
            chain.after[place] = following
            if following != NONE:
                chain.before[following] = place
            _push(chain, merges, place)
            if chain.before[place] != NONE:
                _push(chain, merges, chain.before[place])
    count = i = 0
    while i != NONE:
        ids[count] = chain.tokens[i]
        count += 1
        i = chain.after[i]
    return count


@short_jit
def _remember(memory, slot, data, start, stop, ids, count):
    """Adds a word with its tokens, the first of ids; forgets all others if there is no room."""
    words = memory.words
    word = add_word(words, slot, data, start, stop)
    if word < 0:
        words.slots[:] = -1
        words.size[0] = 0
        if stop - start > len(words.letters):
            return
        word = add_word(words, slot_of(words, data, start, stop), data, start, stop)
    first = memory.ends[word]
    for i in range(count):
        memory.tokens[first + i] = ids[i]
    memory.ends[word + 1] = first + count


@threaded_jit
def encode(ids, data, stops, following, classes, pattern, merges, whole, memory, chain):
    """data (n,) uint8, valid UTF-8 -> how many tokens it has. Writes ids (n + S,), their start.

    NONE is among them for each byte without a token.

    Texts end at stops (S,) int64, the last of them n; each is followed by a token of its own,
    following (S,) int32, or by none where that is negative. The chain is for n bytes; classes and
    pattern are the arguments of `word_end`. Writes memory and chain too.
    """
    start = count = 0
    for text in range(len(stops)):
        while start < stops[text]:
            end = word_end(data, start, stops[text], classes, pattern)
            slot = slot_of(memory.words, data, start, end)
            word = np.int64(memory.words.slots[slot])
            if word < 0:
                known = _token_of(whole, data, start, end)
                if known == NONE:
                    added = _encode_word(ids[count:], chain, merges, data, start, end)
                else:
                    ids[count], added = known, 1
                _remember(memory, slot, data, start, end, ids[count:], added)
                count += added
            else:
                for i in range(memory.ends[word], memory.ends[word + 1]):
                    ids[count] = memory.tokens[i]
                    count += 1
            start = end
        if following[text] >= 0:
            ids[count] = following[text]
            count += 1
    return count

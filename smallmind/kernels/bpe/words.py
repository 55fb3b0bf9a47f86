"""Hash tables: of the distinct words of a text with their counts, and of pairs of tokens."""

from typing import NamedTuple

import numpy as np

from smallmind.kernels.bpe.split import word_end
from smallmind.kernels.codegen.jit import inline_jit, threaded_jit

FREE = -1  # of slots
MIXER = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # Fowler, Noll and Vo's hash


class Words(NamedTuple):
    """Distinct words: the i-th is `letters[starts[i] : starts[i + 1]]` and occurs counts[i] times.

    Below half of the slots hold one, at the place that its hash begins with or a later one.
    """

    slots: np.ndarray  # int32 (a power of two,), a word or -1
    starts: np.ndarray  # int64 (W + 1,)
    counts: np.ndarray  # int64 (W,)
    letters: np.ndarray  # uint8
    size: np.ndarray  # int64 (1,), the words so far

    @classmethod
    def empty(cls, words: int, letters: int) -> "Words":
        """Returns room for so many words, a power of two, of so many bytes together."""
        return cls(
            np.full(4 * words, -1, np.int32),
            np.zeros(words + 1, np.int64),
            np.zeros(words, np.int64),
            np.empty(letters, np.uint8),
            np.zeros(1, np.int64),
        )

    def grown(self) -> "Words":
        """Returns a copy with room for twice as many words and twice as many bytes."""
        n = int(self.size[0])
        larger = Words.empty(2 * len(self.counts), 2 * len(self.letters))
        insert(larger, self.letters, self.starts[: n + 1], self.counts[:n])
        return larger


@inline_jit
def hash_of(data, start, stop):
    """Returns the hash of data[start:stop], 64 bits."""
    value = np.uint64(FNV_OFFSET)
    for i in range(start, stop):
        value = (value ^ np.uint64(data[i])) * np.uint64(FNV_PRIME)
    return value ^ value >> np.uint64(32)


@inline_jit
def slot_of(words, data, start, stop):
    """Returns the slot of the word data[start:stop]: where it is, or where it would go."""
    mask = np.uint64(len(words.slots) - 1)
    slot = hash_of(data, start, stop) & mask
    while True:
        word = words.slots[slot]
        if word < 0:
            return slot
        first = words.starts[word]
        if words.starts[word + 1] - first == stop - start:
            same = 0
            while same < stop - start and words.letters[first + same] == data[start + same]:
                same += 1
            if same == stop - start:
                return slot
        slot = slot + np.uint64(1) & mask


@inline_jit
def add_word(words, slot, data, start, stop):
    """Adds data[start:stop], which is not there, at its slot -> the word, or -1 without room."""
    word = words.size[0]
    first = words.starts[word]
    if word == len(words.counts) or first + stop - start > len(words.letters):
        return np.int64(-1)
    for i in range(stop - start):
        words.letters[first + i] = data[start + i]
    words.starts[word + 1] = first + stop - start
    words.counts[word] = 0
    words.slots[slot] = word
    words.size[0] = word + 1
    return word


@threaded_jit
def insert(words, letters, starts, counts):
    """Adds words (n,) with their counts, as in `Words` -> how many had room. Writes words."""
    for i in range(len(counts)):
        slot = slot_of(words, letters, starts[i], starts[i + 1])
        word = np.int64(words.slots[slot])
        if word < 0:
            word = add_word(words, slot, letters, starts[i], starts[i + 1])
            if word < 0:
                return i
        words.counts[word] += counts[i]
    return len(counts)


@threaded_jit
def count_words(words, data, stops, start, classes, pattern):
    """data (n,) uint8, valid UTF-8 -> where it ended: n, or sooner without room. Writes words.

    Counts the words of data from start on. Texts end at stops (S,) int64, the last of them n;
    classes and pattern are the arguments of `word_end`.
    """
    for stop in stops:
        while start < stop:
            end = word_end(data, start, stop, classes, pattern)
            slot = slot_of(words, data, start, end)
            word = np.int64(words.slots[slot])
            if word < 0:
                word = add_word(words, slot, data, start, end)
                if word < 0:
                    return start
            words.counts[word] += 1
            start = end
    return start


@inline_jit
def pair_slot(slots, lefts, rights, left, right):
    """slots (a power of two,) -> the slot of a pair of tokens: where it is, or where it would go.

    Slots hold indices into lefts and rights, or FREE: at least one of them.
    """
    mask = np.uint64(len(slots) - 1)
    value = (np.uint64(left) << np.uint64(32) | np.uint64(right)) * np.uint64(MIXER)
    slot = value >> np.uint64(32) & mask
    while True:
        pair = slots[slot]
        if pair == FREE or (lefts[pair] == left and rights[pair] == right):
            return slot
        slot = slot + np.uint64(1) & mask

"""Learning merges: the most frequent pair of neighbouring tokens becomes a token, again and again.

Of equally frequent pairs it is the one with the lower tokens. Instead of counting anew after each
merge, the counts of pairs change in the words that have the merged one; every pair knows those
words. A heap holds pairs with counts that may have fallen since.
"""

from typing import NamedTuple

import numpy as np

from smallmind.kernels.bpe.words import FREE, pair_slot
from smallmind.kernels.codegen.jit import called_jit, inline_jit, short_jit

NONE = -1  # ends a list


class Corpus(NamedTuple):
    """Words as tokens: the i-th is tokens[starts[i] : starts[i] + lengths[i]], counts[i] times."""

    tokens: np.ndarray  # int32
    starts: np.ndarray  # int64 (W,)
    lengths: np.ndarray  # int32 (W,), which shrink
    counts: np.ndarray  # int64 (W,)


class Pairs(NamedTuple):
    """Pairs of tokens with their counts; heads begin lists of the words that they are in."""

    slots: np.ndarray  # int32 (a power of two,) -> a pair
    lefts: np.ndarray  # int32 (P,)
    rights: np.ndarray  # int32 (P,)
    counts: np.ndarray  # int64 (P,)
    heads: np.ndarray  # int32 (P,)
    words: np.ndarray  # int32 (N,), of the entries of the lists
    following: np.ndarray  # int32 (N,), entries
    heap: np.ndarray  # int32 (P,), pairs
    queued: np.ndarray  # int64 (P,), the counts with which they are in the heap
    sizes: np.ndarray  # int64 (3,): the pairs, entries and places in the heap in use

    @classmethod
    def empty(cls, pairs: int, entries: int) -> "Pairs":
        """Returns room for so many pairs, a power of two, and entries."""
        return cls(
            slots=np.full(2 * pairs, FREE, np.int32),
            lefts=np.empty(pairs, np.int32),
            rights=np.empty(pairs, np.int32),
            counts=np.zeros(pairs, np.int64),
            heads=np.empty(pairs, np.int32),
            words=np.empty(entries, np.int32),
            following=np.empty(entries, np.int32),
            heap=np.empty(pairs, np.int32),
            queued=np.empty(pairs, np.int64),
            sizes=np.zeros(3, np.int64),
        )

    def with_room(self, more: int) -> "Pairs":
        """Returns a copy with room for `more` additional pairs and entries."""
        P, N, H = self.sizes
        pairs, entries = len(self.lefts), len(self.words)
        if P + more <= pairs and N + more <= entries:
            return self
        while P + more > pairs:
            pairs *= 2
        larger = Pairs.empty(pairs, max(entries, 2 * (N + more)))
        for name, used in zip(self._fields[1:-1], (P, P, P, P, N, N, H, H), strict=True):
            getattr(larger, name)[:used] = getattr(self, name)[:used]
        larger.sizes[:] = self.sizes
        fill_slots(larger)
        return larger


@called_jit
def fill_slots(pairs):
    """Writes the slots of all pairs, which are empty."""
    for pair in range(pairs.sizes[0]):
        left, right = pairs.lefts[pair], pairs.rights[pair]
        pairs.slots[pair_slot(pairs.slots, pairs.lefts, pairs.rights, left, right)] = pair


@inline_jit
def _change(pairs, left, right, word, amount):
    """Adds an amount to the count of a pair; if it is positive, the pair is in this word now."""
    slot = pair_slot(pairs.slots, pairs.lefts, pairs.rights, left, right)
    pair = np.int64(pairs.slots[slot])
    if pair == FREE:
        pair = pairs.sizes[0]
        pairs.sizes[0] = pair + 1
        pairs.slots[slot] = pair
        pairs.lefts[pair], pairs.rights[pair] = left, right
        pairs.counts[pair], pairs.heads[pair] = 0, NONE
    pairs.counts[pair] += amount
    head = np.int64(pairs.heads[pair])
    if amount > 0 and (head == NONE or pairs.words[head] != word):
        entry = pairs.sizes[1]
        pairs.sizes[1] = entry + 1
        pairs.words[entry], pairs.following[entry] = word, head
        pairs.heads[pair] = entry


@short_jit
def _comes_first(pairs, a, a_count, b, b_count):
    """Returns True if pair a is merged before pair b."""
    if a_count != b_count:
        return a_count > b_count
    if pairs.lefts[a] != pairs.lefts[b]:
        return pairs.lefts[a] < pairs.lefts[b]
    return pairs.rights[a] < pairs.rights[b]


@short_jit
def _push(pairs, pair, count):
    """Adds a pair with its count to the heap."""
    place = pairs.sizes[2]
    pairs.sizes[2] = place + 1
    while place > 0:
        parent = (place - 1) // 2
        if not _comes_first(pairs, pair, count, pairs.heap[parent], pairs.queued[parent]):
            break
        pairs.heap[place], pairs.queued[place] = pairs.heap[parent], pairs.queued[parent]
        place = parent
    pairs.heap[place], pairs.queued[place] = pair, count


@short_jit
def _sink(pairs, pair, count):
    """Puts a pair in the place of the first of the heap, and then where it belongs."""
    size, place = pairs.sizes[2], np.int64(0)
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and _comes_first(
            pairs,
            pairs.heap[child + 1],
            pairs.queued[child + 1],
            pairs.heap[child],
            pairs.queued[child],
        ):
            child += 1
        if not _comes_first(pairs, pairs.heap[child], pairs.queued[child], pair, count):
            break
        pairs.heap[place], pairs.queued[place] = pairs.heap[child], pairs.queued[child]
        place = child
    pairs.heap[place], pairs.queued[place] = pair, count


@called_jit
def count_pairs(pairs, corpus):
    """Writes the pairs of all words and the heap, which are empty and have room for them."""
    for word in range(len(corpus.starts)):
        start = corpus.starts[word]
        for i in range(start, start + corpus.lengths[word] - 1):
            _change(pairs, corpus.tokens[i], corpus.tokens[i + 1], word, corpus.counts[word])
    for pair in range(pairs.sizes[0]):
        _push(pairs, pair, pairs.counts[pair])


@called_jit
def next_pair(pairs, least):
    """-> the pair to merge next, taken from the heap; NONE if none occurs `least` times."""
    while pairs.sizes[2]:
        pair, queued = np.int64(pairs.heap[0]), pairs.queued[0]
        count = pairs.counts[pair]
        if queued == count and count >= least:
            last = pairs.sizes[2] - 1
            pairs.sizes[2] = last
            _sink(pairs, pairs.heap[last], pairs.queued[last])
            return pair
        if queued == count:
            return np.int64(NONE)
        _sink(pairs, pair, count)
    return np.int64(NONE)


@called_jit
def most_changes(pairs, corpus, pair):
    """-> how many pairs and entries merging a pair may add."""
    more = 0
    entry = pairs.heads[pair]
    while entry != NONE:
        more += corpus.lengths[pairs.words[entry]]
        entry = pairs.following[entry]
    return more


@short_jit
def _merge_in_word(pairs, corpus, word, left, right, new):
    """Replaces each left and right next to each other in a word by `new`."""
    tokens, count = corpus.tokens, corpus.counts[word]
    i = out = corpus.starts[word]
    end = i + corpus.lengths[word]
    start = i
    while i < end:
        if i + 1 == end or tokens[i] != left or tokens[i + 1] != right:
            tokens[out] = tokens[i]
            i += 1
        else:
            if out > start:
                _change(pairs, tokens[out - 1], left, word, -count)
                _change(pairs, tokens[out - 1], new, word, count)
            i += 2
            if i < end:
                _change(pairs, right, tokens[i], word, -count)
                _change(pairs, new, tokens[i], word, count)
            tokens[out] = new
        out += 1
    corpus.lengths[word] = out - start


@called_jit
def merge_pair(pairs, corpus, pair, new):
    """Replaces a pair by the token `new` in all words. Writes both; pairs has room for it."""
    known = pairs.sizes[0]
    left, right = pairs.lefts[pair], pairs.rights[pair]
    entry = pairs.heads[pair]
    while entry != NONE:
        _merge_in_word(pairs, corpus, pairs.words[entry], left, right, new)
        entry = pairs.following[entry]
    pairs.counts[pair] = 0
    for added in range(known, pairs.sizes[0]):
        if pairs.counts[added] > 0:
            _push(pairs, added, pairs.counts[added])

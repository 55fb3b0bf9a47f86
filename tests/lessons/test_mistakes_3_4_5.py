"""Lessons 3, 4 and 5: typical wrong solutions are refused in words that help."""

import itertools
import math
from collections import Counter

import numpy as np

from tests.lessons.judging import assert_judged, lesson

# 3. Derivatives by machine


def test_the_machine_has_at_most_60_lines():
    from tests.lessons.judging import source_of

    source = source_of(3)
    start, end = source.index("class Scalar:"), source.index("# That is all of it.")
    lines = (line.strip() for line in source[start:end].splitlines())
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 60


def test_silu():
    Scalar = lesson(3).Scalar

    def sigmoid(x):
        e = math.exp(-abs(x))
        return 1 / (1 + e) if x >= 0 else e / (1 + e)

    def with_slope(slope):
        return lambda x: Scalar(x.value * sigmoid(x.value), (x,), (slope(x.value),))

    def overflowing(x):
        s = 1 / (1 + math.exp(-x.value))
        return Scalar(x.value * s, (x,), (s + x.value * s * (1 - s),))

    wrong = [
        (with_slope(lambda x: sigmoid(x) * (1 - sigmoid(x))), "the slope at"),
        (lambda x: x / (1.0 + (-x).exp()), "one step"),
        (overflowing, "e^1000 overflows"),
        (lambda x: x.value * sigmoid(x.value), "return a Scalar, not float"),
        (lambda x: Scalar(sigmoid(x.value), (x,), (0.0,)), "silu(-2.0) is"),
    ]
    assert_judged(lesson(3).check_silu, wrong)


def test_dual_numbers():
    class Dual:
        def __init__(self, value, slope=0.0):
            self.value, self.slope = value, slope

        def __add__(self, other):
            other = other if isinstance(other, Dual) else Dual(other)
            return type(self)(self.value + other.value, self.slope + other.slope)

        def __mul__(self, other):
            other = other if isinstance(other, Dual) else Dual(other)
            slope = self.slope * other.value + self.value * other.slope
            return type(self)(self.value * other.value, slope)

        def exp(self):
            return type(self)(math.exp(self.value), math.exp(self.value) * self.slope)

    class OfSlopes(Dual):
        def __mul__(self, other):
            other = other if isinstance(other, Dual) else Dual(other)
            return type(self)(self.value * other.value, self.slope * other.slope)

    class WithoutInside(Dual):
        def exp(self):
            return type(self)(math.exp(self.value), math.exp(self.value))

    class Changing(Dual):
        def __add__(self, other):
            self.value += getattr(other, "value", other)
            self.slope += getattr(other, "slope", 0)
            return self

    wrong = [
        (OfSlopes, "the slope of x * x at 0.7 is 1.4000, not 1.0000"),
        (WithoutInside, "the slope of exp(x * x)"),
        (Changing, "x + 3 is"),
    ]
    assert_judged(lesson(3).check_dual, wrong, Dual)


def test_counting_numbers():
    def of_a_tree(last):
        return 1 + sum(map(of_a_tree, last.parents))

    def recursive(last, seen=None):
        seen = set() if seen is None else seen
        seen.add(id(last))
        for parent in last.parents:
            if id(parent) not in seen:
                recursive(parent, seen)
        return len(seen)

    wrong = [
        (of_a_tree, "count x once"),
        (recursive, "too deep for recursion"),
        (lambda last: len(last.parents), "a number alone counts 1"),
    ]
    assert_judged(lesson(3).check_count_numbers, wrong, lambda x: len(lesson(3).in_order(x)))


# 4. Tokens


def test_the_most_frequent_pair():
    def best(words, weigh=lambda times: times, step=1, key=lambda pair: pair):
        pairs = Counter()
        for word, times in words.items():
            for pair in list(itertools.pairwise(word))[::step]:
                pairs[pair] += weigh(times)
        return min(pairs, key=lambda pair: (-pairs[pair], key(pair)))

    wrong = [
        (lambda words: best(words, weigh=lambda _: 1), "as often as it occurs"),
        (lambda words: best(words, step=2), "every place in a word"),
        (lambda words: best(words, key=lambda pair: -pair[0][0]), "the smallest"),
        (lambda words: best(dict([max(words.items(), key=lambda x: x[1])])), "add up over words"),
        (lambda words: tuple(max(words, key=words.get)[:2]), "every place in a word"),
    ]
    assert_judged(lesson(4).check_best_pair, wrong, best)


def test_encoding_by_rank():
    merge = lesson(4).merge

    def encode(word, ranks, choose=min, again=True):
        tokens = tuple(bytes([b]) for b in word.encode())
        while found := [pair for pair in itertools.pairwise(tokens) if pair in ranks]:
            tokens = merge(tokens, choose(found, key=ranks.__getitem__))
            if not again:
                break
        return tokens

    def of_letters(word, ranks):
        return tuple(letter.encode() for letter in word) if "é" in word else encode(word, ranks)

    def leftmost(word, ranks):
        return encode(word, ranks, choose=lambda found, **_: found[0])

    wrong = [
        (lambda word, ranks: encode(word, ranks, choose=max), "learned before"),
        (lambda word, ranks: encode(word, ranks, again=False), "then a + bc follows"),
        (leftmost, "b + c was learned before a + b"),
        (of_letters, "a letter may have several bytes"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(lesson(4).check_encode_by_rank, wrong, encode)


def test_bits_per_byte():
    def bits(losses, text, total=np.sum, unit=2, size=lambda text: len(text.encode())):
        return total(losses) / math.log(unit) / size(text)

    wrong = [
        (lambda losses, text: bits(losses, text, unit=math.e), "are 1, not 0.6931"),
        (lambda losses, text: bits(losses, text, total=np.mean, size=lambda _: 1), "add up"),
        (lambda losses, text: bits(losses, text, size=len), "has 4 bytes"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(lesson(4).check_bits_per_byte, wrong, bits)


# 5. Data


def test_cutting_windows():
    def cut(tokens, starts, T, shift=1):
        ids = tokens[starts[:, None] + np.arange(T)]
        return ids, tokens[np.minimum(starts[:, None] + np.arange(T) + shift, len(tokens) - 1)]

    wrong = [
        (lambda *given: cut(*given, shift=0), "the token after it, not itself"),
        (lambda *given: cut(*given, shift=2), "the targets from 7 on"),
        (lambda *given: cut(*given)[0], "the inputs"),
        (lambda *_: None, "return two arrays"),
        (lambda tokens, starts, T: cut(tokens, starts, T - 1), "have the shape (2, 3)"),
    ]
    assert_judged(lesson(5).check_cut_windows, wrong, cut)


def test_a_mask_of_documents():
    def mask(lengths, T):
        lengths = [*lengths, *[1] * (T - sum(lengths))]
        document = np.repeat(np.arange(len(lengths)), lengths)
        return np.tri(T, dtype=bool) & (document[:, None] == document)

    def one_rest(lengths, T):
        return mask([*lengths, T - sum(lengths)] if sum(lengths) < T else lengths, T)

    def blind(lengths, T):
        return mask(lengths, T) & (np.arange(T)[:, None] < sum(lengths))

    wrong = [
        (lambda _, T: np.tri(T, dtype=bool), "must not look into the one before"),
        (lambda lengths, T: mask(lengths, T) | mask(lengths, T).T, "up to the token itself"),
        (one_rest, "an empty place looks at itself alone"),
        (blind, "an empty place looks at itself alone"),
        (lambda lengths, T: mask(lengths, T)[0], "the shape is"),
    ]
    assert_judged(lesson(5).check_document_mask, wrong, mask)


def test_packing_documents():
    def alone(lengths, capacity):
        return [[document] for document in range(len(lengths))]

    def next_fit(lengths, capacity):
        windows, room = [], 0
        for document, length in enumerate(lengths):
            if length > room:
                windows.append([])
                room = capacity
            windows[-1].append(document)
            room -= length
        return windows

    wrong = [
        (alone, "windows for"),
        (next_fit, "the longest first"),
        (lambda lengths, _: [list(range(len(lengths)))], "more than"),
        (lambda lengths, capacity: next_fit(lengths, capacity)[1:], "has to be in one window"),
        (lambda *_: None, "returns None"),
    ]
    assert_judged(lesson(5).check_pack_documents, wrong)

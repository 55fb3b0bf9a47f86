"""Byte-pair encoding: the compiled kernels compute what plain Python does."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.kernels.bpe import reference
from smallmind.kernels.bpe.characters import character_classes
from smallmind.kernels.bpe.encode import Chain, Memory, Merges, Whole, encode
from smallmind.kernels.bpe.split import PATTERNS, split
from smallmind.text.bpe import Special, learn_merges

EXPRESSIONS = {"gpt2": reference.GPT2, "gpt2-digits": reference.GPT2_DIGITS, "gpt4": reference.GPT4}
BYTES = np.arange(256, dtype=np.int32)
# Patterns tell these apart, in characters of one to four bytes.
TELLING = " \t\n\r\u3000\x85'sStTmMdDlLrRvVeE\u017faB1\u0663\u00bd.,_!\u00df\u0301\u65e5\U0001f600"
TEXTS = st.one_of(st.text(alphabet=TELLING), st.text())


def words_of(text, name):
    data = np.frombuffer(text.encode(), np.uint8)
    ends = np.zeros(len(data), np.int64)
    count = split(ends, data, character_classes(), PATTERNS[name])
    starts = [0, *ends[:count].tolist()]
    return [text.encode()[start:end] for start, end in pairwise(starts)]


@settings(deadline=None)  # the first example compiles
@given(TEXTS, st.sampled_from(list(EXPRESSIONS)))
def test_words_are_those_of_the_regular_expression(text, name):
    assert words_of(text, name) == reference.split(text, EXPRESSIONS[name])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt2", "I'll see 12345  cats!\n\nNo", "I|'ll| see| 12345| | cats|!|\n|\n|No"),
        ("gpt4", "I'LL see 12345  cats!\n\nNo", "I|'LL| see| |123|45| | cats|!\n\n|No"),
        ("gpt4", "x = (a, b)\r\n  y", "x| =| (|a|,| b|)\r\n| | y"),
        ("gpt4-digits", "12 3", "1|2| |3"),
        ("gpt2-digits", "I'll see 12  3\u00bd x9\n 4", "I|'ll| see| |1|2|  |3|\u00bd| x|9|\n |4"),
    ],
)
def test_words_of_known_texts(name, text, words):
    assert words_of(text, name) == [word.encode() for word in words.split("|")]


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.text(alphabet="ab c\u00e9", max_size=40), max_size=5), st.integers(0, 30))
def test_merges_are_those_of_counting_anew_after_each(texts, count):
    text = "<|endoftext|>".join(texts)
    special = Special.of({"<|endoftext|>": -1})
    learned = learn_merges([text], special, PATTERNS["gpt2"], BYTES, count)
    expected = reference.learn(texts, reference.GPT2, list(range(256)), count)
    assert list(map(tuple, learned.tolist())) == expected


@settings(deadline=None)  # the first example compiles
@given(
    st.text(alphabet="ab c\u00e9", max_size=80),
    st.text(alphabet="abc \u00e9", max_size=80),
    st.lists(st.text(alphabet="abc \u00e9", min_size=1, max_size=4), unique=True),
)
def test_tokens_are_those_of_one_merge_after_another(text, other, words):
    whole = {word.encode(): 1000 + i for i, word in enumerate(words)}
    merges = reference.learn([text], reference.GPT2, list(range(256)), 40)
    order = {pair: (i, 256 + i) for i, pair in enumerate(merges)}
    pairs = np.array(merges, np.int32).reshape(-1, 2)
    results = np.arange(256, 256 + len(merges), dtype=np.int32)
    table = Merges.of(pairs[:, 0].copy(), pairs[:, 1].copy(), results, BYTES), Whole.of(whole)
    memory, chain = Memory.empty(), Chain.empty(400)
    for some in (other, text, other + text, other):  # the memory knows the words of the last ones
        data = np.frombuffer(some.encode(), np.uint8)
        ids = np.empty(len(data) + 1, np.int32)
        stops, none = np.array([len(data)]), np.array([-1], np.int32)
        arguments = character_classes(), PATTERNS["gpt2"], *table, memory, chain
        count = encode(ids, data, stops, none, *arguments)
        expected = reference.encode(some, reference.GPT2, list(range(256)), order, whole)
        assert ids[:count].tolist() == expected


def test_what_is_remembered_is_forgotten_as_a_whole():
    none = np.empty(0, np.int32)
    table, memory, chain = Merges.of(none, none, none, BYTES), Memory.empty(), Chain.empty(10**6)
    data = np.frombuffer("".join(f" {i}" for i in range(50_000)).encode(), np.uint8)
    ids = np.empty(len(data) + 1, np.int32)
    arguments = character_classes(), PATTERNS["gpt2"], table, Whole.of({}), memory, chain
    encode(ids, data, np.array([len(data)]), np.array([-1], np.int32), *arguments)
    words = memory.words
    assert 0 < words.size[0] < 50_000
    assert sorted(words.slots[words.slots >= 0].tolist()) == list(range(words.size[0]))

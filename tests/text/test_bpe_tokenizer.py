"""Tokens learned from a text: in agreement with other programs, on any text, at any chunk size."""

import functools
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import InputError, Tokenizer
from smallmind.text import bpe
from smallmind.text.stories import built_in_text
from tests.programs import refuses
from tests.text import pieces

STORIES = built_in_text(20_000)[:20_000]
MIXED = (
    "Straße, naïve café!\r\n  日本語テキスト。 def f(x):\n\treturn 'don\u2019t' + \"don't\" "
    "# \U0001f469\u200d\U0001f469 e\u0301 12345"
)
KINDS = {
    "char": lambda: Tokenizer(STORIES + MIXED),
    "byte": lambda: Tokenizer(kind="byte"),
    "bpe": lambda: Tokenizer(STORIES, "bpe", vocab_size=600),
    "gpt4": lambda: Tokenizer(STORIES + MIXED, "bpe", vocab_size=500, split="gpt4"),
}
BPE = ["bpe", "gpt4"]
WORDS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(alphabet=" \t\n\r'sStaZ1é。<|>")


@functools.cache
def tokenizer_of(kind):
    """Not while tests are collected, which every process does: training compiles kernels."""
    return KINDS[kind]()


def test_it_has_bytes_merges_and_an_end_of_text():
    tokenizer = tokenizer_of("bpe")
    assert tokenizer.vocab_size == 600 == 256 + len(tokenizer.merges) + 1
    assert tokenizer.vocabulary[599] == b"<|endoftext|>"
    assert tokenizer.encode("one<|endoftext|>two").tolist().count(599) == 1
    assert len(tokenizer.encode(STORIES)) < len(STORIES) / 2.5


def test_the_vocabulary_ends_where_nothing_is_repeated():
    tokenizer = Tokenizer("abab", "bpe", vocab_size=1000)
    assert tokenizer.vocabulary[256:] == [b"ab", b"<|endoftext|>"]
    assert Tokenizer("", "bpe").vocab_size == 257


@pytest.mark.parametrize("kind", BPE)
@settings(deadline=None, max_examples=150)
@given(text=WORDS)
def test_any_text_decodes_to_itself(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids.tolist())) == text
    spelled = tokenizer.spelled(ids)
    assert spelled == (len(text), len(text.encode()))


@pytest.mark.parametrize("kind", BPE)
def test_a_stream_never_splits_a_character(kind):
    tokenizer = tokenizer_of(kind)
    pieces = list(tokenizer.stream(tokenizer.encode("é日👩 x").tolist()))
    assert "\ufffd" not in "".join(pieces) == "é日👩 x"


@pytest.mark.parametrize("kind", BPE)
def test_half_a_character_is_refused(kind):
    refuses("an unpaired surrogate, at position 3", tokenizer_of(kind).encode, "abc\ud800")


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=200)
@given(text=WORDS)
def test_other_programs_give_the_same_ids(kind, text):
    tokenizer, theirs = tokenizer_of(kind), loaded(kind)
    if kind == "char":
        text = "".join(c for c in text if not tokenizer.unknown(c))
    ids = tokenizer.encode(text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    assert theirs.decode(ids, skip_special_tokens=False) == text


@functools.cache
def loaded(kind):
    """The tokenizer as `tokenizers` reads it."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(kind).as_json()))


ACCENTS = st.text(alphabet="eaé\u0301\u0327\u030a\u0338>= \n1'\u1100\u1161\u11a8\u212b")


@settings(deadline=None, max_examples=150)
@given(text=ACCENTS)
def test_accents_are_joined_where_a_file_says_so(text):
    tokenizers = pytest.importorskip("tokenizers")
    data = {**tokenizer_of("gpt4").as_json(), "normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer.from_json(data)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(data))
    ids = tokenizer.encode(text).tolist()
    assert theirs.encode(text).ids == ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert tokenizer.as_json() == data
    assert Tokenizer.from_state(json.loads(json.dumps(tokenizer.state()))).as_json() == data
    assert tokenizer_of("gpt4").decode(tokenizer_of("gpt4").encode(text)) == text


@pytest.mark.parametrize("size", [300, 800])
def test_merges_are_those_that_others_learn(size):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    theirs.train_from_iterator([STORIES], trainer)
    ours = Tokenizer(STORIES, "bpe", vocab_size=size)
    merges = json.loads(theirs.to_str())["model"]["merges"]
    assert [tuple(merge) for merge in ours.as_json()["model"]["merges"]] == [
        tuple(merge) for merge in merges
    ]
    # Their special token comes first, so all their numbers differ from ours.
    read = Tokenizer.from_json(json.loads(theirs.to_str()))
    text = STORIES[:500] + "<|endoftext|>" + MIXED
    assert read.encode(text).tolist() == theirs.encode(text).ids
    assert read.decode(read.encode(text)) == text
    again = Tokenizer.from_state(json.loads(json.dumps(read.state())))
    assert again.encode(text).tolist() == theirs.encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_survives_its_file_and_its_state(kind, tmp_path):
    tokenizer = tokenizer_of(kind)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert type(loaded) is type(tokenizer) and loaded.state() == tokenizer.state()
    restored = Tokenizer.from_state(json.loads(json.dumps(tokenizer.state())))
    assert restored.state() == tokenizer.state() and restored.as_json() == tokenizer.as_json()


@pytest.mark.parametrize("text", [STORIES, MIXED * 20, "aaaa" * 50, "。" * 90, "x\n\n\n" * 40])
@pytest.mark.parametrize("split", ["gpt2", "gpt4"])
def test_chunks_change_nothing(monkeypatch, text, split):
    whole = Tokenizer(text, "bpe", vocab_size=400, split=split)
    ids = whole.encode(text + "<|endoftext|>" + text)
    for size in (1, 7, 100):
        monkeypatch.setattr(bpe, "CHUNK", size)
        parts = Tokenizer(text, "bpe", vocab_size=400, split=split)
        assert parts.state() == whole.state()
        assert parts.encode(text + "<|endoftext|>" + text).tolist() == ids.tolist()


def test_a_word_as_long_as_the_text_is_encoded():
    text = "ab" * 200_000
    tokenizer = Tokenizer(text, "bpe", vocab_size=300)
    assert tokenizer.decode(tokenizer.encode(text + "a")) == text + "a"


def test_more_words_than_are_remembered_are_encoded():
    words = [f" w{i:x}" for i in range(70_000)]  # twice what the kernel remembers at a time
    tokenizer = Tokenizer("".join(words[:3000]), "bpe", vocab_size=400)
    ids = tokenizer.encode("".join(words * 2)).tolist()
    parts = ("".join(words[start : start + 1000]) for start in range(0, len(words), 1000))
    assert ids == [i for part in parts for i in tokenizer.encode(part).tolist()] * 2
    long = ["x" * n + str(n) for n in range(1, 2000)]  # of 2 MB together
    joined = " ".join(long)
    assert tokenizer.decode(tokenizer.encode(joined)) == joined


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, "vocab_size=256 must be at least 257"),
        ({"vocab_size": 2**30}, "vocab_size=1073741824 must be at most"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"split": "gpt5"}, "split='gpt5' must be one of gpt2, gpt4"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises((InputError, TypeError), match=message):
        Tokenizer("some text", "bpe", **change)


HOSTILE = [
    {"merges": [[256, 0]]},
    {"merges": [[-1, 0]]},
    {"merges": [[0, 1], [0, 1]]},
    {"merges": [[0, 0], *([i, i] for i in range(256, 330))]},
    {"merges": [[0]]},
    {"merges": [2**70, 0]},
    {"merges": [-(2**70), 0]},
    {"merges": [0.0, 1.0]},
    {"merges": [True, False]},
    {"merges": ["0", "1"]},
    {"merges": [0, 1, 2]},
    {"merges": [None, 1]},
    {"special": {"a": 2**70}},
    {"special": {"a": 300.0}},
    {"special": {"a": True}},
    {"special": {3: 300}},
    {"special": {"a\ud800": 300}},
    {"vocabulary": [3]},
    {"vocabulary": [["a"]]},
    {"merges": "ab"},
    {"split": None},
    {"special": {"a": 3}},
    {"special": {"a": 300, "b": 300}},
    {"special": {"a": 2**40}},
    {"special": {"": 300}},
    {"special": ["a"]},
    {"vocabulary": ["a", "b"]},
    {"vocabulary": ["\u4e00"]},
    {"vocabulary": 3},
]


@pytest.mark.parametrize("damage", HOSTILE, ids=str)
def test_damaged_states_are_refused(damage):
    state = {"kind": "bpe", "split": "gpt2", "merges": [], "special": {}, "vocabulary": None}
    assert Tokenizer.from_state(state).vocab_size == 256
    with pytest.raises((InputError, KeyError, TypeError, ValueError)):
        Tokenizer.from_state(state | damage)


def _model(**fields):
    data = tokenizer_of("bpe").as_json()
    return {**data, "model": {**data["model"], **fields}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: [],
        lambda: {},
        lambda: {"model": 3},
        lambda: _model(type="WordPiece"),
        lambda: _model(dropout=0.1),
        lambda: _model(vocab={}),
        lambda: _model(vocab=3),
        lambda: _model(merges=None),
        lambda: _model(merges=["a b c"]),
        lambda: _model(merges=[["a", "\u4e00"]]),
        lambda: _model(merges=[["!", "~"]]),
        lambda: {**tokenizer_of("bpe").as_json(), "normalizer": "NFC"},
        lambda: {**tokenizer_of("bpe").as_json(), "added_tokens": [{"id": 3, "content": "x"}]},
        lambda: {
            **tokenizer_of("bpe").as_json(),
            "added_tokens": [{"id": 700, "content": "x", "lstrip": True}],
        },
        lambda: {**tokenizer_of("bpe").as_json(), "added_tokens": 7},
    ],
)
def test_files_of_other_kinds_are_refused_in_a_line(tmp_path, make):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(make()), encoding="utf-8")
    refuses(r"tokenizer\.json", Tokenizer.load, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [{"id": 600, **pieces.added("cat", lstrip=True)}]},
    ],
    ids=str,
)
def test_what_bytes_in_pairs_lack_is_left_to_the_package(tmp_path, changes):
    tokenizers = pytest.importorskip("tokenizers")
    data = json.dumps({**tokenizer_of("bpe").as_json(), **changes})
    (tmp_path / "tokenizer.json").write_text(data, encoding="utf-8")
    ours, theirs = Tokenizer.load(tmp_path / "tokenizer.json"), tokenizers.Tokenizer.from_str(data)
    for text in (*pieces.hard(100), STORIES[:500], "a  cat ﬁ Ⅷ"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_damaged_files_are_refused_in_a_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    refuses(r"tokenizer\.json", Tokenizer.load, path)
    refuses("cannot read", Tokenizer.load, tmp_path / "missing.json")

"""Tokenizers of published models: the ids and texts that `tokenizers` gives."""

import functools
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import Tokenizer
from smallmind.text import bpe
from tests.programs import refusal
from tests.text.published import (
    BEGIN,
    CALL,
    END,
    LLAMA_END,
    PUBLISHED,
    TEXT,
    TURN,
    TURN_END,
    UNSEEN,
    file_of,
    theirs_of,
)

tokenizers = pytest.importorskip("tokenizers")
NAMES = list(PUBLISHED)
PARTS = [
    END,
    BEGIN,
    LLAMA_END,
    TURN,
    TURN_END,
    CALL,
    "<tool",
    "x<|",
    "x",
    "cafe\u0301 A\u030a",
    "\u0338",
    "e\u0301",
]
# Digits of a later version of Unicode than this project's.
LATER = {*range(0x11DE0, 0x11DEA), *range(0x16FF4, 0x16FF7)}
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(alphabet=" \t\n\r'sStT\u017fZ1\u0663\xbd\xe9\u3002<|>.\u3000\x85"),
    st.integers(0, len(TEXT) - 80).map(lambda start: TEXT[start : start + 80]),
    st.lists(st.sampled_from(PARTS) | st.text(alphabet=" a>\u0301\n1", max_size=3)).map("".join),
)


@functools.cache
def ours_of(name):
    return Tokenizer.from_json(file_of(name))


def known(tokenizer, text):
    """Without what it lacks, and what their version of Unicode has other rules for."""
    unknown = tokenizer.unknown(text)
    text = "".join(c for c in text if c not in unknown and ord(c) not in LATER)
    joined = tokenizers.normalizers.NFC().normalize_str(text)
    return text if joined == unicodedata.normalize("NFC", text) else ""


def ids_of(theirs, text):
    return theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=200)
@given(text=TEXTS)
def test_ids_are_theirs(name, text):
    ours, theirs = ours_of(name), theirs_of(name)
    text = known(ours, text)
    ids = ours.encode(text).tolist()
    assert ids == ids_of(theirs, text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert name == "Qwen" or ours.decode(ids) == text
    assert ours.vocab_size == theirs.get_vocab_size()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(data=st.data())
def test_any_ids_are_decoded_as_theirs(name, data):
    ours, theirs = ours_of(name), theirs_of(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1)))
    if any("\xe9" in (theirs.id_to_token(i) or "") and i >= 550 for i in ids):
        return  # a special token with an accent, which they take for a byte
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert "".join(ours.stream(ids)) == ours.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_of_each_matter(name):
    """Otherwise the tests above would show nothing."""
    ours = ours_of(name)
    ids = ours.encode(TEXT).tolist()
    changes = {
        "GPT-2": {"split": "gpt4"},
        "Llama 3": {"ignore_merges": False},
        "Qwen": {"normalizer": None, "late": []},
        "SmolLM": {"split": "gpt2"},
    }
    other = Tokenizer.from_state({**ours.state(), **changes[name]})
    assert other.encode(TEXT).tolist() != ids
    assert ours.decode(ids) == (unicodedata.normalize("NFC", TEXT) if name == "Qwen" else TEXT)


@pytest.mark.parametrize("name", NAMES)
def test_our_file_of_it_means_the_same_to_others(name, tmp_path):
    ours, theirs = ours_of(name), theirs_of(name)
    ours.save(tmp_path / "tokenizer.json")
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = TEXT + "".join(PARTS) * 2
    ids = ids_of(theirs, text)
    assert ids_of(again, text) == ids == ours.encode(text).tolist()
    for skip in (False, True):
        decoded = again.decode(ids, skip_special_tokens=skip)
        assert decoded == theirs.decode(ids, skip_special_tokens=skip)
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.state() == ours.state()
    assert Tokenizer.from_state(json.loads(json.dumps(ours.state()))).as_json() == ours.as_json()


@pytest.mark.parametrize("name", NAMES)
def test_chunks_change_nothing(name, monkeypatch):
    ours = ours_of(name)
    text = (TEXT[-700:] + "".join(PARTS) + " a" + " ".join(PARTS)) * 3
    ids = ours.encode(text).tolist()
    for size in (1, 7, 100):
        monkeypatch.setattr(bpe, "CHUNK", size)
        assert ours.encode(text).tolist() == ids


@pytest.mark.parametrize(("name", "end"), [("GPT-2", END), ("Llama 3", LLAMA_END), ("Qwen", END)])
def test_the_token_that_ends_texts_is_found(name, end):
    ours = ours_of(name)
    assert ours.separator == end
    assert ours.encode(end).tolist() == [ours.end_of_text] == [ours.separator_token]


def test_a_byte_without_a_token_is_named():
    ours = ours_of("SmolLM")
    assert ours.unknown("abc" + UNSEEN + "\xe9") == "".join(sorted(UNSEEN))
    for character in UNSEEN:
        message = refusal(ours.encode, f"some text\n\xe9{character}more")
        assert f"no token for the character {character!r}; remove it" in message
    assert ours.unknown(TEXT) == ""


@pytest.mark.parametrize(
    "damage", [{"normalizer": "NFKC"}, {"ignore_merges": 1}, {"late": ["x"]}, {"shown": 3}]
)
def test_damaged_rules_are_refused(damage):
    with pytest.raises((TypeError, ValueError)):
        Tokenizer.from_state({**ours_of("Qwen").state(), **damage})

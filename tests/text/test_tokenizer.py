"""Every kind of tokenizer: encoding, decoding, state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind import InputError, RunConfig, Tokenizer, parts
from smallmind.settings.sources import FIELDS, flag_of
from tests.programs import refusal, refuses


def test_the_vocabulary_is_sorted():
    tokenizer = Tokenizer("banana!")
    assert tokenizer.characters == "!abn"
    assert tokenizer.vocab_size == 4
    ids = tokenizer.encode("nab")
    assert ids.dtype == np.int32
    assert ids.tolist() == [3, 1, 2]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encoded_text_decodes_to_itself_and_a_state_restores_the_tokenizer(text):
    for tokenizer in (Tokenizer(text), Tokenizer(kind="byte")):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        again = Tokenizer.from_state(tokenizer.state())
        assert again.encode(text).tolist() == ids.tolist()


def test_an_unknown_character_is_named():
    for unknown in ("é", "a", "😀"):
        with pytest.raises(InputError, match=f"never seen the character '{unknown}' .*position 2"):
            Tokenizer("xyz").encode("xy" + unknown)


def test_bytes_stream_as_whole_characters():
    tokenizer = Tokenizer(kind="byte")
    assert tokenizer.vocab_size == 256
    pieces = list(tokenizer.stream(tokenizer.encode("é€")))
    assert pieces == ["", "é", "", "", "€", ""]


def test_invalid_bytes_are_replaced():
    assert Tokenizer(kind="byte").decode([0xE2, 0x82, 65]) == "\ufffdA"


def test_an_unknown_kind_is_refused():
    refuses("tokenizer='word' must be one of char, byte", Tokenizer, "", kind="word")


def test_a_long_vocabulary_is_shortened_in_messages():
    tokenizer = Tokenizer("".join(map(chr, range(0x4E00, 0x4E00 + 3000))))
    assert len(refusal(tokenizer.encode, "a")) < 300


@pytest.mark.parametrize("token", [-1, 3])
def test_tokens_outside_the_vocabulary_are_refused(token):
    with pytest.raises(InputError, match=rf"ids\[1\] = {token} is outside the vocabulary of 3"):
        Tokenizer("abc").decode([0, token])


def test_bytes_that_are_not_utf8_are_encoded_too():
    assert Tokenizer(kind="byte").encode("a\udcff").tolist() == [97, 255]


def test_the_opening_is_a_newline_if_the_text_has_one():
    assert Tokenizer("ab\n").opening == Tokenizer(kind="byte").opening == "\n"
    assert Tokenizer("ba").opening == "a"


@pytest.mark.parametrize("kind", sorted({*parts.TOKENIZERS} - {"hf"}))
def test_the_settings_of_a_kind_are_fields_of_a_run_with_flags(kind):
    made = Tokenizer("the cat sat on the mat " * 9, kind)
    needing = {
        name for name, (_, field) in FIELDS.items() if field.metadata["needs"][1:] == (kind,)
    }
    assert set(made.settings.values()) == needing & set(vars(RunConfig()))
    assert {name: flag_of(field) for name, field in made.settings.items()} == (
        {"vocab_size": "--vocab-size", "split": "--split"} if kind == "bpe" else {}
    )
    assert all(
        hasattr(made, name) for name in made.settings
    )  # so that given tokens say how they were made


class UpperCase(Tokenizer):
    """A kind whose files say so in words of their own."""

    kind = "upper"

    def __init__(self, letters):
        self.letters = letters

    def as_json(self):
        return {"model": {"type": "UpperCase", "vocab": self.letters}}

    @classmethod
    def claims(cls, data):
        return data["model"]["type"] == "UpperCase"

    @classmethod
    def from_json(cls, data):
        return cls(data["model"]["vocab"])


def test_a_new_kind_recognises_its_own_files(monkeypatch, tmp_path):
    path = tmp_path / "tokenizer.json"
    UpperCase("ABC").save(path)
    refuses("its model is of type 'UpperCase', not BPE", Tokenizer.load, path)
    monkeypatch.setitem(parts.TOKENIZERS, "upper", f"{__name__}:UpperCase")
    assert Tokenizer.load(path).letters == "ABC"
    for kind in ("char", "byte", "bpe"):
        Tokenizer("a text", kind).save(path)
        assert Tokenizer.load(path).kind == kind

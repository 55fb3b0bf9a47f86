"""Special tokens of every kind of tokenizer: found by name, and never made of ordinary text."""

import functools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import Tokenizer
from smallmind.exchange import gguf_tokenizer
from smallmind.text import bpe
from smallmind.text import tokenizer as tokenizer_module
from smallmind.text.stories import built_in_text
from tests.programs import refuses

START, END, PART = NAMES = "<|im_start|>", "<|im_end|>", "<|im_end|>!"
STORIES = built_in_text(20_000)[:20_000]
ALPHABET = " \n'asé。" + "".join(sorted(set("".join(NAMES))))
MADE = {
    "char": lambda: Tokenizer(STORIES + ALPHABET),
    "byte": lambda: Tokenizer(kind="byte"),
    "bpe": lambda: Tokenizer(STORIES, "bpe", vocab_size=500),
    "gpt4": lambda: Tokenizer(STORIES, "bpe", vocab_size=400, split="gpt4"),
}
KINDS = list(MADE)
# Names, parts of them, names within names, and anything else.
TEXTS = st.lists(
    st.sampled_from([*NAMES, "<|", "|>", "im_", "<|im_<|im_end|>end|>", "<|endoftext|>"])
    | st.text(alphabet=ALPHABET, max_size=4)
).map("".join)


@functools.cache
def plain_of(kind):
    return MADE[kind]()


@functools.cache
def grown_of(kind):
    return plain_of(kind).with_special(NAMES)


@functools.cache
def theirs_of(kind):
    """The tokenizer as `tokenizers` reads it."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_str(json.dumps(grown_of(kind).as_json()))


def known(kind, text):
    """Characters are those that occurred."""
    return text.replace("<|endoftext|>", "") if kind == "char" else text


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_names_become_tokens_only_where_they_are_asked_for(kind, text):
    text, grown, plain = known(kind, text), grown_of(kind), plain_of(kind)
    ids, ordinary = grown.encode(text), grown.encode(text, special=False)
    for found in (ids, ordinary):
        assert grown.decode(found) == "".join(grown.stream(found.tolist())) == text
        assert grown.spelled(found) == (len(text), len(text.encode()))
    assert not set(ordinary.tolist()) & set(grown.special.values())
    without = [i for i in ids.tolist() if i >= plain.vocab_size]
    assert len(without) == len(tokenizer_module.special_names(NAMES).findall(text))
    assert [each.tolist() for each in grown.encode_each([text, "", text])] == [
        ordinary.tolist(),
        [],
        ordinary.tolist(),
    ]
    assert grown.unknown(text) == ""


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_other_programs_find_the_same_tokens(kind, text):
    text, grown, theirs = known(kind, text), grown_of(kind), theirs_of(kind)
    ids = grown.encode(text).tolist()
    assert theirs.encode(text).ids == ids
    assert theirs.decode(ids, skip_special_tokens=False) == text
    theirs.encode_special_tokens = True
    assert theirs.encode(text).ids == grown.encode(text, special=False).tolist()
    theirs.encode_special_tokens = False


@pytest.mark.parametrize("kind", KINDS)
def test_all_other_tokens_keep_their_numbers(kind):
    plain, grown = plain_of(kind), grown_of(kind)
    assert grown.vocab_size == plain.vocab_size + 3
    assert [grown.special[name] - plain.vocab_size for name in NAMES] == [0, 1, 2]
    for i in range(plain.vocab_size):
        assert grown.decode([i]) == plain.decode([i])
    np.testing.assert_array_equal(grown.encode(STORIES), plain.encode(STORIES))
    assert grown.encode(END).tolist() == [grown.token_of(END)] == [grown.special[END]]
    assert (grown.separator, grown.end_of_text) == (plain.separator, plain.end_of_text)


@pytest.mark.parametrize("kind", KINDS)
def test_those_that_it_has_are_kept(kind):
    grown = grown_of(kind).with_published({"config.json": {"eos_token_id": 3}})
    assert grown.with_special([END, START]) is grown.with_special([]) is grown
    more = grown.with_special([END, "<|more|>", "<|more|>"])
    assert more.vocab_size == grown.vocab_size + 1 == more.special["<|more|>"] + 1
    assert more.published == grown.published
    assert more.digest != grown.digest != plain_of(kind).digest


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_states_have_them(kind, tmp_path):
    grown = grown_of(kind).with_published({"config.json": {"eos_token_id": 3}})
    grown.save(tmp_path / "tokenizer.json")
    metadata = gguf_tokenizer.metadata_of(grown)
    for again in (
        Tokenizer.load(tmp_path / "tokenizer.json"),
        Tokenizer.from_state(json.loads(json.dumps(grown.state()))),
        Tokenizer.from_saved(grown.saved),
        gguf_tokenizer.tokenizer_of(metadata),
    ):
        assert type(again) is type(grown) and again.special == grown.special
        assert again.encode(STORIES + END).tolist() == grown.encode(STORIES + END).tolist()
        assert again.as_json() == grown.as_json()
    assert Tokenizer.from_state(grown.state()).digest == grown.digest
    assert Tokenizer.from_saved(grown.saved).published == grown.published


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_tokenizers_without_them_are_saved_as_before(kind):
    assert plain_of(kind).state() == {
        "kind": kind,
        "characters": getattr(plain_of(kind), "characters", ""),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_cannot_be_told_from_ordinary_text_is_refused(kind):
    named = "cannot be named .*: use two characters or more"
    for name in ("", "a", "é"):
        refuses(named, plain_of(kind).with_special, [name])
    refuses("an unpaired surrogate", plain_of(kind).with_special, ["<\ud800>"])
    with pytest.raises(TypeError, match="a special token"):
        plain_of(kind).with_special([3])


@pytest.mark.parametrize("name", [" the", "Ġthe"])
def test_a_token_of_several_bytes_is_no_special_one(name):
    refuses("it is an ordinary one", plain_of("bpe").with_special, [name])


@pytest.mark.parametrize("kind", ["char", "byte"])
@pytest.mark.parametrize(
    "special", [["<|a|>"], {"<|a|>": 3}, {"<|a|>": True}, {"a": 256}, {3: 256}, {"<\ud800>": 256}]
)
def test_damaged_ones_are_refused(kind, special):
    state = {"kind": kind, "characters": "".join(map(chr, range(256))), "special": special}
    with pytest.raises((TypeError, ValueError)):
        Tokenizer.from_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_never_end_within_a_name(kind, monkeypatch):
    grown, choose = grown_of(kind), random.Random(1)
    text = "".join(choose.choice([*NAMES, "<|im_", "end|>", " a", "!"]) for _ in range(300))
    ids = grown.encode(text).tolist()
    for size in (1, 7, 100):
        monkeypatch.setattr(tokenizer_module, "CHUNK", size)
        monkeypatch.setattr(bpe, "CHUNK", size)
        pieces = list(grown.chunks(text[i : i + 5] for i in range(0, len(text), 5)))
        assert "".join(pieces) == text and len(pieces) > 10
        assert [i for each in grown.encode_chunks(pieces) for i in each.tolist()] == ids


def test_characters_of_names_need_not_be_known():
    tokenizer = Tokenizer("abc").with_special([END])
    assert tokenizer.encode(f"a{END}b").tolist() == [0, 3, 1]
    assert tokenizer.unknown(f"a{END}b") == "" and tokenizer.unknown(f"{END}<d") == "<d"
    assert tokenizer.token_of(END) == 3
    refuses("never seen the character '<'", tokenizer.encode, END, special=False)


def test_llama_cpp_cannot_have_a_name_that_it_reads_otherwise():
    tokenizer = Tokenizer(kind="byte").with_special(["<\\n>"])
    refuses(
        "cannot find the special token '<.*n>' .*--tokenizer bpe, or export the model with --to hf",
        gguf_tokenizer.metadata_of,
        tokenizer,
    )

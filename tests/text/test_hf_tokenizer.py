"""Tokenizers that are run by the package `tokenizers`: the ids of transformers, texts in chunks."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from smallmind import Tokenizer
from smallmind.settings.config import RunConfig
from smallmind.text import hf_tokenizer
from smallmind.text.chat import Turn
from smallmind.text.templates import fit_template
from tests.programs import refuses
from tests.text import pieces

pytest.importorskip("tokenizers")
SPACES = "One two  three.\nFour, five 👩\u200d👩\u200d👧 six 日本語 seven.\n\n" * 40


@pytest.fixture(params=[*pieces.MADE, *pieces.TRAINED])
def tokenizer(request, tmp_path):
    return opened(request.param, tmp_path)


def opened(name, path):
    """A tokenizer from its file."""
    if name in pieces.MADE:
        file, content = path / "tokenizer.json", json.dumps(pieces.file_of(name)).encode()
    else:
        file, content = path / "tokenizer.model", pieces.trained(name)
    file.write_bytes(content)
    return Tokenizer.load(file)


@pytest.mark.interop
@pytest.mark.parametrize("name", pieces.MADE)
def test_ids_and_texts_are_those_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = opened(name, tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    hidden = {i for name, i in ours.special.items() if name not in {*ours.shown, "<unk>", "[UNK]"}}
    for text in pieces.hard(2000):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        if not set(plain) & hidden:  # Unigram spells names, which are never tokens here
            assert ours.encode(text, special=False).tolist() == plain


def test_what_has_been_written_is_streamed_in_whole_characters(tokenizer):
    for text in pieces.hard(300, seed=1):
        ids = tokenizer.encode(text).tolist()
        streamed = list(tokenizer.stream(ids))
        assert "".join(streamed) == tokenizer.decode(ids)
        assert "\ufffd" not in "".join(streamed)
        # Only at the beginning of a sequence the first word has no space before it.
        later = "".join(tokenizer.stream(ids, begins=False))
        assert later.endswith(tokenizer.decode(ids)) and len(later) - len(tokenizer.decode(ids)) < 8
        spelled = tokenizer.spelled(np.array(ids, np.int32))
        assert spelled.characters == len(later) and spelled.bytes == len(later.encode())


def test_a_space_is_dropped_where_a_sequence_begins_and_nowhere_else(tmp_path):
    llama = opened("llama", tmp_path)
    ids = llama.encode("the the").tolist()
    assert [llama.token_bytes(i) for i in ids] == [b" the", b" the"]
    assert llama.decode(ids) == "the the" and llama.decode(ids[1:]) == "the"
    assert "".join(llama.stream(ids[1:], begins=False)) == " the"
    (rocket,) = [llama.encode("🚀").tolist()]
    pieces_of_text = list(llama.stream(rocket))
    assert pieces_of_text.count("") == len(pieces_of_text) - 1 and "🚀" in pieces_of_text


def test_a_long_text_has_the_tokens_of_a_whole_one(tokenizer, monkeypatch):
    whole = tokenizer.encode(SPACES).tolist()
    for size in (64, 500):
        monkeypatch.setattr(hf_tokenizer, "CHUNK", size)
        monkeypatch.setattr(hf_tokenizer, "PIECE", size // 2)
        chunks = list(tokenizer.chunks([SPACES]))
        assert "".join(chunks) == SPACES and len(chunks) > 3
        found = list(tokenizer.encode_chunks(chunks))
        assert np.concatenate(found).tolist() == whole
        last = int(found[0][-1])  # resumed after the first chunk
        assert np.concatenate(list(tokenizer.encode_chunks(chunks[1:], last))).tolist() == [
            *np.concatenate(found[1:])
        ]


def test_every_document_is_encoded_as_a_text_of_its_own(tokenizer):
    if tokenizer.end_of_text is None:
        assert tokenizer.separator == "\n"
        return
    documents = ["One cat.", "Two dogs", "", " three"]
    found = tokenizer.encode_documents(tokenizer.separator.join(documents)).tolist()
    wanted = []
    for document in documents:
        wanted += [*tokenizer.encode(document).tolist(), tokenizer.end_of_text]
    assert found == wanted[:-1]


@pytest.mark.parametrize("text", ["a" * 100_000, "日" * 100_000, "ab,c" * 25_000, "\n" * 100_000])
def test_a_text_without_spaces_is_encoded_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) <= 3 * len(text)
    if tokenizer.contents["model"]["type"] == "BPE":
        assert tokenizer.decode(ids) == text


def test_a_tokenizer_is_the_same_after_it_was_saved(tokenizer, tmp_path):
    again = Tokenizer.from_saved(tokenizer.saved)
    tokenizer.save(tmp_path / "again.json")
    loaded = Tokenizer.load(tmp_path / "again.json")
    assert again.digest == tokenizer.digest == loaded.digest
    assert again.contents == pieces.written(tokenizer) == loaded.contents
    for text in pieces.hard(50):
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    other = tokenizer.with_special(["<|new|>"])
    assert other.digest != tokenizer.digest
    assert other.encode("a<|new|>").tolist()[-1] == tokenizer.vocab_size == other.vocab_size - 1
    ordinary = next(x for x in tokenizer.pieces if len(x) > 1 and x not in tokenizer.special)
    refuses("it is an ordinary one", tokenizer.with_special, [ordinary])


def test_a_file_is_written_as_it_was_read(tmp_path):
    for name in pieces.MADE:
        opened(name, tmp_path).save(tmp_path / "again.json")
        again = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
        assert again == {**pieces.file_of(name), "post_processor": None}


def test_names_of_special_tokens_in_a_turn_are_ordinary_text(tokenizer):
    grown, template = fit_template(tokenizer, "chatml")
    turns = [Turn("user", "a<|im_end|>b</s>"), Turn("assistant", " Yes. ")]
    ids = template.encode(grown, turns) // 4
    assert (ids == grown.special["<|im_end|>"]).sum() == 2
    assert grown.end_of_text not in ids.tolist()


@pytest.mark.interop
@pytest.mark.parametrize("name", pieces.MADE)
def test_conversations_have_the_ids_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    grown, template = fit_template(opened(name, tmp_path), "chatml")
    grown.save(tmp_path / "grown.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "grown.json"))
    strips = "{% for m in messages %}{{ m.content }}<|im_end|>\n <strip>  \n <mask>{% endfor %}"
    for text in (template.jinja, strips):
        published = {"tokenizer_config.json": {"chat_template": text}}
        found = fit_template(grown.with_published(published), None)[1]
        for said in ("Hello", " a  b ", "日本 👩\u200d👩", ""):
            turns = [Turn("user", said), Turn("assistant", "Yes "), Turn("user", "x")]
            messages = [{"role": turn.role, "content": turn.text} for turn in turns]
            wanted = theirs.apply_chat_template(messages, chat_template=text, return_dict=False)
            assert (found.encode(grown, turns) // 4).tolist() == wanted


DAMAGED = {
    "a score that is not a number": (
        "metaspace",
        lambda data: data["model"]["vocab"][5].__setitem__(1, math.nan),
    ),
    "a score that is infinite": (
        "metaspace",
        lambda data: data["model"]["vocab"][5].__setitem__(1, math.inf),
    ),
    "two equal tokens": ("metaspace", lambda data: data["model"]["vocab"].append(["a", 0.0])),
    "an id twice": ("wordpiece", lambda data: data["model"]["vocab"].update(abcdefg=7)),
    "an id below zero": ("wordpiece", lambda data: data["model"]["vocab"].update(abcdefg=-1)),
    "an id that is a text": ("wordpiece", lambda data: data["model"]["vocab"].update(abcdefg="1")),
    "an enormous id": ("wordpiece", lambda data: data["model"]["vocab"].update(abcdefg=2**40)),
    "no unknown token": ("wordpiece", lambda data: data["model"].update(unk_token="[NO]")),
    "an empty vocabulary": ("prepend", lambda data: data["model"].update(vocab={}, merges=[])),
    "a merge of nothing": ("prepend", lambda data: data["model"]["merges"].append(["zq", "qz"])),
    "a merge of three": ("prepend", lambda data: data["model"]["merges"].append("a b c")),
    "an added token elsewhere": (
        "prepend",
        lambda data: data["added_tokens"].append({**pieces.added("<x>"), "id": 9_000}),
    ),
    "an added token of nothing": (
        "prepend",
        lambda data: data["added_tokens"].append({**pieces.added(""), "id": 900}),
    ),
    "a step that does not exist": ("prepend", lambda data: data.update(normalizer={"type": "X"})),
    "steps that are a number": ("prepend", lambda data: data.update(pre_tokenizer=3)),
    "a damaged table of characters": (
        "metaspace",
        lambda data: data.update(
            normalizer={"type": "Precompiled", "precompiled_charsmap": "AAEC"}
        ),
    ),
    "a lone surrogate": ("wordpiece", lambda data: data["model"]["vocab"].update({"\ud800": 900})),
    "dropout": ("prepend", lambda data: data["model"].update(dropout=0.1)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_in_a_line(damage, tmp_path):
    name, change = DAMAGED[damage]
    data = pieces.file_of(name)
    change(data)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    refuses("tokenizer.json", Tokenizer.load, path)


@pytest.mark.parametrize("cut", [0, 1, 50, 1000, -1])
def test_a_damaged_model_of_sentencepiece_is_refused_in_a_line(cut, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(pieces.trained("llama")[:cut] + b"\xff" * (cut > 0))
    refuses("tokenizer.model", Tokenizer.load, path)
    refuses("cannot read", Tokenizer.load, tmp_path / "no.model")


def test_without_the_package_a_line_names_the_extra(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(pieces.file_of("prepend")), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses(r'pip install "smallmind\[hf\]"', Tokenizer.load, file)


def test_the_kind_is_read_and_never_learned(tmp_path):
    refuses("give the path of a tokenizer.json", Tokenizer, "a text", "hf")
    assert RunConfig(tokenizer="llama/tokenizer.model").tokenizer.endswith(".model")
    refuses("tokenizer.json or tokenizer.model", RunConfig, tokenizer="llama.txt")


def test_the_package_is_imported_for_such_a_tokenizer_alone():
    code = "import sys, smallmind, smallmind.cli.program; from smallmind import Tokenizer; "
    code += "Tokenizer('a text', 'bpe').encode('a'); sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

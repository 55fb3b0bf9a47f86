"""Conversations that are prepared on disk have the marked tokens that they have in memory."""

import json
import tracemalloc

import numpy as np
import pytest

from smallmind import InputError, Tokenizer
from smallmind.corpus import preparation, survey
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding
from smallmind.corpus.shards import open_shards
from smallmind.corpus.tokens import find_tokens
from smallmind.runs import assembly, source
from smallmind.settings.config import RunConfig
from smallmind.text import chat
from smallmind.text.chat import CUT, LEARNED, MARK_KINDS, START
from smallmind.text.templates import TEMPLATES, format_of
from tests.corpus.reading import conversations, written
from tests.corpus.test_preparation import end_after, on_disk
from tests.corpus.texts import write_conversations
from tests.corpus.writing import contents
from tests.peaks import traced
from tests.programs import refusal

pytestmark = pytest.mark.usefixtures("quick_disk")

KINDS_OF_TOKENIZER = {
    "char": {"tokenizer": "char"},
    "byte": {"tokenizer": "byte", "chat_template": "llama3"},
    "gpt2": {"tokenizer": "bpe", "bpe_vocab_size": 280},
    "gpt4": {"tokenizer": "bpe", "bpe_vocab_size": 280, "bpe_split": "gpt4", "chat_template": "qa"},
    "a file": {},
}


@pytest.fixture(params=KINDS_OF_TOKENIZER)
def fields(request, tmp_path):
    """The settings of a kind of tokenizer, and of a template."""
    if request.param == "a file":
        made = Tokenizer("Who has the cat's mat? Tom sat on it. " * 9, "bpe", vocab_size=270)
        made.save(tmp_path / "tokenizer.json")
        return {"tokenizer": str(tmp_path / "tokenizer.json")}
    return KINDS_OF_TOKENIZER[request.param]


@pytest.fixture
def folder(tmp_path):
    return write_conversations(tmp_path)


def in_memory(paths, **fields):
    """The conversations of a run in memory, and its tokenizer."""
    run = RunConfig(**fields)
    encoding = Encoding.of_run(run)
    read = source.read_source(list(paths), run, encoding)
    return read, assembly.fit_tokenizer(run, read, encoding)


def test_marked_tokens_on_disk_are_those_in_memory(folder, tmp_path, fields):
    found = on_disk([folder], tmp_path / "shards", **fields)
    read, tokenizer = in_memory([folder], **fields)
    marked = read.marked(tokenizer)
    np.testing.assert_array_equal(found.train[:], np.concatenate(marked[: -read.held_out]))
    np.testing.assert_array_equal(found.held_out[:], np.concatenate(marked[-read.held_out :]))
    assert found.is_chat and found.sha256 == read.sha256 and found.report == read.report
    assert found.tokenizer.digest == tokenizer.digest
    assert found.tokenizer.special == tokenizer.special
    name = fields.get("chat_template", "chatml")
    assert format_of(found.tokenizer) == TEMPLATES[name]
    shards = open_shards(tmp_path / "shards")
    shards.verify()
    assert shards.index.recipe.vocab_size == MARK_KINDS * tokenizer.vocab_size
    assert len(shards.train.files) > 1
    again = find_tokens([tmp_path / "shards"], None)
    assert again.is_chat and again.report == found.report


def test_each_conversation_is_there_with_its_answers_learned(folder, tmp_path):
    found = on_disk([folder], tmp_path / "shards", tokenizer="byte")
    tokenizer = found.tokenizer
    marked = found.tokens[:]
    parts = np.split(marked, np.flatnonzero(marked % MARK_KINDS == START)[1:])
    read = conversations(Corpus(folder))
    assert len(parts) == len(read) == 16
    for tokens, turns in zip(parts, read, strict=True):
        ids, kinds = tokens // MARK_KINDS, tokens % MARK_KINDS
        learned = tokenizer.decode(ids[kinds == LEARNED])
        if turns[0][0]:
            written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
            assert tokenizer.decode(ids) == written
            assert learned == "".join(f"{x}<|im_end|>" for role, x in turns if role == "assistant")
        else:
            assert tokenizer.decode(ids) == turns[0][1] and learned == turns[0][1][1:]
        assert (kinds == CUT).sum() == len(turns[2::2])
    # A tenth of them, the last ones, are held out.
    np.testing.assert_array_equal(found.held_out[:], np.concatenate(parts[-2:]))


def test_tokens_do_not_depend_on_where_texts_are_cut(folder, tmp_path, monkeypatch, fields):
    expected = on_disk([folder], tmp_path / "whole", **fields)
    for number, (together, most) in enumerate([(1, 1), (3, 10**6), (10**6, 50)]):
        monkeypatch.setattr(chat, "CONVERSATIONS_AT_ONCE", together)
        monkeypatch.setattr(chat, "CHARACTERS_AT_ONCE", most)
        monkeypatch.setattr(preparation, "TOKENS_PER_APPEND", most)
        found = on_disk([folder], tmp_path / str(number), number + 1, **fields)
        assert contents(tmp_path / str(number)) == contents(tmp_path / "whole")
        assert found.report == expected.report


def test_long_documents_among_them_become_several(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "MAX_DOCUMENT", 10)
    found = on_disk([folder], tmp_path / "shards", 4, tokenizer="byte")
    read, tokenizer = in_memory([folder], tokenizer="byte")
    np.testing.assert_array_equal(found.tokens[:], np.concatenate(read.marked(tokenizer)))
    texts = [turns[0].text for turns in read.conversations if turns[0].role == chat.TEXT]
    assert texts == ["the cat's ", "🐈 sat on t", "he mat"]
    assert found.report.documents == 16 and (found.tokens[:] % MARK_KINDS == START).sum() == 18


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("fields", [{"tokenizer": "bpe", "bpe_vocab_size": 270}, {}])
def test_a_preparation_that_ended_anywhere_is_continued(
    folder, tmp_path, monkeypatch, fields, share
):
    expected = on_disk([folder], tmp_path / "unbroken", **fields)
    monkeypatch.setattr(preparation, "TOKENS_PER_APPEND", 20)
    with monkeypatch.context() as patch:
        end_after(patch, share * len(expected.tokens))
        with pytest.raises(EOFError):
            on_disk([folder], tmp_path / "shards", **fields)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "survey_conversations", None)  # only the rest is written
        found = on_disk([folder], tmp_path / "shards", **fields)
    assert found.report == expected.report
    assert contents(tmp_path / "shards") == contents(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"chat": True}, "chat"),
        ({"chat_template": "llama3"}, "template"),
        ({"tokenizer": "char"}, "tokenizer"),
    ],
)
def test_a_directory_that_was_made_otherwise_is_refused(folder, tmp_path, changed, name):
    given = {"tokenizer": "byte"}
    for before, after in [(given, given | changed), (given | changed, given)]:
        directory = tmp_path / f"{len(before)}{before['tokenizer']}"
        on_disk([folder], directory, **before)
        made = contents(directory)
        message = refusal(on_disk, [folder], directory, **after)
        assert f"was made from other texts or settings ({name})" in message
        assert contents(directory) == made


def test_no_chat_prepares_texts(folder, tmp_path):
    written(folder / "a.jsonl", '{"text": "the cat", "prompt": "a", "response": "b"}\n' * 9)
    (folder / "c.jsonl").unlink()
    found = on_disk([folder], tmp_path / "texts", tokenizer="byte", chat=False)
    assert not found.is_chat and found.report.conversations == 0
    assert found.tokenizer.decode(found.tokens[:]).startswith("the cat\nthe cat\n")
    assert on_disk([folder], tmp_path / "chats", tokenizer="byte").report.conversations == 9


def test_a_conversation_that_changes_meanwhile_is_refused(folder, tmp_path, monkeypatch):
    fitted = preparation._fitted

    def changing(*arguments):
        path = folder / "a.jsonl"
        path.write_bytes(path.read_bytes().replace(b"Tom", b"Ann"))
        return fitted(*arguments)

    monkeypatch.setattr(preparation, "_fitted", changing)
    with pytest.raises(
        InputError, match=r"the texts have changed since .* remove it to start over"
    ):
        on_disk([folder], tmp_path / "shards", tokenizer="byte")


def test_a_single_conversation_is_refused_and_leaves_nothing(tmp_path):
    path = written(tmp_path / "a.jsonl", json.dumps({"question": "a", "answer": "b"}))
    with pytest.raises(InputError, match="only one conversation: training needs two or more"):
        on_disk([path], tmp_path / "shards", tokenizer="byte")
    assert not (tmp_path / "shards").exists()


def test_preparing_many_takes_memory_that_does_not_grow_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "CHARACTERS_AT_ONCE", 1 << 12)
    monkeypatch.setattr(preparation, "TOKENS_PER_APPEND", 1 << 12)
    peaks = {}
    for count in (250, 2_500):
        line = json.dumps({"question": "Who sat on the mat?", "answer": "The cat, " * 9})
        path = written(tmp_path / f"{count}.jsonl", f"{line}\n" * count)
        with traced():
            found = on_disk([path], tmp_path / f"{count}", 1 << 12, 10**6, tokenizer="byte")
            peaks[count] = tracemalloc.get_traced_memory()[1]
        assert len(found.tokens) > 100 * count
    assert peaks[2_500] < peaks[250] + 100 * 2_500 // 4

"""Texts that are prepared on disk have the tokens that they have in memory."""

import gzip
import itertools
import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smallmind import InputError, Tokenizer
from smallmind.corpus import preparation, shards, survey
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.corpus.reading import Limits
from smallmind.corpus.shards import open_shards
from smallmind.corpus.survey import DocumentStarts, joined
from smallmind.corpus.tokens import TokensOnDisk
from smallmind.files.lock import RunLock
from smallmind.runs import assembly, source
from smallmind.settings.config import RunConfig
from smallmind.text import bpe, byte_tokenizer, char_tokenizer, tokenizer, tokenizer_json
from smallmind.text.bpe_tokenizer import BPETokenizer
from tests.corpus.reading import written
from tests.corpus.writing import contents
from tests.peaks import traced
from tests.programs import edited, refusal, refuses

pytestmark = pytest.mark.usefixtures("quick_disk")

END = "<|endoftext|>"
STORY = "The cat's hat, naïve 🐈‍⬛🐕, sat\r\n\r\non  12345 mats.\tIt'll go\n" + f"a{END}b <|end "
SHARD_TOKENS = 150


@pytest.fixture
def cats(tmp_path):
    """A short text."""
    return written(tmp_path / "a.txt", "the cat sat " * 50)


def one_document(folder):
    return [written(folder / "a.txt", STORY * 8)]


def many_documents(folder):
    records = [json.dumps({"text": f"{STORY[i:]} {i} {END}"}) for i in range(20)]
    records[3:3] = ["", json.dumps({"text": ""}), json.dumps({"text": "", "number": 1})]
    written(folder / "a.jsonl", "\n".join(records))
    written(folder / "b.txt.gz", gzip.compress((STORY * 3).encode()))
    written(folder / "c.txt", "")
    written(folder / "d.png", b"\xff" * 9)
    for i in range(5):
        written(folder / f"e{i}.txt", f"🐈 {STORY[::-1][:40]}\r")
    return [folder]


def learned_elsewhere(folder):
    """A file of byte pairs with special tokens besides the end of a text."""
    path = folder / "tokenizer.json"
    Tokenizer("the cat sat on the mat " * 9, "bpe", vocab_size=270).save(path)
    with edited(path) as data:
        for number, content in enumerate(["<|end", "hat", "  "], 300):
            token = {"id": number, "content": content, "special": True}
            data["added_tokens"].append({**data["added_tokens"][0], **token})
    return path


KINDS = {
    "char": {"tokenizer": "char"},
    "byte": {"tokenizer": "byte"},
    "gpt2": {"tokenizer": "bpe", "bpe_vocab_size": 300},
    "gpt4": {"tokenizer": "bpe", "bpe_vocab_size": 300, "bpe_split": "gpt4"},
    "a file": {},
}


@pytest.fixture(params=KINDS)
def fields(request, tmp_path):
    """The settings of a kind of tokenizer."""
    if request.param == "a file":
        (tmp_path / "of others").mkdir()
        return {"tokenizer": str(learned_elsewhere(tmp_path / "of others"))}
    return KINDS[request.param]


def in_memory(paths, **fields):
    """The data of a run with a text in memory: the dataset, and its source."""
    run = RunConfig(**fields)
    encoding = Encoding.of_run(run)
    read = source.read_source(list(paths), run, encoding)
    made = assembly.fit_tokenizer(run, read, encoding)
    return read.dataset(made, 4, RunConfig(batch_size=2, seed=1)), read


def on_disk(paths, directory, piece=2**20, shard_tokens=SHARD_TOKENS, chat=None, **fields):
    """The data of a run with a prepared text, or prepared conversations."""
    corpus = Corpus(list(paths), limits=Limits(piece=piece), chat=chat)
    encoding = Encoding.of_run(RunConfig(**fields))
    return TokensOnDisk.of_shards(prepare(corpus, directory, encoding, shard_tokens))


def assert_same(found, dataset, read):
    np.testing.assert_array_equal(found.train[:], dataset.train)
    np.testing.assert_array_equal(found.held_out[:], dataset.held_out)
    assert found.tokenizer.state() == dataset.tokenizer.state()
    assert found.sha256 == read.sha256 and found.characters == read.characters
    assert found.held_out_characters == read.held_out
    assert found.beginning == read.beginning and found.report == read.report


@pytest.mark.parametrize("texts", [one_document, many_documents])
def test_tokens_on_disk_are_those_in_memory(tmp_path, fields, texts):
    paths = texts(tmp_path / "texts")
    found = on_disk(paths, tmp_path / "shards", **fields)
    assert_same(found, *in_memory(paths, **fields))
    assert bool(found.held_out_characters) == (texts is many_documents)
    shards = open_shards(tmp_path / "shards")
    shards.verify()
    assert len(shards.train.files) > 1
    names = {path.name for path in (tmp_path / "shards").iterdir()}
    tokens = {file.path.name for file in found.tokens.files}
    assert names == {*tokens, "index.json", "tokenizer.json"}


def cut_everywhere(monkeypatch, size):
    for module in (bpe, byte_tokenizer, char_tokenizer, tokenizer, source):
        monkeypatch.setattr(module, "CHUNK", size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_tokens_do_not_depend_on_where_texts_are_cut(tmp_path, monkeypatch, fields, size):
    paths = many_documents(tmp_path / "texts")
    whole = in_memory(paths, **fields)
    cut_everywhere(monkeypatch, size)
    assert_same(on_disk(paths, tmp_path / "shards", size, **fields), *whole)


def test_the_whole_text_is_encoded_as_its_tokens_are_in_other_programs(tmp_path, fields):
    """The tokens of one document are those of the text, wherever it is divided."""
    paths = one_document(tmp_path / "texts")
    found = on_disk(paths, tmp_path / "shards", **fields)
    text = (STORY * 8).replace("\r\n", "\n")
    np.testing.assert_array_equal(found.tokens[:], found.tokenizer.encode(text))
    assert found.tokenizer.decode(found.tokens[:]) == text
    assert len(found.held_out) == len(found.tokens) // 10


SPECIAL = [
    (),
    (END,),
    (END, "<|end", "a b"),
    ("ab", "b ", " a", "1!a", "!a 1"),
    ("a ll", "ll'b"),
    ("\xe9 \uac01", "\uac01!", "\u1100"),
]
PARTS = ["a", "b ", " ", "\n", "1", "!", "'", "ll", "ä", "🐈", END, "<|end", "<|endoftext|", "1!a"]
PARTS += [">", "e\u0301", "\u1100", "\u1161", "\u11a8"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=30).map("".join),
    st.lists(st.integers(1, 20), max_size=30),
    st.sampled_from(list(tokenizer_json.PATTERNS)),
    st.sampled_from(SPECIAL),
    st.integers(0, 3),
    st.sampled_from([None, "NFC"]),
    st.integers(1, 6),
)
@example("a" * 9 + END, [21, 1], "gpt2", (END,), 0, None, 5)
def test_a_text_in_chunks_has_the_tokens_of_the_whole(
    text, sizes, split, special, late, normalizer, chunk
):
    learned = Tokenizer("a b ab 1!a ll ll " * 3, "bpe", vocab_size=270, split=split)
    numbers = {content: 300 + i for i, content in enumerate(special)}
    rules = tokenizer_json.Rules(normalizer, late=frozenset(special[:late]))
    encoder = BPETokenizer._of(split, learned.vocabulary[:-1], learned.merges, numbers, rules)
    whole = encoder.encode(text)
    ends = list(itertools.accumulate([0, *sizes], initial=0))
    texts = [text[start:stop] for start, stop in itertools.pairwise([*ends, None])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "CHUNK", chunk)
        chunks = list(encoder.chunks(texts))
        ids = list(encoder.encode_chunks(chunks))
    assert "".join(chunks) == text and all(chunks)
    np.testing.assert_array_equal(np.concatenate([np.empty(0, np.int32), *ids]), whole)


def test_long_texts_without_spaces_are_not_read_again_and_again(monkeypatch):
    monkeypatch.setattr(bpe, "CHUNK", 4)
    texts = ["x" * 5] * 1000
    assert list(bpe.cut(texts, bpe.Special.of({}))) == ["x" * 5000]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=200), st.integers(1, 9))
def test_held_out_parts_begin_with_a_document_however_many_there_are(lengths, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "MAX_STARTS", most)
        starts, ends = DocumentStarts(), np.cumsum(lengths)
        for end in ends[:-1]:
            starts.add(int(end))
        held_out = starts.held_out(int(ends[-1]))
        assert len(starts._starts) <= most
    assert not held_out or ends[-1] - held_out in ends
    assert not held_out or 0.05 <= held_out / ends[-1] <= 0.2


def test_a_tenth_is_found_among_more_documents_than_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "MAX_STARTS", 64)
    records = "\n".join(json.dumps({"text": f"story {i}"}) for i in range(1000))
    paths = [written(tmp_path / "a.jsonl", records)]
    found = on_disk(paths, tmp_path / "shards", tokenizer="char")
    assert_same(found, *in_memory(paths, tokenizer="char"))
    text = found.tokenizer.decode(found.held_out[:])
    assert text.startswith("story ") and 80 < len(text.splitlines()) < 120


def test_documents_are_joined_by_the_separator_of_their_tokens(tmp_path):
    paths = [written(tmp_path / name, name) for name in ("a.txt", "b.txt")]
    for kind, separator in {"char": "\n", "byte": "\n", "bpe": END}.items():
        found = on_disk(paths, tmp_path / kind, tokenizer=kind)
        assert found.tokenizer.decode(found.tokens[:]) == f"a.txt{separator}b.txt"
        assert "".join(joined(Corpus(paths).pieces(), separator)) == f"a.txt{separator}b.txt"


def test_a_prepared_directory_costs_no_second_pass(tmp_path, monkeypatch):
    paths = one_document(tmp_path / "texts")
    on_disk(paths, tmp_path / "shards", tokenizer="byte")
    before = contents(tmp_path / "shards")
    monkeypatch.setattr(preparation, "survey", None)
    monkeypatch.setattr(preparation, "_write", None)
    on_disk(paths, tmp_path / "shards", tokenizer="byte")
    assert contents(tmp_path / "shards") == before


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"tokenizer": "char"}, "tokenizer"),
        ({"bpe_vocab_size": 280}, "vocab_size"),
        ({"bpe_split": "gpt4"}, "split"),
        ({"shard_tokens": 77}, "shard_tokens"),
    ],
)
def test_other_settings_are_refused_and_change_nothing(
    tmp_path, monkeypatch, changed, name, is_complete
):
    paths = one_document(tmp_path / "texts")
    fields = {"tokenizer": "bpe", "bpe_vocab_size": 300}
    if is_complete:
        on_disk(paths, tmp_path / "shards", **fields)
    else:
        half_prepare(monkeypatch, paths, tmp_path / "shards", 30, **fields)
    before = contents(tmp_path / "shards")
    message = refusal(on_disk, paths, tmp_path / "shards", **{**fields, **changed})
    for words in ("was made from other texts or settings", name, "remove it to start over"):
        assert words in message
    assert contents(tmp_path / "shards") == before
    on_disk(paths, tmp_path / "another directory", **{**fields, **changed})


def end_after(monkeypatch, tokens):
    """Makes a preparation end once so many tokens have been appended."""
    append, done = preparation.ShardWriter.append, 0

    def counted(self, ids, *arguments, **more):
        nonlocal done
        append(self, ids, *arguments, **more)
        done += len(ids)
        if done >= tokens:
            raise EOFError

    monkeypatch.setattr(preparation.ShardWriter, "append", counted)


def half_prepare(monkeypatch, paths, directory, tokens=300, **fields):
    """Prepares texts in a process that ends on the way."""
    with monkeypatch.context() as patch:
        cut_everywhere(patch, 16)
        end_after(patch, tokens)
        with pytest.raises(EOFError):
            on_disk(paths, directory, 12, **fields)
    assert not (directory / "index.json").exists()


@pytest.mark.parametrize("texts", [one_document, many_documents])
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.8, 0.95])
def test_a_preparation_that_ended_anywhere_is_continued(tmp_path, monkeypatch, texts, share):
    fields = {"tokenizer": "bpe", "bpe_vocab_size": 280}
    paths = texts(tmp_path / "texts")
    expected = on_disk(paths, tmp_path / "unbroken", **fields)
    tokens = int(share * len(expected.tokens))
    half_prepare(monkeypatch, paths, tmp_path / "shards", tokens, **fields)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "survey", None)  # only written, not measured or learned again
        found = on_disk(paths, tmp_path / "shards", **fields)
    assert found.report == expected.report
    assert contents(tmp_path / "shards") == contents(tmp_path / "unbroken")


@pytest.mark.parametrize("fields", [KINDS["char"], KINDS["gpt4"]], ids=["char", "gpt4"])
def test_a_preparation_is_continued_wherever_texts_are_cut(tmp_path, monkeypatch, fields):
    """Another version may read files in other pieces, and cut texts in other places."""
    paths = many_documents(tmp_path / "texts")
    on_disk(paths, tmp_path / "unbroken", **fields)
    half_prepare(monkeypatch, paths, tmp_path / "shards", **fields)
    assert list((tmp_path / "shards").glob("train_*"))
    cut_everywhere(monkeypatch, 50)
    on_disk(paths, tmp_path / "shards", 40, **fields)
    assert contents(tmp_path / "shards") == contents(tmp_path / "unbroken")


def test_a_text_that_changes_while_it_is_read_is_refused(cats, tmp_path, monkeypatch):
    fitted = preparation._fitted

    def changing(*arguments):
        made = fitted(*arguments)
        cats.write_text("the cat ate " * 50, encoding="utf-8")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_fitted", changing)
        with pytest.raises(InputError, match=r"the texts have changed since .* remove it to start"):
            on_disk([cats], tmp_path / "shards", tokenizer="byte")
    with pytest.raises(InputError, match=r"other texts or settings \(files\)"):
        on_disk([cats], tmp_path / "shards", tokenizer="byte")
    for file in (tmp_path / "shards").iterdir():
        file.unlink()
    found = on_disk([cats], tmp_path / "shards", tokenizer="byte")
    assert_same(found, *in_memory([cats], tokenizer="byte"))


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["", "{}", "[1", None])
def test_a_damaged_record_of_progress_is_refused_in_a_line(
    cats, tmp_path, monkeypatch, name, damage
):
    half_prepare(monkeypatch, [cats], tmp_path / "shards", tokenizer="byte")
    if damage is None:
        (tmp_path / "shards" / name).unlink()
    else:
        (tmp_path / "shards" / name).write_text(damage, encoding="utf-8")
    if (name, damage) == ("plan.json", None):  # all that it said can be found out again
        assert len(on_disk([cats], tmp_path / "shards", tokenizer="byte").tokens) == 600
        return
    message = refusal(on_disk, [cats], tmp_path / "shards", tokenizer="byte")
    assert str(tmp_path / "shards") in message
    assert "remove" in message or "another directory" in message


def test_nothing_is_left_behind_where_nothing_could_be_prepared(tmp_path):
    path = written(tmp_path / "a.txt", "the cat sat ")
    unknown = tmp_path / "known.json"
    Tokenizer("the cat").save(unknown)
    with pytest.raises(InputError, match="the texts have 1 character that the tokenizer does not"):
        on_disk([path], tmp_path / "shards", tokenizer=str(unknown))
    with pytest.raises(InputError, match="shard_tokens=0 must be at least 1"):
        on_disk([path], tmp_path / "shards", tokenizer="char", shard_tokens=0)
    assert not (tmp_path / "shards").exists()


def test_a_directory_that_cannot_be_made_or_is_in_use_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "a.txt", "the cat sat ")
    for out in (path, path / "below"):
        refuses("cannot make", on_disk, [path], out, tokenizer="char")
    written(tmp_path / "taken" / "train_000000.bin", "mine")
    refuses("already holds train", on_disk, [path], tmp_path / "taken", tokenizer="char")
    assert contents(tmp_path / "taken") == {"train_000000.bin": b"mine"}
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    advice = "cannot write to .*choose another directory"
    refuses(advice, on_disk, [path], tmp_path / "closed", tokenizer="char")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"version": "1.0"}'),
        ("config.json", "{}"),
        ("metrics.jsonl", ""),
        ("checkpoints/best.safetensors", "mine"),
        ("notes.txt", "mine"),
    ],
)
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_directory_with_files_of_others_is_left_alone(
    cats, tmp_path, monkeypatch, name, content, is_begun
):
    if is_begun:  # before there was a plan, as an earlier version could beside a run
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "save", _end)
            with pytest.raises(EOFError):
                on_disk([cats], tmp_path / "out", tokenizer="byte")
    if is_begun and name == "tokenizer.json":
        name = "model.safetensors"
    written(tmp_path / "out" / name, content)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "survey", None)  # refused before the texts are read
        with pytest.raises(InputError, match=f"already holds {name.split('/')[0]}, .* new or emp"):
            on_disk([cats], tmp_path / "out", tokenizer="byte")
    after = {p.name: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert after == before


def _end(*_):
    raise EOFError


def test_an_empty_directory_is_prepared_in(cats, tmp_path):
    written(tmp_path / "out" / ".gitkeep", "")
    assert len(on_disk([cats], tmp_path / "out", tokenizer="byte").tokens) == 600
    written(tmp_path / "out" / "notes.txt", "mine")  # beside complete shards
    assert len(on_disk([cats], tmp_path / "out", tokenizer="byte").tokens) == 600


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_directory_that_another_process_prepares_is_refused_at_once(
    cats, tmp_path, monkeypatch, is_begun
):
    if is_begun:
        half_prepare(monkeypatch, [cats], tmp_path / "shards", tokenizer="byte")
    (tmp_path / "shards").mkdir(exist_ok=True)
    with monkeypatch.context() as patch, RunLock(tmp_path / "shards"):
        patch.setattr(preparation, "survey", None)
        with pytest.raises(InputError, match="shards is in use by process"):
            on_disk([cats], tmp_path / "shards", tokenizer="byte")
    assert len(on_disk([cats], tmp_path / "shards", tokenizer="byte").tokens) == 600


def test_preparing_a_long_text_takes_memory_that_does_not_grow_with_it(tmp_path, monkeypatch):
    cut_everywhere(monkeypatch, 1 << 10)
    peaks = {}
    for lines in (2_000, 20_000):
        path = written(tmp_path / f"{lines}.txt", "the cat sat on the mat. 🐈\n" * lines)
        with traced():
            found = on_disk([path], tmp_path / f"{lines}", 1 << 12, 10_000, tokenizer="byte")
            peaks[lines] = tracemalloc.get_traced_memory()[1]
        assert len(found.tokens) == 29 * lines
    assert peaks[20_000] < peaks[2_000] + 29 * 20_000 // 4  # of 29 bytes in each line


def test_vocabularies_above_two_bytes_are_written_as_four(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    found = on_disk([written(tmp_path / "a.txt", text)], tmp_path / "shards", tokenizer="char")
    assert found.tokens.files[0].dtype == np.uint32
    np.testing.assert_array_equal(found.tokens[:], np.arange(70_000))


def test_the_index_names_every_shard_with_its_digest(tmp_path):
    on_disk(one_document(tmp_path / "texts"), tmp_path / "shards", tokenizer="byte")
    index = shards.Index.read(tmp_path / "shards")
    for shard in (*index.parts["train"].shards, *index.parts["held_out"].shards):
        assert shards.digest(tmp_path / "shards" / shard.name).hexdigest() == shard.sha256

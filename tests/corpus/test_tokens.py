"""Paths that mean tokens: prepared directories, and files of nanoGPT and llm.c."""

import functools
from pathlib import Path

import numpy as np
import pytest

from smallmind import Tokenizer
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.corpus.shard_writer import ShardWriter
from smallmind.corpus.tokens import TokensOnDisk, find_tokens
from smallmind.runs import source
from smallmind.runs.source import read_source, size_on_disk
from smallmind.settings.config import RunConfig
from tests.corpus.files import LLAMA3, header, llm_c, plain
from tests.corpus.reading import documents, written
from tests.programs import edited, refusal

pytestmark = pytest.mark.usefixtures("quick_disk")

TEXT = "the cat sat on the mat. 🐈 the dog sat on the log.\n" * 20


# Not while tests are collected, which every process does: training compiles kernels.
@functools.cache
def bpe():
    return Tokenizer(TEXT, "bpe", vocab_size=270)


@functools.cache
def encoded():
    return bpe().encode(TEXT)


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer.json beside nothing else."""
    path = tmp_path / "tokenizers" / "tokenizer.json"
    path.parent.mkdir()
    bpe().save(path)
    return path


def nanogpt(path, ids):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(np.asarray(ids, "<u2").tobytes())
    return path


def prepared(tmp_path, name="shards", tokenizer="bpe", shard_tokens=100):
    path = written(tmp_path / "text" / "cats.txt", TEXT)
    encoding = Encoding(tokenizer, {"vocab_size": 270} if tokenizer == "bpe" else {})
    return prepare(Corpus(path), tmp_path / name, encoding, shard_tokens).directory


def refused(paths, tokenizer=None):
    return refusal(find_tokens, paths, tokenizer)


def test_two_files_of_nanogpt_are_the_two_parts(tmp_path, tokenizer):
    train = nanogpt(tmp_path / "data" / "train.bin", encoded()[:-70])
    val = nanogpt(tmp_path / "data" / "val.bin", encoded()[-70:])
    for paths in ([train, val], [val, train], [str(tmp_path / "data")]):
        found = find_tokens(paths, bpe())
        np.testing.assert_array_equal(found.train[:], encoded()[:-70])
        np.testing.assert_array_equal(found.held_out[:], encoded()[-70:])
        np.testing.assert_array_equal(found.tokens[:], encoded())
        assert found.characters == len(TEXT) and found.beginning == TEXT[: len(found.beginning)]
        assert found.report is None and not found.held_out_characters
    assert find_tokens([tmp_path / "data"], bpe()).sha256 == found.sha256


def test_a_tenth_is_held_out_where_no_file_is_named_for_it(tmp_path, tokenizer):
    found = find_tokens([nanogpt(tmp_path / "train.bin", encoded())], bpe())
    rest = len(encoded()) - len(encoded()) // 10
    np.testing.assert_array_equal(found.train[:], encoded()[:rest])
    np.testing.assert_array_equal(found.held_out[:], encoded()[rest:])


@pytest.mark.parametrize("magic", [(20240520, 1), LLAMA3])
@pytest.mark.parametrize(
    "names",
    [
        ("tiny_train.bin", "tiny_val.bin"),
        ("fineweb_train_000001.bin", "fineweb_val_000000.bin"),
        ("TRAIN.bin", "Validation.bin"),
        ("train-1.bin", "train.valid.bin"),
    ],
)
def test_files_of_llm_c_are_held_out_by_name(tmp_path, magic, names):
    (tmp_path / "data").mkdir()
    llm_c(tmp_path / "data" / names[0], encoded()[:-50], magic)
    llm_c(tmp_path / "data" / names[1], encoded()[-50:], magic)
    for paths in ([tmp_path / "data" / name for name in names], [tmp_path / "data"]):
        found = find_tokens(paths, bpe())
        np.testing.assert_array_equal(found.train[:], encoded()[:-50])
        np.testing.assert_array_equal(found.held_out[:], encoded()[-50:])


@pytest.mark.parametrize("name", ["interval.bin", "valley.bin", "evaluate.bin", "trains.bin"])
def test_a_file_is_not_held_out_because_its_name_has_these_letters(tmp_path, name):
    found = find_tokens([llm_c(tmp_path / name, encoded())], bpe())
    assert len(found.held_out) == len(encoded()) // 10


def test_the_bytes_of_a_digest_are_those_of_the_tokens_and_of_the_parts(tmp_path):
    """Equal tokens in another file are the same text; with other parts, they are another one."""
    one = find_tokens([nanogpt(tmp_path / "a" / "train.bin", encoded())], bpe())
    other = find_tokens([llm_c(tmp_path / "b.bin", encoded(), LLAMA3)], bpe())
    assert one.sha256 == other.sha256
    nanogpt(tmp_path / "c" / "train.bin", encoded()[:-70])
    nanogpt(tmp_path / "c" / "val.bin", encoded()[-70:])
    assert find_tokens([tmp_path / "c"], bpe()).sha256 != one.sha256
    altered = np.where(np.arange(len(encoded())) == 7, encoded()[7] ^ 1, encoded())
    changed = find_tokens([nanogpt(tmp_path / "d" / "train.bin", altered)], bpe())
    assert changed.sha256 != one.sha256


def test_the_tokenizer_is_named_or_beside_the_file(tmp_path, tokenizer):
    file = nanogpt(tmp_path / "data" / "train.bin", encoded())
    for kind in (None, "char", "bpe"):
        message = refused([file], kind)
        assert "name their tokenizer with --tokenizer FILE, or put its tokenizer.json" in message
    bpe().save(tmp_path / "data" / "tokenizer.json")
    for paths in ([file], [tmp_path / "data"]):
        assert find_tokens(paths, None).tokenizer.state() == bpe().state()
    assert refused([file], "byte").count("outside the vocabulary of 256") == 1
    (tmp_path / "data" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "cannot use the tokenizer" in refused([file])


def test_bytes_need_no_tokenizer(tmp_path):
    file = nanogpt(tmp_path / "train.bin", list(TEXT.encode()))
    found = find_tokens([file], "byte")
    assert found.tokenizer.kind == "byte" and found.beginning == TEXT.encode()[:100].decode()
    assert found.characters == pytest.approx(len(TEXT), abs=1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (np.array([1, 2, 269, 270], "<u2").tobytes(), "token 3 is 270, outside the vocabulary of"),
    ],
)
def test_a_wrong_file_is_refused_in_a_line(tmp_path, content, words):
    file = tmp_path / "train.bin"
    file.write_bytes(content)
    message = refused([file], bpe())
    assert words in message and str(file) in message


def test_a_file_without_its_type_is_refused_with_the_way_out(tmp_path):
    file = nanogpt(tmp_path / "mine.bin", encoded())
    assert "put their type into meta.json beside it" in refused([file], bpe())
    plain(file, encoded(), "uint32")
    np.testing.assert_array_equal(find_tokens([file], bpe()).tokens[:], encoded())


def test_paths_that_mean_no_tokens_are_texts(tmp_path):
    written(tmp_path / "texts" / "a.txt", TEXT)
    written(tmp_path / "texts" / "index.json", '{"text": "anybody may call a file so"}')
    written(tmp_path / "texts" / "picture.bin", b"\0\1")
    for paths in ([tmp_path / "texts"], [tmp_path / "texts" / "a.txt"], [tmp_path / "*"]):
        assert find_tokens(paths, None) is None
    assert "anybody" in "".join(documents(tmp_path / "texts"))


def test_tokens_are_not_mixed_with_texts(tmp_path):
    directory, text = prepared(tmp_path), tmp_path / "text"
    file = nanogpt(tmp_path / "train.bin", encoded())
    for paths in ([directory, text], [text, directory], [directory, file], [directory, directory]):
        assert "contains tokens: give it on its own" in refused(paths, bpe())
    for paths in ([file, text], [text, file]):
        message = refused(paths, bpe())
        assert f"{file} contains tokens, and {text} does not: give one of them" in message
    assert "is a held-out part; give the training part" in refused(
        [nanogpt(tmp_path / "only" / "val.bin", encoded())], bpe()
    )


def test_a_missing_file_of_tokens_is_named(tmp_path):
    missing = tmp_path / "train.bin"
    assert refused([missing], bpe()) == f"{missing} does not exist; give the path of a token file"


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_prepared_directory_among_texts_is_skipped_with_a_note(
    tmp_path, monkeypatch, is_complete
):
    inside = tmp_path / "text" / "shards"
    prepared(tmp_path, inside)
    if not is_complete:
        (inside / "index.json").rename(inside / "progress.json")
    corpus = Corpus(tmp_path / "text")
    assert "".join(documents(corpus)) == TEXT
    assert list(map(str, corpus.report.skipped)) == [
        f"{inside} contains tokens; give only this folder to train on them"
    ]
    assert find_tokens([tmp_path / "text"], None) is None
    assert prepared(tmp_path, "other").is_dir()


def test_a_preparation_into_the_folder_of_its_texts_is_continued(tmp_path, monkeypatch):
    write, inside = ShardWriter.append, tmp_path / "text" / "shards"
    folder = written(tmp_path / "text" / "cats.txt", TEXT).parent

    def stop(*arguments, **fields):
        raise EOFError

    monkeypatch.setattr(ShardWriter, "append", stop)
    with pytest.raises(EOFError):
        prepare(Corpus(folder), inside, Encoding("bpe", {"vocab_size": 270}))
    assert (inside / "plan.json").exists()
    monkeypatch.setattr(ShardWriter, "append", write)
    for _ in range(2):
        shards = prepare(Corpus(folder), inside, Encoding("bpe", {"vocab_size": 270}))
        assert len(shards.train) + len(shards.held_out) == len(encoded())


def test_another_tokenizer_than_that_of_the_tokens_is_refused(tmp_path):
    directory = prepared(tmp_path)
    state = find_tokens([directory], None).tokenizer.state()
    for asked in (None, "char", "bpe", Tokenizer.from_state(state)):  # "char" is the default
        assert find_tokens([directory], asked).tokenizer.state() == state
    assert "tokenizer='byte' contradicts" in refused([directory], "byte")
    message = refused([directory], Tokenizer("other", "bpe", vocab_size=260))
    assert f"{directory} has tokens of another tokenizer" in message


DAMAGE = {
    "train_000001.bin": "is missing; restore it, or remove the directory and prepare it again",
    "held_out_000000.bin": "is missing; restore it, or remove",
    "tokenizer.json": "No such file or directory; restore it, or remove the directory",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_directory_that_lacks_a_file_is_refused_with_the_way_out(tmp_path, name):
    directory = prepared(tmp_path)
    (directory / name).unlink()
    message = refused([directory])
    assert str(directory / name) in message and DAMAGE[name] in message


def test_a_directory_with_other_files_is_refused_with_the_way_out(tmp_path):
    directory = prepared(tmp_path)
    shard, tokenizer = directory / "train_000000.bin", directory / "tokenizer.json"
    whole, saved = shard.read_bytes(), tokenizer.read_bytes()
    shard.write_bytes(whole[:-2])
    assert "copy it again" in refused([directory]) and str(shard) in refused([directory])
    shard.write_bytes(header(99) + whole[1024:-2])
    assert "has 99 tokens of uint16, not 100" in refused([directory])
    shard.write_bytes(whole)
    Tokenizer("other", "bpe", vocab_size=260).save(tokenizer)
    assert f"{tokenizer} is not the tokenizer of these tokens; restore it" in refused([directory])
    tokenizer.write_bytes(saved)
    with edited(directory / "index.json") as fields:
        del fields["state"]["sha256"]
    assert "does not describe a text: 'sha256'; prepare it again" in refused([directory])
    (directory / "index.json").unlink()
    (directory / "progress.json").touch()
    assert f"run `smallmind prepare ... --out {directory}` again" in refused([directory])


def test_a_directory_that_was_moved_is_found_there(tmp_path):
    before = find_tokens([prepared(tmp_path)], None)
    moved = (tmp_path / "shards").rename(tmp_path / "moved")
    after = find_tokens([str(moved)], None)
    assert after.sha256 == before.sha256 and after.path == str(moved)
    np.testing.assert_array_equal(after.tokens[:], encoded())


def test_large_texts_are_kept_on_disk_and_tokens_are_there_already(
    tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(source, "LARGE", 0)
    file = nanogpt(tmp_path / "train.bin", encoded())
    assert size_on_disk(str(file), RunConfig(tokenizer=str(tokenizer))) is None
    assert size_on_disk(str(prepared(tmp_path)), RunConfig()) is None
    text = str(tmp_path / "text" / "cats.txt")
    assert size_on_disk(text, RunConfig()) == len(TEXT.encode())
    monkeypatch.undo()
    assert size_on_disk(text, RunConfig()) is None


def test_files_are_read_only_where_they_are_asked(tmp_path, monkeypatch):
    """A prepared directory is opened without reading its tokens."""
    directory = prepared(tmp_path)
    monkeypatch.setattr("smallmind.corpus.token_files.TokenFile.read", None)
    found = find_tokens([directory], None)
    assert isinstance(found, TokensOnDisk) and Path(found.path) == directory


def test_a_folder_of_texts_may_have_a_file_that_is_named_like_tokens(tmp_path):
    (tmp_path / "train.bin").write_bytes(bytes(100))
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 20, encoding="utf-8")
    assert find_tokens([tmp_path], None) is None
    read = read_source(tmp_path)
    assert read.text.startswith("the cat") and len(read.report.skipped) == 1

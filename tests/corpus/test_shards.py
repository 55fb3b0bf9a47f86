"""Writing shards and opening them."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.console import activity
from smallmind.corpus.shards import open_shards
from tests.corpus import writing
from tests.corpus.files import tokens_of
from tests.corpus.writing import DOCUMENTS, contents, part, prepare, writer
from tests.programs import edited, refusal, refuses, started

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def whole(tmp_path):
    prepare(tmp_path / "whole")
    return tmp_path / "whole"


def test_the_shards_are_files_of_llm_c(whole, tmp_path):
    found, shards = contents(whole), writing.expected(tmp_path)
    assert len([name for name in shards if name.startswith("train")]) > 4
    index = json.loads(found.pop("index.json"))
    assert found == shards
    assert index["format"] == 1 and index["dtype"] == "uint16"
    assert index["vocab_size"] == 300 and index["tokenizer_digest"] == "a tokenizer"
    assert index["state"] == {"documents": DOCUMENTS}
    for name, held_out in ("train", False), ("held_out", True):
        assert index["tokens"][name] == len(part(held_out))
        for number, shard in enumerate(index["shards"][name]):
            content = shards[shard["name"]]
            assert shard["name"] == f"{name}_{number:06}.bin"
            assert shard["tokens"] == (len(content) - 1024) // 2
            assert shard["sha256"] == hashlib.sha256(content).hexdigest()


def test_opened_shards_are_what_was_written(whole):
    shards = open_shards(whole)
    np.testing.assert_array_equal(shards.train[:], part(False))
    np.testing.assert_array_equal(shards.held_out[:], part(True))
    assert shards.index.recipe.vocab_size == 300 and shards.index.state == {"documents": DOCUMENTS}
    shards.verify()
    assert f"{len(part(False)):,} training" in repr(shards)


def test_verifying_shows_that_it_is(whole, monkeypatch):
    monkeypatch.setattr(activity, "LARGE", 10)
    shown = []
    with activity.showing_on(lambda phrase, _: shown.append(phrase)):
        open_shards(whole).verify()
    assert shown[0] == f"Verifying {whole}"


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 69_999), max_size=25), st.booleans()), max_size=12),
    st.integers(1, 30),
    st.sampled_from([65_536, 65_537]),
    st.booleans(),
)
def test_any_appends_give_the_same_tokens(appends, shard_tokens, vocab_size, with_positions):
    appends = [([i % vocab_size for i in ids], held_out) for ids, held_out in appends]
    with tempfile.TemporaryDirectory() as folder:
        shape = {"vocab_size": vocab_size, "shard_tokens": shard_tokens}
        with writer(Path(folder) / "a" / "b", **shape) as shards:
            for number, (ids, held_out) in enumerate(appends):
                shards.append(ids, number if with_positions else None, held_out)
        found = open_shards(Path(folder) / "a" / "b")
        for tokens, held_out in (found.train, False), (found.held_out, True):
            assert tokens[:].tolist() == [i for ids, h in appends if h == held_out for i in ids]
            assert all(len(file) == shard_tokens for file in tokens.files[:-1])
            assert all(file.dtype.itemsize == (2 if vocab_size == 65_536 else 4)
                       for file in tokens.files)  # fmt: skip


def test_an_unfinished_directory_is_refused_and_says_how_to_finish_it(tmp_path, whole):
    directory = tmp_path / "run"
    with pytest.raises(EOFError):
        prepare(directory, until=25)
    assert refusal(open_shards, directory) == (
        f"{directory} is not finished: run `smallmind prepare ... --out {directory}` again, as "
        "before, to finish it"
    )
    assert writer(directory).position == {"next": 25}
    prepare(directory)
    assert contents(directory) == contents(whole)


def test_tokens_after_the_last_position_are_appended_again(tmp_path):
    def interrupted():
        with writer(tmp_path) as shards:
            shards.append(range(3))
            assert shards.position is None
            position = ["file", 1]
            shards.append([], position)
            position.append("changed by the caller")
            shards.append(range(10, 10 + 250))  # finishes a shard, but has no position
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(contents(tmp_path)) == {"progress.json", "train_000000.bin"}
    with writer(tmp_path) as shards:
        assert shards.position == ["file", 1]
        shards.append([5])
    assert open_shards(tmp_path).train[:].tolist() == [0, 1, 2, 5]
    assert len(open_shards(tmp_path).held_out) == 0


def test_what_has_no_position_begins_again(tmp_path):
    with pytest.raises(ZeroDivisionError), writer(tmp_path) as shards:
        shards.append(range(250))
        raise ZeroDivisionError
    assert set(contents(tmp_path)) == {"progress.json"}
    with writer(tmp_path) as shards:
        assert shards.position is None


def test_a_complete_directory_is_not_written_to(whole):
    before = contents(whole)
    (whole / "progress.json").write_text("left by a writer that was killed at the very end")
    (whole / "train_000099.bin").write_bytes(b"x")
    (whole / "notes.txt").write_text("of the user")
    refuses("is complete; choose another directory", writer, whole)
    assert contents(whole) == {**before, "notes.txt": b"of the user"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 301}, "was started with vocab_size=300, not 301"),
        ({"tokenizer_digest": "x"}, "started with tokenizer_digest='a tokenizer', not 'x'"),
        ({"shard_tokens": 7}, "was started with shard_tokens=150, not 7"),
    ],
)
def test_a_directory_is_continued_with_the_same_arguments(tmp_path, changed, message):
    with pytest.raises(EOFError):
        prepare(tmp_path, until=20)
    before = contents(tmp_path)
    refuses(message, writer, tmp_path, **changed)
    assert contents(tmp_path) == before


def test_files_that_no_writer_made_are_left_alone(tmp_path):
    (tmp_path / "train_000000.bin").write_bytes(b"precious")
    refuses(r"already holds train_000000\.bin, but no progress\.json", writer, tmp_path)
    assert contents(tmp_path) == {"train_000000.bin": b"precious"}
    refuses("is not a directory of shards: it has no index", open_shards, tmp_path)
    refuses("is a file; choose another directory", writer, tmp_path / "train_000000.bin")
    refuses("cannot make", writer, tmp_path / "train_000000.bin" / "below")


HOLDER = """
import sys
from tests.corpus.writing import writer
with writer(sys.argv[1]):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_two_writers_at_once_are_refused(tmp_path):
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with started(words, stdin=subprocess.PIPE) as other:
        assert other.stdout.readline() == "open\n"
        refuses(f"is in use by process {other.pid}", writer, tmp_path)
        other.communicate("")
    with pytest.raises(ZeroDivisionError), writer(tmp_path / "x"):
        refuses("is in use by process", writer, tmp_path / "x")
        raise ZeroDivisionError
    with writer(tmp_path / "x"):
        pass


def test_wrong_arguments_are_refused_and_the_writer_goes_on(tmp_path):
    for changed in {"vocab_size": 0}, {"shard_tokens": 0}, {"shard_tokens": 2**31}:
        refuses("must be at least 1 and at most", writer, tmp_path / "none", **changed)
    with pytest.raises(TypeError, match="tokenizer_digest must be str"):
        writer(tmp_path / "none", tokenizer_digest=3)
    assert not (tmp_path / "none").exists()
    with writer(tmp_path) as shards:
        refuses(r"ids\[1\] = 300 is outside the vocabulary of 300", shards.append, [0, 300])
        refuses("ids is of type float64", shards.append, [0.5])
        refuses("it must have one dimension", shards.append, [[1, 2]])
        with pytest.raises(TypeError):
            shards.append([1], position=object())
        with pytest.raises(ValueError):
            shards.append([1], position=float("nan"))
        shards.append([3], position=1)
    assert open_shards(tmp_path).train[:].tolist() == [3]
    with pytest.raises(ValueError, match="has ended or failed"):
        shards.append([3])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = [flipped, lambda path: os.truncate(path, 1100), os.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["train_000001.bin", "held_out_000000.bin"])
def test_a_damaged_shard_is_found(whole, name, damage):
    damage(whole / name)
    refuses(rf"{name}.*(restore it, or remove|copy it again)", lambda: open_shards(whole).verify())


def test_a_shard_of_another_length_or_type_is_found_at_once(whole):
    os.replace(whole / "train_000001.bin", whole / "held_out_000001.bin")
    os.replace(whole / "held_out_000000.bin", whole / "train_000001.bin")
    (whole / "held_out_000001.bin").rename(whole / "held_out_000000.bin")
    with edited(whole / "index.json") as index:
        index["vocab_size"] = 70_000
    refuses("tokens of uint16, not 150 of uint32 as", open_shards, whole)


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize("name", ["train_000000.bin", "train_000001.bin"])
def test_a_writer_does_not_go_on_after_damaged_shards(tmp_path, name, damage):
    with writer(tmp_path, shard_tokens=2000) as shards, pytest.raises(ZeroDivisionError):
        shards.append(np.zeros(3000, int), position=1)
        shards.commit()
        saved = contents(tmp_path)
        raise ZeroDivisionError
    for path in tmp_path.iterdir():
        path.unlink()
    for file, content in saved.items():
        (tmp_path / file).write_bytes(content)
    damage(tmp_path / name)
    before = contents(tmp_path)
    refuses(name, writer, tmp_path, shard_tokens=2000)
    assert contents(tmp_path) == before


def changed(fields, *keys, to):
    *outer, last = keys
    for key in outer:
        fields = fields[key]
    fields[last] = to


@pytest.mark.parametrize(
    ("keys", "to", "message"),
    [
        (["format"], 2, "has format 2; this version reads 1"),
        (["vocab_size"], "300", "'300' is not a number of tokens"),
        (["tokenizer_digest"], None, "tokenizer_digest is not a string"),
        (["shards"], {}, "it lacks 'train'"),
        (["shards", "train"], 5, "was not written by smallmind"),
        (["shards", "train", 0, "name"], "../train_000000.bin", "shard 0 of train is named"),
        (["shards", "train", 1, "name"], "train_000000.bin", "shard 1 of train is named"),
        (["shards", "train", 0, "tokens"], True, "True is not a number of tokens"),
        (["shards", "train", 0, "sha256"], "abc", "'abc' is not a SHA-256"),
        (["state"], [], "its state is not a JSON object"),
    ],
)
def test_a_damaged_index_is_refused(whole, keys, to, message):
    with edited(whole / "index.json") as index:
        changed(index, *keys, to=to)
    said = refusal(open_shards, whole)
    assert message in said and said.startswith(str(whole / "index.json"))
    refuses(r"index\.json", writer, whole)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"format": 2}'])
def test_a_damaged_record_of_progress_is_refused(tmp_path, content):
    (tmp_path / "progress.json").write_bytes(content)
    refuses(r"progress\.json was not written by smallmind", writer, tmp_path)
    assert contents(tmp_path) == {"progress.json": content}


def test_shards_are_read_like_any_other_token_files(whole):
    paths = sorted(whole.glob("train_*.bin"))
    np.testing.assert_array_equal(tokens_of(*paths)[:], part(False))

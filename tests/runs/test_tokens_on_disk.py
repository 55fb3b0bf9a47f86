"""Runs on tokens in files end with the bits of runs on the same text in memory."""

import shutil
import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from smallmind import InputError, Run, Tokenizer
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.runs import source
from smallmind.runs.source import TextSource, TokenSource
from smallmind.settings.config import RunConfig
from smallmind.text import samplers
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training.checkpoint import newest
from tests.faults.runs import outcome
from tests.peaks import traced
from tests.programs import refusal, refuses
from tests.runs.small import FIELDS

pytestmark = pytest.mark.usefixtures("quick_disk")

STORIES = [f"story {i}: the cat 🐈 sat on mat {i}.\r\nthe dog ran to hill {i}" for i in range(30)]
KINDS = {
    "char": {},
    "byte": {"tokenizer": "byte"},
    "bpe": {"tokenizer": "bpe", "bpe_vocab_size": 300},
}
LENGTHS = {"steps": {"steps": 9}, "epochs": {"epochs": 2, "batch_size": 20}}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, story in enumerate(STORIES):
        (folder / f"{i:02}.txt").write_bytes(story.encode())
    return folder


@pytest.fixture
def large(monkeypatch):
    """Every text is too large for memory."""
    monkeypatch.setattr(source, "LARGE", 0)


def prepared(folder, directory, **fields):
    encoding = Encoding.of_run(RunConfig(**fields))
    return prepare(Corpus(folder), directory, encoding, shard_tokens=500).directory


def create(text, out, **fields):
    fields = {**FIELDS, **fields}
    if "epochs" in fields:
        del fields["steps"]
    return Run.create(text=text, out=out, **fields)


def stop_at(run, step):
    """Trains to a step and leaves, as after Ctrl-C."""
    with closing(run.steps()) as steps:
        for record in steps:
            if getattr(record, "step", 0) >= step:
                break
    run.unlock()
    assert newest(run.path)[0].step == step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_weights_are_those_of_a_text_in_memory(folder, tmp_path, monkeypatch, kind, length):
    fields = {**KINDS[kind], **LENGTHS[length]}
    runs = tmp_path / "runs"
    in_memory = create(folder, runs / "memory", **fields)
    assert isinstance(in_memory.files.source, TextSource) and in_memory.files.source.held_out
    in_memory.train()
    create(prepared(folder, tmp_path / "shards", **KINDS[kind]), runs / "shards", **fields).train()
    monkeypatch.setattr(source, "LARGE", 0)
    cached = create(folder, runs / "cached", **fields)
    assert isinstance(cached.files.source, TokenSource)
    assert list((runs / "tokens").glob("texts-*/index.json"))
    stop_at(cached, 4)
    again = Run.open(runs / "cached")
    assert isinstance(again.files.source, TokenSource)
    assert again.files.source.sha256 == in_memory.files.source.sha256
    again.resume()
    expected = outcome(runs / "memory")
    for name in ("shards", "cached"):
        assert outcome(runs / name) == expected
        assert (runs / name / "samples.txt").read_bytes() == (
            runs / "memory" / "samples.txt"
        ).read_bytes()
        vocabulary = Run.open(runs / name).settings.model.vocab_size
        assert vocabulary == in_memory.settings.model.vocab_size


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_run_resumes_anywhere_in_an_epoch_too_long_to_shuffle(
    folder, tmp_path, monkeypatch, stop
):
    monkeypatch.setattr(samplers, "MAX_SHUFFLED", 10)
    shards, fields = prepared(folder, tmp_path / "shards"), LENGTHS["epochs"]
    create(folder, tmp_path / "whole", **fields).train()
    run = create(shards, tmp_path / "run", **fields)
    assert len(run.data.train) // 8 > 10
    stop_at(run, stop)
    Run.open(tmp_path / "run").resume()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.fixture
def begun(folder, tmp_path, large):
    """A run on a text in the cache that was interrupted, and how it would have ended."""
    create(folder, tmp_path / "whole" / "run").train()
    run = create(folder, tmp_path / "runs" / "run")
    stop_at(run, 4)
    return tmp_path / "runs" / "run", outcome(tmp_path / "whole" / "run")


def test_a_run_resumes_without_its_text_from_the_cache(begun, folder):
    run, expected = begun
    shutil.rmtree(folder)
    Run.open(run).resume()
    assert outcome(run) == expected
    assert Run.open(run).evaluate().tokens == len(Run.open(run).data.held_out) - 1


@pytest.mark.parametrize("is_large", [True, False])
def test_a_run_resumes_without_the_cache_from_its_text(begun, monkeypatch, is_large):
    """Perhaps on a machine with more memory, where it is no longer large."""
    run, expected = begun
    shutil.rmtree(run.parent / "tokens")
    monkeypatch.setattr(source, "LARGE", 0 if is_large else 0.1)
    Run.open(run).resume()
    assert outcome(run) == expected
    assert (run.parent / "tokens").exists() == is_large


def test_a_run_in_memory_resumes_where_its_text_is_large(folder, tmp_path, monkeypatch):
    create(folder, tmp_path / "whole", tokenizer="bpe", bpe_vocab_size=280).train()
    run = create(folder, tmp_path / "run", tokenizer="bpe", bpe_vocab_size=280)
    stop_at(run, 4)
    monkeypatch.setattr(source, "LARGE", 0)
    again = Run.open(tmp_path / "run")
    assert isinstance(again.files.source, TokenSource)
    again.resume()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_run_without_text_and_cache_says_what_to_do(begun, folder, tmp_path):
    run, expected = begun
    moved = folder.rename(tmp_path / "moved")
    shutil.rmtree(run.parent / "tokens")
    message = refusal(Run.open(run).files.check_text)
    assert "does not exist; " in message and "has moved, say where it is" in message
    assert f"smallmind train --resume {run} PATH" in message
    again = Run.open(run)
    again.files.move_text(moved)
    again.resume()
    assert outcome(run) == expected


def test_a_run_on_a_prepared_directory_that_moved_is_told_where_it_is(folder, tmp_path):
    shards = prepared(folder, tmp_path / "shards")
    create(shards, tmp_path / "whole").train()
    stop_at(create(shards, tmp_path / "run"), 4)
    moved = shards.rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"shards does not exist; .* has moved, say where it is"):
        Run.open(tmp_path / "run").files.check_text()
    other = prepared([folder / "00.txt", folder / "01.txt"], tmp_path / "other")
    again = Run.open(tmp_path / "run")
    refuses("other has tokens of another tokenizer", again.files.move_text, other)
    again.files.move_text(moved)
    again.resume()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert Run.open(tmp_path / "run").settings.run.text == str(moved)


def test_a_run_in_memory_goes_on_with_the_same_text_prepared(folder, tmp_path):
    create(folder, tmp_path / "whole").train()
    stop_at(create(folder, tmp_path / "run"), 4)
    shards = prepared(folder, tmp_path / "shards")
    shutil.rmtree(folder)
    again = Run.open(tmp_path / "run")
    again.files.move_text(shards)
    again.resume()
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_large_text_that_changed_is_refused_unless_its_tokens_are_kept(begun, folder, has_cache):
    run, expected = begun
    (folder / "07.txt").write_text("another story", encoding="utf-8")
    if not has_cache:
        shutil.rmtree(run.parent / "tokens")
        refuses("has changed since the run was created; restore", Run.open(run).resume)
        return
    Run.open(run).resume()
    assert outcome(run) == expected


def test_two_runs_on_a_text_share_its_tokens(folder, tmp_path, large, monkeypatch):
    create(folder, tmp_path / "one").unlock()
    monkeypatch.setattr("smallmind.corpus.preparation.survey", None)
    create(folder, tmp_path / "two").unlock()
    assert len(list((tmp_path / "tokens").iterdir())) == 1
    monkeypatch.undo()


def test_a_directory_that_holds_a_run_is_refused_before_a_text_is_prepared(
    folder, tmp_path, large, monkeypatch
):
    create(folder, tmp_path / "run").unlock()
    shutil.rmtree(tmp_path / "tokens")
    monkeypatch.setattr("smallmind.corpus.preparation.survey", None)
    refuses("already holds a run or part of one; choose another", create, folder, tmp_path / "run")
    assert not (tmp_path / "tokens").exists()


def test_a_damaged_shard_ends_a_run_in_a_line(folder, tmp_path):
    """An id outside the vocabulary is never used as an index."""
    shards = prepared(folder, tmp_path / "shards")
    for shard in shards.glob("*.bin"):
        data = shard.read_bytes()
        shard.write_bytes(data[:1024] + b"\xff\xff" * ((len(data) - 1024) // 2))
    for backend in ("numpy", "numba"):
        run = create(shards, tmp_path / backend, backend=backend)
        refuses("is outside the vocabulary", run.train)


def test_the_tokens_of_others_train_a_run(folder, tmp_path):
    ids = Tokenizer("", "byte").encode("".join(STORIES))
    (tmp_path / "data").mkdir()
    for name, part in (("train", ids[:-200]), ("val", ids[-200:])):
        (tmp_path / "data" / f"{name}.bin").write_bytes(part.astype("<u2").tobytes())
    text = tmp_path / "text.txt"
    text.write_text("".join(STORIES), encoding="utf-8", newline="")
    run = create(tmp_path / "data", tmp_path / "run", tokenizer="byte")
    stop_at(run, 4)
    Run.open(tmp_path / "run").resume()
    data = Run.open(tmp_path / "run").data
    np.testing.assert_array_equal(data.held_out[:], ids[-200:])
    assert isinstance(Run.open(tmp_path / "run").files.source, TokenSource)
    (tmp_path / "data" / "val.bin").write_bytes(ids[-198:].astype("<u2").tobytes())
    files = Run.open(tmp_path / "run").files
    refuses("has changed since the run was created; restore", files.check_text)


def test_a_teachers_cache_on_disk_is_that_in_memory(folder, tmp_path):
    shards = prepared(folder, tmp_path / "shards")
    create(folder, tmp_path / "teacher").train()
    fields = {"teacher": str(tmp_path / "teacher"), "teacher_top_k": 5}
    for name, text in (("memory", folder), ("disk", shards)):
        cache = tmp_path / f"{name}.cache"
        create(text, tmp_path / name, teacher_cache=str(cache), **fields).train()
    assert (tmp_path / "memory.cache").read_bytes() == (tmp_path / "disk.cache").read_bytes()
    assert outcome(tmp_path / "memory") == outcome(tmp_path / "disk")
    other = tmp_path / "other"  # and it may be used with either
    create(shards, other, teacher_cache=str(tmp_path / "memory.cache"), **fields).train()
    assert outcome(other) == outcome(tmp_path / "memory")


def test_a_run_on_disk_verifies_and_evaluates_like_one_in_memory(folder, tmp_path):
    shards = prepared(folder, tmp_path / "shards")
    runs = [create(text, tmp_path / f"{i}") for i, text in enumerate((folder, shards))]
    for run in runs:
        run.train()
        assert all(verdict.fault is None for verdict in Run.open(run.path).verify())
    expected = Run.open(runs[0].path).evaluate()
    for run in runs:
        assert run.final == runs[0].final
        opened = Run.open(run.path)
        for own in (None, folder, shards):
            assert opened.evaluate(own) == expected
        other = opened.evaluate(folder / "00.txt")  # of which all counts
        assert other.tokens == len(STORIES[0]) - len("\r") - 1


def test_a_fine_tuned_run_takes_tokens_of_its_model(folder, tmp_path, large):
    create(folder, tmp_path / "first").train()
    fine = create(folder, tmp_path / "fine", init_from=str(tmp_path / "first"), steps=2)
    assert isinstance(fine.files.source, TokenSource)
    assert fine.data.tokenizer.state() == Run.open(tmp_path / "first").data.tokenizer.state()
    fine.train()
    shards = prepared(folder, tmp_path / "shards", tokenizer="byte")
    with pytest.raises(InputError, match="has tokens of another tokenizer"):
        create(shards, tmp_path / "other", init_from=str(tmp_path / "first"))


def test_memory_does_not_grow_with_a_text_on_disk(tmp_path, large):
    peaks = {}
    for lines in (2_000, 20_000):
        text = tmp_path / f"{lines}.txt"
        text.write_text("the cat sat on the mat.\n" * lines, encoding="utf-8")
        create(text, tmp_path / f"prepare-{lines}", tokenizer="byte").unlock()
        with traced():
            run = create(text, tmp_path / f"run-{lines}", tokenizer="byte", steps=2)
            found = [draw(RandomWindows(run.data), number) for number in range(9)]
            assert run.training and len(found) == 9
            peaks[lines] = tracemalloc.get_traced_memory()[1]
        run.unlock()
    assert peaks[20_000] < peaks[2_000] + 24 * 20_000 // 8  # of 24 bytes in each line

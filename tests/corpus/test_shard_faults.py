"""Writers of shards and preparations that are killed, interrupted or run out of power or disk."""

import errno
import itertools
import os
import sys
from contextlib import suppress

import numpy as np
import pytest

from smallmind.corpus import preparation
from smallmind.corpus.shards import open_shards
from smallmind.files import durable
from smallmind.text import bpe
from tests.corpus.texts import prepare_conversations, prepare_texts
from tests.corpus.writing import contents, prepare, writer
from tests.faults.disk import Faulty, PowerCut, Quick, Volatile
from tests.programs import printed_by

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="children are made by fork")
# Every so many operations meet the fault; all of them take minutes.
some_or_all = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])


def undisturbed(tmp_path, monkeypatch, prepare):
    """The contents of a directory whose writer was never disturbed."""
    monkeypatch.setattr(durable, "files", Quick())
    # Puts back what the writers set.
    monkeypatch.setattr(bpe, "CHUNK", bpe.CHUNK)
    monkeypatch.setattr(preparation, "TOKENS_PER_APPEND", preparation.TOKENS_PER_APPEND)
    prepare(tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


@pytest.fixture
def expected(tmp_path, monkeypatch):
    return undisturbed(tmp_path, monkeypatch, prepare)


def kills(directory, moments, what, number):
    words = "-m", "tests.corpus.killed", str(directory), moments, what, str(number)
    return int(printed_by([sys.executable, *words], OPENBLAS_NUM_THREADS="1"))


@needs_fork
@some_or_all
@pytest.mark.parametrize(("what", "least"), [("ids", 101), ("texts", 51), ("conversations", 51)])
def test_a_writer_killed_at_any_operation_is_continued(tmp_path, what, least, every):
    assert kills(tmp_path, "operations", what, every) >= least


@needs_fork
@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("ids", 20),
        ("texts", 10),
        pytest.param("ids", 2000, marks=pytest.mark.slow),
        pytest.param("texts", 1000, marks=pytest.mark.slow),
        pytest.param("conversations", 1000, marks=pytest.mark.slow),
    ],
)
def test_writers_killed_at_random_moments_end_as_if_unbroken(tmp_path, what, number):
    assert kills(tmp_path, "moments", what, number) >= number


def refuse(number):
    def fault():
        raise OSError(number, os.strerror(number))

    return fault


def interrupt():
    raise KeyboardInterrupt


def each_operation(tmp_path, monkeypatch, prepare, fault, every, lasting=False):
    """Yields a directory for an operation, and what a writer raised that met the fault there."""
    for operation in itertools.count(step=every):
        directory = tmp_path / str(operation)
        disk = Faulty(operation, fault, lasting)
        monkeypatch.setattr(durable, "files", disk)
        raised = None
        try:
            prepare(directory)
        except (OSError, ValueError, KeyboardInterrupt) as error:
            raised = error
        monkeypatch.setattr(durable, "files", Quick())
        if disk.count <= operation:
            return
        yield directory, raised


def temporary(directory):
    return [name for name in contents(directory) if name.endswith(".smallmind")]


@some_or_all
@pytest.mark.parametrize(
    "lasting", [pytest.param(False, marks=pytest.mark.slow), True], ids=["once", "from then on"]
)
def test_a_preparation_on_a_full_disk_is_continued(tmp_path, monkeypatch, lasting, every):
    failures, work = 0, (prepare_texts, refuse(errno.ENOSPC), every, lasting)
    expected = undisturbed(tmp_path, monkeypatch, prepare_texts)
    for directory, raised in each_operation(tmp_path, monkeypatch, *work):
        if isinstance(raised, OSError):
            failures += 1
            assert "No space left on device" in str(raised) and str(directory) in str(raised)
        prepare_texts(directory)
        assert contents(directory) == expected
        open_shards(directory).verify()
    assert failures > 40 / every


@pytest.mark.parametrize(
    ("number", "lasting"),
    [
        (errno.ENOSPC, False),
        (errno.EIO, True),
        pytest.param(errno.ENOSPC, True, marks=pytest.mark.slow),
        pytest.param(errno.EIO, False, marks=pytest.mark.slow),
    ],
)
@some_or_all
def test_a_writer_that_the_disk_refuses_is_continued(
    tmp_path, monkeypatch, expected, number, lasting, every
):
    failures, work = 0, (prepare, refuse(number), every, lasting)
    for directory, raised in each_operation(tmp_path, monkeypatch, *work):
        if raised is not None and directory.exists():
            failures += 1
            assert "\n" not in str(raised) and str(directory) in str(raised)
            if number == errno.ENOSPC and isinstance(raised, OSError):
                assert "No space left on device; make room and start again" in str(raised)
            # A disk that refuses everything lets nothing be removed.
            assert lasting or not temporary(directory)
        prepare(directory)
        assert contents(directory) == expected
    assert failures > 100 / every


@some_or_all
@pytest.mark.parametrize("write", [prepare, prepare_texts, prepare_conversations])
def test_an_interrupted_writer_loses_no_position(tmp_path, monkeypatch, write, every):
    expected = undisturbed(tmp_path, monkeypatch, write)
    for directory, raised in each_operation(tmp_path, monkeypatch, write, interrupt, every):
        assert isinstance(raised, KeyboardInterrupt)
        if directory.exists() and write is prepare:
            assert not temporary(directory)
        write(directory)
        assert contents(directory) == expected


class Full(Quick):
    """A disk with room for some bytes of tokens, and a little for records."""

    def __init__(self, room):
        self.room = room

    def write(self, file, data):
        if data[:1] != b"{":
            data = data[: self.room]
            self.room -= len(data)
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)


def test_a_full_disk_loses_nothing_that_was_appended(tmp_path, monkeypatch):
    ids = np.arange(10) % 7
    monkeypatch.setattr(durable, "files", Full(room=1024 + 300 + 1024 + 293))

    def write():
        with writer(tmp_path) as shards:
            for number in range(100):
                shards.append(ids, position=number + 1)

    with pytest.raises(OSError, match="No space left on device; make room") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "train_000001.bin")
    assert set(contents(tmp_path)) == {"progress.json", "train_000000.bin", "train_000001.bin"}
    monkeypatch.setattr(durable, "files", Quick())
    with writer(tmp_path) as shards:
        assert shards.position == 29  # the next append would have finished the second shard
        shards.append(ids)


def test_a_writer_that_has_failed_writes_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "files", Full(room=1024 + 15))
    shards = writer(tmp_path)
    with pytest.raises(ValueError, match="has ended or failed; make a new one"), shards:
        shards.append([1, 2, 3], position=1)
        with pytest.raises(OSError, match="No space left"):
            shards.append(range(10), position=2)
        with pytest.raises(ValueError, match="has ended or failed"):
            shards.append([4], position=3)
    assert set(contents(tmp_path)) == {"progress.json", "train_000000.bin"}
    monkeypatch.setattr(durable, "files", Quick())
    with writer(tmp_path) as shards:
        assert shards.position == 1


class Ordered(Quick):
    """Remembers the order of operations."""

    def __init__(self):
        self.calls = []

    def unlink(self, path):
        self.calls.append(("unlink", path))
        super().unlink(path)

    def fsync_directory(self, path):
        self.calls.append(("fsync_directory", path))


def test_a_record_is_synced_before_the_files_of_an_earlier_one_are_removed(tmp_path, monkeypatch):
    """Its writer may have died between renaming and syncing it."""
    with pytest.raises(EOFError):
        prepare(tmp_path, until=9)
    leftover = tmp_path / "held_out_000007.bin"
    leftover.touch()
    monkeypatch.setattr(durable, "files", Ordered())
    writer(tmp_path)
    assert durable.files.calls[-2:] == [("fsync_directory", tmp_path), ("unlink", leftover)]


class Failing(Volatile):
    """A disk that refuses one operation, and loses power at the end.

    After an fsync that failed, the next one succeeds, but the data is gone.
    """

    def __init__(self, root, at):
        super().__init__(root, at)
        self.lost = []

    def step(self):
        self.cut -= 1
        if self.cut == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fsync(self, file):
        try:
            synced = self.open[file].synced
            super().fsync(file)
        except OSError:
            self.lost.append(self.open[file])
            raise
        if self.open[file] in self.lost:
            self.open[file].synced = synced


@pytest.mark.parametrize(
    ("failing", "step", "states"),
    [
        (Volatile, 5, 2),
        (Failing, 5, 2),
        *(pytest.param(disk, 1, 4, marks=pytest.mark.slow) for disk in (Volatile, Failing)),
    ],
)
def test_a_power_loss_leaves_what_can_be_continued(
    tmp_path, monkeypatch, expected, failing, step, states
):
    """At any operation, or at the end after any operation that failed."""
    random = np.random.default_rng(1)
    for at in itertools.count(0, step):
        directory = tmp_path / f"{at}" / "shards"
        directory.parent.mkdir()
        disk = failing(directory.parent, at)
        monkeypatch.setattr(durable, "files", disk)
        with suppress(OSError, ValueError, PowerCut):
            prepare(directory)
        monkeypatch.setattr(durable, "files", Quick())
        for state in range(states):
            left = tmp_path / f"{at}-{state}"
            disk.after_power_loss(random, left)
            prepare(left / "shards")
            assert contents(left / "shards") == expected
        if disk.cut >= 0:
            return

"""Preparations that are killed, interrupted or run out of disk end as if undisturbed."""

import errno

import pytest

from smallmind.corpus.shards import open_shards
from smallmind.files import durable
from smallmind.text import bpe
from tests.corpus.test_shard_faults import each_operation, interrupt, kills, needs_fork, refuse
from tests.corpus.texts import prepare_texts
from tests.corpus.writing import contents
from tests.faults.disk import Quick


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """The contents of a directory whose preparation was never disturbed."""
    monkeypatch.setattr(durable, "files", Quick())
    monkeypatch.setattr(bpe, "CHUNK", bpe.CHUNK)  # which is put back
    prepare_texts(tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


@needs_fork
def test_a_preparation_killed_at_any_operation_is_continued(tmp_path):
    assert kills(tmp_path, "operations", "texts", 0) > 50


@needs_fork
@pytest.mark.parametrize("number", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_preparations_killed_at_random_moments_end_as_if_unbroken(tmp_path, number):
    assert kills(tmp_path, "moments", "texts", number) >= number


@pytest.mark.parametrize(
    "lasting", [pytest.param(False, marks=pytest.mark.slow), True], ids=["once", "from then on"]
)
def test_a_preparation_on_a_full_disk_is_continued(tmp_path, monkeypatch, expected, lasting):
    failures = 0
    fault = refuse(errno.ENOSPC)
    for directory, raised in each_operation(tmp_path, monkeypatch, prepare_texts, fault, lasting):
        if isinstance(raised, OSError):
            failures += 1
            assert "No space left on device" in str(raised) and str(directory) in str(raised)
        prepare_texts(directory)
        assert contents(directory) == expected
        open_shards(directory).verify()
    assert failures > 40


def test_an_interrupted_preparation_is_continued(tmp_path, monkeypatch, expected):
    for directory, raised in each_operation(tmp_path, monkeypatch, prepare_texts, interrupt):
        assert isinstance(raised, KeyboardInterrupt)
        prepare_texts(directory)
        assert contents(directory) == expected

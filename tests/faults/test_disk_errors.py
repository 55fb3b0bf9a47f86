"""The disk refuses an operation: the old checkpoint stays sound, and the next save succeeds."""

import errno
import itertools
import os
import shutil

import pytest

from smallmind.files import durable
from smallmind.training.checkpoint import BackgroundSaver, clear_stale, newest, save
from tests.faults.disk import Faulty, Quick, assert_sound, checkpoint, names

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO]


def refuse(number):
    def fault():
        raise OSError(number, os.strerror(number))

    return fault


@pytest.fixture
def before(tmp_path, quick_disk):
    (tmp_path / "before").mkdir()
    for step in (10, 20, 30):
        save(tmp_path / "before", checkpoint(step), keep=2, best=step == 20)
    return tmp_path / "before"


def each_operation(before, monkeypatch, number, lasting):
    """A new copy of the directory for each operation that can fail."""
    for operation in itertools.count():
        directory = before.with_name(str(operation))
        shutil.copytree(before, directory)
        disk = Faulty(operation, refuse(number), lasting)
        monkeypatch.setattr(durable, "files", disk)
        yield directory
        if disk.count <= operation:
            return


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_a_save_that_fails_leaves_the_old_checkpoint(before, monkeypatch, number, lasting):
    failures = 0
    for directory in each_operation(before, monkeypatch, number, lasting):
        failure = None
        try:
            save(directory, checkpoint(40), keep=2, best=True)
        except OSError as error:
            failure = error
            assert error.errno == number and str(directory) in str(error.filename)
        failures += failure is not None
        found, skipped = newest(directory)
        assert_sound(found, {30, 40} if failure else {40})
        assert not skipped
        left = {name for name in names(directory) if name.endswith(".smallmind")}
        assert not left or lasting  # a disk that refuses everything lets nothing be removed
        monkeypatch.setattr(durable, "files", Quick())
        clear_stale(directory)  # as a run that resumes does, once it has the lock
        save(directory, checkpoint(50), keep=1)
        assert_sound(newest(directory)[0], {50})
        assert names(directory) == {"step-00000050.safetensors", "best.safetensors"}
    assert failures > 15


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for the whole save"])
def test_the_background_saver_reports_a_failure_and_tries_again(before, monkeypatch, lasting):
    retried = 0
    for directory in each_operation(before, monkeypatch, errno.ENOSPC, lasting):
        saver = BackgroundSaver(directory, keep=9)
        saver.save(checkpoint(40))
        failed = saver.wait()
        assert failed is None or (lasting and failed.errno == errno.ENOSPC)
        monkeypatch.setattr(durable, "files", Quick())
        failure = saver.save(checkpoint(50), best=True)
        assert failure is None  # first it retries step 40, which now succeeds
        saver.close()
        retried += failed is not None
        assert names(directory) >= {f"step-000000{step}.safetensors" for step in (30, 40, 50)}
        assert_sound(newest(directory)[0], {50})
    assert retried > 5 or not lasting


def test_close_raises_the_last_failure(before, monkeypatch):
    monkeypatch.setattr(durable, "files", Faulty(0, refuse(errno.ENOSPC), lasting=True))
    saver = BackgroundSaver(before)
    assert saver.save(checkpoint(40)) is None
    assert saver.save(checkpoint(50)).errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        saver.close()
    assert saver.failure.errno == errno.ENOSPC
    assert_sound(newest(before)[0], {30})
    monkeypatch.setattr(durable, "files", Quick())
    saver.close()
    assert_sound(newest(before)[0], {50})

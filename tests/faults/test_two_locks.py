"""Two runs in one directory: the second is refused; the lock of a dead process is taken over."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from smallmind import InputError
from smallmind.files import lock as run_lock
from smallmind.files.lock import RunLock, is_held
from smallmind.runs.directory import RunDirectory
from tests.programs import started
from tests.threads import in_threads

HOLDER = """
import os, sys
from smallmind.files.lock import RunLock
lock = RunLock(sys.argv[1])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path, and its number."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with started(words, stdin=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_the_second_process_is_refused_with_the_number_of_the_first(tmp_path, holder):
    for _ in range(2):
        with pytest.raises(InputError, match=f"{tmp_path} is in use by process {holder.pid};"):
            RunLock(tmp_path)


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    host = socket.gethostname()
    assert (tmp_path / ".lock").read_text() == f"{holder.pid} {host}"
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {host}"


def test_who_looks_from_outside_sees_a_lock_and_leaves_it_alone(tmp_path, holder):
    before = (tmp_path / ".lock").read_bytes()
    assert is_held(tmp_path) is True
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert (tmp_path / ".lock").read_bytes() == before
    holder.kill()
    holder.wait()
    assert is_held(tmp_path) is False
    assert (tmp_path / ".lock").exists()
    with RunLock(tmp_path):
        assert is_held(tmp_path) is True
        with pytest.raises(InputError, match="is in use by"):  # it was not released
            RunLock(tmp_path)
    assert is_held(tmp_path) is False and not (tmp_path / ".lock").exists()
    assert is_held(tmp_path / "none") is False


def test_the_number_of_a_dead_process_may_have_been_given_to_another(tmp_path):
    lock = tmp_path / ".lock"
    lock.write_text(f"{os.getpid()} {socket.gethostname()}")
    os.utime(lock, (1e9, 1e9))  # before this process has begun
    assert is_held(tmp_path) is False


@pytest.mark.parametrize("content", ["", "1 elsewhere-7.example", "not a number", "9" * 20])
def test_a_lock_that_says_too_little_is_neither_held_nor_free(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    assert is_held(tmp_path) in ((None, False) if content.isdigit() else (None,))


def test_a_lock_is_released_with_its_last_reference_but_not_by_a_forked_child(tmp_path):
    lock = RunLock(tmp_path)
    lock._process += 1  # as in a child
    del lock
    assert (tmp_path / ".lock").exists()
    lock = RunLock(tmp_path)
    del lock
    assert not (tmp_path / ".lock").exists()


def test_a_lock_on_a_full_disk_holds_without_a_name(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        lock = RunLock(tmp_path)
    with pytest.raises(InputError, match="in use by another process;"):
        RunLock(tmp_path)
    lock.release()


def test_a_released_lock_leaves_nothing(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(InputError, match=f"process {os.getpid()}"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    assert not list(tmp_path.iterdir())
    with RunLock(tmp_path):
        pass


def test_only_one_of_two_simultaneous_runs_gets_the_directory(tmp_path, monkeypatch):
    """Both have found it empty: the second must not take over the files of the first.

    Nor remove them, also where locks have no effect.
    """
    monkeypatch.setattr("os.path.lexists", lambda _: False)
    first = RunDirectory(tmp_path / "run").create()
    with pytest.raises(InputError, match="is in use by process"):
        RunDirectory(tmp_path / "run").create()
    first.unlock()
    with pytest.raises(InputError, match="already holds a run"):
        RunDirectory(tmp_path / "run").create()
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


HOSTILE = "", "12345678901234567890123", "hostile\n", "\x1b[2J", "1 \x1b[2J"


@pytest.mark.parametrize(
    ("content", "holder"),
    [
        ("1 elsewhere-7.example", r"process 1 on elsewhere-7\.example"),  # or in a container
        *((content, "another process") for content in HOSTILE),
    ],
)
def test_the_holder_is_named_if_its_file_says_who_it_is(tmp_path, content, holder):
    with RunLock(tmp_path) as lock:
        lock.path.write_text(content)
        with pytest.raises(InputError, match=f"in use by {holder};"):
            RunLock(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="links and pipes are not files there")
def test_anything_but_a_file_in_place_of_the_lock_is_refused(tmp_path):
    place = tmp_path / ".lock"
    (tmp_path / "target").write_text("precious")
    place.symlink_to(tmp_path / "target")
    with pytest.raises(InputError, match="cannot lock"):
        RunLock(tmp_path)
    assert (tmp_path / "target").read_text() == "precious"
    place.unlink()
    place.mkdir()
    with pytest.raises(InputError, match="cannot lock"):
        RunLock(tmp_path)
    place.rmdir()
    os.mkfifo(place)
    with pytest.raises(InputError, match="is not a regular file"):
        RunLock(tmp_path)
    advice = "; use a directory that you can write to, on a disk that"
    with pytest.raises(InputError, match=rf"cannot lock .*: No such file.*{advice}"):
        RunLock(tmp_path / "missing")


def test_a_lock_released_while_another_takes_it_is_taken_again(tmp_path, monkeypatch):
    """The opened file no longer has a name: another process would create and lock a new one."""
    lock_file, first = run_lock.lock_file, RunLock(tmp_path)

    def release_and_lock(file):
        first.release()
        lock_file(file)

    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "lock_file", release_and_lock)
        second = RunLock(tmp_path)
    with pytest.raises(InputError, match="in use"):
        RunLock(tmp_path)
    second.release()


def test_a_lock_has_one_holder_at_a_time(tmp_path):
    """Threads take and release it without pause, also at the moment it is removed."""
    held, refused, together = [], [], []

    def take():
        for _ in range(500):
            try:
                with RunLock(tmp_path):
                    held.append(1)
                    together.append(sum(held))
                    held.pop()
            except InputError:
                refused.append(1)

    in_threads(*[take] * 4)
    assert set(together) == {1} and len(together) + len(refused) == 2000
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be removed there")
def test_a_lock_whose_file_was_removed_by_hand_leaves_that_of_the_next_run(tmp_path):
    first = RunLock(tmp_path)
    first.path.unlink()
    with RunLock(tmp_path):
        first.release()
        with pytest.raises(InputError, match="is in use by"):
            RunLock(tmp_path)
    assert not list(tmp_path.iterdir())

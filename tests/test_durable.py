"""Atomic writes: the order of operations, and what failures leave behind."""

import os
import subprocess
import sys

import pytest

from smallmind import durable


class Recorder(durable.Files):
    def __init__(self):
        self.calls = []


def recorded(name):
    def operation(self, *arguments):
        self.calls.append(name)
        return getattr(durable.Files, name)(self, *arguments)

    return operation


for _name in [name for name in vars(durable.Files) if not name.startswith("_")]:
    setattr(Recorder, _name, recorded(_name))


@pytest.fixture
def files(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(durable, "files", recorder)
    return recorder


def test_files_are_synced_before_and_after_renaming(tmp_path, files):
    durable.write(tmp_path / "file", [b"one", memoryview(b"two"), b""])
    assert (tmp_path / "file").read_bytes() == b"onetwo"
    assert files.calls == [
        "create",
        "write",
        "write",
        "fsync",
        "close",
        "replace",
        "fsync_directory",
    ]
    files.calls.clear()
    for _ in range(2):
        durable.make_directory(tmp_path / "directory")
    assert files.calls == ["make_directory", "fsync_directory"] * 2


def test_a_partial_write_is_continued(tmp_path, monkeypatch):
    class Slow(durable.Files):
        def write(self, file, data):
            return super().write(file, data[:3])

    monkeypatch.setattr(durable, "files", Slow())
    durable.write(tmp_path / "file", [b"0123456789", b"abc"])
    assert (tmp_path / "file").read_bytes() == b"0123456789abc"


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    durable.write(tmp_path / "file", [b"old"])

    def chunks():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        durable.write(tmp_path / "file", chunks())
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_errors_name_the_target_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        durable.write(tmp_path / "missing" / "file", [b""])
    assert caught.value.filename == str(tmp_path / "missing" / "file")


def test_only_temporary_files_of_dead_processes_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = {f".a.{dead.pid}-0.smallmind", f".b.c.{os.getpid()}-99999.smallmind"}
    others = {f".a.{os.getppid()}-0.smallmind", f".a.{dead.pid}-0.tmp", "b.1-1.smallmind", "c"}
    for name in stale | others:
        (tmp_path / name).write_text("x")
    seen = set()

    def chunks():
        durable.clear_stale(tmp_path)  # as a concurrent write would
        seen.update(os.listdir(tmp_path))
        yield b"new"

    durable.write(tmp_path / "file", chunks())
    assert len(seen - others) == 1  # the file being written
    assert set(os.listdir(tmp_path)) == others | {"file"}

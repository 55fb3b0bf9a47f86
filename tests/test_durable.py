"""Atomic writes: the order of operations, and what failures leave behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smallmind.files import durable
from tests.programs import started


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


def test_temporary_files_are_removed_once_they_have_not_changed_for_a_day(tmp_path):
    """Whatever process their names give: its number means something else in another container."""
    stale = {f".a.{os.getpid()}-0.smallmind", ".b.c.1-9.smallmind", ".d.0123456789abcdef.smallmind"}
    young = {f".a.{os.getpid()}-1.smallmind", ".b.c.1-8.smallmind", ".d.fedcba9876543210.smallmind"}
    others = {".a.1-0.tmp", "b.1-1.smallmind", "c"}
    for name in stale | young | others:
        (tmp_path / name).write_text("x")
    for name in stale | others:
        os.utime(tmp_path / name, (0, 0))
    durable.write(tmp_path / "file", [b"new"])
    assert set(os.listdir(tmp_path)) == young | others | {"file"}
    durable.clear_stale(tmp_path, age=0, targets={"a", "b.c"})
    assert set(os.listdir(tmp_path)) == {".d.fedcba9876543210.smallmind", "file"} | others


@pytest.mark.parametrize("process", [1, 4_000_000])
def test_writers_with_the_same_process_number_do_not_disturb_each_other(
    tmp_path, monkeypatch, process
):
    """As in two containers: both are process 1, and neither sees the other's processes."""
    monkeypatch.setattr(os, "getpid", lambda: process)
    words = [sys.executable, "-c", WRITER, str(tmp_path), str(process)]
    with started(words, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE) as other:
        assert other.stdout.readline() == "writing\n"
        for number in range(3):
            durable.write(tmp_path / "file", [b"ours %d" % number])
        other.communicate("")
    assert other.returncode == 0
    assert (tmp_path / "file").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["file"]


WRITER = """
import os, sys
os.getpid = lambda: int(sys.argv[2])
from smallmind.files import durable

def chunks():
    print("writing", flush=True)
    sys.stdin.read()
    yield b"theirs"

durable.write(sys.argv[1] + "/file", chunks())
"""

"""The disk fills up while a run trains: it continues, retries, and ends with the same result."""

import errno
import os

from smallmind.files import durable
from smallmind.training.checkpoint import newest
from tests.faults.disk import Quick
from tests.faults.runs import outcome, status, train


class Full(Quick):
    """A disk without room for the files of these steps, except for their first few bytes."""

    def __init__(self, *steps):
        self.steps = [f"step-{step:08d}" for step in steps]
        self.refused = set()

    def create(self, path):
        number = super().create(path)
        if any(step in path.name for step in self.steps):
            self.refused.add(number)
        return number

    def write(self, file, data):
        if file in self.refused:
            os.write(file, data[:7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(file, data)

    def close(self, file):
        self.refused.discard(file)
        super().close(file)


def test_a_run_survives_a_full_disk_that_has_room_again(tmp_path, monkeypatch, capsys, whole):
    capsys.readouterr()
    monkeypatch.setattr(durable, "files", Full(5, 7, 10))
    assert train(tmp_path) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("A checkpoint could not be saved; the next save tries again") == 3
    assert "No space left on device" in printed and "step-00000010.safetensors" in printed
    run = tmp_path / "run"
    assert outcome(run) == whole
    assert not [path for path in run.rglob("*") if path.suffix == ".smallmind"]


def test_a_run_on_a_disk_that_stays_full_fails_and_can_be_resumed(
    tmp_path, monkeypatch, capsys, whole
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Full(10, 14, 15, 20))
        assert train(tmp_path) == 1
    printed = capsys.readouterr()
    assert "Errno" not in printed.err
    assert "No space left on device; make room, or write to another disk" in printed.err
    assert printed.err.count("\n") == 1
    assert newest(run)[0].step == 7 and not newest(run)[1]
    assert not [path for path in run.rglob("*") if path.suffix == ".smallmind"]
    assert status("train", "--resume", run) == 0
    assert outcome(run) == whole


class NoRoom:
    """A standard output whose disk is full."""

    encoding = "utf-8"

    def __init__(self, file):
        self.file = file

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        pass

    def isatty(self):
        return False

    def fileno(self):
        return self.file.fileno()


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, capsys, whole):
    capsys.readouterr()
    with open(tmp_path / "log", "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", NoRoom(file))
        assert train(tmp_path) == 1
        assert "No space left" in capsys.readouterr().err
        # Commands that only print fail at once.
        for command in ("generate",), ("evaluate",), ("export-metrics",):
            assert status(*command, tmp_path / "run") == 1
            assert "No space left" in capsys.readouterr().err
    assert outcome(tmp_path / "run") == whole

"""The kernel cache holds only what this user wrote there, and only as it was written."""

import os
import pickle
import signal
import stat
import sys
import time
from collections import namedtuple
from subprocess import PIPE

import pytest
from numba import types
from numba.core.registry import cpu_target

from smallmind.kernels.codegen import cache, cache_directory
from smallmind.kernels.codegen.cache import CheckedFiles
from tests.programs import finished, started

POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Every place for a cache is below tmp_path; the user's own choice is returned."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "shared").mkdir()
    os.chmod(tmp_path / "shared", 0o1777)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("SMALLMIND_CACHE_DIR", str(tmp_path / "chosen"))
    cache_directory.warn.cache_clear()
    return tmp_path / "chosen"


def find():
    """The directory that a new process would use for a module."""
    return cache_directory.cache_directory.__wrapped__("smallmind.kernels.reduce")


@POSIX
def test_only_this_user_can_write_to_the_cache_whatever_the_umask(chosen):
    before = os.umask(0)
    try:
        directory = find()
        CheckedFiles(directory, "kernel").save("key", 1)
    finally:
        os.umask(before)
    assert directory.is_relative_to(chosen)
    for path in (chosen, *(chosen.rglob("*"))):
        assert not path.stat().st_mode & 0o077, path


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("level", range(4))
def test_a_cache_that_others_can_write_to_is_not_used(chosen, level, mode):
    directory = find()
    others = [directory, *directory.parents][level]
    os.chmod(others, mode)
    with pytest.warns(UserWarning, match=f"chmod go-w {others}$"):
        assert not find().is_relative_to(chosen)
    os.chmod(others, 0o755)  # the advice
    assert find() == directory


@POSIX
@pytest.mark.parametrize("level", range(3))
def test_a_link_in_the_cache_is_not_followed(chosen, tmp_path, level):
    directory = find()
    replaced = [directory, *directory.parents][level]
    replaced.rename(tmp_path / "elsewhere")
    replaced.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="is a link or a file; remove it"):
        assert not find().is_relative_to(chosen)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives files away")
def test_what_belongs_to_another_user_is_not_used(chosen, tmp_path, monkeypatch):
    directory = find()
    files = CheckedFiles(directory, "kernel")
    files.save("key", 1)
    assert files.load("key") == 1
    for path in directory.iterdir():
        os.chown(path, 12345, 12345)
    assert files.load("key") is None
    os.chown(directory, 12345, 12345)
    with pytest.warns(UserWarning, match="belongs to another user; name another"):
        assert not find().is_relative_to(chosen)


@POSIX
def test_without_a_home_the_cache_in_the_shared_temporary_directory_is_checked_too(
    chosen, tmp_path, monkeypatch
):
    monkeypatch.delenv("SMALLMIND_CACHE_DIR")
    (tmp_path / "home").touch()
    directory = find()
    assert directory.is_relative_to(tmp_path / "shared")
    os.chmod(tmp_path / "shared" / f"smallmind-{os.geteuid()}", 0o777)
    with pytest.warns(UserWarning, match="chmod go-w"):
        private = find()
    assert not private.is_relative_to(tmp_path / "shared" / f"smallmind-{os.geteuid()}")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_relative_choice_counts_from_the_working_directory(chosen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SMALLMIND_CACHE_DIR", "chosen")
    assert find().is_relative_to(chosen)
    assert find().is_absolute()


def test_a_full_read_only_cache_is_used_and_an_empty_one_is_not(chosen, monkeypatch):
    directory = find()
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != directory and writable(path, mode))
    with pytest.warns(UserWarning, match=r"SMALLMIND_CACHE_DIR: cannot .*: it is read-only, and"):
        assert not find().is_relative_to(chosen)
    CheckedFiles(directory, "kernel").save("key", 1)
    assert find() == directory


def test_a_choice_that_cannot_be_used_costs_a_warning(chosen):
    chosen.write_text("a file")
    with pytest.warns(UserWarning, match=r"SMALLMIND_CACHE_DIR: cannot keep kernels in .*chosen: "):
        assert not find().is_relative_to(chosen)


def test_no_place_for_a_cache_costs_a_warning(chosen, monkeypatch):
    def full(*_arguments, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.delenv("SMALLMIND_CACHE_DIR")
    monkeypatch.setattr("os.mkdir", full)
    monkeypatch.setattr(cache_directory, "_temporary_directory", full)
    with pytest.warns(UserWarning, match="not kept: no temporary directory: No space left"):
        assert find() is None


def test_caches_of_other_versions_are_removed_once_unused(chosen):
    directory = find()
    kernels, now = directory.parent, time.time()
    for name, age in {"0" * 16: 30, "1" * 16: 2, "not-a-digest": 30}.items():
        (kernels / name).mkdir()
        (kernels / name / "kernel.nbc").touch()
        os.utime(kernels / name, (now, now - age * 86400))
    (kernels / ("2" * 16)).symlink_to(chosen)
    CheckedFiles(directory, "kernel").save("key", 1)
    os.utime(directory, (now, now - 2 * 86400))
    assert find() == directory
    names = {path.name for path in kernels.iterdir()}
    assert names == {directory.name, "1" * 16, "2" * 16, "not-a-digest"}
    assert directory.stat().st_mtime > now - 60  # it was used today
    assert chosen.exists()


@pytest.mark.parametrize("damage", ["flip", "zero", "cut"])
def test_damage_is_found_before_anything_is_unpickled(tmp_path, monkeypatch, damage):
    files = CheckedFiles(tmp_path, "kernel")
    files.save("key", b"code" * 2000)
    files.save("other", b"more" * 2000)
    path = next(path for path in tmp_path.iterdir() if b"code" in path.read_bytes())
    content = path.read_bytes()

    def unpickle(_data):
        raise AssertionError("damaged contents are unpickled")

    monkeypatch.setattr(pickle, "loads", unpickle)
    for place in range(0, len(content), 97):
        rest = {
            "flip": bytes([content[place] ^ 4]) + content[place + 1 :],
            "zero": bytes(len(content) - place),
            "cut": b"",
        }[damage]
        path.write_bytes(content[:place] + rest)
        assert files.load("key") is None
    monkeypatch.undo()
    assert files.load("other") == b"more" * 2000
    files.save("key", b"again")
    assert files.load("key") == b"again"


def test_the_code_of_one_key_is_never_that_of_another(tmp_path):
    files = CheckedFiles(tmp_path, "kernel")
    files.save("a", "code of a")
    files.save("b", "code of b")
    a, b = (tmp_path / files._file(key) for key in "ab")
    a.write_bytes(b.read_bytes())
    assert files.load("a") is None and files.load("b") == "code of b"


def test_keys_tell_named_tuples_of_other_fields_apart(tmp_path):
    def kernel():
        pass

    def key(*fields):
        inner = types.NamedUniTuple(types.int64, 2, namedtuple("Same", fields))
        outer = types.NamedTuple([inner, types.int64], namedtuple("Outer", "inner count"))
        return kept._key((types.int64, outer), cpu_target.target_context.codegen())

    kept = cache.KernelCache(kernel, tmp_path)
    assert key("row", "column") == key("row", "column") != key("column", "row")


NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files stay empty, as on a full disk
import numpy as np
from smallmind.kernels.reduce import sum_of_squares
print(sum_of_squares(np.ones(3, np.float32)))
"""


@POSIX
def test_a_full_disk_costs_a_warning_not_the_run(tmp_path):
    result = finished([sys.executable, "-c", NO_ROOM], SMALLMIND_CACHE_DIR=str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "3.0\n")
    assert result.stderr.count("cannot keep compiled kernels in") == 1
    assert "File too large" in result.stderr and "Traceback" not in result.stderr


def test_functions_from_elsewhere_are_not_cached(tmp_path):
    class Compiled:
        pass

    def kernel():
        pass

    assert not hasattr(cache.enable_cache(Compiled(), kernel, cache.KernelCache), "_cache")


HOLD = """
import sys
from pathlib import Path
from smallmind.kernels.codegen.cache import _Turns
turns = _Turns(Path(sys.argv[1]))
print(turns.take("gelu"), flush=True)
input()
turns.give("gelu")
print("given", flush=True)
input()
"""


def test_one_process_at_a_time_has_the_turn_for_a_function_until_it_ends(tmp_path):
    turns = cache._Turns(tmp_path)
    for ending in ("give", "kill"):
        with started([sys.executable, "-c", HOLD, str(tmp_path)], stdin=PIPE) as holder:
            assert holder.stdout.readline() == "True\n"
            assert not turns.take("gelu")
            assert turns.take("relu2")
            if ending == "give":
                holder.stdin.write("\n")
                holder.stdin.flush()
                assert holder.stdout.readline() == "given\n"
            holder.kill()
            holder.wait()
        assert turns.take("gelu")
        turns.give("gelu")


# Stops itself as it compiles the first kernel, if it is told to.
COMPILES = """
import os, signal, sys
import numpy as np
from smallmind.kernels.codegen.cache import KernelCache
take = KernelCache._take_turn
def hold(self, name):
    waited = take(self, name)
    os.kill(os.getpid(), signal.SIGSTOP)
    return waited
if sys.argv[1] == "hold":
    KernelCache._take_turn = hold
if sys.argv[1] == "notes":
    signal.signal(signal.SIGINT, lambda *_: print("noted", flush=True))
from smallmind.kernels.elementwise import gelu_backward
gelu_backward(*np.ones((4, 1, 1), np.float32))
print("compiled")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no process can be stopped")
@pytest.mark.parametrize("does", ["end", "notes"])
def test_ctrl_c_while_a_stopped_process_compiles_the_same_is_handled_at_once(tmp_path, does):
    """Before anything is compiled; if its handler does not raise, the process then compiles."""
    settings = {"env": {**os.environ, "SMALLMIND_CACHE_DIR": str(tmp_path)}, "stderr": PIPE}
    words = [sys.executable, "-c", COMPILES]
    with started([*words, "hold"], **settings) as holder:
        assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
        kept = sorted(tmp_path.rglob(f"*{cache_directory.SUFFIX}"))
        with started([*words, does], **settings) as process:
            assert "Compiling" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            if does == "notes":
                assert process.stdout.read() == "noted\ncompiled\n"
            else:
                assert "KeyboardInterrupt" in process.stderr.read().splitlines()[-1]
                assert sorted(tmp_path.rglob(f"*{cache_directory.SUFFIX}")) == kept
        holder.kill()


def test_a_process_that_is_told_where_finds_a_temporary_cache(chosen, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache_directory, "_candidates", lambda: [])
        directory = find()
        told = cache_directory.environment()
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert find() == directory and not directory.is_relative_to(chosen)


def test_where_nothing_can_be_locked_everybody_has_the_turn(tmp_path):
    turns = cache._Turns(tmp_path / "missing")
    assert turns.take("gelu")
    turns.give("gelu")

"""Windows and macOS differ in this, played on any system: `systems`, and bench/README.md."""

import contextlib
import ctypes
import errno
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest

from smallmind.checks import InputError
from smallmind.cli import console, parallel, signals
from smallmind.console import live_line
from smallmind.corpus import token_files
from smallmind.files import durable, lock
from smallmind.kernels import alignment
from smallmind.kernels.codegen import cache_directory, cpus, isa
from smallmind.kernels.codegen.cpus import cores  # conftest.py replaces it
from smallmind.memory import tracker
from smallmind.parallel import launch
from tests.faults.runs import write_text
from tests.faults.systems import Locking, Other
from tests.programs import printed_by

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="plays the others")

WINDOWS = Other(os, "geteuid pread sched_getaffinity sched_setaffinity", name="nt")
MACOS = Other(os, "sched_getaffinity sched_setaffinity")
SMALL = (
    "--block-size 16 --n-embd 16 --n-layer 1 --n-head 2 --batch-size 2 --val-batches 1 "
    "--warmup-steps 1 --save-every 2"
)


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_a_run_is_trained_resumed_verified_and_used(tmp_path, system):
    """With the threading layer that wheels for macOS fall back to, and no encoding left open."""
    text, out = write_text(tmp_path), tmp_path / "run"
    commands = [
        f"train {text} {SMALL} --steps 2 --out {out}",
        f"train --resume {out} --steps 4",
        f"verify {out}",
        f"generate {out} --prompt the --max-tokens 5",
        f"watch {out} --once",
    ]
    python = [sys.executable, "-X", "warn_default_encoding", "-W", "error"]
    words = [*python, "-m", "tests.faults.systems", system, *commands]
    shown = printed_by(words, NUMBA_THREADING_LAYER="workqueue")
    assert "workqueue" in shown and "checks passed" in shown
    assert sorted(path.name for path in (out / "checkpoints").iterdir())[1:] == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]
    assert not (out / ".lock").exists()
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines if b'"lr"' in line][-1] == 4


# Files.


class Held:
    """Stands in for os, whose files another program has open for the first few attempts."""

    def __init__(self, attempts):
        self.attempts = attempts
        self.calls = 0

    def on(self, system):
        return Other(system, replace=self.attempt(os.replace), unlink=self.attempt(os.unlink))

    def attempt(self, operation):
        def run(*paths):
            self.calls += 1
            if self.calls <= self.attempts:
                raise PermissionError(errno.EACCES, "it is being used by another process")
            operation(*paths)

        return run


@pytest.mark.parametrize("attempts", [0, 1, len(durable.WAIT_SECONDS)])
def test_windows_replaces_and_removes_files_that_a_scanner_had_open(
    tmp_path, monkeypatch, attempts
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (tmp_path / "file").write_bytes(b"old")
    for act in (
        lambda: durable.write(tmp_path / "file", [b"new"]),
        lambda: durable.remove(tmp_path / "file"),
    ):
        held = Held(attempts)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", held.on(Other(os, name="nt")))
            act()
        assert held.calls == attempts + 1
    assert os.listdir(tmp_path) == []


def test_windows_leaves_the_old_file_if_another_program_keeps_it_open(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    (tmp_path / "file").write_bytes(b"old")
    in_use = PermissionError(errno.EACCES, "it is being used by another process")

    def replace(*_):
        raise in_use

    monkeypatch.setattr(durable, "os", Other(os, name="nt", replace=replace))
    with pytest.raises(PermissionError, match="used by another") as caught:
        durable.write(tmp_path / "file", [b"new"])
    assert caught.value.filename == str(tmp_path / "file")
    assert 1 < sum(slept) < 2
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_other_systems_do_not_wait_for_a_permission_that_will_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "os", Held(1).on(os))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(PermissionError):
        durable.write(tmp_path / "file", [b"new"])
    assert os.listdir(tmp_path) == []


def test_windows_syncs_files_but_no_directories(tmp_path, monkeypatch):
    synced = []
    windows = Other(os, name="nt", fsync=synced.append)
    monkeypatch.setattr(durable, "os", windows)
    monkeypatch.setattr(durable, "FULL_FSYNC", None)
    durable.write(tmp_path / "file", [b"new"])
    assert len(synced) == 1


class FullFsync:
    """Stands in for macOS's fcntl and os, noting what they were asked to sync, and how."""

    def __init__(self, monkeypatch, error=None):
        self.calls, self.error = [], error
        monkeypatch.setattr(durable, "FULL_FSYNC", 51)
        monkeypatch.setattr(durable, "fcntl", SimpleNamespace(fcntl=self.fcntl))
        monkeypatch.setattr(durable, "os", Other(os, fsync=lambda _: self.calls.append("plain")))

    def fcntl(self, file, command):
        assert command == 51
        self.calls.append("full")
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    ("error", "calls"),
    [(None, ["full"]), *((error, ["full", "plain"]) for error in sorted(durable.NO_FULL_FSYNC))],
)
def test_macos_empties_the_cache_of_the_drive_if_it_can(tmp_path, monkeypatch, error, calls):
    """After writing and after renaming; a network disk is synced as far as it can."""
    asked = FullFsync(monkeypatch, error)
    durable.write(tmp_path / "file", [b"new"])
    assert asked.calls == calls * 2


def test_macos_does_not_take_a_failing_drive_for_a_network_disk(tmp_path, monkeypatch):
    asked = FullFsync(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        durable.write(tmp_path / "file", [b"new"])
    assert asked.calls == ["full"]
    assert os.listdir(tmp_path) == []


def test_windows_locks_a_byte_that_nobody_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "os", WINDOWS)
    monkeypatch.setattr(lock, "msvcrt", Locking, raising=False)
    Locking.places.clear()
    with lock.RunLock(tmp_path) as first:
        assert first.path.read_text().startswith(f"{os.getpid()} ")
        with pytest.raises(InputError, match=f"in use by process {os.getpid()};"):
            lock.RunLock(tmp_path)
        assert lock.is_held(tmp_path)
    assert Locking.places == [lock.LOCKED_BYTE] * 2
    assert os.listdir(tmp_path) == []


def test_windows_leaves_the_lock_of_the_next_holder(tmp_path, monkeypatch):
    """Its file is closed before it is removed, which fails if the next holder has opened it."""

    def unlink(_):
        raise PermissionError(errno.EACCES, "it is being used by another process")

    monkeypatch.setattr(lock, "os", Other(os, name="nt", unlink=unlink))
    monkeypatch.setattr(lock, "msvcrt", Locking, raising=False)
    lock.RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == [".lock"]
    lock.RunLock(tmp_path).release()


def test_without_pread_threads_share_the_place_in_a_file(tmp_path, monkeypatch):
    tokens = np.arange(1000, dtype=token_files.UINT16)
    (tmp_path / "train.bin").write_bytes(tokens.tobytes())
    file = token_files.TokenFile(tmp_path / "train.bin")
    monkeypatch.setattr(token_files, "os", WINDOWS)
    for first in (990, 0, 500):
        file.read(first, out := np.empty(10, np.int32))
        np.testing.assert_array_equal(out, tokens[first : first + 10])


def test_windows_maps_memory_without_flags(monkeypatch):
    monkeypatch.setattr(alignment, "os", WINDOWS)
    monkeypatch.setattr(alignment, "mmap", Other(alignment.mmap, "MAP_PRIVATE MADV_HUGEPAGE"))
    x = alignment.aligned_zeros((alignment.MIN_HUGE_PAGE_BYTES // 4,))
    assert x.ctypes.data % alignment.ALIGNMENT == 0 and not x.any()


def test_windows_keeps_kernels_in_the_profile_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_directory, "os", WINDOWS)
    for name in ("SMALLMIND_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    base, *names = next(cache_directory._candidates())
    directory = cache_directory._usable_directory(base, *names)
    assert directory.is_relative_to(tmp_path / "smallmind" / "kernels")
    assert cache_directory.is_ours(os.stat("/"))


def test_macos_keeps_kernels_in_its_folder_of_caches(tmp_path, monkeypatch):
    for name in ("SMALLMIND_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cache_directory, "sys", Other(sys, platform="darwin"))
    base, *_ = next(cache_directory._candidates())
    assert base == tmp_path / "Library" / "Caches"


# Signals and processes.


@pytest.fixture
def without_hangup(monkeypatch):
    """The signals of Windows, with that of Ctrl-Break in place of one of this system's."""
    windows = Other(signal, "SIGHUP SIGUSR1 SIGKILL setitimer", SIGBREAK=signal.SIGUSR2)
    for module in (signals, parallel, launch):
        monkeypatch.setattr(module, "signal", windows)


def test_ctrl_break_ends_a_command_in_order(without_hangup):
    closed = []
    with pytest.raises(SystemExit) as caught, signals.ending_on_signals():
        try:
            signal.raise_signal(signal.SIGUSR2)
        finally:
            closed.append(True)
    assert caught.value.code == 128 + signal.SIGUSR2 and closed


def test_ctrl_break_stops_training_after_the_step(without_hangup):
    stopped = []
    training = SimpleNamespace(progress=SimpleNamespace(step=3))
    run = SimpleNamespace(training=training, stop=lambda: stopped.append(True))
    with signals.stopping_on_signals(run, console.Console(io.StringIO())) as received:
        signal.raise_signal(signal.SIGUSR2)
    assert stopped and received == [signal.SIGUSR2]


@pytest.mark.parametrize("channel", [None, "", "x", "0", "12345"])
def test_a_rank_that_cannot_join_ends_by_itself(without_hangup, monkeypatch, capsys, channel):
    """Where mpiexec has no socket for it, or none of this protocol."""
    monkeypatch.delenv("PMI_FD", raising=False)
    if channel is not None:
        monkeypatch.setenv("PMI_FD", channel)
    monkeypatch.setattr(launch.subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        parallel._end_unjoined(InputError("no MPI"))
    assert ended.value.code == 2
    assert "no MPI" in capsys.readouterr().err


def test_without_timers_a_rank_waits_for_mpi_itself(without_hangup):
    with launch._ending_after(0.0):
        pass


@pytest.mark.parametrize("system", [WINDOWS, MACOS])
def test_without_affinity_the_ranks_of_a_machine_take_a_thread_each(monkeypatch, system):
    monkeypatch.setattr(launch, "os", Other(system, environ={}))
    assert launch.usable_cpus() == []
    assert launch.share_of_cores(0, [[], []]) == []
    launch.use_cores([])
    assert launch.os.environ == {"NUMBA_NUM_THREADS": "1"}


# Cores.


class Sysctl:
    """Stands in for macOS's sysctlbyname, on a Mac with some performance cores, or an older one."""

    def __init__(self, cores):
        self.cores = cores

    def sysctlbyname(self, name, count, size, _new, _new_size):
        assert name == b"hw.perflevel0.physicalcpu"
        if self.cores is None:
            return -1
        assert size._obj.value == 4
        count._obj.value = self.cores
        return 0


@pytest.mark.parametrize(("performance", "expected"), [(4, 4), (12, 10), (None, 8)])
def test_a_mac_uses_its_performance_cores(monkeypatch, performance, expected):
    monkeypatch.setattr(cpus, "sys", Other(sys, platform="darwin"))
    monkeypatch.setattr(cpus, "os", MACOS)
    monkeypatch.setattr(cpus, "CPUS", Path("/missing"))
    monkeypatch.setattr(cpus, "ctypes", Other(ctypes, CDLL=lambda _: Sysctl(performance)))
    monkeypatch.setattr(cpus, "most_threads", lambda: 10)
    monkeypatch.setattr(cpus.psutil, "cpu_count", lambda **_: 8)
    assert cores() == expected


def test_only_a_mac_is_asked_for_its_performance_cores():
    assert cpus.fast_cores_of_mac() is None


@pytest.mark.parametrize(
    ("capacities", "usable", "fast"),
    [
        ({0: 430, 1: 430, 2: 1024, 3: 1024}, {0, 1, 2, 3}, [2, 3]),
        ({0: 430, 1: 430, 2: 1024, 3: 1024}, {0, 1}, []),  # all that a container has
        ({0: 430, 1: 430, 2: 1024, 3: 1024}, {1, 3}, [3]),
        ({0: 700, 1: 1024}, {0, 1}, []),  # not much slower
        ({0: 1024, 1: 1024}, {0, 1}, []),
        ({}, {0, 1}, []),
    ],
)
def test_linux_leaves_out_cores_that_all_others_would_wait_for(
    tmp_path, monkeypatch, capacities, usable, fast
):
    for cpu, capacity in capacities.items():
        (tmp_path / f"cpu{cpu}").mkdir()
        (tmp_path / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity}\n")
    (tmp_path / "cpufreq").mkdir()
    system = Other(os, sched_getaffinity=lambda _: usable, environ={})
    monkeypatch.setattr(cpus, "os", system)
    monkeypatch.setattr(cpus, "CPUS", tmp_path)
    monkeypatch.setattr(cpus, "most_threads", lambda: 4)
    monkeypatch.setattr(cpus.psutil, "cpu_count", lambda **_: 4)
    assert cpus.fast_cpus() == fast
    assert cores() == (len(fast) or 4)
    cpus.bind_to_cores()
    places = ",".join(f"{{{cpu}}}" for cpu in fast)
    assert system.environ["OMP_PLACES"] == (places or "cores")


def intel(monkeypatch, tmp_path, performance, efficient, is_wide=False, capacities=None):
    """Plays an Intel CPU: its performance cores come first, with two CPUs each."""
    folder = tmp_path / "system" / "cpu"
    first = 2 * performance
    for cpu in range(first + efficient):
        siblings = f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" if cpu < first else f"{cpu}"
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
        if capacities:
            (folder / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacities[cpu >= first]}\n")
    if efficient:
        for name, ends in (
            ("core", f"0-{first - 1}"),
            ("atom", f"{first}-{first + efficient - 1}"),
        ):
            (tmp_path / f"cpu_{name}").mkdir()
            (tmp_path / f"cpu_{name}" / "cpus").write_text(f"{ends}\n")
    usable = set(range(first + efficient))
    monkeypatch.setattr(cpus, "os", Other(os, sched_getaffinity=lambda _: usable, environ={}))
    monkeypatch.setattr(cpus, "CPUS", folder)
    monkeypatch.setattr(cpus, "most_threads", lambda: len(usable))
    monkeypatch.setattr(cpus.psutil, "cpu_count", lambda **_: performance + efficient)
    features = {"avxvnniint8": is_wide}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)


@pytest.mark.parametrize(
    ("performance", "efficient", "kind", "expected"),
    [
        (8, 4, {}, 8),  # Core i7-12700
        (8, 8, {}, 8),
        (2, 8, {}, 10),  # Core i5-1235U: ten at half the speed compute more than two
        (6, 8, {"capacities": (1024, 620)}, 6),  # a new Linux grades them
        (4, 4, {"is_wide": True}, 8),  # Lunar Lake
        (8, 16, {"is_wide": True, "capacities": (1024, 800)}, 24),
        (4, 0, {}, 4),
    ],
)
def test_intels_efficient_cores_take_part_where_all_compute_more(
    tmp_path, monkeypatch, performance, efficient, kind, expected
):
    intel(monkeypatch, tmp_path, performance, efficient, **kind)
    assert cores() == expected
    cpus.bind_to_cores()
    fast = "" if expected > performance else ",".join(f"{{{2 * n}}}" for n in range(performance))
    is_uniform = expected == performance + efficient
    assert cpus.os.environ["OMP_PLACES"] == ("cores" if is_uniform else fast)


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "x86_64"), ("Windows", "AMD64")])
def test_only_linux_is_asked_for_tile_registers(monkeypatch, system, machine):
    played = SimpleNamespace(system=lambda: system, machine=lambda: machine)
    monkeypatch.setattr(isa, "platform", played)
    monkeypatch.setattr(isa.ctypes, "CDLL", lambda _: pytest.fail("asked"))
    assert not isa._may_use_matrix_unit()


# Memory.


def process(**fields):
    return lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5, **fields))


def test_windows_tells_the_peak_of_memory_itself(monkeypatch):
    monkeypatch.setattr(tracker.psutil, "Process", process(peak_wset=123))
    assert tracker.peak_resident_bytes() == 123


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_the_peak_of_memory_has_the_unit_of_the_system(monkeypatch, platform, unit):
    import resource

    usage = SimpleNamespace(ru_maxrss=777)
    monkeypatch.setattr(tracker.psutil, "Process", process())
    monkeypatch.setattr(tracker, "Path", lambda _: SimpleNamespace(exists=lambda: False))
    monkeypatch.setattr(tracker, "sys", Other(sys, platform=platform))
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    assert tracker.peak_resident_bytes() == 777 * unit


# Consoles.


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("system", "knows"), [(os, True), (WINDOWS, False)])
def test_the_console_of_windows_gets_no_escape_sequences(monkeypatch, system, knows):
    monkeypatch.setenv("TERM", "xterm")  # as in Git Bash
    monkeypatch.setattr(live_line, "os", system)
    stream = Terminal()
    line = live_line.LiveLine(stream)
    line.show("one")
    line.clear()
    assert live_line.knows_escapes(stream) == knows
    assert ("\x1b" in stream.getvalue()) == knows


@pytest.mark.parametrize(
    ("system", "number", "is_closed"),
    [(WINDOWS, errno.EINVAL, True), (WINDOWS, errno.EPIPE, True), (os, errno.EINVAL, False)],
)
def test_a_closed_pipe_is_no_error_and_windows_has_its_own_number_for_it(
    monkeypatch, tmp_path, system, number, is_closed
):
    class Failing(io.TextIOWrapper):
        def write(self, _text):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(console, "os", system)
    with open(tmp_path / "file", "wb") as file:
        shown = console.Console(Failing(file))
        if is_closed:
            shown.line("lost")
            assert not shown.has_reader and shown.failure is None
        else:
            with pytest.raises(OSError, match="Invalid argument"):
                shown.line("lost")
        with contextlib.suppress(OSError):
            shown.stream.detach()

"""Checks what runs survive, many times over: python -m bench faults.

The faults are those of `tests/faults`, whose short forms are part of the tests.
"""

import argparse
import itertools
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tabulate import tabulate

from smallmind import InputError
from smallmind.files import durable
from smallmind.training.checkpoint import load, save
from tests.faults import (
    cache_damage,
    forked,
    test_damage,
    test_hostile_files,
    test_hostile_settings,
    test_power_loss,
)
from tests.faults.disk import Quick, assert_sound, checkpoint

Counts = tuple[int, int]  # tried, lost
SEEDS = 300  # states that a disk may be in after each loss of power
EXAMPLES = 1000  # between two checks of the time


def _forked(module: str, what: str, number: int) -> Counts:
    """The counts of a module of tests.faults; those that exit at the first loss count no others."""
    with tempfile.TemporaryDirectory() as directory:
        tried, *lost = forked.counts(module, directory, what, number)
    return tried, sum(lost)


@contextmanager
def _saved() -> Iterator[Path]:
    """The file of a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        before, durable.files = durable.files, Quick()
        try:
            save(directory, checkpoint(20, elements=200))
        finally:
            durable.files = before
        yield test_damage.file_of(Path(directory), 20)


def _is_accepted(path: Path) -> bool:
    try:
        load(path)
    except InputError as error:
        return str(path) not in str(error)
    return True


def _power() -> Counts:
    tried = 0
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        layer, steps = test_power_loss.Volatile, test_power_loss.STEPS
        states = test_power_loss.outcomes(Path(directory), patch, layer, SEEDS)
        for returned, found in states:
            if found or returned[-1]:
                assert_sound(found, {returned[-1], *steps[len(returned) - 1 : len(returned)]})
            tried += 1
    return tried, 0


def _cuts() -> Counts:
    with _saved() as path, open(path, "r+b") as file:
        size, lost = path.stat().st_size, 0
        for length in reversed(range(size)):
            file.truncate(length)
            lost += _is_accepted(path)
    return size, lost


def _flips(number: int) -> Counts:
    tried = lost = 0
    with _saved() as path, open(path, "r+b", buffering=0) as file:
        for bit in test_damage.random_bits(path, number):
            test_damage.flip(file, bit)
            tried, lost = tried + 1, lost + _is_accepted(path)
            test_damage.flip(file, bit)
    return tried, lost


def _kernels(number: int) -> Counts:
    """Damages one file of a copy of the cache at a time; the weights must be the same."""
    lost = 0
    with tempfile.TemporaryDirectory() as directory:
        sound, copy = Path(directory) / "sound", Path(directory) / "copy"
        expected = cache_damage.outcome(sound)
        if expected[0]:
            raise RuntimeError(expected[2])
        for i in range(number):
            shutil.copytree(sound, copy)
            cache_damage.damage(copy, i)
            lost += cache_damage.outcome(copy) != expected
            shutil.rmtree(copy)
    return number, lost


def _fuzzing(minutes: float, first: int) -> Counts:
    end, tried = time.monotonic() + 60 * minutes, 0
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        for number in itertools.count():

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @seed(1_000_000 * first + number)
            @given(
                header=test_hostile_files.headers,
                data=st.binary(max_size=16),
                change=test_hostile_files.changes,
                settings=test_hostile_settings.settings,
                lines=test_hostile_settings.lines,
            )
            def read(
                header: object,
                data: bytes,
                change: tuple[list[int], list[int]],
                settings: object,
                lines: list[bytes],
            ) -> None:
                nonlocal tried
                tried += 4
                test_hostile_settings.check_settings(Path(directory), settings)
                test_hostile_settings.check_metrics(Path(directory), lines)
                test_hostile_files.check_headers(path, header, data)
                test_hostile_files.check_changes(path, *change)

            read()
            if time.monotonic() > end:
                break
    return tried, 0


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, object]]:
    """Injects the faults; prints and returns a row for each: how many were tried, and lost."""
    parts: dict[str, tuple[str, Callable[[], Counts]]] = {
        "operations": (
            "killed at every file operation of a save",
            lambda: _forked("killed", "operations", 0),
        ),
        "saves": (
            "killed at random moments of saves",
            lambda: _forked("killed", "saves", options.kills),
        ),
        "runs": (
            "killed at random moments of whole runs",
            lambda: _forked("killed", "runs", -(-options.kills // 5)),
        ),
        "writers": (
            "two processes in one directory: writes, all as process 1",
            lambda: _forked("together", "writers", 10 * options.kills),
        ),
        "starts": (
            "two processes in one directory: runs started at once",
            lambda: _forked("together", "starts", -(-options.kills // 20)),
        ),
        "pairs": (
            "signals in pairs, to runs and while kernels compile",
            lambda: _forked("sessions", "pairs", options.sessions),
        ),
        "terminals": (
            "terminals closed",
            lambda: _forked("sessions", "terminals", options.sessions),
        ),
        "power": ("power lost at every operation of saves", _power),
        "cuts": ("file cut at each length", _cuts),
        "flips": ("bit flipped", lambda: _flips(options.flips)),
        "kernels": ("kernel cache damaged", lambda: _kernels(options.damages)),
        "fuzzing": (
            "files made up or changed at random",
            lambda: _fuzzing(options.minutes, options.seed),
        ),
    }
    rows: list[dict[str, object]] = []
    for name in options.only or parts:
        fault, attempt = parts[name]
        begin = time.monotonic()
        try:
            tried, lost = attempt()
        except Exception:
            traceback.print_exc()
            tried, lost = 1, 1  # at least
        seconds = time.monotonic() - begin
        rows.append(
            {"fault": fault, "tried": tried, "survived": tried - lost, "lost": lost, "s": seconds}
        )
    print(tabulate(rows, headers="keys", intfmt=",", floatfmt=",.0f"))
    return rows


def failures(rows: list[dict[str, object]]) -> list[str]:
    """A line for every fault that was not survived."""
    return [f"{row['fault']}: {row['lost']} lost" for row in rows if row["lost"]]

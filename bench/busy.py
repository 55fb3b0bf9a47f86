"""Measures training steps beside programs that keep the cores busy: python -m bench busy.

The same training on one thread, on all, and on those that it chooses takes turns, first alone and
then beside as many endless loops as there are cores.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tabulate import tabulate

from smallmind.kernels.codegen.cpus import cores
from smallmind.kernels.codegen.threads import let_passes_choose, set_threads
from smallmind.runs.creating import prepare
from smallmind.settings.presets import SIZES
from smallmind.settings.rules import Choices
from smallmind.training.training import Training

NAMES = ("nano", "tiny", "small")
QUIET = {"val_every": 0, "sample_every": 0, "save_every": 0, "max_rollbacks": 0, "log_every": 1}
WARMUP = 20  # steps: passes are recorded meanwhile
TURN = 2.0  # seconds
MOST = 1.3  # times as long as on the better of one and all threads that a step may take
LOOP = "while True: pass"


class Steps:
    """The steps of a training on some threads; None: on those that it chooses."""

    def __init__(self, training: Training, config: Any, threads: int | None) -> None:
        self.threads = threads
        self._set()
        self._records = training.steps(config)
        self.seconds: list[float] = []  # of each step in the turns
        for _ in range(WARMUP):
            next(self._records)

    def _set(self) -> None:
        set_threads(self.threads or cores(), are_fixed=self.threads is not None)
        let_passes_choose(self.threads is None)

    def turn(self, seconds: float) -> None:
        """Trains for some seconds, at least three steps."""
        self._set()
        begun = last = time.perf_counter()
        steps = 0
        while steps < 3 or last - begun < seconds:
            next(self._records)
            now = time.perf_counter()
            self.seconds.append(now - last)
            last, steps = now, steps + 1

    def close(self) -> None:
        self._records.close()


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Within the block, this many programs compute all the time."""
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(size: str, rounds: int) -> list[dict[str, Any]]:
    """Trains a model of this size -> a record without and one with busy loops. Units: seconds."""
    settings = Choices(QUIET | SIZES[size] | {"steps": 10**9})
    prepared = prepare(settings)
    records = []
    counts: Sequence[int | None] = (1, cores(), None)
    contestants = [Steps(prepared.training(), prepared.settings.training, n) for n in counts]
    for loops in (0, cores()):
        with busy_loops(loops):
            for steps in contestants:
                steps.turn(TURN)  # it may choose other threads now
                steps.seconds.clear()
            for _ in range(rounds):
                for steps in contestants:
                    steps.turn(TURN)
        one, all_, chosen = (statistics.fmean(steps.seconds) for steps in contestants)
        record = {"size": size, "loops": loops, "one": one, "all": all_, "chosen": chosen}
        records.append({**record, "ratio": chosen / min(one, all_)})
    for steps in contestants:
        steps.close()
    return records


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    records = []
    for size in options.sizes or NAMES:
        records += measure(size, options.rounds)
    rows = [
        [
            record["size"],
            record["loops"],
            *(f"{1e3 * record[name]:.1f}" for name in ("one", "all", "chosen")),
            f"{record['ratio']:.2f}",
        ]
        for record in records
    ]
    heads = ["size", "busy loops", "ms on 1 thread", f"on {cores()}", "chosen", "x the better"]
    print(tabulate(rows, heads, stralign="right", disable_numparse=True))
    return records


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for every row in which the chosen threads are too slow."""
    return [
        f"{r['size']} beside {r['loops']} loops: {r['ratio']:.2f} times the better"
        for r in records
        if r["ratio"] > MOST
    ]

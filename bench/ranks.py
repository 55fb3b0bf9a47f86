"""Compares several ranks with one process, and measures the network's cost: python -m bench ranks.

Two ranks of one thread and one process of two threads compute the same update, in turn. Then ranks
exchange their gradients as over networks of known latency and bandwidth, and the steps are compared
with a model of them; the model predicts more machines than there are cores here.
"""

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

from bench.peers.ranks import Case
from smallmind.settings.presets import SIZES

ROOT = Path(__file__).parent.parent
TURN, WARMUP = 5, 12  # steps
SHAPES = [(16, 128, 128, 4, 4), (16, 128, 384, 6, 6)]
# Name -> seconds until a small message arrives, bytes per second of a link.
NETWORKS = {"1 Gbit/s": (100e-6, 117e6), "10 Gbit/s": (30e-6, 1170e6)}
MACHINES = (2, 4, 8, 16, 32, 64)


class _Ranks:
    """A contestant in processes of its own."""

    def __init__(self, case: Case, size: int) -> None:
        command = [sys.executable, "-m", "bench.peers.ranks", json.dumps(dataclasses.asdict(case))]
        if size > 1:
            command = [_mpiexec(), "-n", str(size), *command]
        environment = {**os.environ, "NUMBA_NUM_THREADS": str(case.threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        self.seconds: list[float] = []
        self.exchanging: list[float] = []

    def take(self, steps: int) -> tuple[float, float]:
        """Takes some steps -> the median of their seconds, and of those spent on the exchange."""
        assert self.process.stdin and self.process.stdout
        self._resume()
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a contestant ended with status {self.process.wait()}; see above")
        for process in self._processes():
            process.suspend()  # ranks that wait for each other would disturb the next contestant
        step, exchange = json.loads(answer)
        return step, exchange

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def _resume(self) -> None:
        for process in self._processes():
            process.resume()

    def close(self) -> None:
        assert self.process.stdin
        self._resume()
        self.process.stdin.write("0\n")
        self.process.stdin.close()
        self.process.wait()


def _mpiexec() -> str:
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        sys.exit('ranks needs MPI: python -m pip install -e ".[mpi]"')
    return found


def _compare(contestants: dict[str, tuple[Case, int]], rounds: int) -> dict[str, tuple[float, ...]]:
    """Takes turns -> name -> the median of the seconds per step, and of those of the exchange."""
    opened = {name: _Ranks(*contestant) for name, contestant in contestants.items()}
    try:
        for ranks in opened.values():
            ranks.take(WARMUP)
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in opened}
        for _ in range(rounds):
            for name, ranks in opened.items():
                turns[name].append(ranks.take(TURN))
    finally:
        for ranks in opened.values():
            ranks.close()
    return {
        name: tuple(map(statistics.median, zip(*taken, strict=True)))
        for name, taken in turns.items()
    }


def _overhead(rounds: int) -> list[dict[str, Any]]:
    """Two ranks of a thread beside one process of two, on the same updates."""
    rows = []
    for shape in SHAPES:
        for shards in (2, 8):
            seconds = _compare(
                {
                    "1 process": (Case(*shape, shards, threads=2), 1),
                    "2 ranks": (Case(*shape, shards, threads=1), 2),
                    "1 shard": (Case(*shape, 1, threads=2), 1),
                },
                rounds,
            )
            alone, together, one = (
                seconds[name][0] for name in ("1 process", "2 ranks", "1 shard")
            )
            B, T, C, layers, _ = shape
            rows.append(
                {
                    "model": f"{layers} x {C}, {B} x {T} tokens",
                    "shards": shards,
                    "1 process, ms": 1000 * alone,
                    "2 ranks, ms": 1000 * together,
                    "ratio": together / alone,
                    "exchange": seconds["2 ranks"][1] / together,
                    "to 1 process, 1 shard": together / one,
                }
            )
    return rows


def predicted(computing: float, nbytes: float, machines: int, network: str) -> float:
    """Seconds of a step on several machines, without overlap: computing, and the exchange.

    nbytes: twice the gradient. Each machine sends and receives all of it but its own share, a
    message to each of the others at a time; a small message before that says whether all are well.
    """
    latency, bandwidth = NETWORKS[network]
    others = (machines - 1) / machines
    return computing + others * nbytes / bandwidth + 3 * latency


def _networks(rounds: int) -> list[dict[str, Any]]:
    """Two ranks as over a network, with and without overlap, beside the model."""
    rows = []
    for shape in SHAPES:
        for network, (latency, bandwidth) in NETWORKS.items():
            case = Case(*shape, shards=2, threads=1)
            there = {"latency": latency, "bandwidth": bandwidth}
            seconds = _compare(
                {
                    "memory": (dataclasses.replace(case, overlap=False), 2),
                    "apart": (dataclasses.replace(case, overlap=False, **there), 2),
                    "overlapped": (dataclasses.replace(case, overlap=True, **there), 2),
                },
                rounds,
            )
            computing = seconds["memory"][0] - seconds["memory"][1]
            expected = predicted(computing, case.bytes_exchanged, 2, network)
            B, T, C, layers, _ = shape
            rows.append(
                {
                    "model": f"{layers} x {C}, {B} x {T} tokens",
                    "network": network,
                    "computing, ms": 1000 * computing,
                    "predicted, ms": 1000 * expected,
                    "measured, ms": 1000 * seconds["apart"][0],
                    "ratio": seconds["apart"][0] / expected,
                    "overlapped, ms": 1000 * seconds["overlapped"][0],
                }
            )
    return rows


def _scaling(threads: int, rounds: int) -> list[dict[str, Any]]:
    """The efficiency that the model predicts for machines like this one, each with a full batch."""
    rows = []
    for name in ("tiny", "small", "medium"):
        size = SIZES[name]
        shape = (size[key] for key in ("batch_size", "block_size", "n_embd", "n_layer", "n_head"))
        case = Case(*shape, shards=1, threads=threads)
        computing = _compare({name: (case, 1)}, rounds)[name][0]
        for network in NETWORKS:
            for precision in ("float32", "bfloat16"):
                row: dict[str, Any] = {"size": name, "step, ms": 1000 * computing}
                row |= {"network": network, "gradients": precision}
                nbytes = dataclasses.replace(case, reduce_precision=precision).bytes_exchanged
                for machines in MACHINES:
                    row[f"{machines}"] = computing / predicted(computing, nbytes, machines, network)
                rows.append(row)
    return rows


def run(options: argparse.Namespace, _machine: dict[str, object]) -> dict[str, Any]:
    """Measures and prints all tables -> their rows."""
    results = {
        "overhead": _overhead(options.rounds),
        "networks": _networks(options.rounds),
        "scaling": _scaling(options.threads or os.cpu_count() or 1, options.rounds),
    }
    for rows in results.values():
        print(tabulate(rows, headers="keys", floatfmt=".3g"), end="\n\n")
    return results

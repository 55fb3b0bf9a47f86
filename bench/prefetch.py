"""Measures how long steps wait for batches, by how many are drawn ahead: python -m bench prefetch.

One model trains on tokens in memory, on tokens as from a slow disk, and on a file whose pages are
dropped before every step. Runs with different numbers of batches ahead take turns.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smallmind import Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table
from smallmind.corpus.token_files import UINT16, encode_header, open_tokens
from smallmind.kernels.timing import Stopwatch
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.samplers import RandomWindows, draw

MODEL = {"block_size": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
BATCH, VOCABULARY, TOKENS = 12, 65, 10**6
SLOW = (0.5, 1.5)  # of a step, that reading a batch takes from a slow disk
STALL, EVERY = 1.5, 10  # of a step, that one of so many batches takes
COLD = 3  # steps of a turn that are not counted: before the first one nothing is drawn
HEADS = ["tokens", "reading", "computing", "ahead", "step", "waiting", "share", "unavoidable"]


class _Slow:
    """Tokens of which every `every`-th read takes `seconds` longer."""

    def __init__(self, tokens: np.ndarray, seconds: float, every: int = 1) -> None:
        self.tokens, self.seconds, self.every, self.reads = tokens, seconds, every, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key: slice) -> np.ndarray:
        self.reads += 1
        if self.reads % self.every == 0:
            time.sleep(self.seconds)
        return self.tokens[key]


def _write(path: Path, megabytes: int) -> None:
    """A token file of random ids."""
    random, half = np.random.default_rng(0), TOKENS // 2
    with path.open("wb") as file:
        file.write(encode_header(UINT16, megabytes * half))
        for _ in range(megabytes):
            file.write(random.integers(0, VOCABULARY, half, np.uint16).tobytes())
        file.flush()
        os.fsync(file.fileno())  # else its pages could not be dropped


class _Case(NamedTuple):
    name: str
    tokens: Tokens
    before_step: Callable[[], object] = lambda: None


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Measures and prints each kind of tokens -> a record for each number of batches ahead.

    Units: seconds.
    """
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS, np.int32)
    training = _training(tokens)
    turn(training, 0, options.steps, lambda: None)  # compiles, and touches all memory
    step = statistics.median(turn(training, 0, options.steps, lambda: None)[0])
    records = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in _cases(training, tokens, step, Path(folder), options.megabytes):
            training.data.train = case.tokens
            records += _measure(training, case, options)
    _show(records)
    return records


def _training(tokens: np.ndarray) -> Training:
    tokenizer = Tokenizer("".join(map(chr, range(48, 48 + VOCABULARY))))
    data = Dataset(tokens, MODEL["block_size"], BATCH, 1, tokenizer)
    return Training(TransformerModel(VOCABULARY, **MODEL), data=data)


def _cases(
    training: Training, tokens: np.ndarray, step: float, folder: Path, megabytes: int
) -> Iterator[_Case]:
    yield _Case("in memory", tokens)
    counted = training.data.train = _Slow(tokens, 0.0)
    draw(RandomWindows(training.data), 0)
    for share in SLOW:
        name = f"slow: {share:g} of a step"
        yield _Case(name, _Slow(tokens, share * step / counted.reads))
    stalls = _Slow(tokens, STALL * step, EVERY * counted.reads)
    yield _Case(f"stalls: {STALL:g} steps, 1 in {EVERY}", stalls)
    if not hasattr(os, "posix_fadvise"):
        print("This system cannot drop the pages of a file: only slow reads are measured.")
        return
    path = folder / "tokens.bin"
    _write(path, megabytes)
    with path.open("rb") as file:
        drop = functools.partial(os.posix_fadvise, file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield _Case("file, pages dropped", open_tokens(path), drop)


def _measure(training: Training, case: _Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    reading = _reading(training, case.before_step, options.steps)
    turns: dict[int, list[tuple[list[float], list[float]]]] = {n: [] for n in options.ahead}
    for _ in range(options.rounds):
        for ahead, measured in turns.items():
            measured.append(turn(training, ahead, options.steps, case.before_step))
    # In these turns: on a busy machine it differs from that of other turns.
    computing = statistics.median(
        step - waited
        for measured in turns.values()
        for each in measured
        for step, waited in zip(*each, strict=True)
    )
    records = []
    for ahead, measured in turns.items():
        seconds, waiting = (
            statistics.median(x for each in measured for x in each[i]) for i in (0, 1)
        )
        records.append(
            {
                "tokens": case.name,
                "reading": reading,
                "computing": computing,
                "ahead": ahead,
                "step": seconds,
                "waiting": waiting,
                "share": statistics.median(
                    sum(waiting) / sum(steps) for steps, waiting in measured
                ),
                "unavoidable": max(0.0, 1 - computing / reading),
            }
        )
    return records


def _reading(training: Training, before_step: Callable[[], object], batches: int) -> float:
    """Seconds to draw a batch while nothing else happens."""
    sampler, seconds = RandomWindows(training.data), []
    for number in range(batches):
        before_step()
        start = time.perf_counter()
        draw(sampler, 10**6 + number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def turn(
    training: Training, ahead: int, steps: int, before_step: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """Trains for some steps -> the seconds of each, and those of them that waited for a batch."""
    config = TrainingConfig(
        steps=COLD + steps, prefetch=ahead, log_every=1, val_every=0, max_rollbacks=0
    )
    watch = training.model.workspace.profile = Stopwatch("GetBatch")
    seconds, waiting = [], []
    records = training.steps(config)
    for _ in range(COLD + steps):
        before_step()
        start, waited = time.perf_counter(), sum(watch.seconds)
        next(records)
        seconds.append(time.perf_counter() - start)
        waiting.append(sum(watch.seconds) - waited)
    records.close()
    return seconds[COLD:], waiting[COLD:]


def _show(records: list[dict[str, Any]]) -> None:
    rows = [
        [
            record["tokens"],
            f"{1000 * record['reading']:.2f}",
            f"{1000 * record['computing']:.2f}",
            str(record["ahead"]),
            f"{1000 * record['step']:.2f}",
            f"{1000 * record['waiting']:.2f}",
            f"{record['share']:.1%}",
            f"{record['unavoidable']:.1%}",
        ]
        for record in records
    ]
    table = Table("WAITING FOR BATCHES, MILLISECONDS", rows, HEADS)
    print(table.box(ascii_only=not can_print(sys.stdout, BOX)), end="")
    for name in dict.fromkeys(r["tokens"] for r in records if r["unavoidable"]):
        print(
            f"{name}: reading a batch takes longer than computing a step, so steps wait however "
            "many batches are drawn ahead."
        )

"""Prepares a corpus larger than memory should hold, and trains from it: python -m bench corpus.

The corpus is written by the grammar of the built-in stories: as text files, and with a story in
each line of .jsonl files. Training on its tokens is compared with training on its first megabyte in
memory: the memory of whole runs, and the steps of one model that takes turns between both.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.prefetch import turn
from smallmind import Training, TransformerModel
from smallmind.bench.machine import answer_of
from smallmind.corpus.shards import open_shards
from smallmind.corpus.tokens import TokensOnDisk
from smallmind.text.dataset import Dataset
from smallmind.text.stories import built_in_text

FILE = 10  # megabytes of stories per file
KINDS = {  # what is prepared -> the folder, and the flags
    "text, characters": ("text", []),
    "text, 1024 tokens": ("text", ["--tokenizer", "bpe", "--vocab-size", "1024"]),
    "JSON lines, characters": ("jsonl", ["--field", "text"]),
}
PROGRAM = """
import sys
from smallmind.cli import main
from smallmind.memory.tracker import peak_resident_bytes
assert main(sys.argv[1:]) == 0
print(peak_resident_bytes())
"""
SMALL = 10**6  # characters of the run in memory
SHAPE = {"block_size": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
BATCH = 12


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Writes, prepares and trains -> a record per kind, one of memory and one of steps."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        numbers = range(max(1, round(options.megabytes / FILE)))
        for kind in ("text", "jsonl"):
            (place / kind).mkdir()
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(_write, place), numbers))
        records = [_prepare(place, name) for name in KINDS]
        text = (place / "text" / "000000.txt").read_text(encoding="utf-8")
        (place / "small.txt").write_text(text[:SMALL], encoding="utf-8")
        large = place / next(iter(KINDS))
        memory = {
            name: _peak(
                [
                    "train",
                    str(path),
                    "--steps",
                    str(2 * options.steps),
                    "--out",
                    str(place / f"{name} run"),
                ]
            )
            for name, path in (("memory", place / "small.txt"), ("disk", large))
        }
        records.append({"measured": "peak", **memory})
        records.append({"measured": "step", **_steps(text[:SMALL], large, options)})
    _show(records)
    return records


def _write(place: Path, number: int) -> None:
    """One file of stories, of either kind."""
    text = built_in_text(round(FILE * 10**6), seed=number + 2)
    (place / "text" / f"{number:06}.txt").write_text(text, encoding="utf-8")
    with (place / "jsonl" / f"{number:06}.jsonl").open("w", encoding="utf-8") as file:
        for story in text.rstrip("\n").split("\n\n"):
            file.write(json.dumps({"text": story}) + "\n")


def _prepare(place: Path, name: str) -> dict[str, Any]:
    folder, flags = KINDS[name]
    nbytes = sum(path.stat().st_size for path in (place / folder).iterdir())
    start = time.perf_counter()
    peak = _peak(["prepare", str(place / folder), "--out", str(place / name), *flags])
    seconds = time.perf_counter() - start
    tokens = len(TokensOnDisk.of_shards(open_shards(place / name)).tokens)
    return {
        "measured": "prepare",
        "kind": name,
        "bytes": nbytes,
        "seconds": seconds,
        "peak": peak,
        "tokens": tokens,
    }


def _peak(command: Iterable[str]) -> int:
    """Runs a command of smallmind -> the most bytes of memory that it took."""
    return int(answer_of("-c", PROGRAM, *command))


def _steps(text: str, prepared: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step from memory and from disk, in turns, and the median of their ratios."""
    found = TokensOnDisk.of_shards(open_shards(prepared))
    data = Dataset.from_text(text, found.tokenizer, SHAPE["block_size"], BATCH, 1)
    training = Training(TransformerModel(found.tokenizer.vocab_size, **SHAPE), data=data)
    sources = {"memory": data.train, "disk": found.train}
    turn(training, 0, options.steps, lambda: None)  # compiles, and touches all memory
    medians: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(options.rounds):
        for name, tokens in sources.items():
            data.train = tokens
            ahead = training.config.batches_ahead(data.is_on_disk)
            seconds, _ = turn(training, ahead, options.steps, lambda: None)
            medians[name].append(statistics.median(seconds))
    ratios = [d / m for m, d in zip(medians["memory"], medians["disk"], strict=True)]
    result = {name: statistics.median(values) for name, values in medians.items()}
    return {**result, "ratio": statistics.median(ratios)}


def _show(records: list[dict[str, Any]]) -> None:
    rows = [
        [
            r["kind"],
            f"{r['bytes'] / 1e6:,.0f} MB",
            f"{r['seconds']:.1f} s",
            f"{r['bytes'] / r['seconds'] / 1e6:,.0f} MB/s",
            f"{r['peak'] / 1e6:,.0f} MB",
            f"{r['tokens']:,}",
        ]
        for r in records
        if r["measured"] == "prepare"
    ]
    print(tabulate(rows, ["prepare", "read", "took", "", "peak memory", "tokens"]))
    peak, step = ({**r} for r in records if r["measured"] in ("peak", "step"))
    rows = [
        [
            "1 MB of text in memory",
            f"{peak['memory'] / 1e6:,.0f} MB",
            f"{1000 * step['memory']:.2f} ms",
        ],
        ["tokens on disk", f"{peak['disk'] / 1e6:,.0f} MB", f"{1000 * step['disk']:.2f} ms"],
        ["", f"{(peak['disk'] - peak['memory']) / 1e6:+,.0f} MB", f"x {step['ratio']:.3f}"],
    ]
    print(tabulate(rows, ["train", "peak memory", "step"]))

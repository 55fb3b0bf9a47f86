"""Compares how fast recipes learn, over several seeds: python -m bench recipe.

Each run is a whole `smallmind train`, timed from its start to its end. Runs take turns, a seed at a
time, so that a machine that slows down does so for all of them. With --target a run ends at the
first evaluation that reaches that loss; otherwise it trains to its end. Either way the loss shown
is that of the whole held-out part, for each character; that of nanoGPT, of its 20 random batches.
PPMd (Shkarin 2002), a compressor, predicts the held-out part after the rest and learns from it as
it goes. Texts are learned by characters unless flags choose a tokenizer.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from smallmind.bench.machine import started
from smallmind.text.dataset import HELD_OUT

NANOGPT = "nanoGPT in PyTorch"
PPMD_ORDERS = range(4, 9)
PPMD_MEMORY = 1 << 28  # bytes
SEED = 1337


def variants(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> the flags of each contestant. SystemExit for one that has no name."""
    base = shlex.split(options.flags)
    chosen = {}
    for item in options.compare or []:
        name, equals, flags = item.partition("=")
        if not equals or not name:
            raise SystemExit(f"--compare {item!r}: write name=flags, as in 'fast=--steps 500'")
        if name in chosen:
            raise SystemExit(f"--compare: two recipes are named {name!r}; rename one")
        chosen[name] = base + shlex.split(flags)
    chosen = chosen or {"default": base}
    characters = ["--tokenizer", "char"]
    return {
        name: flags if "--tokenizer" in flags else [*flags, *characters]
        for name, flags in chosen.items()
    }


def without_length(flags: Sequence[str]) -> list[str]:
    """The flags without those that set the length of a run, and without their values."""
    lengths = ("--steps", "--epochs", "--minutes", "--target-loss")
    pairs = zip(["", *flags], flags, strict=False)
    return [flag for before, flag in pairs if flag not in lengths and before not in lengths]


def train(text: str | None, flags: Sequence[str], seed: int, threads: int) -> dict[str, Any]:
    """Runs `smallmind train` once -> seconds, steps, tokens, losses. SystemExit if it fails."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "smallmind", "train", *([text] if text else [])]
        command += [*flags, "--seed", str(seed), "--out", str(out)]
        start = time.perf_counter()
        _run(command, threads)
        seconds = time.perf_counter() - start
        settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {"seconds": seconds, **summary(settings, [json.loads(line) for line in lines])}


def summary(settings: dict[str, Any], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """config.json, the lines of metrics.jsonl -> what a run took and what it reached."""
    steps = [record for record in records if "step_ms" in record]
    evaluations = [record for record in records if "val_loss" in record]
    final = next(record for record in reversed(records) if "final_loss" in record)
    run, training, model = settings["run"], settings["training"], settings["model"]
    per_step = run["batch_size"] * training["grad_accum_steps"] * model["block_size"]
    return {
        # To the last step, of which not every one is logged.
        "training_seconds": steps[-1]["elapsed_seconds"] * final["step"] / steps[-1]["step"],
        "steps": final["step"],
        "tokens": final["step"] * per_step,
        "loss": math.log(2) * final["final_bits_per_character"],
        "evaluations": [[record["step"], record["val_loss"]] for record in evaluations],
    }


def row(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """The runs of a contestant -> its row: medians, and their spread."""
    seconds, losses = [run["seconds"] for run in runs], [run["loss"] for run in runs]
    return [
        name,
        f"{statistics.median(seconds):.1f}",
        f"{min(seconds):.1f}-{max(seconds):.1f}",
        f"{statistics.median(run['training_seconds'] for run in runs):.1f}",
        f"{statistics.median(run['steps'] for run in runs):,.0f}",
        f"{statistics.median(run['tokens'] for run in runs) / 1e6:.2f}",
        f"{statistics.median(losses):.4f}",
        f"{min(losses):.4f}-{max(losses):.4f}",
    ]


HEADS = [
    "",
    "seconds",
    "range",
    "in steps",
    "steps",
    "M tokens",
    "held-out loss",
    "range",
]


def run(options: argparse.Namespace, machine: dict[str, object]) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    contestants = variants(options)
    if options.target is not None:
        for flags in contestants.values():
            flags += ["--target-loss", str(options.target)]
    threads = int(str(machine["threads"]))
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for flags in contestants.values():  # compiles the kernels, as a user's first start does
        train(options.text, [*without_length(flags), "--steps", "2"], SEED, threads)
    for number in range(options.seeds):
        for name, flags in contestants.items():
            measured = train(options.text, flags, SEED + number, threads)
            results[name].append({"seed": SEED + number, **measured})
            print(f"  {name}, seed {SEED + number}: loss {measured['loss']:.4f}", flush=True)
        if "nanogpt" in options.peers:
            results.setdefault(NANOGPT, []).append(_nanogpt(options, SEED + number, threads))
    if "ppmd" in options.peers:
        run = ppmd(Path(options.text).read_text(encoding="utf-8"))
        results[f"PPMd of order {run['order']}"] = [run]
    print(tabulate([row(*item) for item in results.items()], HEADS, disable_numparse=True))
    return [
        {"name": name, "flags": contestants.get(name, []), "text": options.text, "runs": runs}
        for name, runs in results.items()
    ]


def _nanogpt(options: argparse.Namespace, seed: int, threads: int) -> dict[str, Any]:
    """nanoGPT's recipe for a CPU, in PyTorch, on the same text -> the same figures."""
    command = [sys.executable, "-m", "bench.peers.nanogpt", options.text, str(seed)]
    command += [str(options.target or 0)]
    start = time.perf_counter()
    output = _run(command, threads)
    seconds = time.perf_counter() - start
    return {"seed": seed, "seconds": seconds, **json.loads(output.splitlines()[-1])}


def ppmd(text: str) -> dict[str, Any]:
    """Compresses a text with the order that suits its last tenth best -> the same figures.

    The loss is what that tenth adds to the compressed size, in nats per character.
    """
    import pyppmd

    rest = text[: int((1 - HELD_OUT) * len(text))]
    found = []
    for order in PPMD_ORDERS:
        start = time.perf_counter()
        sizes = [
            len(pyppmd.compress(x, max_order=order, mem_size=PPMD_MEMORY)) for x in (rest, text)
        ]
        seconds = (time.perf_counter() - start) / 2  # it reads the text once
        loss = 8 * math.log(2) * (sizes[1] - sizes[0]) / (len(text) - len(rest))
        found.append((loss, order, seconds))
    loss, order, seconds = min(found)
    figures = {"seconds": seconds, "training_seconds": seconds, "steps": 0, "tokens": len(text)}
    return {**figures, "loss": loss, "order": order}


def _run(command: Sequence[str], threads: int) -> str:
    """Runs a program on the CPUs that are measured -> what it prints. SystemExit if it fails."""
    with started(command, threads, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output[-2000:]}")
    return output

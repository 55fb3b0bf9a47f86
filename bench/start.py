"""Compares the time that a run's start predicts with the time it takes: bench start --sizes."""

import argparse
import os
import tempfile

from tabulate import tabulate

from bench.memory import run_trial
from smallmind.cli.bench import measure


def predictions(sizes: list[str], steps: int | None, threads: int) -> list[dict[str, object]]:
    """Runs of these sizes, each with an empty cache of kernels and with a full one.

    The time that the start predicts, that which the run takes, both without compiling, and that
    of predicting. Only an idle machine shows how good predictions are.
    """
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in sizes:
            kernels = {"SMALLMIND_CACHE_DIR": _made(f"{directory}/kernels-{size}")}
            for cache in ("cold", "warm"):
                flags = ["--size", size] + (["--steps", str(steps)] if steps else [])
                trial = run_trial(
                    threads, kernels, flags=[*flags, "--out", f"{directory}/{size}-{cache}"]
                )
                ratio = trial["predicted"] / trial["seconds"]
                records.append({"run": " ".join(flags), "cache": cache, "ratio": ratio, **trial})
    rows = [
        {
            "run": r["run"],
            "kernel cache": r["cache"],
            "predicted": f"{r['predicted']:.1f} s",
            "real": f"{r['seconds']:.1f} s",
            "ratio": f"{r['ratio']:.2f}",
            "spread": f"{r['spread']:.1f}",
            "predicting took": f"{r['timing']:.2f} s",
        }
        for r in records
    ]
    print("\nThe time of a run as its start predicts it")
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))
    return records


def _made(directory: str) -> str:
    os.makedirs(directory, exist_ok=True)
    return directory


def run(options: argparse.Namespace, machine: dict[str, object]) -> list[dict[str, object]]:
    """Measures and prints starts and the runs of --sizes; returns the records."""
    records = measure(argparse.Namespace(**vars(options) | {"json": None}), "start")
    return records + predictions(options.sizes, options.steps, int(str(machine["threads"])))

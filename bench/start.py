"""Measures compiling at the first start, and loading at later ones: python -m bench start.

With --sizes also the time of a run that its start predicts, beside the time that it takes.
"""

import argparse
import os
import subprocess
import tempfile

from tabulate import tabulate

from bench.machine import answer_of
from bench.memory import run_trial

# A training step uses every kernel; the time of a second step is subtracted.
PROGRAM = """
import json, time
begin = time.perf_counter()
import numpy as np
import smallmind
from smallmind.kernels import compiled
imported = time.perf_counter()
model = smallmind.TransformerModel(65, 64, 128, 4, 4, dropout=0.1)
optimizer = smallmind.AdamW(model)
ids = np.zeros((2, 65), np.int32)

def step():
    model.loss_and_gradients(ids[:, :-1], ids[:, 1:])
    optimizer.step(max_grad_norm=1.0)

step()
first = time.perf_counter()
step()
print(json.dumps([imported - begin, first - imported - (time.perf_counter() - first)]))
"""


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
    """Runs a step in new processes, first without a cache and then with it. Units: seconds."""
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", *["later"] * options.rounds):
            imports, kernels = answer_of(
                "-c",
                PROGRAM,
                variables={"SMALLMIND_CACHE_DIR": cache},
                stderr=subprocess.DEVNULL,
            )
            records.append({"start": start, "imports": imports, "kernels": kernels})
    rows = [
        [r["start"], f"{r['imports']:.2f} s", f"{r['kernels']:.2f} s"]  # type: ignore[str-format]
        for r in records
    ]
    print(tabulate(rows, ["start", "imports", "compiling or loading kernels"]))
    if options.sizes:
        records += predictions(options.sizes, options.steps, int(str(machine["threads"])))
    return records

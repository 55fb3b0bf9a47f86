"""python -m bench start: how long compiling takes at the first start, and loading at later ones.

With --sizes also the time of a run that its start predicts, beside what it takes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tabulate import tabulate

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


def _times(sizes: list[str], steps: int | None, threads: int) -> list[dict[str, object]]:
    """Runs of these sizes, each with an empty cache of kernels and with a full one.

    What the start predicts, what the run takes without compiling, and what predicting took.
    """
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in sizes:
            for start in ("first", "later"):
                flags = ["--size", size, "--out", f"{directory}/{size}-{start}"]
                flags += ["--steps", str(steps)] if steps else []
                cache = {"SMALLMIND_CACHE_DIR": _made(f"{directory}/kernels-{size}")}
                trial = run_trial(threads, cache, flags=flags)
                records.append({"size": size, "start": start, **trial})
    rows = [
        [
            r["size"],
            r["start"],
            f"{r['predicted']:.1f} s",
            f"{r['seconds']:.1f} s",
            f"{(r['predicted'] / r['seconds'] - 1) * 100:+.0f} %",  # type: ignore[operator]
            f"{r['spread']:.1f}",
            f"{r['timing']:.2f} s",
        ]
        for r in records
    ]
    heads = ["size", "start", "predicted", "took", "off", "spread", "timing"]
    print(tabulate(rows, heads))
    return records


def _made(directory: str) -> str:
    os.makedirs(directory, exist_ok=True)
    return directory


def run(options: argparse.Namespace, machine: dict[str, object]) -> list[dict[str, object]]:
    """Runs a step in new processes, first without a cache and then with it. Units: seconds."""
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "SMALLMIND_CACHE_DIR": cache}
        for start in ("first", *["later"] * options.rounds):
            command = [sys.executable, "-c", PROGRAM]
            output = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            imports, kernels = json.loads(output)
            records.append({"start": start, "imports": imports, "kernels": kernels})
    rows = [
        [r["start"], f"{r['imports']:.2f} s", f"{r['kernels']:.2f} s"]  # type: ignore[str-format]
        for r in records
    ]
    print(tabulate(rows, ["start", "imports", "compiling or loading kernels"]))
    if options.sizes:
        records += _times(options.sizes, options.steps, int(str(machine["threads"])))
    return records

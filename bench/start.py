"""python -m bench start: how long compiling takes at the first start, and loading at later ones."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from tabulate import tabulate

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
    return records

"""Measures compiling at the first start, and loading at later ones."""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping

from smallmind.bench.machine import ROOT, answer_of

# A training step uses every kernel; the time of a second step is subtracted.
PROGRAM = """
import json, time
begin = time.perf_counter()
import numba
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


def starts(later: int, variables: Mapping[str, str]) -> Iterator[dict[str, object]]:
    """Runs a step in new processes, first without a cache and then with it. Units: seconds."""
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", *["later"] * later):
            imports, kernels = answer_of(
                "-c",
                PROGRAM,
                variables={**variables, "SMALLMIND_CACHE_DIR": cache},
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
            )
            yield {"start": start, "imports": imports, "kernels": kernels}

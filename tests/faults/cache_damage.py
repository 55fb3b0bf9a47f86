"""Damage to the files of compiled kernels, and a program whose result shows it."""

import random
import sys
from pathlib import Path

from tests.programs import PATIENCE, finished

PAGE = 4096
# Two steps of training use every kernel of float32; the digest is that of all weights.
STEPS = """
import hashlib
import numpy as np
import smallmind
model = smallmind.TransformerModel(65, 16, 16, 1, 2, dropout=0.1)
optimizer = smallmind.AdamW(model)
ids = np.arange(2 * 17, dtype=np.int32).reshape(2, 17)
for _ in range(2):
    model.loss_and_gradients(ids[:, :-1], ids[:, 1:])
    optimizer.step(max_grad_norm=1.0)
print(hashlib.sha256(model.flat.data.tobytes()).hexdigest())
"""


def outcome(cache, program=STEPS):
    """Runs the program with this cache -> exit status, output, and errors but for "Compiling"."""
    words = [sys.executable, "-W", "error", "-c", program]
    result = finished(words, timeout=PATIENCE, SMALLMIND_CACHE_DIR=str(cache))
    lines = result.stderr.splitlines(keepends=True)
    errors = "".join(line for line in lines if not line.startswith("Compiling "))
    return result.returncode, result.stdout, errors


def flip(content, choose):
    """One bit."""
    place = choose.randrange(len(content))
    return (
        content[:place] + bytes([content[place] ^ 1 << choose.randrange(8)]) + content[place + 1 :]
    )


def zero(content, choose):
    """One page, as after a loss of power."""
    start = choose.randrange(0, len(content), PAGE)
    end = min(len(content), start + PAGE)
    return content[:start] + bytes(end - start) + content[end:]


def cut(content, choose):
    """The end."""
    return content[: choose.randrange(len(content))]


def damage(cache, number, files=1):
    """Damages some files in the cache, chosen by a number."""
    choose = random.Random(number)
    found = sorted(Path(cache).rglob("*.nbc"))
    for path in choose.sample(found, min(files, len(found))):
        change = choose.choice([flip, zero, cut])
        path.write_bytes(change(path.read_bytes(), choose))

"""A run of six steps in plain NumPy, on a short text."""

from smallmind import Run

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 60
FIELDS = {
    "block_size": 8,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "batch_size": 2,
    "steps": 6,
    "val_every": 3,
    "val_batches": 1,
    "save_every": 3,
    "keep": 9,
    "warmup_steps": 2,
    "log_every": 1,
    "backend": "numpy",
}


def create(out, **fields):
    return Run.create(text=TEXT, out=out, **{**FIELDS, **fields})

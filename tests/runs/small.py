"""A run of six steps in plain NumPy, on a short text."""

from smallmind import Run
from smallmind.training.records import StepRecord
from tests.programs import CATS

TEXT = CATS
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


def left(run, step):
    """Trains a run until the record of a step comes, and leaves it there -> the run."""
    for record in run.steps():
        if isinstance(record, StepRecord) and record.step == step:
            break
    return run


def resumed_after(run, step):
    """Stops a run after the record of a step, and resumes it -> the run, to its end."""
    for record in run.steps():
        if record.step == step:
            run.stop()
    resumed = Run.open(run.path)
    resumed.resume()
    return resumed

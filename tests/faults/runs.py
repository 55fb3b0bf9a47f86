"""Small runs for the faults: their text and flags, and the outcome that is compared."""

import hashlib
import json
import shlex
from pathlib import Path

from smallmind.training.checkpoint import newest
from tests.programs import status

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 60
STEPS_BETWEEN_SAVES = 5
FLAGS = shlex.split(
    "--block-size 16 --n-embd 16 --n-layer 2 --n-head 2 --batch-size 4 --steps 20 --val-every 7 "
    f"--val-batches 2 --warmup-steps 5 --log-every 1 --save-every {STEPS_BETWEEN_SAVES} "
    "--dropout 0.1"
)


def write_text(directory):
    path = Path(directory) / "cats.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def train(directory, *flags, name="run"):
    """Trains a run in directory/name -> exit status."""
    return status("train", write_text(directory), *FLAGS, *flags, "--out", Path(directory) / name)


def outcome(run):
    """Hashes of a run's newest checkpoint, and its losses step by step."""
    hashes = {
        name: hashlib.sha256(value.tobytes()).hexdigest()
        for name, value in newest(run)[0].tensors.items()
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "lr", "grad_norm", "train_loss", "val_loss", "final_loss")
    shown = [{key: line[key] for key in keys if key in line} for line in lines]
    return hashes, [line for line in shown if len(line) > 1]


def ended(run):
    """The outcome of a run that has ended, and the names and the sample that it leaves behind."""
    names = {path.name for path in run.iterdir()}
    return outcome(run), names, (run / "samples.txt").read_bytes()

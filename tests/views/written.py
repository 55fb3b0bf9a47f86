"""Run directories written by hand, as runs leave them, without training."""

import json
import math

from smallmind.settings.settings import Settings

STEP = {
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 1000.0,
    "step_ms": 100.0,
    "windows": 4,
    "precision": "float32",
    "loss_scale": 1.0,
    "clip_share": 0.0,
    "memory": 1,
    "peak_memory": 1,
}
EVALUATION = {"train_loss": 1.0, "perplexity": 2.0, "bits_per_character": 2.0, "accuracy": 0.5}


def step(number, loss=None, **more):
    """The record of a step: a tenth of a second each."""
    loss = 1 + 3 * math.exp(-number / 20) if loss is None else loss
    return {"step": number, "loss": loss, **STEP, "elapsed_seconds": number / 10, **more}


def evaluation(number, loss, bits=1.5):
    return {"step": number, "val_loss": loss, **EVALUATION, "bits_per_byte": bits}


def final(number, loss):
    return {"step": number, "final_loss": loss, "final_bits_per_byte": 1.25}


def rollback(number, spike):
    return {
        "step": number,
        "spike_step": spike,
        "spike_loss": None,
        "average_loss": 2.0,
        "lr_factor": 0.5,
        "next_lr": 5e-4,
    }


def append(run, *records, end=""):
    """Adds lines to the metrics of a run."""
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) + end)


def write(run, *records, steps=100, end="", saved=None, **fields):
    """Writes a run with these records; `saved` are more keys of config.json -> its directory."""
    run.mkdir(parents=True)
    settings = Settings.from_fields({"steps": steps, **fields}).to_dict()
    config = {**settings, "text_sha256": "0" * 64, "parameters": 123_456, "smallmind": "0.2.0"}
    (run / "config.json").write_text(json.dumps({**config, **(saved or {})}), encoding="utf-8")
    append(run, *records, end=end)
    return run


def finish(run, number):
    """Leaves what a run writes last."""
    (run / "model.safetensors").touch()
    (run / "samples.txt").write_text(f"--- step {number}\nthe cat\n", encoding="utf-8")
    return run

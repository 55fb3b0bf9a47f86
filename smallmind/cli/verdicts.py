"""Verdicts on the checkpoints of a run, a line each."""

from pathlib import Path

from smallmind.cli.console import Console
from smallmind.config import InputError, TrainingConfig
from smallmind.runs.verification import Verdict, verification
from smallmind.training.loop import Training
from smallmind.training.records import StepRecord


def show_verification(
    console: Console,
    run: Path,
    training: Training | None = None,
    config: TrainingConfig | None = None,
) -> int:
    """A line a checkpoint and, with training and config, a stretch; the verdict -> exit status."""
    failed = checks = 0
    for record in verification(run, training, config):
        if isinstance(record, StepRecord) and console.is_terminal:
            console.live(f"trained again: step {record.step}")
        if isinstance(record, Verdict):
            fault = record.fault or (
                "sound" if record.name.endswith(".safetensors") else "the same"
            )
            console.line(f"{'FAILED' if record.fault else 'ok    '}  {record.name}: {fault}")
            checks, failed = checks + 1, failed + bool(record.fault)
    if not checks:
        raise InputError(f"{run} holds no checkpoint yet; train on, or let it end")
    if failed:
        console.line(f"{failed} of {checks} checks failed")
    else:
        console.line(f"All {checks} checks passed")
    return 1 if failed else 0

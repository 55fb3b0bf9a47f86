"""How a model was trained, in a few words per fact, for those who get it."""

import math
from contextlib import suppress
from pathlib import Path

from smallmind.checks import InputError, number
from smallmind.runs.directory import SavedConfig
from smallmind.runs.files import name_of
from smallmind.runs.metrics import read_metrics


def history_of(run: Path, config: SavedConfig, checkpoint: str) -> dict[str, str]:
    """The directory and config of a run, a name of one of its models -> what -> how much.

    Paths are left out: they are nobody else's business.
    """
    if config.imported:
        return {"imported from": config.imported}
    settings, training = config.settings, config.settings.training
    tokens = settings.model.block_size * settings.run.batch_size * training.grad_accum_steps
    facts = {
        "model": checkpoint,
        "text": name_of(settings.run.text),
        "length": f"{training.steps:,} steps of {tokens:,} tokens",
        "optimizer": f"{training.optimizer}, learning rate {training.learning_rate:g}, "
        f"schedule {training.schedule}",
        "precision": training.requested_precision.value,
        "seed": str(settings.run.seed),
    }
    if settings.run.init_from:
        facts["started from"] = Path(settings.run.init_from).name
    if settings.distillation.teacher:
        facts["teacher"] = Path(settings.distillation.teacher).name
    with suppress(InputError):  # no metrics yet
        found = [
            (row["step"], loss)
            for row in read_metrics(run).rows
            if math.isfinite(loss := number(row.get("final_loss", row.get("val_loss"))))
        ]
        if found:
            step, loss = found[-1]
            facts["held-out loss"] = f"{loss:.4f} nats per token, after step {step:,}"
    return facts

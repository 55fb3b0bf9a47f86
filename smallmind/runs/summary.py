"""A run in a few words: how far it is, in a notebook, and for those who get its model."""

import base64
import math
from contextlib import suppress
from pathlib import Path

from smallmind.charts.svg import Svg
from smallmind.checks import InputError, count_of, number
from smallmind.console.activity import duration
from smallmind.console.table import Table
from smallmind.nn.network import declare_parameters
from smallmind.runs.metrics import MetricsTable, read_metrics
from smallmind.runs.saved import RunFiles
from smallmind.training import checkpoint


def html_of(run: RunFiles) -> str:
    """Describes a run in a table, as far as it is known, with its losses as a picture."""
    metrics = metrics_so_far(run.path)
    table, picture = _table(run, metrics).html(), metrics.losses_svg() if metrics else Svg("")
    if not picture:
        return table
    # As <img>, which keeps its style from the page and the page's from it.
    data = base64.b64encode(picture.encode()).decode()
    return f'{table}<img alt="Losses by step" src="data:image/svg+xml;base64,{data}"/>'


def metrics_so_far(path: Path) -> MetricsTable | None:
    """Reads the metrics; None if nothing has been logged yet."""
    with suppress(InputError):
        return read_metrics(path)
    return None


def state_of(run: RunFiles) -> str:
    """Tells how far a run is, from what is on disk, in a few words."""
    config = run.config
    if config.imported:
        return f"imported from {config.imported}"
    if config.awaits_timing and run.settings.run.minutes:
        return f"not timed yet, to train for {count_of(run.settings.run.minutes, 'minute')}"
    steps, saved = run.settings.training.steps, checkpoint.peek(run.path)
    if saved is None:
        return f"no checkpoint yet, {count_of(steps, 'step')} to train"
    ended_early = run.ended_early(saved)
    if not (ended_early or saved.step >= steps):
        return f"saved at step {saved.step:,} of {steps:,}"
    if not run.directory.is_complete(saved.step):
        return f"interrupted at its end, after step {saved.step:,} of {steps:,}"
    if ended_early:
        return f"ended early after step {saved.step:,} of {steps:,}"
    return f"finished, {count_of(steps, 'step')}"


def _table(run: RunFiles, metrics: MetricsTable | None) -> Table:
    model = run.settings.model
    shape = f"{count_of(model.n_layer, 'layer')} of {count_of(model.n_embd, 'channel')}"
    size = f"{shape}, {declare_parameters(model).count:,} parameters"
    rows = [("model", f"{model.architecture}, {size}" if model.architecture else size)]
    if not run.config.imported:
        rows.append(("text", run.name))
    if metrics:
        held_out = metrics.curve("val_loss")
        if len(held_out):
            loss = min(held_out.values)
            step = held_out.steps[held_out.values.index(loss)]
            rows.append(("best held-out loss", f"{loss:.4f} nats per token, after step {step:,}"))
        if final := metrics.curve("final_loss").values:
            text = f"{final[-1]:.4f} nats per token, on the whole held-out text"
            rows.append(("final held-out loss", text))
        if bits := metrics.curve("final_bits_per_byte").values:
            rows.append(("bits per byte", f"{bits[-1]:.3f}"))
        if seconds := metrics.curve("elapsed_seconds").values:
            rows.append(("time of training", duration(seconds[-1])))
    return Table(f"Run {run.path}: {state_of(run)}", rows, align="<<")


def history_of(run: RunFiles, model: str) -> dict[str, str]:
    """Tells how one of a run's models was trained, without paths: name -> fact."""
    settings, training = run.config.settings, run.config.settings.training
    if run.config.imported:
        return {"imported from": run.config.imported}
    tokens = settings.model.block_size * settings.run.batch_size * training.grad_accum_steps
    facts = {
        "model": model,
        "text": run.name,
        "length": f"{count_of(training.steps, 'step')} of {count_of(tokens, 'token')}",
        "optimizer": f"{training.optimizer}, learning rate {training.learning_rate:g}, "
        f"schedule {training.schedule}",
        "precision": training.requested_precision.value,
        "seed": str(settings.run.seed),
    }
    if settings.run.init_from:
        facts["started from"] = Path(settings.run.init_from).name
    for loss in settings.losses.values():
        facts |= {role: Path(path).name for role, path in loss.models.items()}
    with suppress(InputError):  # no metrics yet
        found = [
            (row["step"], loss, "final " * ("final_loss" in row))
            for row in read_metrics(run.path).rows
            if math.isfinite(loss := number(row.get("final_loss", row.get("val_loss"))))
        ]
        if found:
            step, loss, final = found[-1]
            facts[f"{final}held-out loss"] = f"{loss:.4f} nats per token, after step {step:,}"
    return facts

"""What a run shows of itself in a notebook: a table, and its losses as a picture."""

import base64

from smallmind.charts.svg import Svg
from smallmind.console.activity import duration
from smallmind.console.table import Table
from smallmind.nn.network import declare_parameters
from smallmind.runs.files import name_of
from smallmind.runs.metrics import MetricsTable
from smallmind.settings.settings import Settings


def table_of(title: str, settings: Settings, has_text: bool, metrics: MetricsTable | None) -> Table:
    """What was trained on what, how well it does and how long it took, as far as it is known."""
    model = settings.model
    layers = "1 layer" if model.n_layer == 1 else f"{model.n_layer} layers"
    size = f"{layers} of {model.n_embd} channels, {declare_parameters(model).count:,} parameters"
    rows = [("model", f"{model.architecture}, {size}" if model.architecture else size)]
    if has_text:
        rows.append(("text", name_of(settings.run.text)))
    if metrics:
        held_out = metrics.curve("val_loss")
        if len(held_out):
            step, loss = min(
                zip(held_out.steps, held_out.values, strict=True), key=lambda pair: pair[1]
            )
            rows.append(("best held-out loss", f"{loss:.4f} nats per token, after step {step:,}"))
        for field, name, form in (
            ("final_loss", "whole held-out text", "{:.4f} nats per token"),
            ("final_bits_per_byte", "bits per byte", "{:.3f}"),
        ):
            if final := metrics.curve(field).values:
                rows.append((name, form.format(final[-1])))
        if seconds := metrics.curve("elapsed_seconds").values:
            rows.append(("time of training", duration(seconds[-1])))
    return Table(title, rows, align="<<")


def image(picture: Svg) -> str:
    """The picture as <img>, which keeps its style from the page and the page's from it."""
    if not picture:
        return ""
    data = base64.b64encode(picture.encode()).decode()
    return f'<img alt="Losses by step" src="data:image/svg+xml;base64,{data}"/>'

"""Watch a run from another process until it ends: curve, speed, samples."""

import argparse
import math
import shutil
import time
from typing import TYPE_CHECKING

from smallmind.charts.figure import losses_of
from smallmind.charts.text import SAMPLES, draw
from smallmind.checks import number
from smallmind.cli.console import INDENT, Console, full_width, line_width, wrap
from smallmind.cli.flags import add_run, run_of
from smallmind.console.activity import duration
from smallmind.console.live_line import can_print, fit, knows_escapes
from smallmind.console.table import GAP, format_bytes
from smallmind.training.progress import draw_bar

if TYPE_CHECKING:
    from smallmind.views.run_view import RunView

LOOK_SECONDS = 0.5  # between two looks at the files
DRAW_SECONDS = 0.1  # between two drawings at least
LINE_SECONDS = 10.0  # between two lines where there is no terminal
SAMPLE_LINES = 6
FIELDS = ("loss", "val_loss", "lr", "tokens_per_second", "peak_memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind watch`."""
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="show the run once, and exit")
    parser.epilog = (
        "Use it in another window while a run trains. Ctrl-C stops watching, not the run. "
        "Without a terminal, it prints a line every ten seconds."
    )


def run(options: argparse.Namespace) -> int:
    """Shows the run until it ends, or Ctrl-C ends this program. Only reads its files."""
    from smallmind.views.run_view import State, open_view

    view = open_view(run_of(options), FIELDS)
    console = Console()
    is_live = knows_escapes(console.stream)
    try:
        if not options.once and view.state == State.RUNNING:
            (_watch_terminal if is_live else _watch_lines)(view, console)
    except KeyboardInterrupt:
        return 0
    view.refresh()
    console.drawing("\n".join(_frame(view, console, full_width(), 40)))
    return 0


def _watch_terminal(view: "RunView", console: Console) -> None:
    """Redraws a screen of its own until the run has ended."""
    from smallmind.views.run_view import State

    with console.own_screen():
        shown: tuple[object, ...] = ()
        drawn = 0.0
        while True:
            is_new = view.refresh()
            size = shutil.get_terminal_size()
            now = (size, int(time.monotonic()))  # the clock of the run goes on
            if is_new or now != shown:
                time.sleep(max(0.0, drawn + DRAW_SECONDS - time.monotonic()))
                console.draw_screen(_frame(view, console, size.columns, size.lines))
                shown, drawn = now, time.monotonic()
            if view.state != State.RUNNING:
                return
            time.sleep(LOOK_SECONDS)


def _watch_lines(view: "RunView", console: Console) -> None:
    """Prints a line every few seconds if there is something new, until the run has ended."""
    from smallmind.views.run_view import State

    printed = -LINE_SECONDS
    is_new = True
    while view.state == State.RUNNING and console.has_reader:
        is_new |= view.refresh()
        if is_new and time.monotonic() - printed >= LINE_SECONDS:
            console.line("\n".join(_packed([_place(view), *_numbers(view)], line_width())))
            printed, is_new = time.monotonic(), False
        time.sleep(LOOK_SECONDS)


def _frame(view: "RunView", console: Console, width: int, height: int) -> list[str]:
    """Draws everything, in lines of at most `width` columns, as far as `height` allows."""
    ascii_only = not can_print(console.stream, SAMPLES)
    text = f", {view.text}" if view.text else ""
    lines = [fit((f"{view.name}: {view.state}{text}", f"{view.name}: {view.state}"), width)]
    bar = draw_bar(view.step / view.steps if view.steps else 1.0, console.stream)
    lines.append(fit((f"{bar}  {_place(view)}", _place(view)), width))
    lines += _packed(_numbers(view), width)
    for note in view.notes[-2:]:
        lines += wrap(note, width).split("\n")
    sample = _sample(view, width)
    rows = min(16, height - len(lines) - len(sample) - 6)
    loss, held_out = view.curves["loss"].finite(), view.curves["val_loss"].finite()
    if rows >= 4 and len(loss) > 1:
        figure, title = losses_of(loss, held_out), "Loss; line: training, smoothed; o: held-out"
        lines += ["", fit((title, "Loss"), width)]
        lines += draw(figure, figure.panels[0], width, rows, ascii_only).split("\n")
    return [*lines, *sample]


def _place(view: "RunView") -> str:
    """-> step 1,200 of 3,000 (40%), 1:23 so far, 2:05 left"""
    step, steps = view.step, view.steps
    place = f"step {step:,} of {steps:,} ({step / steps:.0%})" if steps else f"step {step:,}"
    if view.seconds:
        place += f", {duration(view.seconds)} so far"
        if steps and view.state == "running":
            place += f", {duration(view.seconds / max(1, step) * max(0, steps - step))} left"
    return place


def _packed(parts: list[str], width: int) -> list[str]:
    """Returns lines of as many parts as fit, each part whole, if that is possible."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(GAP) + len(part) <= width:
            lines[-1] += GAP + part
        else:
            lines += wrap(part if not lines else INDENT + part, width).split("\n")
    return lines


def _numbers(view: "RunView") -> list[str]:
    """Returns the latest numbers of the run."""
    curves = {name: curve.finite() for name, curve in view.curves.items()}
    latest = {name: curve.values[-1] for name, curve in curves.items() if len(curve)}
    parts = []
    if "loss" in latest:
        parts.append(f"training loss {latest['loss']:.4f}")
    if "val_loss" in latest:
        best = view.best
        lowest = f" (best {best['val_loss']:.4f}, step {best['step']:,})" if best else ""
        parts.append(f"held-out loss {latest['val_loss']:.4f}{lowest}")
    if math.isfinite(final := number((view.final or {}).get("final_loss"))):
        parts.append(f"final held-out loss {final:.4f}")
    if "lr" in latest:
        parts.append(f"lr {latest['lr']:.1e}")
    if "tokens_per_second" in latest:
        parts.append(f"{latest['tokens_per_second']:,.0f} tokens/s")
    if "peak_memory" in latest:
        parts.append(f"peak memory {format_bytes(int(latest['peak_memory']))}")
    return parts or ["Nothing logged yet."]


def _sample(view: "RunView", width: int) -> list[str]:
    """Returns the beginning of the latest text that the model wrote."""
    samples = view.samples()
    if not samples:
        return []
    step, text = samples[-1]
    lines = [line for x in text.strip().split("\n") for line in wrap(x, width, "").split("\n")]
    shown = lines[:SAMPLE_LINES]
    return ["", f"Sample after step {step:,}:", *(line[:width] for line in shown)]

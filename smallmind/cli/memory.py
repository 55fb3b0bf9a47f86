"""The memory a run takes, what fits, and refusing a run that does not."""

import math
from typing import TYPE_CHECKING

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console
from smallmind.console.table import format_bytes
from smallmind.settings.config import Precision
from smallmind.settings.settings import Settings
from smallmind.settings.sources import flags_of

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.forecast.memory import MemoryPlan, TextSize
    from smallmind.losses.loss import Outline

WARNING_SHARE = 0.9  # of the free memory, above which there is a warning


def make_plan(
    settings: Settings, loss: "Outline | None" = None, text: "TextSize | None" = None
) -> "MemoryPlan":
    """Plans the run as train would start it, in a process like this one. Loads its kernels."""
    from smallmind.forecast.compiling import rehearse
    from smallmind.forecast.memory import MemoryPlan, Program
    from smallmind.forecast.threads import use_threads
    from smallmind.losses.loss import CROSS_ENTROPY
    from smallmind.nn.backend import resolve_precision

    run = settings.run
    if settings.training.requested_precision == Precision.AUTO:
        settings = settings.replace(precision=resolve_precision(Precision.AUTO, run.backend))
    use_threads(run)
    loss = loss or CROSS_ENTROPY
    rehearse(settings.model, settings.training, run.backend, loss)
    return MemoryPlan(settings, loss, text, Program.measured(text))


def free_bytes(plan: "MemoryPlan", processes: int = 1) -> int:
    """Returns the memory for a run: what is free for each process, and what this one holds."""
    from smallmind.memory.available import available_bytes

    return available_bytes() // processes + plan.held


def check_memory(console: Console, plan: "MemoryPlan", processes: int = 1) -> None:
    """Warns if the run barely fits. InputError, with advice, if it does not."""
    free, total = free_bytes(plan, processes), plan.estimate.total
    what = "this run" if processes == 1 else f"each of {processes} processes on this machine"
    left = "is free" if processes == 1 else "is free for each"
    if total > free:
        fitting = [change for change in plan.changes_to_fit(free) if change.total <= free]
        advice = " or ".join(f"{flags_of(c.settings)} ({format_bytes(c.total)})" for c in fitting)
        raise InputError(
            f"{what} needs {format_bytes(total)} of memory and {format_bytes(free)} {left}; "
            + (f"use {advice}" if advice else "no setting makes it fit: close other programs")
        )
    if total > WARNING_SHARE * free:
        console.warning(
            f"{what[0].upper()}{what[1:]} needs {format_bytes(total)} of the {format_bytes(free)} "
            f"{left.removeprefix('is ')}."
        )


def show_estimate(console: Console, plan: "MemoryPlan", memory: int | None, target: int) -> int:
    """Prints the memory that the plan takes, in parts, and what fits -> exit status."""
    available, estimate = memory or free_bytes(plan), plan.estimate
    parts = estimate.table()
    console.table(parts.title, parts.rows)
    fits = estimate.total <= available
    verdict = "Fits" if fits else "Does not fit"
    kind = "allowed" if memory else "free"
    console.line(
        f"{verdict}: {format_bytes(estimate.total)} needed, {format_bytes(available)} {kind}."
    )
    _show_what_fits(console, plan, available, target)
    return 0 if fits else 1


def _show_what_fits(console: Console, plan: "MemoryPlan", memory: int, target: int) -> None:
    """Shows the largest batch that fits and ways to reach the target, or what to change."""
    largest = plan.largest_batch(memory)
    if not largest:
        _show_changes(console, plan, memory)
        return

    def row(name: str, batch: int, micro_batch: int, **more: int) -> list[str]:
        return [name, flags_of({"batch_size": batch, "micro_batch_size": micro_batch, **more})]

    rows = [row("largest batch in one pass", largest, largest)]
    update = f"{target} sequences per update"
    together = plan.changed(batch_size=target).max_micro_batch(memory)
    if together:
        passes = math.ceil(target / together)
        count = count_of(passes, "pass", "passes")
        rows.append(row(f"{update}, {count}", target, together))
    batch = max(n for n in range(1, min(largest, target) + 1) if target % n == 0)
    steps = target // batch
    count = count_of(steps, "batch", "batches")
    rows.append(row(f"{update}, {count}", batch, batch, grad_accum_steps=steps))
    console.table("What fits", rows)
    console.line(
        "A batch goes through the model in micro-batches of --micro-batch-size\n"
        "sequences, by default of 2048 tokens. Memory hardly grows with the batch,\n"
        "and larger micro-batches are no faster."
    )


def _show_changes(console: Console, plan: "MemoryPlan", memory: int) -> None:
    """Shows the changes that would make one sequence fit, or bring it closer."""
    console.line("Not even one sequence fits.")
    changes = plan.changes_to_fit(memory)
    any_fits = any(change.total <= memory for change in changes)
    rows = []
    for change in changes:
        verdict = ["fits" if change.total <= memory else ""] if any_fits else []
        rows.append([flags_of(change.settings), *verdict, format_bytes(change.total)])
    if rows:
        console.table("Memory needed with other settings", rows)

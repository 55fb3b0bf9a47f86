"""What a run takes in memory, what fits, and the refusal of one that does not."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from smallmind.cli.console import Console, megabytes
from smallmind.config import InputError, ModelConfig, RunConfig, TrainingConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.training.memory_estimate import Teacher
    from smallmind.training.memory_plan import Plan

NEARLY = 0.9  # share of the free memory above which a run is warned of


def make_plan(
    model: ModelConfig, training: TrainingConfig, run: RunConfig, teacher: "Teacher | None"
) -> "Plan":
    """The run as train would start it."""
    from smallmind.nn.transformer import resolve_precision
    from smallmind.training.memory_plan import Plan

    precision = resolve_precision(training.requested_precision, run.backend)
    return Plan(model, dataclasses.replace(training, precision=precision), run, teacher)


def check_memory(console: Console, plan: "Plan") -> None:
    """InputError, with advice, where the run would not fit; a warning where it hardly does."""
    from smallmind.memory.available import available_bytes

    free, total = available_bytes(), plan.estimate.total
    if total > free:
        fitting = [way for way in plan.ways_to_fit(free) if way.total <= free]
        advice = " or ".join(f"{flags(w.settings)} ({megabytes(w.total)})" for w in fitting)
        raise InputError(
            f"this run would take {megabytes(total)} of memory and {megabytes(free)} are free; "
            + (f"give {advice}" if advice else "no setting makes it fit: free some memory")
        )
    if total > NEARLY * free:
        console.warning(f"The run takes {megabytes(total)} of the {megabytes(free)} that are free.")


def show_estimate(console: Console, plan: "Plan", memory: int | None, target: int) -> int:
    """What the plan takes, beside memory or what is free; what fits -> exit status."""
    from smallmind.memory.available import available_bytes

    memory, estimate = memory or available_bytes(), plan.estimate
    parts = [
        [name.replace("_", " ").replace("program", "the program itself"), megabytes(nbytes)]
        for name, nbytes in vars(estimate).items()
        if nbytes or name != "teacher"
    ]
    console.table("Memory", [*parts, ["total", megabytes(estimate.total)]])
    fits = estimate.total <= memory
    verdict = "It fits" if fits else "It does not fit"
    console.line(f"{verdict}: {megabytes(estimate.total)} of {megabytes(memory)}.")
    _show_what_fits(console, plan, memory, target)
    return 0 if fits else 1


def _show_what_fits(console: Console, plan: "Plan", memory: int, target: int) -> None:
    """The most windows at once and how they make up the target batch, or what to change."""
    from smallmind.training.memory_estimate import largest_at_once

    threads = plan.run.threads or 1
    most = largest_at_once(plan.model, plan.training, memory, threads, plan.teacher)
    if not most:
        _show_ways(console, plan, memory)
        return

    def row(name: str, batch: int, at_once: int, **more: int) -> list[str]:
        return [name, flags({"batch_size": batch, "micro_batch_size": at_once, **more})]

    rows = [row("largest batch at once", most, most)]
    update = f"{target} windows an update"
    together = plan.changed(batch_size=target).most_at_once(memory)
    if together:
        passes = math.ceil(target / together)
        rows.append(row(f"{update}; passes: {passes}", target, together))
    batch = max(n for n in range(1, min(most, target) + 1) if target % n == 0)
    steps = target // batch
    rows.append(row(f"{update}; accumulation steps: {steps}", batch, batch, grad_accum_steps=steps))
    console.table("What fits", rows)
    console.line(
        "A batch goes through the model --micro-batch-size at a time, by default as many as have "
        "2048 tokens:\nmemory hardly grows with it, and more windows at once are no faster."
    )


def _show_ways(console: Console, plan: "Plan", memory: int) -> None:
    """What would make one window at once fit, or bring it nearer."""
    console.line("Not one window fits at once.")
    rows = [
        [flags(way.settings), "fits" if way.total <= memory else "", megabytes(way.total)]
        for way in plan.ways_to_fit(memory)
    ]
    if rows:
        console.table("It would take with", rows)


def flags(settings: dict[str, Any]) -> str:
    """Fields of the configs and their values -> the flags that set them."""
    words = []
    for name, value in settings.items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return " ".join(words)

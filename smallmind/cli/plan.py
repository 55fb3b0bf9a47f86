"""Show how large a model to train on a text for some time, and the loss to expect.

Runs short trials on this machine, and extrapolates from their losses to longer runs.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, choices_of_run
from smallmind.console import activity
from smallmind.console.activity import duration
from smallmind.console.table import Table, format_bytes
from smallmind.runs.files import RUNS, paths_of
from smallmind.settings.rules import Choices
from smallmind.settings.sources import FIELDS, flags_of

if TYPE_CHECKING:
    from smallmind.forecast.budget import Size
    from smallmind.forecast.law import Trial
    from smallmind.forecast.memory import MemoryPlan
    from smallmind.runs.planning import Planned, Planner

SHOWN_MINUTES = 5.0, 20.0, 60.0, 240.0  # of the table
DEFAULT_MINUTES = 60.0
NEARLY_ALL_PASSES = 0.99  # of those that a run makes at most
TRIAL_SHARE = 0.1  # of the minutes of a run, for trials
MIN_TRIAL_MINUTES, MAX_TRIAL_MINUTES = 1.0, 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind plan`: those of train, and how long the trials may take."""
    add_training_flags(parser)
    group = parser.add_argument_group("Plan")
    group.add_argument(
        "--trials",
        type=float,
        metavar="MINUTES",
        help="minutes of trials in all; 0: none; default: a tenth of --minutes, from 1 to 10",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object, for programs")
    parser.epilog = (
        "Trials are kept in runs/plans, and finished runs on the same text count too: the more of "
        "them, the narrower the intervals. `smallmind train --minutes` uses them as well."
    )


def run(options: argparse.Namespace) -> int:
    """Makes the trials that are missing and prints the table."""
    from smallmind.cli.memory import check_memory, make_plan
    from smallmind.forecast.memory import TextSize
    from smallmind.runs.planning import Planner

    choices = choices_of_run(options)
    _ = choices.fields  # refuses a number of minutes that is out of range
    minutes = choices.chosen.get("minutes") or DEFAULT_MINUTES
    trials = options.trials
    if trials is None:
        trials = min(minutes, MAX_TRIAL_MINUTES, max(MIN_TRIAL_MINUTES, TRIAL_SHARE * minutes))
    if not 0 <= trials <= minutes:
        most = count_of(minutes, "minute")
        raise InputError(f"--trials {trials:g} must be from 0 to {most}, the length of a run")
    console = Console(sys.stderr) if options.json else Console()
    chosen = {name: x for name, x in choices.chosen.items() if name not in ("minutes", "out")}
    folder = Path(choices.chosen.get("out") or Path(RUNS) / "run").parent
    with activity.showing_on(console.activity):
        planner = Planner(dataclasses.replace(choices, chosen=chosen), folder=folder)
        prepared = planner.prepared
        text = TextSize.of(prepared.source.nbytes, prepared.data)
        memory = make_plan(prepared.settings, None, text)
        check_memory(console, memory)
        characters = f"{prepared.source.name}: {prepared.source.characters:,} characters"
        vocabulary = f"vocabulary of {prepared.tokenizer.vocab_size:,}"
        console.line(f"{characters}; {planner.unique:,} training tokens, {vocabulary}")
        if planner.outcomes:
            known = count_of(len(planner.outcomes) - planner.runs, "trial")
            console.line(f"Already available: {known}, {count_of(planner.runs, 'run')}")
        made = [_try(console, planner, planned) for planned in planner.planned(trials)]
        if planner.unkept:
            console.warning(f"Trials cannot be saved: {planner.unkept}")
        rows = {time: planner.sizes(time) for time in sorted({*SHOWN_MINUTES, minutes})}
        shown = [_described(planner, time, sizes, memory) for time, sizes in rows.items()]
    if trials and not (made or planner.outcomes):
        console.line(_why_none(planner, trials))
    if options.json:
        outcomes = [outcome._asdict() for outcome in planner.outcomes]
        found = {"minutes": shown, "law": planner.law(minutes).constants, "outcomes": outcomes}
        Console().piece(json.dumps(found, indent=2) + "\n")
        return 0
    _show(console, planner, shown, minutes)
    console.command("Next:", _next(options, choices, minutes))
    return 0


def _next(options: argparse.Namespace, choices: Choices, minutes: float) -> list[str]:
    """Returns the command line that trains for this time, with the flags of this one."""
    words = ["smallmind", "train", *map(str, paths_of(choices.chosen.get("text")))]
    for name in ("config", "preset", "arch", "size", "recipe"):
        if value := getattr(options, name):
            words += [f"--{name}", str(value)]
    flags = {name: x for name, x in vars(options).items() if name in FIELDS and name != "text"}
    for name, value in (flags | {"minutes": minutes}).items():
        words += flags_of({name: value}).split(" ", 1)
    return words


def _try(console: Console, planner: "Planner", planned: "Planned") -> "Trial":
    """Makes a trial and tells its outcome."""
    from smallmind.runs.planning import MAX_TRIALS

    fields, config = planned.settings.model, planned.settings.training
    size = f"{fields.n_layer} x {fields.n_embd}"
    with activity.doing(f"Running trial {planned.number} of at most {MAX_TRIALS}: {size}"):
        trial = planner.make(planned)
    drops = f", dropout {fields.dropout:g}" if fields.dropout else ""
    console.line(
        f"Trial {planned.number}: {size}{drops}, {count_of(config.steps, 'step')}, "
        f"{_count(trial.outcome.tokens)} tokens: final held-out loss {trial.outcome.loss:.4f}, "
        f"{duration(trial.seconds)}"
    )
    return trial


def _why_none(planner: "Planner", trials: float) -> str:
    from smallmind.forecast.pace import MAX_PASSES
    from smallmind.runs.planning import MIN_STEPS

    if planner.sizes(sys.maxsize)[0].updates < MIN_STEPS:
        return (
            f"No trials: {MAX_PASSES} passes over the text are fewer than {MIN_STEPS} steps, too "
            "few to learn from; give more text, or smaller batches"
        )
    return (
        f"No trials: {count_of(trials, 'minute')} are too short for enough steps; raise --trials, "
        "and --minutes with it"
    )


def _described(
    planner: "Planner", minutes: float, sizes: list["Size"], memory: "MemoryPlan"
) -> dict[str, Any]:
    """Returns a row of the table: the best size for a time, what it takes, and its neighbours."""
    from smallmind.forecast.budget import best

    size = best(sizes)
    index = sizes.index(size)
    return {
        "minutes": minutes,
        "settings": size.fields,
        "parameters": size.parameters,
        "tokens": size.tokens,
        "passes": size.passes,
        "steps": round(size.updates),
        "loss": size.loss,
        "interval": list(size.interval),
        "bytes": dataclasses.replace(memory, settings=planner.settings(size)).estimate.total,
        "smaller": sizes[index - 1].loss if index else None,
        "larger": sizes[index + 1].loss if index + 1 < len(sizes) else None,
    }


def _show(console: Console, planner: "Planner", rows: list[dict[str, Any]], minutes: float) -> None:
    from smallmind.forecast.pace import MAX_PASSES
    from smallmind.runs.planning import MIN_STEPS

    heads = ["minutes", "model", "tokens", "passes", "loss", "90% interval", "memory"]
    heads += ["smaller", "larger"]
    lines = []
    for row in rows:
        fields, (low, high) = row["settings"], row["interval"]
        lines.append(
            [
                f"{row['minutes']:g}",
                f"{fields['n_layer']} x {fields['n_embd']}, {_count(row['parameters'])}",
                _count(row["tokens"]),
                f"{row['passes']:.3g}",
                f"{row['loss']:.3f}",
                f"{low:.3f}-{high:.3f}",
                format_bytes(row["bytes"]),
                *("-" if row[name] is None else f"{row[name]:.3f}" for name in heads[-2:]),
            ]
        )
    console.line()
    console.drawing(Table("", lines, heads, ">" + "<" + ">" * 7).columns())
    known = f"Fitted to {count_of(len(planner.outcomes), 'outcome')}"
    if not planner.outcomes:
        known = "No trials or runs on this text yet: these are guesses from other texts"
    console.line(
        "Expected held-out loss in nats per token, with a 90% interval; smaller, larger: loss of "
        f"the neighbouring sizes. {known}. For N parameters and D tokens, in "
        f"{count_of(minutes, 'minute')}:"
    )
    console.line(f"loss = {planner.law(minutes)}")
    if rows[0]["steps"] < MIN_STEPS:
        console.line(
            f"A run of {count_of(rows[0]['minutes'], 'minute')} has only "
            f"{count_of(rows[0]['steps'], 'step')} here: with fewer than {MIN_STEPS}, expect a "
            "higher loss"
        )
    if rows[-1]["passes"] > NEARLY_ALL_PASSES * MAX_PASSES:
        console.line(
            f"Runs end after {MAX_PASSES} passes over the text: beyond that, only more text helps"
        )


def _count(number: float) -> str:
    from smallmind.cli.runs import format_count

    return format_count(round(number))

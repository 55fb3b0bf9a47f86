"""Show which model a text and the time are enough for, and how good it will be.

Makes short trials on this machine, and tells from their losses what longer runs would reach.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.cli.flags import add_training_flags, choices_of_run
from smallmind.console import activity
from smallmind.console.activity import duration
from smallmind.console.table import Table, format_bytes

if TYPE_CHECKING:
    from smallmind.runs.budget import Size
    from smallmind.runs.planning import Planned, Planner

MINUTES = 5.0, 20.0, 60.0, 240.0  # of the table
USUAL = 60.0
MANY = 0.99  # of the passes that a run makes at most
TRIALS, FEWEST, MOST = 0.1, 1.0, 10.0  # minutes of trials: a share of those of the run, limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `smallmind plan`: those of train, and how long the trials may take."""
    add_training_flags(parser)
    group = parser.add_argument_group("Plan")
    group.add_argument(
        "--trials",
        type=float,
        metavar="MINUTES",
        help="of trials in all, 0 for none; default: a tenth of --minutes, from 1 to 10",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object, for programs")
    parser.epilog = (
        "Trials are kept in runs/plans, and finished runs on the same text count as well: the more "
        "there are, the surer the table is. `smallmind train --minutes` chooses by what is known."
    )


def run(options: argparse.Namespace) -> int:
    """Makes the trials that are missing and prints the table."""
    from smallmind.runs.planning import Planner

    choices = choices_of_run(options)
    minutes = choices.given.get("minutes") or USUAL
    trials = options.trials
    if trials is None:
        trials = min(MOST, max(FEWEST, TRIALS * minutes))
    if not 0 <= trials <= minutes:
        raise InputError(f"--trials {trials:g} must be from 0 to the {minutes:g} minutes of a run")
    _ = choices.fields  # refuses a number of minutes that is out of range
    console = Console(sys.stderr) if options.json else Console()
    given = {name: x for name, x in choices.given.items() if name not in ("minutes", "out")}
    with activity.showing_on(console.activity):
        planner = Planner(type(choices)(given, choices.recipe, is_default=choices.is_default))
        _introduce(console, planner)
        if trials:
            for planned in planner.planned(trials):
                _try(console, planner, planned)
        rows = {time: planner.sizes(time) for time in sorted({*MINUTES, minutes})}
        shown = [_described(planner, time, sizes) for time, sizes in rows.items()]
    if options.json:
        outcomes = [outcome._asdict() for outcome in planner.outcomes]
        found = {"minutes": shown, "law": planner.law.constants, "outcomes": outcomes}
        Console().piece(json.dumps(found, indent=2) + "\n")
        return 0
    _show(console, planner, shown)
    text = [str(path) for path in choices.given.get("text") or ()]
    console.command("Next:", ["smallmind", "train", *text, "--minutes", f"{minutes:g}"])
    return 0


def _introduce(console: Console, planner: "Planner") -> None:
    data, known = planner.prepared, len(planner.outcomes) - planner.runs
    tokens = f"{planner.unique:,} tokens to learn from, {data.tokenizer.vocab_size} different ones"
    console.line(f"{data.source.name}: {data.source.characters:,} characters; {tokens}")
    if planner.outcomes:
        runs = "1 run" if planner.runs == 1 else f"{planner.runs} runs"
        console.line(f"Known from before: {known} trials, {runs}")


def _try(console: Console, planner: "Planner", planned: "Planned") -> None:
    """Makes a trial and tells its outcome."""
    from smallmind.runs.planning import COUNT

    fields, config = planned.settings.model, planned.settings.training
    what = f"Trial {planned.number} of {COUNT}: {fields.n_layer} x {fields.n_embd}"
    with activity.doing(what, usual=True):
        trial = planner.make(planned)
    drops = f", dropout {fields.dropout:g}" if fields.dropout else ""
    console.line(
        f"{what}{drops}, {config.steps:,} steps, {_count(trial.outcome.tokens)} tokens: "
        f"loss {trial.outcome.loss:.4f}, {duration(trial.seconds)}"
    )


def _described(planner: "Planner", minutes: float, sizes: list["Size"]) -> dict[str, Any]:
    """A row of the table: the best size for a time, what it takes, and its neighbours."""
    from smallmind.cli.memory import make_plan
    from smallmind.runs.budget import best
    from smallmind.runs.scaling import SURE
    from smallmind.training.memory_estimate import TextSize

    size = best(sizes)
    half = SURE * size.deviation * size.loss
    place = sizes.index(size)
    settings, prepared = planner.settings(size), planner.prepared
    memory = make_plan(settings, None, TextSize.of(prepared.source.nbytes, prepared.data))
    neighbours = {"smaller": place - 1, "larger": place + 1}
    return {
        "minutes": minutes,
        "settings": size.fields,
        "parameters": size.parameters,
        "tokens": size.tokens,
        "passes": size.passes,
        "loss": size.loss,
        "interval": [size.loss - half, size.loss + half],
        "bytes": memory.estimate.total,
        **{name: sizes[i].loss if 0 <= i < len(sizes) else None for name, i in neighbours.items()},
    }


def _show(console: Console, planner: "Planner", rows: list[dict[str, Any]]) -> None:
    from smallmind.runs.pace import MAX_PASSES

    heads = ["minutes", "model", "tokens", "passes", "loss", "", "memory", "smaller", "larger"]
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
                f"+-{(high - low) / 2:.3f}",
                format_bytes(row["bytes"]),
                *("-" if row[name] is None else f"{row[name]:.3f}" for name in heads[-2:]),
            ]
        )
    console.line()
    console.drawing(Table("", lines, heads, ">" + "<" + ">" * 7).columns())
    count = len(planner.outcomes)
    outcomes = "1 outcome" if count == 1 else f"{count} outcomes"
    console.line(
        "Losses on held-out text, in nats per token, with the interval that 9 of 10 runs end in; "
        f"smaller and larger: the next sizes. From {outcomes}, for N parameters and D tokens:"
    )
    console.line(f"loss = {planner.law}")
    if rows[-1]["passes"] > MANY * MAX_PASSES:
        console.line(
            f"A run ends after {MAX_PASSES} passes over the text: then more text helps, more time "
            "does not"
        )


def _count(number: float) -> str:
    from smallmind.cli.runs import format_count

    return format_count(round(number))

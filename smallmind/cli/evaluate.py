"""Measure how well a trained model predicts a text, or how it does on tasks."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import InputError
from smallmind.cli.console import Console, shorten
from smallmind.cli.flags import (
    MODEL_OR_RUN,
    add_checkpoint,
    add_form,
    add_precision,
    add_run,
    asked_form,
    form_of,
    run_of,
)
from smallmind.console import activity

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.nn.transformer import TransformerModel
    from smallmind.runs.source import Source
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.evaluation import Evaluation

MOST_ASKED = 1000  # held-out questions
TASKS = {
    "pairs": "items with a good and a bad sentence; correct if the good one is likelier",
    "choices": "items with a context, choices and an answer; correct if the answer is the "
    "likeliest choice, as a whole, per character or per byte",
    "exact": "items with a prompt and an answer; correct if the model writes that answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind evaluate`."""
    add_run(parser, f"{MODEL_OR_RUN}; must be a run if neither TEXT nor tasks are given")
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="another text; default: the run's held-out part"
    )
    add_checkpoint(parser)
    add_precision(
        parser,
        "several, separated by commas, are compared, and shown in the report of the run",
    )
    parser.add_argument(
        "--unknown",
        choices=("refuse", "skip"),
        default="refuse",
        help="if TEXT has characters that the model does not know: refuse the text, or skip and "
        "count them; in tasks, skip the items that contain any (refuse)",
    )
    group = parser.add_argument_group(
        "Tasks",
        "Files in .jsonl, .json, .csv or .tsv, optionally .gz, instead of TEXT. `smallmind guide "
        "evaluating` lists their fields. The run keeps its last 100 results, for `report` and "
        "`compare`.",
    )
    for kind, about in TASKS.items():
        group.add_argument(f"--{kind}", type=Path, metavar="FILE", help=about)
    group.add_argument(
        "--group-by",
        metavar="FIELD",
        help="field whose values are the rows of the table; default: group, paradigm, UID, task, "
        "subset, category, subject or type, if there is one",
    )
    group.add_argument("--json", action="store_true", help="print a line of JSON for each file")
    add_form(parser)


def run(options: argparse.Namespace) -> int:
    """Prints a table of the loss and what follows from it, or of the losses by precision."""
    if options.run_flag and options.run_name and not options.text:
        options.run_name, options.text = None, str(options.run_name)  # evaluate --run RUN TEXT
    if (form := asked_form(options)) and not options.exact:
        raise InputError(f"--{form} constrains generated text: add --exact FILE")
    if any(vars(options)[kind] for kind in TASKS):
        return _run_tasks(options)
    if options.json or options.group_by:
        flag = "--json" if options.json else "--group-by"
        raise InputError(
            f"{flag} is for tasks: add {' or '.join(f'--{kind} FILE' for kind in TASKS)}"
        )
    from smallmind.cli.display import floor_of_stories, format_perplexity, token_name
    from smallmind.corpus.preparation import Encoding
    from smallmind.exchange.stored import find
    from smallmind.runs.loading import missing_from
    from smallmind.runs.precisions import PrecisionLoss, PrecisionTable, losses_of
    from smallmind.runs.run import Run
    from smallmind.runs.source import read_source, recognising
    from smallmind.text.conversations import PackedDataset
    from smallmind.training.answers import ask
    from smallmind.training.evaluation import evaluate_held_out, evaluate_tokens

    console, left_out = Console(), ""
    path = run_of(options)
    given = options.precision  # one of them if it was left out
    precisions = given if isinstance(given, list) else [given]
    is_run = _is_run(path)
    if not (is_run or options.text):
        raise InputError(
            f"{path} is a bare model: name the text to evaluate, e.g. `evaluate MODEL book.txt`"
        )
    with activity.showing_on(Console(sys.stderr).activity):
        if is_run and (missing := missing_from(path)):
            raise InputError(missing)
        opened = Run.open(path) if is_run else None
        found = find(path, options.checkpoint, options.adapter)
        model, tokenizer = found.load(precision=precisions[0])
        run = recognising(opened.settings.run) if opened else None
        encoding = Encoding(tokenizer, chosen_separator=run.text_separator if run else None)
        source = read_source(options.text, run, encoding) if options.text else None
        is_own = opened is not None and (
            source is None or source.sha256 == opened.files.config.text_sha256
        )
        data = opened.data.as_written() if opened and is_own else None
        if source and not data:
            data = source.whole(tokenizer, model.config.block_size)
        if not data:
            assert source  # a file needs a text
            source, left_out = _known(source, tokenizer, options.unknown)
            tokens = source.tokens(tokenizer)

        def evaluated(model: "TransformerModel") -> "Evaluation":
            if data:
                return evaluate_held_out(model, data)
            return evaluate_tokens(model, tokenizer, tokens)

        result = evaluated(model)
        asked = ask(0, model, data, MOST_ASKED) if isinstance(data, PackedDataset) else None
        losses = [PrecisionLoss.of(model, result)]
        del model  # one at a time
        losses += losses_of(found, evaluated, precisions[1:])
    compared = PrecisionTable(found.name, tuple(losses))
    if opened and is_own and len(losses) > 1:
        compared.save(path)
    if source and not is_own:
        part = f"{shorten(source.name)}, all of it (not the run's own text)"
    elif opened:
        part = f"{shorten(opened.files.name)}, the held-out part"
    token = token_name(tokenizer.kind)
    rows = [
        ["model", found.name],
        ["text", part],
        *([["skipped", left_out]] if left_out else []),
        *([["precision", losses[0].precision]] if precisions != ["float32"] else []),
        ["tokens predicted", f"{result.tokens:,}"],
        ["held-out loss" if is_own else "loss", f"{result.loss:.4f} nats per token"],
        ["", f"{result.bits_per_character:.4f} bits/char"],
        ["", f"{result.bits_per_byte:.4f} bits/byte"],
        ["perplexity", format_perplexity(result.perplexity)],
        [f"next-{token} accuracy", f"{result.accuracy:.1%}"],
    ]
    if asked:
        right = round(asked.exact_match * asked.asked)
        rows.append(["exact answers", f"{right:,} of {asked.asked:,}"])
    elif opened and is_own and opened.settings.run.text is None:
        floor, excess = floor_of_stories(result)
        rows.append(["entropy of the stories", f"{floor:.4f} nats per character"])
        rows.append(["above that limit", f"{excess:.4f} nats"])
    console.table("Evaluation", rows)
    if len(losses) > 1:
        console.line(str(compared.table()))
    return 0


def _is_run(path: Path) -> bool:
    """Returns True for a directory that no other program has written."""
    from smallmind.exchange.format import find_external
    from smallmind.exchange.peft import find_peft

    return path.is_dir() and not (find_external(path) or find_peft(path))


def _run_tasks(options: argparse.Namespace) -> int:
    """Prints a table for each file of a task, or a line of JSON."""
    if options.text:
        raise InputError("tasks come from their own files: leave out TEXT, or evaluate it alone")
    if len(options.precision or ()) > 1:
        raise InputError("tasks take one --precision at a time")
    from smallmind.exchange.stored import find
    from smallmind.runs.files import TASKS as KEPT
    from smallmind.tasks.task import evaluate_task

    console, notes = Console(), Console(sys.stderr)
    (precision,) = options.precision or ["float32"]
    options.precision = [precision]  # other programs compute in float32 too
    path = run_of(options)
    is_run = _is_run(path) and not options.adapter
    with activity.showing_on(notes.activity):
        found = find(path, options.checkpoint, options.adapter)
        model, tokenizer = found.load(precision=precision)
        for kind in TASKS:
            if (file := vars(options)[kind]) is None:
                continue
            skips = options.unknown == "skip"
            form = form_of(options, tokenizer) if kind == "exact" else None
            result = evaluate_task(
                model, tokenizer, kind, file, options.group_by, skips, found.name, form
            )
            if options.json:
                console.piece(json.dumps(result.as_json()) + "\n")
            else:
                console.line(f"{result.title}, {result.model}, {result.precision}")
                console.line()
                console.drawing(result.table().columns())
                console.line()
                for note in result.notes:
                    console.line(note)
            try:
                if is_run:
                    result.keep(path / KEPT)
            except OSError as error:  # after it has been shown: it may have taken long
                notes.warning(f"This result cannot be saved with the run: {error}")
    return 0


def _known(source: "Source", tokenizer: "Tokenizer", unknown: str) -> tuple["Source", str]:
    """A text -> the text without the characters that the model does not know, and a list of them.

    InputError if there are any, unless they are to be skipped.
    """
    characters = source.unknown(tokenizer)
    if not characters:
        return source, ""
    known = source.without(characters)
    count = source.characters - known.characters
    found = f"{count:,} character{'s' if count > 1 else ''}"
    shown = ", ".join(map(repr, characters[:5])) + (", ..." if len(characters) > 5 else "")
    if unknown != "skip":
        raise InputError(
            f"{shorten(source.name)} has {found} that the model has never seen: {shown}; skip "
            f"{'them' if count > 1 else 'it'} with --unknown skip, or retrain with --tokenizer "
            "bpe, which handles any text"
        )
    return known, f"{found}: {shown}"

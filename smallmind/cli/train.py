"""Train a model on a text, or resume a run."""

import argparse
import dataclasses
import functools
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import InputError, count_of
from smallmind.cli import check
from smallmind.cli.console import Console, shorten
from smallmind.cli.flags import (
    add_training_flags,
    check_writable,
    choices_of_run,
    find_run,
    neutral_of,
)
from smallmind.cli.parallel import in_parallel
from smallmind.console import activity
from smallmind.console.live_line import can_print
from smallmind.console.table import BOX, Table
from smallmind.parallel.environment import launched
from smallmind.settings.config import NEUTRAL
from smallmind.settings.settings import CHOSEN, new_files
from smallmind.settings.sources import FIELDS, flag_of

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.parallel.group import Group
    from smallmind.runs.run import Run
    from smallmind.settings.rules import Choices

VALUE_WIDTH = 28  # characters of a value in a table of settings
STUDENT_SHARE = 0.6  # of the time, if a run takes less than that, a student is worth training
OTHER_MASKS = ("0.1.0",)  # versions whose dropout masks were different


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind train`."""
    parser.epilog = (
        "Several processes can share each batch: mpiexec -n 4 smallmind train ... Ctrl-C or "
        "SIGTERM to mpiexec saves and ends the run. Open MPI kills its processes shortly after "
        "these signals: send it SIGUSR1 instead, which every MPI passes on."
    )
    parser.add_argument("--dry-run", action="store_true", help="only check, as `smallmind check`")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="only print the settings that differ from the defaults, each with the rule, preset, "
        "file or flag that sets it",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="resume a run, named by its directory or its name in runs/; no other flags needed; "
        "auto: the newest unfinished run in runs/",
    )
    parser.add_argument(
        "--generations",
        type=int,
        metavar="N",
        help="train N models one after another, each from scratch with the one before as its "
        "teacher, and divide --minutes among them: for a text that one model would read more than "
        "30 times. The last one is in --out; repeat the command to continue after an interrupt",
    )
    parser.add_argument(
        "--after-save",
        metavar="COMMAND",
        help="run a command after each save, without a shell; {} in it is replaced by the path of "
        "the checkpoint; otherwise it is passed as the last argument. A failure only prints a "
        "warning",
    )
    add_training_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Trains and shows the progress -> exit status."""
    return in_parallel(options, functools.partial(_run, options, activity.clock()))


def _run(options: argparse.Namespace, start: float, group: "Group") -> int:
    for flag in ("profile_json", "profile_speedscope"):
        if file := getattr(options, flag):
            check_writable(f"--{flag.replace('_', '-')}", Path(file))
    if options.after_save is not None:
        from smallmind.training.after_save import AfterSave

        AfterSave(options.after_save)  # InputError before anything is read
    if options.resume:
        return _resume(options, start, group)
    if options.dry_run:
        return check.run(options)
    if options.explain:
        return _explain(options)
    from smallmind.parallel.shards import DEFAULT_SHARDS
    from smallmind.runs.parallel import Leader
    from smallmind.runs.run import Run

    console = Console(defer_errors=True)
    with activity.showing_on(console.activity):
        choices = choices_of_run(options)
        if launched() and choices.chosen.get("data_shards") is None:
            choices = choices.having(data_shards=DEFAULT_SHARDS)
        for name, file in new_files(choices.chosen).items():
            check_writable(flag_of(name), file)
        if options.generations is not None:
            return _train_generations(console, choices, options, start, group)
        created = Run.of(choices)
        created.session.join(Leader(group))
        return _train_new(console, created, options, start)


def _train_new(console: Console, created: "Run", options: argparse.Namespace, start: float) -> int:
    """Trains a run that has just been created -> exit status."""
    try:
        _build(console, created)
        return _train(console, created, options, start)
    finally:
        created.discard_untrained()


def _train_generations(
    console: Console,
    choices: "Choices",
    options: argparse.Namespace,
    start: float,
    group: "Group",
) -> int:
    """Trains one run after another, each as the teacher of the next -> exit status."""
    from smallmind.runs.generations import directories, generations
    from smallmind.runs.parallel import Leader

    if options.generations < 2:
        raise InputError(f"--generations {options.generations} must be at least 2")
    paths, status = directories(choices, options.generations), 0
    with closing(generations(choices, paths, start)) as each:
        for number, (run, is_new) in enumerate(each, 1):
            title = f"Generation {number} of {len(paths)}"
            if not is_new and run.is_finished:
                console.line(f"{title} is finished: {run.path}")
                continue
            console.line(f"\n{title}\n")
            run.session.join(Leader(group))
            begun = start if number == 1 else activity.clock()
            if is_new:
                status = _train_new(console, run, options, begun)
            else:
                run.lock()
                try:
                    status = _continue(console, run, options, begun)
                finally:
                    run.unlock()
            if not run.is_finished:
                out = "" if choices.chosen.get("out") else f" with --out {paths[-1]}"
                console.line(f"Repeat the command{out} to continue with {title.lower()}.")
                return status
    _show_generations(console, paths)
    _show_next(console, run)
    return status


def _show_generations(console: Console, paths: Sequence[Path]) -> None:
    """Prints the loss of each generation, and which one is best if that is not the last."""
    from smallmind.runs.metrics import read_metrics

    losses = [read_metrics(path).curve("final_loss").values[-1] for path in paths]
    rows = [[str(i), str(path), f"{losses[i - 1]:.4f}"] for i, path in enumerate(paths, 1)]
    console.line()
    heads = ["generation", "run", "held-out loss"]
    console.drawing(Table("", rows, heads, "><>").columns())
    if (least := min(losses)) < losses[-1]:
        best = paths[losses.index(least)]
        console.line(f"The last generation is not the best: use {best}, or fewer generations")


def _explain(options: argparse.Namespace) -> int:
    """Prints where the settings of a new run come from; writes nothing -> exit status."""
    from smallmind.runs.creating import prepare

    console = Console()
    with activity.showing_on(console.activity):
        settings = prepare(choices_of_run(options)).settings
    origins, values = settings.explain(), settings.fields
    rows = []
    for name, origin in origins.items():
        flag = "TEXT" if name == "text" else flag_of(name)
        value = f"{x:.6g}" if isinstance(x := values[name], float) else str(x)
        rows.append([name, shorten(value, VALUE_WIDTH), flag if origin == CHOSEN else origin.by])
    console.drawing(Table("", rows, ["setting", "value", "set by"], "<<<").columns())
    console.line()
    for by, why in sorted({origin for origin in origins.values() if origin.why}):
        console.line(f"{by}: {why}")
    console.line("All other settings are at their defaults, shown by --help.")
    return 0


def _resume(options: argparse.Namespace, start: float, group: "Group") -> int:
    """Continues a run; only its length and what does not affect the result may change."""
    changeable = ("text", "threads", "steps", "epochs", *NEUTRAL)
    fixed = [name for name in vars(options) if name in FIELDS and name not in changeable]
    named = options.recipe, options.size, options.arch, options.preset, options.config
    if fixed or any(named) or options.dry_run or options.explain or options.generations:
        raise InputError(
            "--resume takes all settings from the run, except --steps to make it longer and the "
            "paths of a text that has moved; leave out the other flags"
        )
    from smallmind.runs.parallel import Leader
    from smallmind.runs.run import Run

    console = Console(defer_errors=True)
    is_chosen = options.resume != "auto"
    opened = Run.open(find_run(Path(options.resume))) if is_chosen else Run.unfinished()
    for reason in opened.passed_over:
        console.line(f"Skipping a newer run: {reason}")
    opened.session.join(Leader(group))
    opened.lock()
    try:
        return _continue(console, opened, options, start)
    finally:
        opened.unlock()


def _continue(console: Console, opened: "Run", options: argparse.Namespace, start: float) -> int:
    """Trains a locked run to its end, or does what is missing there -> exit status."""
    threads = {"threads": options.threads} if "threads" in options else {}
    if "text" in options:
        opened.files.move_text(options.text)
    opened.files.check_text()
    opened.change(**threads, **neutral_of(options))
    try:
        newest = opened.newest()
    finally:
        for file, reason in opened.files.skipped_checkpoints:
            console.warning(f"Skipping {file.name}: {reason}")
    length = {name: getattr(options, name) for name in ("steps", "epochs") if name in options}
    if length:
        opened.extend(**length)
    step = newest.step if newest else 0
    if opened.is_finished:
        console.line(f"The run is finished: {count_of(step, 'step')}")
        console.line(f"The run is in {opened.path}")
        longer = ["smallmind", "train", "--resume", str(opened.path), "--steps", str(2 * step)]
        console.command("To train longer:", longer)
        return 0
    begun_by = newest.state.get("smallmind") if newest else None
    if opened.settings.model.dropout and begun_by in OTHER_MASKS:
        console.line(f"Dropout now drops different elements than in smallmind {begun_by}")
    with activity.showing_on(console.activity):
        _build(console, opened)
        resuming = f"Resuming after step {step}" if step else "Starting over: no checkpoint yet"
        if length:
            steps = count_of(opened.settings.training.steps, "step")
            resuming += f", with the learning rate schedule of a run of {steps}"
        return _train(console, opened, options, start, resuming)


def _build(console: Console, run: "Run") -> None:
    """Builds the model, unless it would not fit in memory; announces what takes long."""
    from smallmind.cli.memory import check_memory, make_plan
    from smallmind.forecast.memory import TextSize
    from smallmind.runs.assembly import outline_of

    loss = outline_of(run.settings, run.data.tokenizer)
    plan = make_plan(run.settings, loss, TextSize.of(run.files.source.nbytes, run.data))
    check_memory(console, plan, run.session.leader.neighbours)
    run.training  # noqa: B018


def _fit(console: Console, run: "Run", end: float) -> bool:
    """Chooses the number of steps of a run with --minutes -> False if it was stopped meanwhile."""
    from smallmind.cli.describe import model_for_minutes
    from smallmind.cli.display import LONGER_MEMORISES

    with activity.doing("Timing a few steps"):
        timed = run.session.fit_steps(end)
    if timed is None:
        return False
    (pace, left), config = timed, run.settings.training
    console.line(model_for_minutes(run.settings))
    console.line(
        f"{count_of(config.steps, 'step')} fit in the remaining {left:.0f} s "
        f"({_seconds(pace.step)} each), after {_seconds(pace.evaluation)} per evaluation and "
        f"{_seconds(pace.end)} at the end; their number is adjusted as the run goes"
    )
    if (total := pace.total(config)) < 0.9 * left:
        console.line(f"The run will end early: {LONGER_MEMORISES}")
        if total < STUDENT_SHARE * left and _can_teach(run):
            console.line(
                "--generations 2 uses the rest of the time: a second model learns from the text "
                "and from the first, and predicts better"
            )
    return True


def _can_teach(run: "Run") -> bool:
    """-> False for a student, adaptation or conversations, which a second model is not for."""
    is_plain = run.settings.loss[0] == "cross-entropy" and not run.settings.run.init_from
    return is_plain and not run.files.source.is_chat


def _seconds(value: float) -> str:
    """-> "1.07 s", "35 ms"."""
    return f"{1000 * value:.3g} ms" if value < 0.1 else f"{value:.3g} s"


def _train(
    console: Console,
    run: "Run",
    options: argparse.Namespace,
    start: float,
    resuming: str | None = None,
) -> int:
    """Trains to the end or an interrupt, minutes counted from `start` -> exit status."""
    from smallmind.cli.describe import describe
    from smallmind.cli.display import show_result

    minutes = run.settings.run.minutes
    if run.files.config.awaits_timing and minutes and not _fit(console, run, start + 60 * minutes):
        console.line("Interrupted while steps were being timed; nothing has been trained.")
        return 128 + signal.SIGTERM  # which another process has got
    describe(console, run)
    if resuming:
        console.line(resuming)
    with _profiling(console, run, options):
        status = _show_steps(console, run, options.after_save)
    for line in run.training.loss.last_words():
        console.line(line)
    is_finished = run.sample is not None  # it comes last, perhaps after a signal
    if is_finished:
        show_result(console, run)
        console.line("\nSample:")
        console.quote(run.sample or "")
    console.line(f"The run is in {run.path}")
    if options.generations is not None:
        return status  # what comes next depends on the others
    if is_finished:
        _show_next(console, run)
    else:
        console.command("Next:", ["smallmind", "train", "--resume", str(run.path)])
    return status


def _show_next(console: Console, run: "Run") -> None:
    """Prints the command that uses a finished run, and any error of the output."""
    if run.files.source.is_chat:
        console.command("Next:", ["smallmind", "chat", str(run.path)])
    else:
        prompt = _suggested_prompt(run.files.source.beginning)
        flags = ["--prompt", prompt] if prompt else []
        console.command("Next:", ["smallmind", "generate", str(run.path), *flags])
    console.check()


def _show_steps(console: Console, run: "Run", after_save: str | None) -> int:
    """Trains and shows each record -> exit status."""
    from smallmind.cli.display import (
        ProgressDisplay,
        show_costs,
        show_looks,
        show_losses,
        show_minutes,
        show_usage,
        token_name,
    )
    from smallmind.cli.signals import stopping_on_signals

    unit = run.training.loss.unit
    token = token_name(run.training.tokenizer.kind) if unit == "token" else unit
    progress = ProgressDisplay(console, run.settings.training.steps, token)
    run.training.on_step = progress.during_step
    records = run.session.steps(after_save)
    with stopping_on_signals(run, console) as received, closing(records) as steps:
        for record in steps:
            progress.progress.steps = run.settings.training.steps
            progress.show(record)
        show_losses(console, run)
        show_minutes(console, run)
        progress.show_health()
        show_looks(console, run.training)
        show_costs(console, run)
        if used := str(run.session.energy or ""):
            console.line(used)
        show_usage(console, run.training)
    if not received and (run.session.leader.size == 1 or run.sample is not None):
        return 0
    if run.sample is None:
        console.line(f"Interrupted after step {run.training.progress.step}; everything is saved.")
    return 128 + (received[0] if received else signal.SIGTERM)  # which another process has got


@contextmanager
def _profiling(console: Console, run: "Run", options: argparse.Namespace) -> Iterator[None]:
    """Wraps training: shows and writes what was measured at the end, if profiling is on."""
    if not run.settings.training.enable_diagnostics:
        yield
        return
    from smallmind.training.profiler import TrainingProfiler

    profiler = TrainingProfiler(
        keep_events=bool(options.profile_json or options.profile_speedscope)
    )
    run.training.profiler = profiler
    try:
        yield
    finally:
        ascii_only = not can_print(console.stream, BOX)
        console.drawing(profiler.report(options.profile_wide, ascii_only))
        if run.session.memory:
            console.drawing(run.session.memory.report(ascii_only))
        console.line(_about_recording(run))
        if options.profile_json:
            profiler.save_trace(options.profile_json)
            console.line(f"Wrote the trace to {options.profile_json}")
        if options.profile_speedscope:
            profiler.save_speedscope(options.profile_speedscope)
            console.line(f"Wrote the profile to {options.profile_speedscope}")


def _about_recording(run: "Run") -> str:
    """Returns why the steps of a profile were not repeated, and whether they are without it."""
    from smallmind.forecast.memory import why_not_repeated

    config = dataclasses.replace(run.settings.training, enable_diagnostics=False)
    reason = why_not_repeated(run.training, config)
    if reason:
        return f"Steps are not replayed from a recording: {reason}"
    return (
        "Steps were not replayed from a recording, because --profile times each kernel; without "
        "it they are, and run faster"
    )


def _suggested_prompt(text: str) -> str | None:
    """Returns the first two words of the text, if it starts with words."""
    words = "".join(c if c.isalnum() else " " for c in text[:200]).split()[:2]
    prompt = " ".join(words)
    return prompt if prompt and len(prompt) <= 40 and prompt in text else None

"""The command line, a caller of the library like any other."""

import argparse
import contextlib
import dataclasses
import hashlib
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.box import can_print, draw
from smallmind.config import (
    OBSERVING,
    SCHEDULES,
    GenerationConfig,
    InputError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    __version__,
)
from smallmind.console import Console, megabytes
from smallmind.display import (
    SAMPLE_TOKENS,
    Progress,
    describe,
    show_checks,
    show_costs,
    show_result,
    show_sample,
    suggested_prompt,
)
from smallmind.presets import FIELDS, PRESETS, SECTIONS, SIZES, Settings, resolve

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.memory.plan import Plan
    from smallmind.optim.schedule import Schedule
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.checkpoint import Checkpoint
    from smallmind.training.run_directory import RunDirectory
    from smallmind.training.training import Training

NO_FLAGS = ("vocab_size", "text", "enable_diagnostics")  # the last is --profile
SCHEDULE_FIELDS = (
    "steps", "learning_rate", "min_lr", "warmup_steps", "lr_decay_factor", "lr_decay_every",
    "lr_decay_share", "plateau_patience",
)  # fmt: skip
CURVE_POINTS = 2000  # of a plot, and the last step
NEARLY = 0.9  # share of the free memory above which a run is warned of
UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line arguments -> exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    Of estimate: 0 the run fits in memory, 1 it does not.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options) or 0)
    except InputError as error:
        print(f"smallmind: {error}", file=sys.stderr)
        return 2
    except (FloatingPointError, OSError) as error:
        print(f"smallmind: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"smallmind: not enough memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsmallmind: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smallmind", description="Train a small transformer on the CPU, and let it talk."
    )
    parser.add_argument("--version", action="version", version=f"smallmind {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model on a text")
    train.add_argument(
        "--dry-run", action="store_true", help="only check, as `smallmind check` does"
    )
    train.add_argument(
        "--resume", metavar="DIR",
        help="go on with the run in this directory, which needs no other flag; "
        "auto: the newest in runs that has not ended",
    )  # fmt: skip
    _add_training_flags(train)
    train.set_defaults(command=_train)

    check = commands.add_parser("check", help="see whether a run would learn, before it is started")
    _add_training_flags(check)
    check.set_defaults(command=_train, dry_run=True, resume=None)

    estimate = commands.add_parser(
        "estimate", help="show the memory that train would take, and what fits"
    )
    _add_training_flags(estimate)
    group = estimate.add_argument_group("What it shall fit")
    group.add_argument(
        "--vocab-size", type=int, default=argparse.SUPPRESS, metavar="N",
        help="distinct tokens; default: those of the text",
    )  # fmt: skip
    group.add_argument(
        "--memory", type=_size, metavar="SIZE", help="like 800MB or 1.5GiB; default: what is free"
    )
    group.add_argument(
        "--target-batch", type=int, default=64, metavar="N", help="windows an update (64)"
    )
    estimate.set_defaults(command=_estimate)

    generate = commands.add_parser("generate", help="let a trained model write")
    generate.add_argument("--run", required=True, metavar="DIR", help="the directory of the run")
    generate.add_argument(
        "--prompt", metavar="TEXT", help="what it goes on from; default: a new line"
    )
    for field in dataclasses.fields(GenerationConfig):
        _add_flag(generate, field)
    generate.set_defaults(command=_generate)

    evaluate = commands.add_parser("evaluate", help="measure a trained model on a whole text")
    evaluate.add_argument("--run", required=True, metavar="DIR", help="the directory of the run")
    evaluate.add_argument(
        "text", nargs="?", metavar="TEXT", help="another text; without it, the run's held-out part"
    )
    evaluate.set_defaults(command=_evaluate)

    schedule = commands.add_parser("schedule", help="show the learning rate over a run")
    schedule.add_argument(
        "--schedule", choices=SCHEDULES, default=argparse.SUPPRESS,
        help="one of them; default: all side by side",
    )  # fmt: skip
    for field in dataclasses.fields(TrainingConfig):
        if field.name in SCHEDULE_FIELDS:
            _add_flag(schedule, field)
    _add_sources(schedule)
    schedule.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves here")
    schedule.set_defaults(command=_schedule)

    export = commands.add_parser("export-metrics", help="write a run's metrics as a CSV table")
    export.add_argument("run", type=Path, metavar="RUN", help="the directory of the run")
    export.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="write here; default: the standard output"
    )
    export.set_defaults(command=_export_metrics)
    return parser


def _add_training_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "text", nargs="?", default=argparse.SUPPRESS, metavar="TEXT",
        help="a UTF-8 text file; without it, built-in stories",
    )  # fmt: skip
    _add_sources(command)
    for config in SECTIONS.values():
        title = (config.__doc__ or "").splitlines()[0].split(" (")[0].rstrip(".")
        group = command.add_argument_group(title)
        for field in dataclasses.fields(config):
            if field.name not in NO_FLAGS:
                _add_flag(group, field)
    group = command.add_argument_group("What is measured on the way")
    group.add_argument(
        "--profile", dest="enable_diagnostics", action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS, help="show at the end where time and memory went",
    )  # fmt: skip
    group.add_argument(
        "--profile-wide", action="store_true", help="the same with minimum, maximum and GB/s"
    )
    group.add_argument(
        "--profile-json", metavar="FILE", help="the same, and a trace that chrome://tracing shows"
    )


def _add_sources(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "Settings by name or from a file",
        "A file wins over --preset, a preset over --size, and any flag below over all three.",
    )
    shapes = ", ".join(f"{name} {s['n_layer']}x{s['n_embd']}" for name, s in SIZES.items())
    lengths = ", ".join(f"{name} of {s['steps']} steps" for name, s in PRESETS.items())
    group.add_argument("--size", choices=SIZES, help=f"layers x channels of the model: {shapes}")
    group.add_argument("--preset", choices=PRESETS, help=f"a run: {lengths}")
    group.add_argument(
        "--config", type=Path, metavar="FILE.toml",
        help="sections [model], [training], [run] with the flags' names, as in n_layer = 4; "
        "or a run's config.json, to train again like it",
    )  # fmt: skip


def _size(text: str) -> int:
    """800MB or 1.5GiB -> bytes."""
    words = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?i?B)", text.strip(), re.IGNORECASE)
    nbytes = int(float(words[1]) * UNITS.get(words[2].upper(), 0)) if words else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 800MB or 1.5GiB")
    return nbytes


def _add_flag(group: Any, field: "dataclasses.Field[Any]") -> None:
    flag = "--" + field.name.replace("_", "-")
    default = "" if field.default is None else f" ({field.default})"
    # Only what the user gives becomes an attribute: no default may hide what a file sets.
    settings: dict[str, Any] = {
        "default": argparse.SUPPRESS,
        "help": field.metadata["help"] + default,
    }
    if field.type is bool:
        settings["help"] = field.metadata["help"] + f" ({'yes' if field.default else 'no'})"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        return
    kind: Any = field.type
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if field.metadata["choices"]:
        settings["choices"] = field.metadata["choices"]
    else:
        settings["metavar"] = {int: "N", float: "X", str: "DIR"}[kind]
    group.add_argument(flag, type=kind, **settings)


def _settings(options: argparse.Namespace) -> Settings:
    """What the flags, --config, --preset and --size set together."""
    flags = {name: value for name, value in vars(options).items() if name in FIELDS}
    return resolve(options.size, options.preset, options.config, flags)


def _observing(options: argparse.Namespace) -> Settings:
    """The flags that only watch a run: it may be gone on with under others."""
    flags = {name: value for name, value in vars(options).items() if name in OBSERVING}
    if options.profile_wide or options.profile_json:
        flags["enable_diagnostics"] = True
    return flags


def _config(kind: Any, settings: Settings, **known: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    chosen = {name: value for name, value in settings.items() if name in names}
    return kind(**{**chosen, **known})


def _flags(settings: dict[str, Any]) -> str:
    """Fields of the configs and their values -> the flags that set them."""
    words = []
    for name, value in settings.items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return " ".join(words)


def _run_configs(options: argparse.Namespace) -> tuple[Settings, TrainingConfig, RunConfig]:
    """All settings and two of their configs: what is wrong with them comes before the work."""
    settings = {**_settings(options), **_observing(options)}
    training_config = _config(TrainingConfig, settings)
    if training_config.checkpoint_strategy and not training_config.use_gradient_checkpointing:
        raise InputError("--checkpoint-strategy needs --use-gradient-checkpointing too")
    _config(ModelConfig, settings)
    return settings, training_config, _config(RunConfig, settings)


def _check_writable(flag: str, file: Path) -> None:
    if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise InputError(f"{flag}: {file} cannot be written; name a file in a directory")


def _train(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    if options.profile_json:
        _check_writable("--profile-json", Path(options.profile_json))
    if options.resume:
        return _resume(options)
    settings, training_config, run_config = _run_configs(options)

    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.run_directory import RunDirectory, default_directory

    console = Console()
    text, name = _read(run_config.text)
    tokenizer = Tokenizer(text, run_config.tokenizer)
    model_config = _config(ModelConfig, settings, vocab_size=tokenizer.vocab_size)
    with _kernels(run_config, console):
        run_config = dataclasses.replace(run_config, threads=_set_threads(run_config))
        if not options.dry_run:
            _check_memory(console, _plan(model_config, training_config, run_config))
        training = _training(model_config, training_config, run_config, text, tokenizer)
        training_config = training.resolved(training_config)
        if options.dry_run:
            return show_checks(console, training)
        path = Path(run_config.out) if run_config.out else default_directory(name)
        directory = RunDirectory.create(path)
        run_config = dataclasses.replace(
            run_config,
            out=str(path),
            text=run_config.text and str(Path(run_config.text).resolve()),
        )
        try:
            if run_config.minutes:
                end = start + 60 * run_config.minutes
                training_config = _fitted(console, training, training_config, end, path)
            directory.save_config(model_config, training_config, run_config, _digest(text))
            describe(console, name, text, training, training_config, run_config)
            return _train_on(
                console, options, directory, training, training_config, run_config, text
            )
        finally:
            # Nothing is lost yet, and the directory is free for another try.
            if not training.progress.step:
                directory.discard()


def _fitted(
    console: Console, training: "Training", config: TrainingConfig, end: float, directory: Path
) -> TrainingConfig:
    """The config of a run that ends at `end`, as time.perf_counter counts; says what it fixed."""
    from smallmind.training.pace import fitted, measure

    pace = measure(training, config, end - time.perf_counter(), directory, SAMPLE_TOKENS)
    left = end - time.perf_counter()
    config = fitted(config, pace, left)
    console.line(
        f"{config.steps:,} steps of {1000 * pace.step:.1f} ms fit in the {left:.0f} seconds that "
        f"are left, with evaluations of {pace.evaluation:.2f} s, saves of {pace.save:.2f} s and "
        f"{pace.end:.1f} s at the end; the warmup takes {config.warmup_steps} of them"
    )
    return config


def _resume(options: argparse.Namespace) -> int:
    """Goes on with a run: all is as it was but the number of threads and who watches."""
    changeable = ("threads", *OBSERVING)
    given = [name for name in vars(options) if name in FIELDS and name not in changeable]
    if given or options.size or options.preset or options.config or options.dry_run:
        raise InputError("--resume takes all settings from the run; leave the others out")
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.checkpoint import newest
    from smallmind.training.run_directory import RunDirectory, is_finished, unfinished_run

    console = Console()
    path = unfinished_run() if options.resume == "auto" else Path(options.resume)
    directory = RunDirectory(path)
    saved = directory.load_config()
    text, name = _read(saved["run"].text)
    if _digest(text) != saved["text_sha256"]:
        raise InputError(f"{name} has changed since the run; it cannot go on as it was")
    run_config = dataclasses.replace(saved["run"], out=str(path))
    if "threads" in options:
        run_config = dataclasses.replace(run_config, threads=options.threads)
    tokenizer = Tokenizer(text, run_config.tokenizer)
    training_config = dataclasses.replace(saved["training"], **_observing(options))
    checkpoint, passed_over = newest(path)
    for file, reason in passed_over:
        console.warning(f"{file.name} is passed over: {reason}")
    with _kernels(run_config, console):
        run_config = dataclasses.replace(run_config, threads=_set_threads(run_config))
        if checkpoint and is_finished(checkpoint, training_config) and directory.has_model():
            console.line(f"The run in {path} is finished: {checkpoint.step} steps")
            return 0
        _check_memory(console, _plan(saved["model"], training_config, run_config))
        training = _training(saved["model"], training_config, run_config, text, tokenizer)
        describe(console, name, text, training, training_config, run_config)
        step = checkpoint.step if checkpoint else 0
        console.line(f"Goes on after step {step}" if step else "Starts again: no checkpoint yet")
        return _train_on(
            console, options, directory, training, training_config, run_config, text, checkpoint
        )


def _training(
    model: ModelConfig, training: TrainingConfig, run: RunConfig, text: str, tokenizer: "Tokenizer"
) -> "Training":
    from smallmind.nn.transformer import TransformerModel
    from smallmind.training.training import Training

    built = TransformerModel(**dataclasses.asdict(model), seed=run.seed, backend=run.backend)
    built.use_precision(training.storage)
    return Training(built, tokenizer, text, batch_size=run.batch_size, seed=run.seed)


def _train_on(
    console: Console,
    options: argparse.Namespace,
    directory: "RunDirectory",
    training: "Training",
    training_config: TrainingConfig,
    run_config: RunConfig,
    text: str,
    checkpoint: "Checkpoint | None" = None,
) -> int:
    """Trains in the directory, from the checkpoint on if there is one -> exit status."""
    from smallmind.training.run_lock import RunLock

    with RunLock(directory.path):
        directory.cut_metrics(checkpoint.step if checkpoint else 0)
        with _profiled(console, training, training_config, options):
            status = _run(console, training, training_config, directory, checkpoint)
        if not status:
            show_result(console, training, of_stories=run_config.text is None)
            show_sample(console, training, training.progress.step, directory)
    console.line(f"The run is in {directory.path}")
    if status:
        console.line(f"Next: smallmind train --resume {shlex.quote(str(directory.path))}")
    else:
        run, prompt = shlex.quote(str(directory.path)), suggested_prompt(text)
        console.line(f"Next: smallmind generate --run {run}{prompt}")
    return status


def _run(
    console: Console,
    training: "Training",
    config: TrainingConfig,
    directory: "RunDirectory",
    checkpoint: "Checkpoint | None",
) -> int:
    """Trains, shows, logs and saves, even if interrupted -> exit status."""
    from smallmind.training.saving import saved_steps

    progress = Progress(console, config.steps)
    with _stopped_by_signals(training) as received:
        for record in saved_steps(training, config, directory.path, checkpoint):
            directory.log(record)
            progress.show(record)
        progress.show_health_of_run()
        show_costs(console, training)
        directory.flush()
        directory.save_model(training.model, training.tokenizer)
    if received:
        step = training.progress.step
        console.line(f"Interrupted after step {step}; everything is saved as it is now.")
        return 128 + received[0]
    return 0


@contextlib.contextmanager
def _stopped_by_signals(training: "Training") -> Iterator[list[int]]:
    """Within the block Ctrl-C and SIGTERM end the training after the batch that it is in.

    The number of the signal is then in the list. The second one ends the process at once, and so
    does the first where there is nothing to save yet.
    """
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received:
            os._exit(128 + number)
        if not training.progress.step:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        received.append(number)
        training.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may not
        before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _profiled(
    console: Console,
    training: "Training",
    config: TrainingConfig,
    options: argparse.Namespace,
) -> Iterator[None]:
    """Around a run: what was measured, if asked for, is shown and written at its end."""
    if not config.enable_diagnostics:
        yield
        return
    from smallmind.memory.tracker import MemoryTracker
    from smallmind.training.profiler import TrainingProfiler

    profiler = training.profiler = TrainingProfiler(keep_events=bool(options.profile_json))
    tracker = MemoryTracker()
    tracker.snapshot("Before training")
    try:
        yield
    finally:
        tracker.snapshot("After training")
        ascii_only = not can_print(console.stream)
        console.line(profiler.report(options.profile_wide, ascii_only).rstrip())
        console.line(tracker.report(ascii_only).rstrip())
        if options.profile_json:
            profiler.save_trace(options.profile_json)
            console.line(f"The trace is in {options.profile_json}")


def _read(path: str | None) -> tuple[str, str]:
    """Path of a text or None -> text and a name for it."""
    if path is None:
        from smallmind.text.corpus import built_in_text

        return built_in_text(), "stories"
    from smallmind.text.dataset import read_text

    return read_text(path), Path(path).stem


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def _kernels(run: RunConfig, console: Console) -> Iterator[None]:
    """Within the block, console is told when kernels have to be compiled."""
    if run.backend != "numba":
        yield
        return
    if run.threads is None:
        # A thread for every core: each stays on its own. Left to the system, two may share one
        # while another program has the other, and wait for each other at every kernel.
        os.environ.setdefault("OMP_PROC_BIND", "spread")
        os.environ.setdefault("OMP_PLACES", "cores")
    from smallmind.kernels import compilation

    words = "Compiling kernels for this CPU, once: about 15 seconds ..."
    with compilation.on_first_compile(lambda: console.line(words)):
        yield


def _set_threads(config: RunConfig) -> int:
    """The number of threads from now on: what was asked for, or one a core."""
    if config.backend != "numba":
        return 1
    from smallmind.kernels import compilation

    most = compilation.most_threads()
    if config.threads is not None and config.threads > most:
        raise InputError(f"threads={config.threads} must be at most {most}, what this machine runs")
    threads = config.threads or compilation.cores()
    compilation.set_threads(threads)
    return threads


def _plan(model: ModelConfig, training: TrainingConfig, run: RunConfig) -> "Plan":
    """The run as train would start it."""
    from smallmind.memory.plan import Plan
    from smallmind.nn.transformer import resolved

    precision = resolved(training.storage, run.backend)
    return Plan(model, dataclasses.replace(training, precision=precision), run)


def _check_memory(console: Console, plan: "Plan") -> None:
    """InputError, with advice, where the run would not fit; a warning where it hardly does."""
    from smallmind.memory.available import available_bytes

    free, total = available_bytes(), plan.estimate.total
    if total > free:
        fitting = [way for way in plan.ways_to_fit(free) if way.total <= free]
        advice = " or ".join(f"{_flags(w.settings)} ({megabytes(w.total)})" for w in fitting)
        raise InputError(
            f"this run would take {megabytes(total)} of memory and {megabytes(free)} are free; "
            + (f"give {advice}" if advice else "no setting makes it fit: free some memory")
        )
    if total > NEARLY * free:
        console.warning(f"The run takes {megabytes(total)} of the {megabytes(free)} that are free.")


def _generate(options: argparse.Namespace) -> None:
    config = _config(GenerationConfig, vars(options))
    from smallmind.generation import stream
    from smallmind.training.run_directory import RunDirectory

    console = Console()
    with _kernels(RunConfig(threads=1), Console(sys.stderr)):
        model, tokenizer = RunDirectory(Path(options.run)).load_model()
        prompt = tokenizer.opening if options.prompt is None else options.prompt
        pieces = stream(model, tokenizer, prompt, config)
        console.piece(prompt)
        for piece in pieces:
            if not console.is_read:
                break
            console.piece(piece)
    console.line()


def _evaluate(options: argparse.Namespace) -> None:
    from smallmind.text.dataset import HELD_OUT
    from smallmind.training.evaluation import evaluate
    from smallmind.training.run_directory import RunDirectory

    console = Console()
    directory = RunDirectory(Path(options.run))
    config = directory.load_config()
    with _kernels(RunConfig(threads=1), Console(sys.stderr)):
        model, tokenizer = directory.load_model()
    text, name = _read(config["run"].text if options.text is None else options.text)
    is_same = _digest(text) == config["text_sha256"]
    if options.text is None and not is_same:
        raise InputError(f"{name} has changed since the run; name a TEXT to evaluate on")
    tokens = tokenizer.encode(text)
    if is_same:
        tokens = tokens[len(tokens) - int(len(tokens) * HELD_OUT) :]
        part = "the held-out part"
    else:
        part = "all of it, as the run was on another text"
    with _kernels(RunConfig(threads=1), Console(sys.stderr)):
        result = evaluate(model, tokens, len(tokenizer.decode(tokens)))
    rows = [
        ["text", f"{name}, {part}"],
        ["tokens predicted", f"{result.tokens:,}"],
        ["loss", f"{result.loss:.4f} nats a token"],
        ["", f"{result.bits_per_character:.4f} bits a character"],
        ["perplexity", f"{result.perplexity:.4g}"],
        ["next tokens right", f"{result.accuracy:.1%}"],
    ]
    if is_same and config["run"].text is None:
        from smallmind.text.corpus import entropy_per_character

        floor = entropy_per_character()
        rows.append(["floor", f"{floor:.4f} nats a character"])
        rows.append(["above the floor", f"{result.nats_per_character - floor:.4f} nats"])
    console.table("Evaluation", rows)


def _estimate(options: argparse.Namespace) -> int:
    settings, training, run = _run_configs(options)
    if options.target_batch < 1:
        raise InputError(f"target_batch={options.target_batch} must be at least 1")
    from smallmind.memory.available import available_bytes

    console = Console()
    model = _config(ModelConfig, settings)
    if "vocab_size" not in options:
        from smallmind.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(_read(run.text)[0], run.tokenizer)
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    run = dataclasses.replace(run, threads=_set_threads(run))
    plan = _plan(model, training, run)
    memory, estimate = options.memory or available_bytes(), plan.estimate
    parts = [
        [name.replace("_", " ").replace("program", "the program itself"), megabytes(nbytes)]
        for name, nbytes in vars(estimate).items()
    ]
    console.table("Memory", [*parts, ["total", megabytes(estimate.total)]])
    fits = estimate.total <= memory
    verdict = "It fits" if fits else "It does not fit"
    console.line(f"{verdict}: {megabytes(estimate.total)} of {megabytes(memory)}.")
    _show_what_fits(console, plan, memory, options.target_batch)
    return 0 if fits else 1


def _show_what_fits(console: Console, plan: "Plan", memory: int, target: int) -> None:
    """The most windows at once and how they make up the target batch, or what to change."""
    from smallmind.memory.estimate import largest_at_once

    most = largest_at_once(plan.model, plan.training, memory, plan.run.threads or 1)
    if not most:
        _show_ways(console, plan, memory)
        return

    def row(name: str, batch: int, at_once: int, **more: int) -> list[str]:
        return [name, _flags({"batch_size": batch, "windows_at_once": at_once, **more})]

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
        "A batch goes through the model --windows-at-once at a time, by default as many as have "
        "2048 tokens:\nmemory hardly grows with it, and more windows at once are no faster."
    )


def _show_ways(console: Console, plan: "Plan", memory: int) -> None:
    """What would make one window at once fit, or bring it nearer."""
    console.line("Not one window fits at once.")
    rows = [
        [_flags(way.settings), "fits" if way.total <= memory else "", megabytes(way.total)]
        for way in plan.ways_to_fit(memory)
    ]
    if rows:
        console.table("It would take with", rows)


def _schedule(options: argparse.Namespace) -> None:
    settings = _settings(options)
    config = _config(TrainingConfig, settings)
    if "steps" not in settings and (config.epochs or settings.get("minutes")):
        raise InputError("how many steps a run by epochs or minutes has is not known: give --steps")
    if not config.steps:
        raise InputError("steps=0 must be at least 1, or there is no learning rate to show")
    if options.plot:
        from smallmind.plot import check_plot

        check_plot(options.plot)
        _check_writable("--plot", options.plot)
    from smallmind.optim.schedule import schedule

    console, shown, left_out = Console(), {}, []
    for name in [config.schedule] if "schedule" in settings else SCHEDULES:
        try:
            shown[name] = schedule(dataclasses.replace(config, schedule=name))
        except InputError as error:
            left_out.append(f"{name} is left out: {error}")
    _show_schedules(console, shown, config)
    for reason in left_out:
        console.line(reason)
    if options.plot:
        _draw_schedules(shown, config.steps, options.plot)
        console.line(f"The plot is in {options.plot}")


def _export_metrics(options: argparse.Namespace) -> None:
    if options.out:
        if options.out.suffix != ".csv":
            raise InputError(f"--out: {options.out} must end in .csv")
        _check_writable("--out", options.out)
    from smallmind.training.metrics import read_metrics
    from smallmind.training.run_directory import METRICS

    table = read_metrics(options.run)
    if options.out:
        options.out.write_text(table.to_csv(), encoding="utf-8")
    else:
        Console().piece(table.to_csv())
    notes = Console(sys.stderr)
    if table.unreadable:
        lines = ", ".join(map(str, table.unreadable))
        notes.line(f"Left out of {options.run / METRICS} as cut or damaged: line {lines}")
    if options.out:
        notes.line(f"{len(table.rows)} steps are in {options.out}")


def _show_schedules(
    console: Console, schedules: "dict[str, Schedule]", config: TrainingConfig
) -> None:
    """A row a step: the first, in the warmups, the peaks, every tenth of the run, 95 % of it."""
    # As train's records count them: from 1 to the last.
    steps = {1, config.steps * 19 // 20, *(config.steps * tenth // 10 for tenth in range(1, 11))}
    for s in schedules.values():
        steps |= {s.warmup // 2, s.warmup + 1}
    heads = ["at step", *schedules]
    width = max(len(heads[0]), len(f"{config.steps:,}"))
    rows = [
        [f"{n:{width},}", *(f"{s.lr(n - 1):.1e}" for s in schedules.values())]
        for n in sorted(steps)
        if 1 <= n <= config.steps
    ]
    ascii_only = not can_print(console.stream)
    console.line(draw("LEARNING RATE", heads, rows, ascii_only=ascii_only).rstrip())
    if "plateau" in schedules:
        console.line(
            "plateau is shown while the held-out loss falls; "
            f"{config.plateau_patience} evaluations without a lower one multiply it by "
            f"{config.lr_decay_factor:g}, never under {config.min_lr:g}"
        )


def _draw_schedules(schedules: "dict[str, Schedule]", last: int, file: Path) -> None:
    from smallmind.plot import draw_curves

    steps = sorted({*range(1, last + 1, math.ceil(last / CURVE_POINTS)), last})
    curves = {name: (steps, [s.lr(n - 1) for n in steps]) for name, s in schedules.items()}
    draw_curves(curves, "step", "learning rate", file)

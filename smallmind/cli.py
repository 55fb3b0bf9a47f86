"""The command line, a caller of the library like any other."""

import argparse
import contextlib
import dataclasses
import hashlib
import math
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.box import can_print, draw
from smallmind.config import (
    SCHEDULES,
    CheckpointStrategy,
    GenerationConfig,
    InputError,
    ModelConfig,
    Precision,
    RunConfig,
    TrainingConfig,
    __version__,
)
from smallmind.console import Console, duration, megabytes

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.memory.plan import Plan
    from smallmind.nn.transformer import TransformerModel
    from smallmind.optim.schedule import Schedule
    from smallmind.text.dataset import Dataset
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.run_directory import RunDirectory
    from smallmind.training.training import Record, StepRecord, Training

CONFIGS = (ModelConfig, TrainingConfig, RunConfig)
FROM_TEXT = ("vocab_size", "text")  # fields that are no flags
SCHEDULE_FIELDS = (
    "steps", "learning_rate", "min_lr", "warmup_steps", "lr_decay_factor", "lr_decay_every",
    "lr_decay_share", "plateau_patience",
)  # fmt: skip
CURVE_POINTS = 2000  # of a plot, and the last step
SAMPLE_TOKENS = 400
PLAIN_EVERY = 10  # records between lines where no line can be rewritten
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
    _add_run_flags(train)
    group = train.add_argument_group("What is measured on the way")
    group.add_argument(
        "--profile", action="store_true", help="show at the end where time and memory went"
    )
    group.add_argument(
        "--profile-wide", action="store_true", help="the same with minimum, maximum and GB/s"
    )
    group.add_argument(
        "--profile-json", metavar="FILE", help="write a trace that chrome://tracing shows"
    )
    train.set_defaults(command=_train)

    estimate = commands.add_parser(
        "estimate", help="show the memory that train would take, and what fits"
    )
    _add_run_flags(estimate)
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
        "--schedule", choices=SCHEDULES, help="one of them; default: all side by side"
    )
    for field in dataclasses.fields(TrainingConfig):
        if field.name in SCHEDULE_FIELDS:
            _add_flag(schedule, field)
    schedule.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves here")
    schedule.set_defaults(command=_schedule)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="a UTF-8 text file; without it, built-in stories"
    )
    for config in CONFIGS:
        title = (config.__doc__ or "").splitlines()[0].split(" (")[0].rstrip(".")
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(config):
            if field.name not in FROM_TEXT:
                _add_flag(group, field)


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
    settings: dict[str, Any] = {"default": field.default, "help": field.metadata["help"] + default}
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


def _config(kind: Any, options: argparse.Namespace, **known: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return kind(**{**given, **known})


def _flags(settings: dict[str, Any]) -> str:
    """Fields of the configs and their values -> the flags that set them."""
    words = []
    for name, value in settings.items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return " ".join(words)


def _run_configs(options: argparse.Namespace) -> tuple[TrainingConfig, RunConfig]:
    """Both, after a look at the model's flags: what is wrong with flags comes before the work."""
    if options.checkpoint_strategy and not options.use_gradient_checkpointing:
        raise InputError("--checkpoint-strategy needs --use-gradient-checkpointing too")
    _config(ModelConfig, options)
    return _config(TrainingConfig, options), _config(RunConfig, options)


def _check_writable(flag: str, file: Path) -> None:
    if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise InputError(f"{flag}: {file} cannot be written; name a file in a directory")


def _train(options: argparse.Namespace) -> int:
    training_config, run_config = _run_configs(options)
    if options.profile_json:
        _check_writable("--profile-json", Path(options.profile_json))

    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.run_directory import RunDirectory, default_directory

    console = Console()
    text, name = _read(run_config.text)
    tokenizer = Tokenizer(text, run_config.tokenizer)
    model_config = _config(ModelConfig, options, vocab_size=tokenizer.vocab_size)
    if run_config.threads is None:
        # A thread for every core: each stays on its own. Left to the system, two may share one
        # while another program has the other, and wait for each other at every kernel.
        os.environ.setdefault("OMP_PROC_BIND", "spread")
        os.environ.setdefault("OMP_PLACES", "cores")
    with _kernels(run_config.backend, console):
        from smallmind.nn.transformer import TransformerModel
        from smallmind.training.training import Training

        threads = _set_threads(run_config)
        run_config = dataclasses.replace(run_config, threads=threads)
        _check_memory(console, _plan(model_config, training_config, run_config))
        model = TransformerModel(
            **dataclasses.asdict(model_config), seed=run_config.seed, backend=run_config.backend
        )
        training = Training(
            model, tokenizer, text, batch_size=run_config.batch_size, seed=run_config.seed
        )
        precision = model.use_precision(training_config.storage)
        path = Path(run_config.out) if run_config.out else default_directory(name)
        directory = RunDirectory.create(path)
        run_config = dataclasses.replace(
            run_config,
            out=str(path),
            text=run_config.text and str(Path(run_config.text).resolve()),
        )
        directory.save_config(model_config, training_config, run_config, _digest(text))
        _describe_model(console, model)
        _describe_data(console, name, text, tokenizer, training.dataset)
        _describe_run(console, training_config, run_config, training.dataset.block_size, precision)
        with _profiled(console, training, options):
            finished = _run(console, training, training_config, directory)
        if finished:
            _show_result(console, training, of_stories=run_config.text is None)
            _show_sample(console, training, training_config.steps, directory)
    console.line(f"The run is in {path}")
    prompt = _suggested_prompt(text)
    console.line(f"Next: smallmind generate --run {shlex.quote(str(path))}{prompt}")
    return 0 if finished else 130


def _run(
    console: Console, training: "Training", config: TrainingConfig, directory: "RunDirectory"
) -> bool:
    """Trains, shows, logs and saves, even if interrupted -> whether it went to the end."""
    progress = _Progress(console, config.steps)
    finished = False
    try:
        for record in training.steps(config):
            directory.log(record)
            progress.show(record)
        finished = True
    except KeyboardInterrupt:
        if not progress.step:
            raise
        console.line(f"Interrupted after step {progress.step}; the model is saved as it is now.")
    finally:
        # Before the first step there is nothing to keep.
        if progress.step or finished:
            directory.save_model(training.model, training.tokenizer)
        else:
            directory.discard()
    return finished


@contextlib.contextmanager
def _profiled(
    console: Console, training: "Training", options: argparse.Namespace
) -> Iterator[None]:
    """Within the block everything is measured, if asked for; shown and written at its end."""
    shows = options.profile or options.profile_wide
    if not shows and not options.profile_json:
        yield
        return
    from smallmind.memory.tracker import MemoryTracker
    from smallmind.training.profiler import TrainingProfiler

    profiler = TrainingProfiler(keep_events=bool(options.profile_json))
    tracker = MemoryTracker()
    tracker.snapshot("Before training")
    try:
        with profiler.watch(training.model):
            yield
    finally:
        tracker.snapshot("After training")
        if shows:
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
def _kernels(backend: str, console: Console) -> Iterator[None]:
    """Within the block, console is told when kernels have to be compiled."""
    if backend != "numba":
        yield
        return
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


def _describe_model(console: Console, model: "TransformerModel") -> None:
    rows: dict[str, list[Any]] = {}
    for name, value in model.parameters.items():
        # One row for what all blocks have in common.
        words = name.split(".")
        layer = f"{model.config.n_layer} x {words[2]}" if words[0] == "blocks" else words[0]
        row = rows.setdefault(layer.replace("_", " "), [[], 0])
        if value.ndim == 2:
            shape = f"{value.shape[0]} x {value.shape[1]}"
            row[0] += [shape] if shape not in row[0] else []
        row[1] += value.size
    if model.config.tie_weights:
        rows["head"] = [["the token embedding"], 0]
    table = [[layer, ", ".join(shapes), f"{count:,}"] for layer, (shapes, count) in rows.items()]
    total = sum(value.size for value in model.parameters.values())
    console.table("Model", [*table, ["parameters", "", f"{total:,}"]])


def _describe_data(
    console: Console, name: str, text: str, tokenizer: "Tokenizer", dataset: "Dataset"
) -> None:
    kind = "characters" if tokenizer.kind == "char" else "bytes"
    console.table(
        "Data",
        [
            ["text", name],
            ["characters", f"{len(text):,}"],
            ["tokens", f"{len(dataset.train) + len(dataset.held_out):,}"],
            ["vocabulary", f"{tokenizer.vocab_size} {kind}"],
            ["trained on", f"{len(dataset.train):,} tokens"],
            ["held out", f"{len(dataset.held_out):,} tokens, the end of the text"],
        ],
    )


def _describe_run(
    console: Console,
    training: TrainingConfig,
    run: RunConfig,
    block_size: int,
    precision: Precision,
) -> None:
    windows = run.batch_size * training.grad_accum_steps
    tokens = f"{windows * block_size:,} ({windows} windows of {block_size})"
    chosen = " (auto)" if training.storage == Precision.AUTO else ""
    rows = [
        ["steps", f"{training.steps:,}"],
        ["tokens a step", tokens],
        ["precision", f"{precision}{chosen}"],
    ]
    if training.recompute != CheckpointStrategy.NONE:
        rows.append(["activations", f"recomputed, {training.recompute}"])
    if run.backend == "numba":
        from smallmind.kernels.compilation import threading_layer
        from smallmind.kernels.isa import ISA

        rows += [
            ["threads", f"{run.threads}"],
            ["threading layer", threading_layer()],
            ["instruction set", ISA.name],
        ]
    else:
        rows.append(["kernels", "plain NumPy"])
    console.table("Run", [*rows, ["directory", str(run.out)]])


class _Progress:
    """One line that is rewritten on a terminal; some lines where there is none."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.records = 0
        self.step = 0
        self.first: StepRecord | None = None

    def show(self, record: "Record") -> None:
        from smallmind.training.training import EvaluationRecord, OverflowRecord

        self.step = record.step
        width = len(str(self.steps))
        place = f"step {record.step:{width}}/{self.steps}"
        if isinstance(record, EvaluationRecord):
            losses = f"training text {record.train_loss:.4f}  held-out text {record.val_loss:.4f}"
            self.console.line(f"{place}  {losses}")
            return
        if isinstance(record, OverflowRecord):
            self.console.warning(
                f"Step {record.step}: Gradient overflow detected, skipping update. "
                f"Loss scale: {record.loss_scale:g}"
            )
            return
        if self.first is None:
            self.first = record  # it may have waited for kernels to compile
        elapsed = record.elapsed_seconds - self.first.elapsed_seconds
        left = elapsed / max(1, record.step - self.first.step) * (self.steps - record.step)
        text = f"{place}  loss {record.loss:.4f}  lr {record.lr:.1e}"
        if elapsed:
            text += f"  {record.tokens_per_second:,.0f} tokens/s  {duration(left)} left"
        if self.console.is_terminal:
            self.console.live(text)
        elif self.records % PLAIN_EVERY == 0 or record.step == self.steps:
            self.console.line(text)
        self.records += 1


def _show_result(console: Console, training: "Training", of_stories: bool) -> None:
    """The loss over the whole held-out part, beside the floor where it is known."""
    from smallmind.training.evaluation import evaluate

    held_out = training.dataset.held_out
    result = evaluate(training.model, held_out, len(training.tokenizer.decode(held_out)))
    console.line(
        f"Whole held-out text: {result.loss:.4f} nats a token, "
        f"{result.bits_per_character:.4f} bits a character, perplexity {result.perplexity:.4g}"
    )
    if of_stories:
        from smallmind.text.corpus import entropy_per_character

        floor = entropy_per_character()
        excess = result.nats_per_character - floor
        console.line(
            f"The stories' own entropy is {floor:.4f} nats a character: "
            f"{excess:.2f} nats above the best possible"
        )


def _show_sample(
    console: Console, training: "Training", step: int, directory: "RunDirectory"
) -> None:
    from smallmind.generation import generate

    seed = training.dataset.seed
    sample = generate(training.model, training.tokenizer, max_tokens=SAMPLE_TOKENS, seed=seed)
    directory.save_sample(step, sample)
    console.line("\nIt writes:")
    console.quote(sample)


def _suggested_prompt(text: str) -> str:
    """The flag with the first two words of the text, if it begins with words."""
    words = "".join(c if c.isalnum() else " " for c in text[:200]).split()[:2]
    prompt = " ".join(words)
    return f' --prompt "{prompt}"' if prompt and len(prompt) <= 40 and prompt in text else ""


def _generate(options: argparse.Namespace) -> None:
    config = _config(GenerationConfig, options)
    from smallmind.generation import stream
    from smallmind.training.run_directory import RunDirectory

    console = Console()
    with _kernels("numba", Console(sys.stderr)):
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
    with _kernels("numba", Console(sys.stderr)):
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
    with _kernels("numba", Console(sys.stderr)):
        result = evaluate(model, tokens, len(tokenizer.decode(tokens)))
    rows = [
        ["text", f"{name}, {part}"],
        ["tokens predicted", f"{result.tokens:,}"],
        ["loss", f"{result.loss:.4f} nats a token"],
        ["", f"{result.bits_per_character:.4f} bits a character"],
        ["perplexity", f"{result.perplexity:.4g}"],
    ]
    if is_same and config["run"].text is None:
        from smallmind.text.corpus import entropy_per_character

        floor = entropy_per_character()
        rows.append(["floor", f"{floor:.4f} nats a character"])
        rows.append(["above the floor", f"{result.nats_per_character - floor:.4f} nats"])
    console.table("Evaluation", rows)


def _estimate(options: argparse.Namespace) -> int:
    training, run = _run_configs(options)
    if options.target_batch < 1:
        raise InputError(f"target_batch={options.target_batch} must be at least 1")
    from smallmind.memory.available import available_bytes

    console = Console()
    model = _config(ModelConfig, options)
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
    config = _config(TrainingConfig, options, schedule=options.schedule or "cosine")
    if not config.steps:
        raise InputError("steps=0 must be at least 1, or there is no learning rate to show")
    if options.plot:
        from smallmind.plot import check_plot

        check_plot(options.plot)
        _check_writable("--plot", options.plot)
    from smallmind.optim.schedule import schedule

    console, shown, left_out = Console(), {}, []
    for name in [options.schedule] if options.schedule else SCHEDULES:
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

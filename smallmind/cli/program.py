"""The command line, a caller of the library like any other."""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import re
import shlex
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.box import can_print
from smallmind.cli.console import Console
from smallmind.cli.display import (
    SAMPLE_TOKENS,
    ProgressDisplay,
    describe,
    show_checks,
    show_costs,
    show_result,
    show_sample,
    suggested_prompt,
)
from smallmind.cli.memory import check_memory, make_plan, measure_text, show_estimate
from smallmind.cli.schedules import show_schedules
from smallmind.config import (
    OBSERVING,
    SCHEDULES,
    SECTIONS,
    DistillationConfig,
    GenerationConfig,
    InputError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    __version__,
)
from smallmind.presets import FIELDS, PRESETS, SIZES, Fields, resolve

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.runs.directory import RunDirectory
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.distillation import Distillation
    from smallmind.training.loop import Training
    from smallmind.training.memory_estimate import Teacher
    from smallmind.training.state import RunState

NO_FLAGS = ("vocab_size", "text", "enable_diagnostics")  # the last is --profile
SCHEDULE_FIELDS = (
    "steps", "learning_rate", "min_lr", "warmup_steps", "lr_decay_factor", "lr_decay_every",
    "lr_decay_share", "plateau_patience",
)  # fmt: skip
UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line arguments -> exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    SystemExit with 128 and the number of the signal where another one ends the command.
    Of estimate: 0 the run fits in memory, 1 it does not; of verify: 1 a checkpoint is wrong.
    """
    options = _parser().parse_args(arguments)
    try:
        with _handling(_terminate, *_signals("SIGTERM", "SIGHUP")):
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

    verify = commands.add_parser(
        "verify", help="check the checkpoints of a run, and train again from each to the next"
    )
    verify.add_argument("run", type=Path, metavar="RUN", help="the directory of the run")
    verify.add_argument(
        "--digests-only", action="store_true", help="only see that each file is sound"
    )
    verify.set_defaults(command=_verify)

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
        help="sections [model], [training], [run], [distillation] with the flags' names, as in "
        "n_layer = 4; "
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
        metavars = {"teacher": "RUN_OR_MODEL", "teacher_cache": "FILE"}
        by_kind = {int: "N", float: "X", str: "DIR"}[kind]
        settings["metavar"] = metavars.get(field.name, by_kind)
    group.add_argument(flag, type=kind, **settings)


def _settings(options: argparse.Namespace) -> Fields:
    """What the flags, --config, --preset and --size set together."""
    flags = {name: value for name, value in vars(options).items() if name in FIELDS}
    return resolve(options.size, options.preset, options.config, flags)


def _observing(options: argparse.Namespace) -> Fields:
    """The flags that only watch a run: it may be gone on with under others."""
    flags = {name: value for name, value in vars(options).items() if name in OBSERVING}
    if options.profile_wide or options.profile_json:
        flags["enable_diagnostics"] = True
    return flags


def _config(kind: Any, settings: Fields, **known: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    chosen = {name: value for name, value in settings.items() if name in names}
    return kind(**{**chosen, **known})


def _run_configs(
    options: argparse.Namespace,
) -> tuple[Fields, TrainingConfig, RunConfig, DistillationConfig]:
    """All settings and three of their configs: what is wrong with them comes before the work."""
    settings = {**_settings(options), **_observing(options)}
    training_config = _config(TrainingConfig, settings)
    if training_config.checkpoint_strategy and not training_config.use_gradient_checkpointing:
        raise InputError("--checkpoint-strategy needs --use-gradient-checkpointing too")
    _config(ModelConfig, settings)
    distillation_config = _config(DistillationConfig, settings)
    return settings, training_config, _config(RunConfig, settings), distillation_config


def _check_writable(flag: str, file: Path) -> None:
    if file.is_dir() or not os.access(file.resolve().parent, os.W_OK):
        raise InputError(f"{flag}: {file} cannot be written; name a file in a directory")


def _train(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    if options.profile_json:
        _check_writable("--profile-json", Path(options.profile_json))
    if options.resume:
        return _resume(options)
    settings, training_config, run_config, distillation_config = _run_configs(options)
    cache = distillation_config.teacher_cache
    if cache and not os.path.lexists(cache):
        _check_writable("--teacher-cache", Path(cache))

    from smallmind.runs.directory import RunDirectory, default_directory
    from smallmind.text.tokenizer import Tokenizer

    console = Console(patient=True)
    text, name = _read(run_config.text)
    tokenizer = Tokenizer(text, run_config.tokenizer)
    model_config = _config(ModelConfig, settings, vocab_size=tokenizer.vocab_size)
    with _kernels(run_config, console):
        run_config = dataclasses.replace(run_config, threads=_set_threads(run_config))
        if not options.dry_run:
            teacher = _teacher(distillation_config)
            size = measure_text(text, tokenizer)
            plan = make_plan(model_config, training_config, run_config, teacher, size)
            check_memory(console, plan)
        elif distillation_config.teacher:  # of a run that is only checked, no cache is written
            distillation_config = dataclasses.replace(distillation_config, teacher_cache=None)
        distillation = _distillation(distillation_config, run_config, tokenizer)
        training = _training(
            console, model_config, training_config, run_config, text, tokenizer, distillation
        )
        training_config = training.with_step_count(training_config)
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
            directory.save_config(
                model_config, training_config, run_config, _digest(text),
                _absolute_paths(distillation_config), distillation.digest if distillation else None,
            )  # fmt: skip
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
    from smallmind.runs.pace import fit_steps, measure

    pace = measure(training, config, end - time.perf_counter(), directory, SAMPLE_TOKENS)
    left = end - time.perf_counter()
    config = fit_steps(config, pace, left)
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
    from smallmind.runs.directory import RunDirectory, is_finished, unfinished_run
    from smallmind.training.checkpoint import newest

    console = Console(patient=True)
    path = unfinished_run() if options.resume == "auto" else Path(options.resume)
    directory = RunDirectory(path)
    saved, text, name = _reopen(directory)
    run_config = dataclasses.replace(saved["run"], out=str(path))
    if "threads" in options:
        run_config = dataclasses.replace(run_config, threads=options.threads)
    training_config = dataclasses.replace(saved["training"], **_observing(options))
    checkpoint, passed_over = newest(path)
    for file, reason in passed_over:
        console.warning(f"{file.name} is passed over: {reason}")
    if passed_over and not checkpoint:
        raise InputError(
            f"no checkpoint in {path} is sound: put one back from a copy, or remove them all and "
            "the run starts again"
        )
    with _kernels(run_config, console):
        run_config = dataclasses.replace(run_config, threads=_set_threads(run_config))
        if checkpoint and is_finished(checkpoint, training_config) and directory.has_model():
            console.line(f"The run in {path} is finished: {checkpoint.step} steps")
            return 0
        training = _saved_training(console, saved, training_config, run_config, text)
        describe(console, name, text, training, training_config, run_config)
        step = checkpoint.step if checkpoint else 0
        console.line(f"Goes on after step {step}" if step else "Starts again: no checkpoint yet")
        return _train_on(
            console, options, directory, training, training_config, run_config, text, checkpoint
        )


def _reopen(directory: "RunDirectory") -> tuple[dict[str, Any], str, str]:
    """-> the configs of a run by name, its text and a name for that."""
    saved = directory.load_config()
    text, name = _read(saved["run"].text)
    if _digest(text) != saved["text_sha256"]:
        raise InputError(f"{name} has changed since the run; it cannot go on as it was")
    return saved, text, name


def _saved_training(
    console: Console,
    saved: dict[str, Any],
    training: TrainingConfig,
    run: RunConfig,
    text: str,
) -> "Training":
    """What load_config has read, with the settings that may be others -> the run's training."""
    from smallmind.text.tokenizer import Tokenizer

    teacher, tokenizer = _teacher(saved["distillation"]), Tokenizer(text, run.tokenizer)
    size = measure_text(text, tokenizer)
    check_memory(console, make_plan(saved["model"], training, run, teacher, size))
    distillation = _distillation(saved["distillation"], run, tokenizer)
    if distillation and distillation.digest != saved["teacher_sha256"]:
        raise InputError(
            f"{saved['distillation'].teacher} has changed since the run, which learns from it; "
            "it cannot go on as it was"
        )
    return _training(console, saved["model"], training, run, text, tokenizer, distillation)


def _training(
    console: Console,
    model: ModelConfig,
    training: TrainingConfig,
    run: RunConfig,
    text: str,
    tokenizer: "Tokenizer",
    distillation: "Distillation | None",
) -> "Training":
    from smallmind.nn.transformer import TransformerModel
    from smallmind.training.loop import Training

    built = TransformerModel(**dataclasses.asdict(model), seed=run.seed, backend=run.backend)
    built.use_precision(training.requested_precision)
    file = distillation and distillation.cache_file
    if file and not os.path.lexists(file):
        console.line(f"The teacher reads the text once; what it says is kept in {file} ...")
    return Training(
        built, tokenizer, text, batch_size=run.batch_size, seed=run.seed, distillation=distillation
    )


def _model_file(teacher: str) -> Path:
    """A run's directory or a file with a model -> the file."""
    from smallmind.runs.directory import MODEL

    path = Path(teacher)
    return path / MODEL if path.is_dir() else path


def _absolute_paths(config: DistillationConfig) -> DistillationConfig:
    """The same with paths that hold from any working directory."""
    names = ("teacher", "teacher_cache")
    paths: Fields = {
        name: str(Path(getattr(config, name)).resolve()) for name in names if getattr(config, name)
    }
    return dataclasses.replace(config, **paths)


def _teacher(config: DistillationConfig) -> "Teacher | None":
    """What the teacher is, from the head of its file: enough to estimate its memory."""
    if not config.teacher:
        return None
    from smallmind import safetensors
    from smallmind.training.memory_estimate import Teacher

    file = _model_file(config.teacher)
    try:
        model = ModelConfig(**safetensors.from_json(safetensors.read_metadata(file)["config"]))
    except (KeyError, TypeError) as error:
        raise InputError(f"{file} is not a model saved by smallmind: {error}") from None
    return Teacher(model, config.teacher_top_k if config.teacher_cache else None)


def _distillation(
    config: DistillationConfig, run: RunConfig, tokenizer: "Tokenizer"
) -> "Distillation | None":
    """The teacher loaded. InputError where its tokens are not those of the text."""
    if not config.teacher:
        return None
    from smallmind.runs.directory import load_model
    from smallmind.training.distillation import Distillation

    teacher, its_tokenizer = load_model(_model_file(config.teacher), run.backend)
    if its_tokenizer.state() != tokenizer.state():
        raise InputError(
            f"the teacher {config.teacher} has other tokens than this text; take one that was "
            "trained on text of the same characters, or both with --tokenizer byte"
        )
    return Distillation(
        teacher, config.temperature, config.alpha, config.learn_temperature,
        config.teacher_cache, config.teacher_top_k,
    )  # fmt: skip


def _train_on(
    console: Console,
    options: argparse.Namespace,
    directory: "RunDirectory",
    training: "Training",
    training_config: TrainingConfig,
    run_config: RunConfig,
    text: str,
    checkpoint: "RunState | None" = None,
) -> int:
    """Trains in the directory, from the checkpoint on if there is one -> exit status."""
    from smallmind.runs.lock import RunLock

    with RunLock(directory.path):
        directory.cut_metrics(checkpoint.step if checkpoint else 0)
        with _profiled(console, training, training_config, options):
            status = _run(console, training, training_config, directory, checkpoint)
        if training.distillation and training.distillation.config.learn_temperature:
            console.line(f"Temperature at the end: {training.distillation.temperature:.3f}")
        if not status:
            show_result(console, training, of_stories=run_config.text is None)
            show_sample(console, training, training.progress.step, directory)
    console.line(f"The run is in {directory.path}")
    if status:
        console.line(f"Next: smallmind train --resume {shlex.quote(str(directory.path))}")
    else:
        run, prompt = shlex.quote(str(directory.path)), suggested_prompt(text)
        console.line(f"Next: smallmind generate --run {run}{prompt}")
        console.check()
    return status


def _run(
    console: Console,
    training: "Training",
    config: TrainingConfig,
    directory: "RunDirectory",
    checkpoint: "RunState | None",
) -> int:
    """Trains, shows, logs and saves, even if interrupted -> exit status."""
    from smallmind.training.checkpoint import BackgroundSaver

    progress = ProgressDisplay(console, config.steps)
    with _stopped_by_signals(training) as received:
        with BackgroundSaver(directory.path, config.keep) as saver:
            for record in training.steps(config, checkpoint, saver=saver):
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
    """Within the block Ctrl-C and the end of the session end training after the batch it is in.

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

    with _handling(handle, *_signals("SIGINT", "SIGTERM", "SIGHUP")):
        yield received


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _signals(*names: str) -> list[int]:
    """Those of the names that this system has and nobody ignores, as nohup does."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


@contextlib.contextmanager
def _handling(handle: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Within the block handle is called at these signals."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may not
        before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
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
        from smallmind.text.stories import built_in_text

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
    from smallmind.kernels.codegen.jit import on_first_compile
    from smallmind.kernels.codegen.threads import bind_to_cores

    if run.threads is None:
        bind_to_cores()

    words = "Compiling kernels for this CPU, once: about 15 seconds ..."
    with on_first_compile(lambda: console.line(words)):
        yield


def _set_threads(config: RunConfig) -> int:
    """The number of threads from now on: what was asked for, or one a core."""
    if config.backend != "numba":
        return 1
    from smallmind.kernels.codegen.threads import cores, max_threads, set_threads

    most = max_threads()
    if config.threads is not None and config.threads > most:
        raise InputError(f"threads={config.threads} must be at most {most}, what this machine runs")
    threads = config.threads or cores()
    set_threads(threads)
    return threads


def _generate(options: argparse.Namespace) -> None:
    config = _config(GenerationConfig, vars(options))
    from smallmind.generation import stream
    from smallmind.runs.directory import RunDirectory

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
    from smallmind.runs.directory import RunDirectory
    from smallmind.text.dataset import HELD_OUT
    from smallmind.training.evaluation import evaluate

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
        from smallmind.text.stories import entropy_per_character

        floor = entropy_per_character()
        rows.append(["floor", f"{floor:.4f} nats a character"])
        rows.append(["above the floor", f"{result.nats_per_character - floor:.4f} nats"])
    console.table("Evaluation", rows)


def _estimate(options: argparse.Namespace) -> int:
    settings, training, run, distillation = _run_configs(options)
    if options.target_batch < 1:
        raise InputError(f"target_batch={options.target_batch} must be at least 1")
    model = _config(ModelConfig, settings)
    size = None
    if "vocab_size" not in options:
        from smallmind.text.tokenizer import Tokenizer

        text = _read(run.text)[0]
        tokenizer = Tokenizer(text, run.tokenizer)
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
        size = measure_text(text, tokenizer)
    run = dataclasses.replace(run, threads=_set_threads(run))
    plan = make_plan(model, training, run, _teacher(distillation), size)
    return show_estimate(Console(), plan, options.memory, options.target_batch)


def _schedule(options: argparse.Namespace) -> None:
    settings = _settings(options)
    config = _config(TrainingConfig, settings)
    if "steps" not in settings and (config.epochs or settings.get("minutes")):
        raise InputError("how many steps a run by epochs or minutes has is not known: give --steps")
    if not config.steps:
        raise InputError("steps=0 must be at least 1, or there is no learning rate to show")
    if options.plot:
        from smallmind.cli.plot import check_plot

        check_plot(options.plot)
        _check_writable("--plot", options.plot)
    names = [config.schedule] if "schedule" in settings else SCHEDULES
    show_schedules(Console(), config, names, options.plot)


def _verify(options: argparse.Namespace) -> int:
    from smallmind.cli.verdicts import show_verification
    from smallmind.runs.directory import RunDirectory

    console, directory = Console(), RunDirectory(options.run)
    if options.digests_only:
        directory.load_config()  # or it is no run
        return show_verification(console, options.run)
    saved, text, _ = _reopen(directory)
    # Of this machine: the run may have been on another.
    run = dataclasses.replace(saved["run"], threads=None)
    with _kernels(run, console):
        run = dataclasses.replace(run, threads=_set_threads(run))
        training = _saved_training(console, saved, saved["training"], run, text)
        return show_verification(console, options.run, training, saved["training"])


def _export_metrics(options: argparse.Namespace) -> None:
    if options.out:
        if options.out.suffix != ".csv":
            raise InputError(f"--out: {options.out} must end in .csv")
        _check_writable("--out", options.out)
    from smallmind.runs.directory import METRICS
    from smallmind.runs.metrics import read_metrics

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

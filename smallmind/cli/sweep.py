"""Train with several values of settings, one run per combination, and compare the results."""

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind import parts
from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console, full_width, shorten
from smallmind.cli.flags import add_setting_flags, choices_of_run
from smallmind.cli.runs import number
from smallmind.cli.signals import ENDING_SIGNALS, handled
from smallmind.console.activity import duration
from smallmind.console.signals import handling, impatience
from smallmind.console.table import GAP, Table
from smallmind.parallel.environment import python
from smallmind.settings.settings import LOSS_SETTINGS
from smallmind.settings.sources import FIELDS, flag_of

if TYPE_CHECKING:
    from smallmind.runs.sweep import PlannedRun, SweepPlan
    from smallmind.views.sweep import Result, SweepGroup

LOOK_SECONDS = 0.2  # between two looks at the processes
SOURCES = ("recipe", "size", "arch", "preset", "config")
# Settings that are paths, which must be valid from any directory.
PATHS = ("config", "init_from", *(x for loss in LOSS_SETTINGS.values() for x in loss.paths))
ONE_VALUE = ("exclude", "include", "out")
MAX_ERRORS = 5  # below the table
# A run ends in order, and saves, as soon as nobody holds the other end of its standard input: this
# process may be killed.
PROGRAM = """import os, signal, sys, threading
def wait():
    sys.stdin.read()
    os.kill(os.getpid(), getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
threading.Thread(target=wait, daemon=True).start()
from smallmind.cli import main
sys.exit(main(sys.argv[1:]))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind sweep`."""
    group = parser.add_argument_group("Sweep")
    group.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="train each combination with N seeds from --seed on, and show mean and spread (1)",
    )
    group.add_argument(
        "--minutes-each",
        dest="minutes",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="minutes of each run, as --minutes",
    )
    group.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="train N runs at a time, each on its own cores (1)",
    )
    group.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the sweep in a folder; no other flags"
    )
    add_setting_flags(parser)
    parser.several = _several(parser)  # type: ignore[attr-defined]
    parser.epilog = (
        "Every setting that takes a value takes several, separated by commas; a backslash before "
        "a comma makes it part of a value. Example: smallmind sweep book.txt --learning-rate "
        "1e-3,3e-3 --n-embd 64,128 --seeds 3 --minutes-each 1. --out is the folder of the sweep, "
        "by default runs/<text>-sweep; it holds a run and a log per combination, results.csv and "
        "results.json. To continue, repeat the command or --resume the folder: finished runs are "
        "kept, an interrupted one resumes. More values of the same flags extend the sweep. "
        "`smallmind compare DIR` and `report DIR` read it."
    )


def _several(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the settings whose flags take a value."""
    flags = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    return {x.dest for x in flags if x.dest in (*FIELDS, *SOURCES)}.difference(ONE_VALUE)


def run(options: argparse.Namespace) -> int:
    """Trains what is left of the sweep, and shows the table -> exit status."""
    from smallmind.files.lock import RunLock
    from smallmind.forecast.threads import divided_cpus
    from smallmind.runs.sweep import PLAN, SweepPlan
    from smallmind.views.sweep import result_of

    if options.jobs < 1:
        raise InputError(f"--jobs {options.jobs} must be at least 1")
    try:
        cpus = divided_cpus(options.jobs)
    except InputError as error:
        raise InputError(f"--jobs {options.jobs}: {error}") from None
    console = Console(defer_errors=True)
    plan = None if options.resume else _plan(options)
    folder = options.resume or _folder(options)
    if options.resume:
        _check_alone(options)
        SweepPlan.read(folder)  # before a lock is written
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder):
        saved = SweepPlan.read(folder) if (folder / PLAN).exists() else None
        if plan and saved:
            try:
                plan = saved.extended(plan)
            except InputError as error:
                raise InputError(
                    f"the sweep in {folder} {error}; add them, choose another --out, or continue "
                    f"it unchanged with --resume {folder}"
                ) from None
        plan = plan or saved
        assert plan
        if plan != saved:
            plan.save(folder)
        if saved and len(plan.runs) > len(saved.runs):
            console.line(f"The sweep grows from {len(saved.runs)} to {len(plan.runs)} runs")
        sweep = _Sweep(console, folder, plan, cpus)
        received = sweep.train()
        results = [result_of(folder, each) for each in plan.runs]
        _show(console, folder, plan, results)
        if received:
            console.command("Next:", ["smallmind", "sweep", "--resume", str(folder)])
            return 128 + received
    has_ended = [each.state == "finished" for each in results]
    if sum(has_ended) > 1:
        console.command("Next:", ["smallmind", "compare", str(folder)])
    console.check()
    return 0 if any(has_ended) else 1


def _check_alone(options: argparse.Namespace) -> None:
    """Raises InputError if there is another flag than --jobs beside --resume."""
    others = [name for name in vars(options) if name in FIELDS or name == "text"]
    if others or any(getattr(options, name) for name in (*SOURCES, "seeds")):
        raise InputError(
            "--resume takes all settings from the sweep; leave out the other flags, or repeat the "
            "original command with more values"
        )


def _plan(options: argparse.Namespace) -> "SweepPlan":
    """Returns the plan that the flags make, each of whose runs has been checked."""
    from smallmind.corpus.corpus import Corpus
    from smallmind.corpus.tokens import are_tokens
    from smallmind.runs.sweep import SweepPlan

    values = {name: _listed(x) for name, x in vars(options).items() if name in FIELDS}
    values |= {name: _listed(x) for name in SOURCES if (x := getattr(options, name))}
    paths = [str(Path(path).resolve()) for path in values.pop("text", [])]
    values.pop("out", None)
    which = {name: values.get(name, []) for name in ("exclude", "include")}
    if several := [name for name, patterns in which.items() if len(patterns) > 1]:
        raise InputError(
            f"a sweep takes one --{several[0]}; for several, encode the texts with smallmind "
            "prepare and give the directory that it writes"
        )
    for name in PATHS:
        if name in values:
            values[name] = [
                path if path in parts.REWARDS else str(Path(path).resolve())
                for path in values[name]
            ]
    if "tokenizer" in values:
        kinds = values["tokenizer"]
        values["tokenizer"] = [
            str(Path(kind).resolve()) if str(kind).endswith(".json") else kind for kind in kinds
        ]
    seeds = values.pop("seed", [FIELDS["seed"][1].default])
    if options.seeds is not None:
        if options.seeds < 1:
            raise InputError(f"--seeds {options.seeds} must be at least 1")
        if len(seeds) > 1:
            raise InputError("--seeds counts from one --seed: leave out one of the two lists")
        seeds = [seeds[0] + i for i in range(options.seeds)]
    plan = SweepPlan.of(paths, values | {"seed": seeds})
    for each in plan.runs:
        try:
            choices_of_run(_options_of(each.settings)).settings()
        except InputError as error:
            raise InputError(f"{each.name}: {error}") from None
    if paths and not are_tokens(paths):
        Corpus(
            paths, exclude=which["exclude"], include=which["include"]
        )  # raises for a file that cannot be read
    return plan


def _listed(value: Any) -> list[Any]:
    """Returns the values of a flag, of which there may be only one."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _options_of(settings: Mapping[str, Any]) -> argparse.Namespace:
    """Returns the settings of a run, as the flags of `smallmind train` would make them."""
    options = argparse.Namespace(**{**dict.fromkeys(SOURCES), **settings})
    options.config = Path(options.config) if options.config else None
    return options


def _folder(options: argparse.Namespace) -> Path:
    from smallmind.runs.files import RUNS, name_of

    if "out" in options:
        return Path(options.out)
    return Path(RUNS) / f"{name_of(getattr(options, 'text', None) or None)}-sweep"


def _flags(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the words that set them on a command line."""
    for name, value in settings.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif value is not None:
            yield f"{flag}={value}"


class _Job:
    """A process that trains a run, and the run as it is seen from here."""

    def __init__(
        self,
        folder: Path,
        plan: "SweepPlan",
        run: "PlannedRun",
        cpus: list[int],
        threads: int | None,
    ) -> None:
        from smallmind.runs.files import CONFIG
        from smallmind.views.run_view import RunView
        from smallmind.views.sweep import LOG

        self.run, self.cpus = run, cpus
        self.log = folder / f"{run.name}{LOG}"
        path = folder / run.name
        words = ["train", "--resume", str(path)]
        if not (path / CONFIG).exists():
            words = ["train", *plan.text, *_flags(run.settings), "--out", str(path)]
        if threads and "threads" not in run.settings:
            words += ["--threads", str(threads)]
        # Ctrl-C in the terminal is for this process, which then tells the others.
        group: dict[str, Any] = {"process_group": 0}
        if os.name == "nt":
            group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
        with open(self.log, "ab") as log, _bound_to(cpus):
            self.process = subprocess.Popen(
                python(PROGRAM, *words), stdin=subprocess.PIPE, stdout=log, stderr=log, **group
            )
        self.view = RunView(path, ("loss",))
        self.start = time.monotonic()

    def stop(self) -> None:
        """Makes it save and end."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stop()

    def note_end(self) -> None:
        """Adds to the log how the process ended, if it could not say it itself."""
        number = -self.process.returncode
        if number > 0:
            with suppress(ValueError):
                name = signal.Signals(number).name
                advice = "; perhaps it ran out of memory" if name == "SIGKILL" else ""
                with open(self.log, "a", encoding="utf-8") as log:
                    log.write(f"\nsmallmind: ended by {name}{advice}\n")

    @property
    def share(self) -> float:
        """How much of the run is done."""
        return min(1.0, self.view.step / self.view.steps) if self.view.steps else 0.0

    def progress(self) -> str:
        """Says how far it is; the name, which may be long, comes last."""
        losses = self.view.curves["loss"].values
        taken = duration(time.monotonic() - self.start)
        if not losses:
            return f"   0%, {taken}, starting   {self.run.name}"
        return f"{self.share:5.0%}, {taken}, training loss {losses[-1]:.4f}  {self.run.name}"


@contextmanager
def _bound_to(cpus: list[int]) -> Iterator[None]:
    """Runs processes that are started in the block on these CPUs; on any if there are none."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Sweep:
    """The runs of a plan that are still to train, and those that are being trained."""

    def __init__(
        self, console: Console, folder: Path, plan: "SweepPlan", cpus: list[list[int]]
    ) -> None:
        from smallmind.kernels.codegen.cpus import cores
        from smallmind.views.sweep import result_of

        self.console, self.folder, self.plan = console, folder, plan
        results = [result_of(folder, each) for each in plan.runs]
        self.waiting = [
            each for each, found in zip(plan.runs, results, strict=True) if not found.is_over
        ]
        self.done = len(plan.runs) - len(self.waiting)
        self.begun_with = self.done
        self.free = cpus if len(cpus) > 1 else [[]]  # one run at a time may have all CPUs
        # Where a process cannot be bound to CPUs, it has its share of the threads.
        self.threads = None if cpus[0] or len(cpus) == 1 else max(1, cores() // len(cpus))
        self.jobs: list[_Job] = []
        self.start = time.monotonic()

    def train(self) -> int:
        """Trains the runs -> the number of the signal that ended this early, or 0."""
        count, left = len(self.plan.runs), len(self.waiting)
        known = f", {self.done} already done" if self.done else ""
        self.console.line(f"Sweep of {count_of(count, 'run')} in {self.folder}{known}")
        with ExitStack() as stack, stopping() as received:
            stack.callback(self._kill)
            while (self.waiting and not received) or self.jobs:
                if received:
                    for job in self.jobs:
                        job.stop()
                else:
                    self._start_jobs()
                self._end_jobs()
                self._show_progress(bool(received))
                time.sleep(LOOK_SECONDS)
        if left and not received:
            self.console.line(f"Done in {duration(time.monotonic() - self.start)}")
        return received[0] if received else 0

    def _start_jobs(self) -> None:
        """Starts runs on the CPUs that are free, but not those that another process trains."""
        from smallmind.files.lock import is_held

        for run in list(self.waiting):
            if not self.free:
                return
            # The process of a sweep that was killed may still be saving.
            if not is_held(self.folder / run.name):
                self.waiting.remove(run)
                job = _Job(self.folder, self.plan, run, self.free.pop(0), self.threads)
                self.jobs.append(job)

    def _kill(self) -> None:
        for job in self.jobs:
            job.kill()

    def _end_jobs(self) -> None:
        """Shows and saves the results of runs that have ended."""
        from smallmind.views.sweep import result_of, save

        for job in list(self.jobs):
            if job.process.poll() is None:
                continue
            job.note_end()
            job.stop()
            self.jobs.remove(job)
            self.free.append(job.cpus)
            results = [result_of(self.folder, each) for each in self.plan.runs]
            result = next(each for each in results if each.name == job.run.name)
            self.done += result.is_over or result.error is not None
            self.console.line(f"{self.done}/{len(self.plan.runs)}  {_told(result)}")
            save(self.folder, self.plan, results)

    def _show_progress(self, is_stopping: bool) -> None:
        """Shows a line for the sweep, and one for each run that is being trained."""
        for job in self.jobs:
            job.view.refresh()
        text = f"{self.done} of {len(self.plan.runs)} runs done"
        here = self.done - self.begun_with + sum(job.share for job in self.jobs)
        if is_stopping:
            text += ", stopping: runs are saving after their step; Ctrl-C again quits at once"
        elif not self.jobs and self.waiting:
            text += f"; waiting for another process to finish {self.waiting[0].name}"
        elif here:
            left = len(self.plan.runs) - self.begun_with - here
            text += f", {duration((time.monotonic() - self.start) * left / here)} left"
        self.console.live_lines([text, *(job.progress() for job in self.jobs)])


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Adds the numbers of signals to the list within the block; a second Ctrl-C raises."""
    received: list[int] = []
    is_impatient = impatience()

    def stop(number: int, _frame: object) -> None:
        if number == signal.SIGINT and is_impatient():
            raise KeyboardInterrupt
        received.append(number)

    with handling(stop, *handled("SIGINT", *ENDING_SIGNALS)):
        yield received


def _told(result: "Result") -> str:
    """Returns how a run ended, in a line."""
    if result.error:
        return f"{result.name}: {result.error}"
    length = f"{count_of(result.step, 'step')}, {duration(result.seconds)}"
    if result.state == "waiting":
        return f"{result.name}: not started yet"
    if result.loss is None:
        return f"{result.name}: {result.state} after {length}"
    return f"{result.name}: final held-out loss {result.loss:.4f}, {length}"


def _show(console: Console, folder: Path, plan: "SweepPlan", results: "list[Result]") -> None:
    """Shows the table, sorted by loss, and what it means; saves the results."""
    from smallmind.runs.sweep import shown
    from smallmind.views.sweep import CSV, JSON, UNITS, groups_of, measure_of, save

    save(folder, plan, results)
    measure, groups = measure_of(plan), groups_of(plan, results)
    names = list(groups[0].settings)
    heads = [*names, "final held-out loss", "spread", "runs", "time"]
    has_notes = any(_note(group) for group in groups)
    rows = []
    for group in groups:
        settings = [shorten(shown(x), 24) for x in group.settings.values()]
        row = [*settings, number(group.mean, 4), number(group.spread, 4)]
        row += [str(len(group.values)), duration(group.seconds)]
        rows.append([*row, _note(group)] if has_notes else row)
    sides = ">" * len(heads)
    if has_notes:
        heads, sides = [*heads, "note"], f"{sides}<"
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        width = full_width() - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)
        for row in rows:
            if len(row[-1]) > width:
                row[-1] = f"{row[-1][: max(20, width) - 3].rstrip()}..."
    console.line()
    console.drawing(Table("", rows, heads, sides).columns())
    console.line(
        f"Final held-out loss in {UNITS[measure]}, lowest first"
        + ("; spread: standard deviation over the seeds" if "seed" in plan.varied else "")
    )
    if len({result.text for result in results} - {None}) > 1:
        console.warning("The text has changed between runs: their losses cannot be compared")
    failed = [result for result in results if result.error]
    for result in failed[:MAX_ERRORS]:
        console.line(f"{result.name}: {result.error}")
    if len(failed) > MAX_ERRORS:
        console.line(f"{len(failed) - MAX_ERRORS} more failed: {folder / CSV} shows why")
    console.line(f"Results: {folder / CSV} and {JSON}")


def _note(group: "SweepGroup") -> str:
    """Returns why a mean has fewer values than there are runs."""
    states = [f"{x.error}" if x.error else x.state for x in group.results if x.loss is None]
    counted = [f"{states.count(x)} x {x}" if states.count(x) > 1 else x for x in states]
    return "; ".join(dict.fromkeys(counted))

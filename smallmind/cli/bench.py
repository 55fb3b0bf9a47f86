"""Measure kernels, training steps and starts on this machine, and compare with other libraries."""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smallmind.checks import InputError, from_json
from smallmind.cli.console import Console, full_width
from smallmind.cli.flags import check_writable
from smallmind.console.live_line import LiveLine
from smallmind.console.table import Table

ISAS = ("haswell", "x86-64", "skylake-avx512")  # those of `smallmind.bench.machine`
ARCHS = ("gpt2", "llama", "modern")
# Shapes of `step` that have a name.
NAMED_SHAPES: dict[str, list[tuple[int, ...]]] = {
    "tiny": [(16, 16, C, 1, 4) for C in (16, 64, 128)]
}
STEP_SHAPES = "such as 12x64x128x4x4: B, T, C, layers, heads"

Record = dict[str, Any]
NOISY_SPREAD, DISTURBED = 0.2, "!"  # above which a figure is marked, and the mark
LONG_STEP = 1.0  # seconds of a step, after which that of larger sizes is computed
# Columns of `kernels` that a narrow terminal hides, these first.
SPARE = ("MB", "MFLOP", "median", "x 1 thread", "FLOP/byte", "x NumPy")
NOISE = 0.05  # by how much of a limit the best of both may differ
Flag = tuple[str, dict[str, Any]]  # the arguments of `add_argument`


def shape(text: str) -> tuple[int, ...]:
    """768x128x384 -> its sizes."""
    try:
        sizes = tuple(int(size) for size in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write 768x128x384")
    return sizes


def _step_shapes(text: str) -> list[tuple[int, ...]]:
    return [found for word in text.split(",") for found in NAMED_SHAPES.get(word) or [shape(word)]]


def count(text: str) -> int:
    """Returns a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Returns the type of a flag whose value is one of these names."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"no {kind} named {text!r}; there are {', '.join(names)}"
            )
        return text

    return check


def flag(name: str, metavar: str, help: str, **rest: Any) -> Flag:
    """Returns a flag, or a positional argument."""
    return name, {"metavar": metavar, "help": help, **rest}


def counted(name: str, default: int | None, help: str = "") -> Flag:
    """Returns a flag whose value is a whole number above 0."""
    help = help if default is None else f"{help} ({default})".strip()
    return flag(name, "N", help, type=count, default=default)


def several(
    name: str, metavar: str, type: Callable[[str], Any], help: str, default: Any = None
) -> Flag:
    """Returns a flag whose values have commas between them."""

    def values(text: str) -> list[Any]:
        return [type(word) for word in text.split(",")]

    return flag(name, metavar, help, type=values, default=default)


def peers(default: str) -> Flag:
    """Returns a flag that names other libraries."""
    help = f"such as torch,torch compile; default: {default}"
    return flag(
        "--peers", "P,P", help, type=lambda text: [name for name in text.split(",") if name]
    )


# Each has a function of its name below: its help and its flags.
COMMANDS: dict[str, tuple[str, list[Flag]]] = {
    "kernels": (
        "compare each kernel with the machine's limit",
        [
            flag(
                "names",
                "NAME",
                "a kernel, such as matmul or attention, or a file.py that adds some; default: all",
                nargs="*",
            ),
            several("--shapes", "S,S", shape, "such as 768x128x384,1x512x128"),
            counted("--rounds", 7, "turns per contestant"),
            flag("--plot", "FILE.svg", "draw a roofline, with a point for each kernel", type=Path),
        ],
    ),
    "step": (
        "compare a training step with other libraries",
        [
            flag(
                "--shapes",
                "S,S",
                f"{STEP_SHAPES}; or tiny: 1 layer of 16, 64, 128",
                type=_step_shapes,
            ),
            peers("torch, torch compile and jax, if installed"),
            several(
                "--arch",
                "A,A",
                one_of("architecture", ARCHS),
                f"some of {', '.join(ARCHS)}; default: gpt2",
                ["gpt2"],
            ),
            counted("--steps", 60, "steps to time"),
        ],
    ),
    "machine": ("show in one page what this machine is good for", []),
    "start": (
        "time compiling kernels and loading them from cache",
        [counted("--rounds", 3, "later starts")],
    ),
}
COMPARE = flag("--compare", "FILE", "also print the ratios to an earlier --json", type=Path)
ALL: list[Flag] = [
    counted("--threads", None, "default: one per core"),
    ("--isa", {"choices": ISAS, "help": "compile for this instruction set"}),
    flag("--json", "FILE", "write the results to FILE", type=Path),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind bench`."""
    commands = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    for name, (help, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=f"{help}.".capitalize())
        for text, settings in [*flags, *ALL, COMPARE]:
            command.add_argument(text, **settings)
    parser.epilog = (
        "Contestants take turns, so that other load affects all of them alike; a spread above 20 % "
        "says that the machine was busy. The page `kernels` of the guide explains the tables."
    )


def run(options: argparse.Namespace) -> int:
    """Prints and writes what it measures."""
    measure(options, options.what)
    return 0


def measure(options: argparse.Namespace, what: str) -> list[Record]:
    """Measures and prints -> the records, after --json and --compare were served."""
    from smallmind.bench.machine import variables_of

    before = _read(options.compare, what) if options.compare else None
    plotted = getattr(options, "plot", None)
    for name, file in ("--json", options.json), ("--plot", plotted):
        if file:
            check_writable(name, file)
    console = Console()
    variables = variables_of(options.threads, options.isa)
    whole: Record = {"command": what}
    results = whole["results"] = []
    steps: dict[str, Callable[..., Generator[Record, None, None]]]
    steps = {"kernels": _kernels, "step": _step, "machine": _overview, "start": _start}
    try:
        with closing(steps[what](options, variables, console, whole)) as found:
            results.extend(found)
    except KeyboardInterrupt:
        console.line("Interrupted; the measurements so far are kept")
    if _is_disturbed(results):
        console.warning(
            f"{DISTURBED} marks what other programs disturbed, or small sizes whose times vary: "
            "measure again when nothing else runs"
        )
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if plotted and results:
        plotted.write_text(_roofline(whole), encoding="utf-8")
        console.line(f"Wrote {plotted}")
    if before is not None and results:
        _compare(console, before, whole, options.compare)
    # Only now, so that what was measured is kept.
    if what == "step":
        from smallmind.bench.step import failures

        if wrong := failures(results):
            raise InputError("; ".join(wrong))
    return results


def _machine(console: Console, described: Record) -> Record:
    console.line("  ".join(f"{name} {value}" for name, value in described.items()))
    return described


def _described(console: Console, variables: Mapping[str, str], whole: Record) -> Record:
    """Prints and returns the machine, and what disturbs it."""
    from smallmind.bench.machine import ROOT, answer_of

    with saying("starting"):
        words = "-m", "smallmind.bench.machine"
        machine, load = answer_of(*words, variables=variables, cwd=ROOT)
    whole["machine"], whole["limits"] = _machine(console, machine), load
    _warn(console, load, machine["threads"])
    return whole["machine"]


def _show(console: Console, title: str, rows: list[dict[str, str]]) -> None:
    """Prints rows under their title, in parts if the terminal is narrow."""
    table = Table("", [list(row.values()) for row in rows], list(rows[0]))
    width = full_width() if console.is_terminal else sys.maxsize
    console.line()
    console.line(title)
    console.drawing("\n\n".join(table.parts(Table.columns, width)) + "\n")


class _Rows:
    """A table whose rows are printed as they come, in columns as wide as the first one needs.

    A narrow terminal hides some of the `spare` columns, the first of them first.
    """

    def __init__(self, console: Console, title: str, spare: Sequence[str] = ()) -> None:
        self._console, self._title, self._spare = console, title, spare
        self._widths: dict[str, int] = {}
        self.hidden: list[str] = []

    def add(self, row: dict[str, str], first: int = 8, least: int = 8) -> None:
        """Prints a row, the first one below the title and the names of the columns.

        `first` and `least` are the smallest widths: of the first column, and of the others.
        """
        if not self._widths:
            least_widths = [first, *[least] * (len(row) - 1)]
            for (name, cell), width in zip(row.items(), least_widths, strict=True):
                self._widths[name] = max(len(name), len(cell), width)
            self._hide()
            self._console.line()
            self._console.line(self._title)
            self._print({name: name for name in row})
            self._print({name: "-" * width for name, width in self._widths.items()})
        self._print(row)

    def _hide(self) -> None:
        """Removes columns until the table is as wide as the terminal, or none is spare."""
        room = full_width() if self._console.is_terminal else sys.maxsize
        for name in self._spare:
            if sum(self._widths.values()) + 2 * len(self._widths) - 2 <= room:
                break
            del self._widths[name]
            self.hidden.append(name)

    def _print(self, row: Mapping[str, str]) -> None:
        (name, first), *others = self._widths.items()
        cells = [f"{row[name]:<{first}}", *(f"{row[x]:>{width}}" for x, width in others)]
        self._console.drawing(f"{'  '.join(cells).rstrip()}\n")


def _kernels(
    options: argparse.Namespace, variables: Mapping[str, str], console: Console, whole: Record
) -> Generator[Record, None, None]:
    from smallmind.bench.machine import Worker

    threads = int(variables["NUMBA_NUM_THREADS"])
    files = [str(Path(name).resolve()) for name in options.names if name.endswith(".py")]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise InputError(f"{missing[0]} does not exist")
    names = [name for name in options.names if not name.endswith(".py")]
    words = ["kernels", "smallmind.bench.peers.kernels", *_libraries(names, bool(files))]
    with Worker(*words, threads=threads, variables=variables, binds=False) as worker:
        with saying("starting"):
            known = worker.ask(known=files)
        _check_kernels(names, options.shapes, known)
        for name in known if files else ():
            with saying(f"checking {name}"):
                _refuse_wrong(worker.ask(check=name))
        whole["machine"] = _machine(console, worker.ask(machine=None))
        calls = [[name, x] for name in names or known for x in options.shapes or known[name][1]]
        with saying("the machine's limits"):
            whole["limits"] = worker.ask(limits=[calls, options.plot is not None])
        _show(console, "The machine's limits", _limits(whole["limits"]))
        _warn(console, whole["limits"], threads)
        hidden: list[str] = []
        for name in names or known:
            axes, shapes = known[name]
            rows = _Rows(console, f"{name} ({axes})", SPARE)
            longest = max(len("x".join(map(str, x))) for x in options.shapes or shapes)
            for sizes in options.shapes or shapes:
                with saying(f"{name} {'x'.join(map(str, sizes))}"):
                    record = worker.ask(measure=[name, sizes, options.rounds])
                _refuse_wrong(record)
                rows.add(_kernel_row(record), first=longest)
                yield record
            if added := [x for x in rows.hidden if x not in hidden]:
                hidden += added
                shown = ", ".join(added)
                console.line(f"Columns hidden (terminal too narrow): {shown}; --json has them")


def _refuse_wrong(answer: Record) -> None:
    """Raises InputError for a kernel that does not do what its plain form does."""
    if "wrong" in answer:
        raise InputError(answer["wrong"])


def _libraries(names: Sequence[str], are_added: bool) -> list[str]:
    """Returns the peers to import, which takes seconds: only those that these kernels have.

    A file's own kernels have none.
    """
    if are_added and not names:
        return []
    from smallmind.bench.cases import TORCH

    is_wanted = not names or any(name.startswith(tuple(TORCH)) for name in names)
    return ["torch"] if is_wanted and find_spec("torch") else []


def _check_kernels(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]] | None, known: Record
) -> None:
    """Raises InputError unless the kernels exist and have the axes of the shapes."""
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no kernel named {unknown[0]}; there are {', '.join(known)}")
    axes = {len(known[name][0].split()) for name in names or (known if len(known) == 1 else ())}
    if any(axes != {len(sizes)} for sizes in shapes or []):
        raise InputError(
            "--shapes: name kernels with the same axes; column_sum takes RxC, matmul MxKxN"
        )


def _limits(found: Record) -> list[dict[str, str]]:
    row = {"": "multiply-adds, float32"}
    for name, suffix in (("all threads", ""), ("one thread", "_on_one")):
        row[name] = f"{found[f'multiply_add_per_second{suffix}'] / 1e9:.0f} GFLOP/s"
    rows = [row]
    for nbytes, rate in found["copy_bytes_per_second"].items():
        name = f"copy of {int(nbytes) / 1e6:g} MB"
        rows.append({"": name, "all threads": f"{rate / 1e9:.0f} GB/s", "one thread": ""})
    rows[-1]["one thread"] = f"{found['copy_bytes_per_second_on_one'] / 1e9:.0f} GB/s"
    return rows


def _spread(share: float) -> str:
    """Returns a spread as a table shows it, marked if other programs disturbed what was timed."""
    shown = f"{share * 100:.0f} %" if share <= 1 else "> 100 %"
    return f"{shown} {DISTURBED}" if share > NOISY_SPREAD else shown


def _share(share: float) -> str:
    """-> a share of a limit; one well above it says that measuring the limit was disturbed."""
    return f"{min(share, 1.0) * 100:.0f} %" if share <= 1 + NOISE else DISTURBED


def _is_disturbed(found: Any) -> bool:
    """-> True if any of these records has a spread that is marked, or more than all of a limit."""
    if isinstance(found, dict):
        excess = max(
            found.get("spread", 0.0) - NOISY_SPREAD, found.get("share_of_bound", 0.0) - 1 - NOISE
        )
        return excess > 0 or any(map(_is_disturbed, found.values()))
    return isinstance(found, list) and any(map(_is_disturbed, found))


def _kernel_row(record: Record) -> dict[str, str]:
    from smallmind.kernels.timing import duration

    times = record["times"]
    best, flops, nbytes = times["ours"]["minimum"], record["flops"], record["bytes"]

    def ratio(name: str) -> str:
        return f"{times[name]['minimum'] / best:.2f}" if name in times else ""

    rate, unit = (flops, "GFLOP/s") if record["bound"] == "arithmetic" else (nbytes, "GB/s")
    return {
        "shape": "x".join(map(str, record["shape"])),
        "best": duration(best),
        "median": duration(times["ours"]["median"]),
        "spread": _spread(times["ours"]["spread"]),
        "MFLOP": _million(flops),
        "MB": _million(nbytes),
        "FLOP/byte": f"{flops / nbytes:.2f}",
        "rate": f"{rate / best / 1e9:.0f} {unit}",
        "bound": record["bound"],
        "of bound": _share(record["share_of_bound"]),
        "x NumPy": ratio("NumPy"),
        "x PyTorch": ratio("PyTorch"),
        "x 1 thread": ratio("one thread"),
    }


def _roofline(whole: Record) -> str:
    """Returns a picture with a point for each kernel, at the shape with the most work."""
    from smallmind.charts.roofline import Point, roofline

    most: dict[str, Record] = {}
    for record in whole["results"]:
        if record["flops"] >= most.get(record["kernel"], record)["flops"]:
            most[record["kernel"]] = record
    points = []
    for name, record in most.items():
        rate = record["flops"] / record["times"]["ours"]["minimum"]
        shape = "x".join(map(str, record["shape"]))
        points.append(Point(name, record["flops"] / record["bytes"], rate, shape))
    limits = whole["limits"]
    bandwidths = {f"{int(n) / 1e6:g} MB": x for n, x in limits["bytes_per_second"].items()}
    peaks = {"float32": limits["multiply_add_per_second"]}
    for record in most.values():
        kind, rate = record.get("type", "float32"), record["multiply_add_per_second"] or 0.0
        if kind != "float32" and rate > 1.1 * peaks["float32"]:
            peaks[kind] = max(rate, peaks.get(kind, 0.0))
    return roofline(points, peaks, bandwidths)


def _warn(console: Console, limits: Record, threads: int) -> None:
    """Names what disturbs the machine, before it is measured."""
    from smallmind.bench.machine import disturbances

    if found := disturbances(limits, threads):
        console.warning(f"This machine is busy: {'; '.join(found)}. Figures will be too low")


def _million(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.3g}"


def _step(
    options: argparse.Namespace, variables: Mapping[str, str], console: Console, whole: Record
) -> Generator[Record, None, None]:
    from smallmind.bench import step
    from smallmind.bench.peers.job import Sizes

    for sizes in options.shapes or []:
        if len(sizes) != 5 or sizes[2] % sizes[4]:
            raise InputError("--shapes needs B, T, C, layers and heads, C a multiple of the heads")
    able = {arch: step.peers_of(options.peers, arch) for arch in options.arch}
    machine = _described(console, variables, whole)
    for sizes in [Sizes(*shape) for shape in options.shapes] if options.shapes else step.SIZES:
        for arch in options.arch:
            with saying(f"{arch}, {sizes.name}"):
                record = step.measure(
                    sizes, arch, able[arch], options.steps, machine["threads"], variables
                )
            _show_step(console, record)
            yield record
            if record["is_interrupted"]:
                raise KeyboardInterrupt


def _show_step(console: Console, record: Record) -> None:
    from smallmind.bench.peers.job import Sizes
    from smallmind.bench.step import COMPARED

    sizes, ours = Sizes(**record["sizes"]), record["contestants"]["ours"]
    rows = []
    for name, result in record["contestants"].items():
        rate = record["operations"] / result["seconds"]
        rows.append(
            {
                "": name,
                "best ms": f"{result['best_seconds'] * 1e3:.3f}",
                "median ms": f"{result['seconds'] * 1e3:.3f}",
                "us/sample": f"{result['seconds'] / sizes.B * 1e6:,.1f}",
                "spread": _spread(result["spread"]),
                "CPU ms": f"{result['processor_seconds'] * 1e3:.2f}",
                "tokens/s": f"{sizes.B * sizes.T / result['seconds']:,.0f}",
                "GFLOP/s": f"{rate / 1e9:.0f}",
                "of FMA": _share(rate / record["multiply_add_per_second"]),
                "time / ours": f"{result['seconds'] / ours['seconds']:.2f}",
                "CPU / ours": f"{result['processor_seconds'] / ours['processor_seconds']:.2f}",
                "peak MB": f"{result['peak_bytes'] / 1e6:.0f}",
                "ours / this": f"{ours['peak_bytes'] / result['peak_bytes']:.2f}",
                f"loss after {COMPARED}": f"{result['losses'][-1]:.5f}",
                "differs": f"{result['worst_difference']:.0e}" if name != "ours" else "",
            }
        )
    share, python = record["python_seconds"] / ours["seconds"], record["python_seconds"] * 1e3
    _show(console, f"{record['arch']}, {sizes.name}, {record['parameters']:,} parameters", rows)
    console.line(f"Python takes {python:.3f} ms of our step, {share * 100:.1f} %")


def _overview(
    _: argparse.Namespace, variables: Mapping[str, str], console: Console, whole: Record
) -> Generator[Record, None, None]:
    """Measures what a machine is good for, and prints each figure as it comes."""
    from smallmind.bench.machine import Worker
    from smallmind.kernels.timing import duration
    from smallmind.settings.presets import SIZES

    threads = int(variables["NUMBA_NUM_THREADS"])
    words = "machine", "smallmind.bench.overview"
    with Worker(*words, threads=threads, variables=variables, binds=False) as worker:

        def ask(what: str, asked: Any = None) -> Any:
            with saying(what):
                return worker.ask(**{what: asked})

        whole["machine"] = _machine(console, ask("machine"))
        whole["limits"] = ask("load")
        _warn(console, whole["limits"], threads)
        rows = _Rows(console, "Rates")
        for kind, both in ask("peaks").items():
            cells = _both(*(f"{x / 1e9:,.0f} GFLOP/s" for x in both))
            rows.add({"": kind, **cells}, first=22, least=13)
            yield from _figures(f"{kind}, {{}}", both, "FLOP/s")
        for nbytes, found in ask("bandwidths").items():
            for how, both in found.items():
                what = f"{how} {int(nbytes) / 1e6:g} MB"
                rows.add(
                    {"": what, **_both(*(f"{x / 1e9:,.0f} GB/s" for x in both))}, first=22, least=13
                )
                yield from _figures(f"{what}, {{}}", both, "B/s")
        rows = _Rows(console, "A training step of each size (GPT-2, AdamW)")
        rate = None
        for size in SIZES:
            with saying(f"step of {size}"):
                found = worker.ask(step=[size, rate])
            if found["seconds"] > LONG_STEP:
                rate = found["rate"]  # the next would take minutes
            per_second = f"{found['tokens'] / found['seconds']:,.0f}"
            rows.add(
                {
                    "size": size,
                    "step": duration(found["seconds"]),
                    "tokens/s": per_second,
                    "GFLOP/s": f"{found['rate'] / 1e9:,.0f}",
                    "": "" if found["is_measured"] else "computed",
                }
            )
            yield {"name": f"step of {size}", "value": found["seconds"], "unit": "s"}
        found = ask("generation")
        rows = _Rows(console, "Generation")
        speed, millions = found["tokens_per_second"], found["parameters"] / 1e6
        rows.add({"model": f"{millions:.0f} M in q8_0", "tokens/s": f"{speed:,.0f}"})
        yield {"name": "generation, 135 M in q8_0", "value": speed, "unit": "tokens/s"}


def _both(all_threads: str, one: str) -> dict[str, str]:
    return {"all threads": all_threads, "one thread": one}


def _figures(name: str, both: Sequence[float], unit: str) -> Iterator[Record]:
    """Yields the records of a figure on all threads and on one."""
    for threads, value in zip(("all threads", "one thread"), both, strict=True):
        yield {"name": name.format(threads), "value": value, "unit": unit}


def _start(
    options: argparse.Namespace, variables: Mapping[str, str], console: Console, whole: Record
) -> Generator[Record, None, None]:
    from smallmind.bench.start import starts

    _described(console, variables, whole)
    records = starts(options.rounds, variables)
    rows = []
    for number in range(1 + options.rounds):
        with saying("the first start, which compiles" if not number else f"later start {number}"):
            record = next(records)
        yield record
        seconds = {name: f"{record[name]:.2f} s" for name in ("imports", "kernels")}
        rows.append({"start": str(record["start"]), **seconds})
    _show(console, "Seconds to import, and to compile or load the kernels of a step", rows)


def _seconds(whole: Record) -> dict[str, float]:
    """Returns the best times of a whole --json by the name of what was timed."""
    found: dict[str, list[float]] = {}
    for record in whole["results"]:
        if whole["command"] == "kernels":
            name = f"{record['kernel']} {'x'.join(map(str, record['shape']))}"
            each = {name: record["times"]["ours"]["minimum"]}
        elif whole["command"] == "step":
            sizes = "x".join(map(str, record["sizes"].values()))
            each = {
                # Earlier files have medians.
                f"{record['arch']} {sizes}, {name}": result.get("best_seconds", result["seconds"])
                for name, result in record["contestants"].items()
            }
        elif whole["command"] == "machine":
            each = {record["name"]: record["value"]}
        else:
            each = {f"{record['start']} start, {x}": record[x] for x in ("imports", "kernels")}
        for name, seconds in each.items():
            found.setdefault(name, []).append(seconds)
    return {name: min(seconds) for name, seconds in found.items()}


def _read(file: Path, what: str) -> Record:
    """Returns an earlier --json of this command. InputError if it is none."""
    try:
        whole = from_json(file.read_bytes())
        if whole["command"] != what:
            raise InputError(f"--compare: {file} is of `smallmind bench {whole['command']}`")
        _seconds(whole)
    except OSError as error:
        raise InputError(f"--compare: cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"--compare: {file} was not written by `smallmind bench {what} --json`"
        ) from None
    return dict(whole)


def _figure(value: float, unit: str) -> str:
    """Returns a number with its unit, briefly."""
    from smallmind.kernels.timing import duration

    if unit == "s":
        return duration(value)
    return f"{value / 1e9:,.0f} G{unit}" if value >= 1e9 else f"{value:,.0f} {unit}"


def _compare(console: Console, before: Record, now: Record, file: Path) -> None:
    """Prints the best times of both, and their ratios."""
    earlier, later = _seconds(before), _seconds(now)
    both = [name for name in later if name in earlier]
    if not both:
        console.line(f"{file} has none of these rows")
        return
    units = {record.get("name"): record.get("unit", "s") for record in now["results"]}
    ratios = [later[name] / earlier[name] for name in both]
    rows = []
    for name, ratio in zip(both, ratios, strict=True):
        unit = units.get(name, "s")
        shown = {"then": earlier[name], "now": later[name]}
        cells = {key: _figure(x, unit) for key, x in shown.items()}
        rows.append({"": name, **cells, "now / then": f"{ratio:.3f}"})
    _show(console, f"Beside {file}", rows)
    if now["command"] != "machine":  # whose figures are not all times
        console.line(f"Median of {len(both)} ratios: {statistics.median(ratios):.3f}")
    machines, names = (before["machine"], now["machine"]), ("cpu", "compiled_for", "threads")
    if differing := [x for x in names if len({machine.get(x) for machine in machines}) > 1]:
        console.warning(f'Not the same {", ".join(differing)}: see "machine" in both files')


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Shows within the block every two seconds what is being done; in a file, by dots."""
    line, ended, start = LiveLine(sys.stdout), threading.Event(), time.monotonic()

    def show() -> None:
        dots = f"  {what} "
        while not ended.wait(2.0):
            if line.is_live:
                line.show(f"  {what}: {time.monotonic() - start:.0f} s")
            else:
                print(dots, end=".", flush=True)
                dots = ""
        if not line.is_live and not dots:
            print()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.clear()

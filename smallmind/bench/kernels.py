"""Compares each kernel with the machine's limit, NumPy and PyTorch."""

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from smallmind.bench.cases import numpy_peer, torch_peer
from smallmind.bench.ceilings import Streams, one_thread
from smallmind.bench.machine import load
from smallmind.kernels import cases
from smallmind.kernels.cases import Case, WrongError
from smallmind.kernels.ceilings import multiply_add, multiply_bfloat16
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.description import ADDED, described
from smallmind.kernels.timing import Contestant, take_in_turn

# Bytes of the arrays by which memory is timed, at least: fewer take less time than a call.
SMALLEST_STREAM = 250_000
# Products of integers multiply so many bytes where a multiply-add has one number: those of four in
# one instruction, or in two on a CPU that has none for that.
BYTES_PER_LANE = 4 if ISA.byte_dots else 2
BYTES = 4  # of most elements of arrays


def measure(row: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Checks one call and times it together with its peers and limits. Units: seconds, 1/s.

    WrongError if its result is wrong: that is not timed.
    """
    name, kind = named(row)
    case = Case(name, sizes, kind)
    error = case.check()
    operations = _operations(case)
    case.overlap()
    traffic = case.traffic()
    streams = Streams(max(SMALLEST_STREAM, sum(traffic)))
    prepare = case.restore_consumed if case.is_consumed else None
    ours = Contestant(case.run, prepare)
    contestants = {"ours": ours, **streams.contestants(*traffic)}
    peak = multiply_bfloat16 if kind == "bfloat16" else multiply_add
    if operations:
        contestants["multiply-add"] = Contestant(peak)
    if threads() > 1:
        contestants["one thread"] = replace(ours, setting=one_thread)
    for library, peer in ("NumPy", numpy_peer), ("PyTorch", torch_peer):
        if run := peer(case):
            contestants[library] = Contestant(run)
    times = take_in_turn(contestants, rounds)
    floors = {"memory": streams.floor({key: x.minimum for key, x in times.items()}, *traffic)}
    rate = None
    if operations:
        rate = peak() / times["multiply-add"].minimum
        if case.arguments.get("by_rows") and kind in cases.QUANTISED:
            rate *= BYTES_PER_LANE
        floors["arithmetic"] = operations / rate
    bound = max(floors, key=lambda name: floors[name])
    return {
        "kernel": row,
        "type": kind,
        "axes": " ".join(case.takes.axes),
        "shape": list(sizes),
        "flops": operations,
        "bytes": traffic[0] + traffic[1] + 2 * traffic[2],
        "bound": bound,
        "share_of_bound": floors[bound] / times["ours"].minimum,
        "multiply_add_per_second": rate,
        "worst_error": error,
        "times": {name: asdict(value) for name, value in times.items()},
    }


def _operations(case: Case) -> int:
    """Returns the operations of a call: those that its description counts, or its plain twin's."""
    if case.description.operations:
        return case.description.operations(*case.arguments.values())
    return case.exact(count=True)[1]


COPIED = (1_000_000, 16_000_000, 256_000_000)  # bytes: from each cache, and from memory


def limits(
    others: Callable[[], float], calls: Sequence[tuple[str, Sequence[int]]], is_plotted: bool
) -> dict[str, Any]:
    """-> the limits of the machine, on all threads and on one, and the load of other programs.

    Copies are as large as these calls need, each a row and its sizes. Those of a plot are of the
    fastest way to move bytes, too. Units: 1/s, and cores.
    """
    found: dict[str, Any] = load(others)
    most = max(BYTES * cases.elements(named(row)[0], sizes) for row, sizes in calls)
    streams = {n: Streams(n) for n in COPIED[: 1 + sum(n < most for n in COPIED)]}
    found["copy_bytes_per_second"] = {str(n): each.copy_rate() for n, each in streams.items()}
    with one_thread():
        found["copy_bytes_per_second_on_one"] = streams[max(streams)].copy_rate()
    if is_plotted:
        found["bytes_per_second"] = {str(n): each.rate() for n, each in streams.items()}
    return found


def named(row: str) -> tuple[str, str]:
    """matmul, matmul_bfloat16 -> the kernel and its number type."""
    for kind in sorted((*cases.FLOATS, *cases.QUANTISED), key=len, reverse=True):
        name = row.removesuffix(f"_{kind}")
        if name != row and kind in cases.types(name):
            return name, kind
    return row, cases.types(row)[0]


def rows() -> list[str]:
    """Returns what is measured: every kernel in the type that it computes in.

    Products also in bfloat16, and those of small integers in each type of these.
    """
    found = []
    for name in cases.kernels():
        kinds = cases.types(name)
        is_quantised = kinds[0] in cases.QUANTISED
        found += [f"{name}_{kind}" for kind in kinds] if is_quantised else [name]
        if described(name).operations and "bfloat16" in kinds:
            found.append(f"{name}_bfloat16")
    return found


def known(files: Sequence[str] = ()) -> dict[str, Any]:
    """Runs files that add kernels -> the rows, each with its axes and its usual shapes.

    Those of the files alone, if there are any.
    """
    for file in files:
        _run(Path(file))
    found = [row for row in rows() if not files or named(row)[0] in ADDED]
    axes = {row: described(named(row)[0]).arguments.axes for row in found}
    return {row: [" ".join(axes[row]), cases.shapes(named(row)[0])] for row in found}


def _run(file: Path) -> None:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)


def checked(row: str) -> dict[str, str]:
    """Checks a kernel at sizes that are no multiples of anything -> why it is wrong, if it is."""
    name, kind = named(row)
    try:
        for sizes in cases.awkward(name):
            Case(name, sizes, kind, optional=True).check()
    except WrongError as error:
        return {"wrong": str(error)}
    return {}


def measured(row: str, shape: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the record of one call, whose memory is free again; or why it is wrong."""
    try:
        record = measure(row, shape, rounds)
    except WrongError as error:
        return {"wrong": str(error)}
    gc.collect()
    return record

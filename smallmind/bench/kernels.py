"""Compares each kernel with the machine's limit, NumPy and PyTorch."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from smallmind.bench.cases import KERNELS, Case, Kernel, Shape
from smallmind.bench.ceilings import TimedCopy, copy_rate, multiply_add_rate, one_thread
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.number_types import to_float32
from smallmind.kernels.timing import Contestant, Times, take_in_turn


def measure(kernel: Kernel, shape: Shape, rounds: int) -> dict[str, object]:
    """Checks one case and times it together with its peers and limits. Units: seconds, 1/s."""
    case = kernel.build(*shape)
    error = worst_error(case)
    if not error < case.allowed_error:
        name = "x".join(map(str, shape))
        raise SystemExit(f"{kernel.name} {name} is wrong: error {error:.1e} against float64")
    copy = TimedCopy(case.nbytes)
    contestants = {"ours": case.ours, "copy": Contestant(copy)}
    if case.flops:
        contestants["multiply-add"] = Contestant(case.peak)
    if threads() > 1:
        contestants["one thread"] = replace(case.ours, setting=one_thread)
    if case.numpy:
        contestants["NumPy"] = case.numpy
    if case.torch:
        contestants["PyTorch"] = case.torch
    times = take_in_turn(contestants, rounds)
    return _record(kernel, shape, case, copy, error, times)


def worst_error(case: Case) -> float:
    """Runs ours once -> the largest error of any output, relative to its largest element."""
    if case.ours.prepare:
        case.ours.prepare()
    expected = case.exact()
    case.ours.run()
    return max(
        float(np.abs(actual - exact).max() / max(np.abs(exact).max(), 1e-30))
        if np.isfinite(actual).all()
        else float("inf")
        for actual, exact in zip(map(to_float32, case.results), expected, strict=True)
    )


def _record(
    kernel: Kernel, shape: Shape, case: Case, copy: TimedCopy, error: float, times: dict[str, Times]
) -> dict[str, object]:
    ours = times["ours"].median
    bandwidth = copy.nbytes / times["copy"].median
    floors = {"copy": case.nbytes / bandwidth}
    peak = None
    if case.flops:
        peak = case.peak() / times["multiply-add"].median
        floors["FMA"] = case.flops / peak
    limit = max(floors, key=lambda name: floors[name])
    return {
        "kernel": kernel.name,
        "axes": kernel.axes,
        "shape": list(shape),
        "flops": case.flops,
        "bytes": case.nbytes,
        "limit": limit,
        "share_of_limit": floors[limit] / ours,
        "multiply_add_per_second": peak,
        "copy_bytes_per_second": bandwidth,
        "worst_error": error,
        "times": {name: asdict(value) for name, value in times.items()},
    }


COPIED = (1_000_000, 16_000_000, 256_000_000)  # bytes: from each cache, and from memory


def limits() -> dict[str, Any]:
    """Returns the machine's limits, on all threads and on one. Units: 1/s."""
    with one_thread():
        alone = multiply_add_rate(), copy_rate(COPIED[-1])
    return {
        "multiply_add_per_second": multiply_add_rate(),
        "multiply_add_per_second_on_one": alone[0],
        "copy_bytes_per_second": {str(nbytes): copy_rate(nbytes) for nbytes in COPIED},
        "copy_bytes_per_second_on_one": alone[1],
    }


def known() -> dict[str, Any]:
    """Returns the names of the kernels, each with its axes and its usual shapes."""
    return {name: [kernel.axes, kernel.shapes] for name, kernel in KERNELS.items()}


def measured(name: str, shape: Sequence[int], rounds: int) -> dict[str, Any]:
    """Returns the record of one case, whose memory is free again."""
    record = measure(KERNELS[name], tuple(shape), rounds)
    gc.collect()
    return record

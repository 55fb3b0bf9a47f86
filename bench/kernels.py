"""Compares each kernel with the machine's limit, NumPy and PyTorch: python -m bench kernels."""

import argparse
import gc
from dataclasses import asdict, replace

import numpy as np
from tabulate import tabulate

from bench.cases import KERNELS, Case, Kernel, Shape
from bench.ceilings import Copy, one_thread
from bench.timing import Contestant, Times, duration, take_in_turn
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.half import to_float32


def measure(kernel: Kernel, shape: Shape, rounds: int) -> dict[str, object]:
    """Checks one case and times it together with its peers and limits. Units: seconds, 1/s."""
    case = kernel.build(*shape)
    error = worst_error(case)
    if not error < case.allowed_error:
        name = "x".join(map(str, shape))
        raise SystemExit(f"{kernel.name} {name} is wrong: error {error:.1e} against float64")
    copy = Copy(case.nbytes)
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
    kernel: Kernel, shape: Shape, case: Case, copy: Copy, error: float, times: dict[str, Times]
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


def _row(record: dict) -> dict[str, str]:
    times = record["times"]
    ours = times["ours"]["median"]

    def ratio(name: str) -> str:
        return f"{times[name]['median'] / ours:.2f}" if name in times else ""

    if record["limit"] == "FMA":
        rate = f"{record['flops'] / ours / 1e9:.0f} GFLOP/s"
    else:
        rate = f"{record['bytes'] / ours / 1e9:.0f} GB/s"
    return {
        "shape": "x".join(map(str, record["shape"])),
        "median": duration(ours),
        "spread": f"{times['ours']['spread'] * 100:.0f} %",
        "rate": rate,
        "limit": record["limit"],
        "of limit": f"{record['share_of_limit'] * 100:.0f} %",
        "x NumPy": ratio("NumPy"),
        "x PyTorch": ratio("PyTorch"),
        "x 1 thread": ratio("one thread"),
        "worst error": f"{record['worst_error']:.0e}",
    }


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, object]]:
    """Measures and prints the chosen kernels; returns their records."""
    records = []
    for name in options.names or KERNELS:
        kernel = KERNELS[name]
        rows = []
        for shape in options.shapes or kernel.shapes:
            try:
                record = measure(kernel, shape, options.rounds)
            except KeyboardInterrupt:
                print("Interrupted; the measurements so far are kept")
                return records
            records.append(record)
            rows.append(_row(record))
            gc.collect()
        print(f"\n{name} ({kernel.axes})")
        alignment = ["left"] + ["right"] * (len(rows[0]) - 1)
        print(tabulate(rows, "keys", colalign=alignment, disable_numparse=True), flush=True)
    return records

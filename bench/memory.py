"""Measures training memory by precision and recompute, and its estimate: python -m bench memory.

Every figure is measured in a separate process.
"""

import argparse
import json
import random
import statistics
import tempfile
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from bench.trial import ALPHABET
from smallmind.bench.machine import ROOT, answer_of, environment
from smallmind.forecast.memory import MemoryEstimate, MemoryPlan, estimate
from smallmind.settings.config import ModelConfig, TrainingConfig
from smallmind.settings.rules import Choices

Settings = dict[str, Any]
Record = dict[str, Any]

EXAMPLE = {"block_size": 512, "n_layer": 4, "n_head": 4, "n_embd": 128}
BATCH = 16
LONG = 32768  # tokens
PRECISIONS = ("float32", "float16", "bfloat16")
STRATEGIES = ("none", "every_layer", "sqrt_layers")
LIMIT = 10**9  # bytes
# Batches whose gradients are added before an update, and the windows of each.
ACCUMULATED = ((1, 64), (4, 16), (16, 4))
VECTORS = ("weights", "working_weights", "gradients", "moments", "snapshot")
HELD = (
    "weights",
    "working_weights",
    "activations",
    "gradients",
    "moments",
    "snapshot",
    "scratch",
)


def training_settings(precision: str, strategy: str, micro_batch: int | None = None) -> Settings:
    """The fields of TrainingConfig that are compared."""
    return {
        "precision": precision,
        "use_gradient_checkpointing": strategy != "none",
        "checkpoint_strategy": strategy,
        "micro_batch_size": micro_batch,
    }


def run_trial(
    threads: int, variables: Mapping[str, str] = MappingProxyType({}), **arguments: Any
) -> Record:
    """Calls `bench.trial` with these arguments in a new process, in this environment -> result."""
    variables = environment(threads) | variables
    trial = json.dumps(arguments)
    return dict(answer_of("-m", "bench.trial", trial, variables=variables, cwd=ROOT))


def _estimate(model: Settings, settings: Settings, batch_size: int, threads: int) -> MemoryEstimate:
    config = ModelConfig(len(ALPHABET), **model)
    return estimate(config, TrainingConfig(**settings), batch_size, threads)


def _measure(
    threads: int, model: Settings, batch_size: int, micro_batch: int | None, steps: int
) -> list[Record]:
    """A record for each precision and strategy; times are of steps taken in turn."""
    records = []
    for precision in PRECISIONS:
        settings = [training_settings(precision, strategy, micro_batch) for strategy in STRATEGIES]
        # The first step loads the kernels.
        seconds = run_trial(
            threads, model=model, batch_size=batch_size, settings=settings, steps=steps + 1
        )["seconds"]
        for chosen, times in zip(settings, seconds, strict=True):
            ratios = [mine / none for mine, none in zip(times, seconds[0], strict=True)]
            held = run_trial(
                threads, model=model, batch_size=batch_size, settings=[chosen], steps=2
            )
            expected = _estimate(model, chosen, batch_size, threads)
            measured = held["pool"]["bytes_held"] + sum(held[name] for name in VECTORS)
            counted = expected.activations + sum(getattr(expected, name) for name in VECTORS)
            records.append(
                {
                    **chosen,
                    **held,
                    "activations": held["pool"]["high_water_mark"],
                    "seconds": statistics.median(times[1:]),
                    "times_none": statistics.median(ratios[1:]),
                    "estimate": {**asdict(expected), "total": expected.total},
                    "error": expected.total / held["peak"] - 1,
                    "error_of_held": counted / measured - 1,
                }
            )
    return records


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _example(threads: int, steps: int) -> list[Record]:
    """The guide's example, in one pass and in micro-batches of the default size."""
    records = []
    for micro_batch in (BATCH, None):
        records += _measure(threads, EXAMPLE, BATCH, micro_batch, steps)
    rows = [
        {
            "precision": r["precision"],
            "recompute": r["checkpoint_strategy"],
            "micro-batch": r["micro_batch_size"] or "default",
            **{name.replace("_", " "): _mb(r[name]) for name in HELD},
            "peak": _mb(r["peak"]),
            "estimate": _mb(r["estimate"]["total"]),
            "off": f"{r['error'] * 100:+.1f} %",
            "ms": f"{r['seconds'] * 1e3:.0f}",
            "x none": f"{r['times_none']:.2f}",
        }
        for r in records
    ]
    worst = max(abs(r["error_of_held"]) for r in records)
    _show(f"B{BATCH} T512 4x128, MB", rows)
    print(f"The estimate of vectors and pool is at most {worst * 100:.1f} % off")
    return records


def _layers(threads: int, steps: int) -> list[Record]:
    """Activations by strategy for 16 layers."""
    model = {**EXAMPLE, "n_layer": 16}
    records = _measure(threads, model, 4, 4, steps)
    rows = []
    for n, r in enumerate(records):
        whole = records[n - n % len(STRATEGIES)]["activations"]  # of the first: no recompute
        r["share_of_none"] = r["activations"] / whole
        rows.append(
            {
                "precision": r["precision"],
                "recompute": r["checkpoint_strategy"],
                "activations, MB": _mb(r["activations"]),
                "of none": f"{r['share_of_none'] * 100:.1f} %",
                "ms": f"{r['seconds'] * 1e3:.0f}",
                "x none": f"{r['times_none']:.2f}",
            }
        )
    _show("B4 T512 16x128", rows)
    return records


def _limit(threads: int, _steps: int) -> list[Record]:
    """The largest batch that is estimated to fit in LIMIT: runs it, and a larger one."""
    records: list[Record] = []
    for precision, strategy in (("float32", "none"), ("float16", "every_layer")):
        settings = training_settings(precision, strategy)
        fields = {"vocab_size": len(ALPHABET), **EXAMPLE, **settings, "threads": threads}
        windows = MemoryPlan(Choices(fields, recipe=None).settings()).largest_batch(LIMIT)
        expected = _estimate(EXAMPLE, {**settings, "micro_batch_size": windows}, windows, threads)
        capacity = LIMIT - (expected.total - expected.activations)
        larger = windows * 3 // 2
        run, more = (
            run_trial(
                threads,
                model=EXAMPLE,
                batch_size=n,
                settings=[{**settings, "micro_batch_size": n}],
                steps=2,
                capacity=capacity,
            )
            for n in (windows, larger)
        )
        records.append(
            {
                "precision": precision,
                "checkpoint_strategy": strategy,
                "limit": LIMIT,
                "capacity": capacity,
                "windows": windows,
                "fits": "peak" in run,
                "peak": run.get("peak", 0),
                "larger": larger,
                "larger_refused": "out_of_memory" in more,
            }
        )
    rows = [
        {
            "precision": r["precision"],
            "recompute": r["checkpoint_strategy"],
            "windows": r["windows"],
            "x first": f"{r['windows'] / records[0]['windows']:.2f}",
            "it": "runs" if r["fits"] else "is refused",
            "peak, MB": _mb(r["peak"]),
            "a larger batch": f"{r['larger']} {'is refused' if r['larger_refused'] else 'runs'}",
        }
        for r in records
    ]
    _show(f"T512 4x128, the largest batch in one pass in {_mb(LIMIT)} MB", rows)
    return records


def _long(threads: int, _steps: int) -> list[Record]:
    """One step over a long context, without a snapshot: there is no earlier step to restore."""
    model, settings = {**EXAMPLE, "block_size": LONG}, training_settings("float16", "every_layer")
    settings["max_rollbacks"] = 0
    record = run_trial(threads, model=model, batch_size=1, settings=[settings], steps=1)
    held = record["pool"]["high_water_mark"]
    expected = _estimate(model, settings, 1, threads).total
    off = f"{(expected / record['peak'] - 1) * 100:+.1f} %"
    row = {
        "seconds": f"{record['seconds'][0][0]:.0f}",
        "activations": _mb(held),
        "peak": _mb(record["peak"]),
        "estimate": _mb(expected),
        "off": off,
    }
    _show(f"B1 T{LONG} 4x128 float16 every_layer, MB", [row])
    return [{**record, "estimate": expected}]


def _accumulation(threads: int, steps: int) -> list[Record]:
    """An update from 64 windows in one pass, and in several whose gradients are added."""
    records: list[Record] = []
    for batches, windows in ACCUMULATED:
        settings = training_settings("float32", "none", windows) | {"grad_accum_steps": batches}
        trial = run_trial(
            threads, model=EXAMPLE, batch_size=windows, settings=[settings], steps=steps + 1
        )
        records.append({"batches": batches, "windows": windows, **trial})
    first = records[0]
    rows = [
        {
            "batches x windows": f"{r['batches']} x {r['windows']}",
            "ms": f"{statistics.median(r['seconds'][0][1:]) * 1e3:.0f}",
            "peak, MB": _mb(r["peak"]),
            "loss": f"{r['loss']:.7f}",
            "bits": "the same" if r["digest"] == first["digest"] else "others",
        }
        for r in records
    ]
    _show(f"T512 4x128, {steps + 1} updates from 64 windows", rows)
    return records


# Runs by the flags of `smallmind train`; {text} is one of TEXT_BYTES with characters of any width.
SHORT = "--steps 25 --val-every 12 --val-batches 2"
RUNS = (
    f"--size nano {SHORT}",
    f"{{text}} --size tiny {SHORT}",
    f"{{text}} --size small {SHORT}",
    "{text} --size medium --steps 2 --val-batches 1",
    f"--recipe gpt2 --size nano {SHORT}",
    f"{{text}} --arch llama --size tiny {SHORT}",
    f"--size nano --precision float16 --dropout 0.1 {SHORT}",
    f"{{text}} --size tiny --precision float32 --threads 1 {SHORT}",
    f"{{text}} --recipe gpt2 --tokenizer bpe --vocab-size 2000 --n-layer 2 --n-embd 64 --n-head 1 "
    f"--block-size 512 --batch-size 6 --max-rollbacks 0 {SHORT}",
    f"{{text}} --n-layer 4 --n-embd 192 --n-head 6 --n-kv-head 2 --block-size 256 --batch-size 8 "
    f"{SHORT}",
    f"{{text}} --tokenizer byte --recipe gpt2 --n-layer 3 --n-embd 96 --n-head 3 --block-size 1024 "
    f"--batch-size 2 --use-gradient-checkpointing {SHORT}",
    f"{{text}} --size tiny --batch-size 48 --micro-batch-size 7 {SHORT}",
    "{text} --recipe gpt2 --n-layer 1 --n-embd 64 --n-head 1 --block-size 4096 --batch-size 1 "
    "--steps 2 --val-batches 1",
    f"--size nano --teacher {{teacher}} {SHORT}",
    f"--size nano --backend numpy {SHORT}",
    f"{{text}} --recipe gpt2 --backend numpy --tokenizer bpe --vocab-size 500 --block-size 128 "
    f"{SHORT}",
)
TEXT_BYTES = 270_000


def _runs(threads: int, _steps: int) -> list[Record]:
    """Whole runs of the command line: what their start says, and their peak."""
    records = []
    with tempfile.TemporaryDirectory() as directory:
        files = {"text": f"{directory}/text.txt", "teacher": f"{directory}/teacher"}
        letters = random.Random(0).choices(
            "abcde fghi\n\u00e4\u00e9\u0436\u4e2d\U0001f600", k=10**6
        )
        text = "".join(letters).encode()[:TEXT_BYTES].decode(errors="ignore")
        Path(files["text"]).write_text(text, encoding="utf-8")
        run_trial(threads, flags=["--size", "nano", "--steps", "1", "--out", files["teacher"]])
        for number, run in enumerate(RUNS):
            flags = [*run.format(**files).split(), "--out", f"{directory}/{number}"]
            records.append({"flags": run, **run_trial(threads, flags=flags)})
    for record in records:
        record["error"] = record["estimate"] / record["peak"] - 1
    rows = [
        {
            "flags": textwrap.fill(r["flags"], 60),
            "peak": _mb(r["peak"]),
            "estimate": _mb(r["estimate"]),
            "off": f"{r['error'] * 100:+.1f} %",
        }
        for r in records
    ]
    _show("Whole runs, MB", rows)
    return records


PARTS: dict[str, Callable[[int, int], list[Record]]] = {
    "example": _example,
    "layers": _layers,
    "limit": _limit,
    "long": _long,
    "accumulation": _accumulation,
    "runs": _runs,
}


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True), flush=True)


def run(options: argparse.Namespace, machine: dict[str, object]) -> dict[str, list[Record]]:
    """Measures and prints the chosen parts; returns their records. Units: bytes, seconds."""
    threads = int(str(machine["threads"]))
    # Separate processes compile the kernels, as a user's first start does.
    for precision in PRECISIONS:
        settings = [training_settings(precision, "every_layer")]
        run_trial(threads, model=EXAMPLE, batch_size=4, settings=settings, steps=1)
    parts = options.only or list(PARTS)
    return {name: PARTS[name](threads, options.steps) for name in parts}

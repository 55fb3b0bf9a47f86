"""Compares a training step of smallmind with those of other libraries: python -m bench step.

Every contestant is a separate process that trains the same model from the same weights on the same
batches. They take turns of a few steps.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.machine import Worker
from bench.peers import job
from bench.peers.job import Sizes
from smallmind import TransformerModel
from smallmind.nn.parameters import Role
from smallmind.text.stories import built_in_text

# name -> package; those in 16 bits are measured only with --peers.
PEERS = {
    "torch": "torch",
    "torch compile": "torch",
    "jax": "jax",
    "ours float16": "smallmind",
    "ours bfloat16": "smallmind",
    "torch compile bfloat16": "torch",
}
GPT2_ONLY = ("jax",)
COMPARED = 20  # first steps, in which losses must agree
AGREEMENT = 1e-3  # nats
AGREEMENT_16_BITS = 2e-2
TURN = 5  # steps
TURN_OPERATIONS = 1e10  # so many operations make a turn longer, and the measurement with it
LONGEST_TURN = 100  # steps
SIZES = [
    Sizes(12, 64, 128, 4, 4),
    Sizes(16, 128, 128, 4, 4),
    Sizes(16, 512, 128, 4, 4),
    Sizes(8, 256, 384, 6, 6),
]


def installed() -> list[str]:
    """The peers whose package is installed."""
    return [name for name, package in PEERS.items() if importlib.util.find_spec(package)]


def _is_16_bit(name: str) -> bool:
    return name.endswith("float16")


def operations(sizes: Sizes, multiplied: int) -> int:
    """Operations per step: 6 per multiplied parameter and token; attention's causal products."""
    tokens = sizes.B * sizes.T
    return 6 * multiplied * tokens + 6 * sizes.n_layer * sizes.n_embd * sizes.T * tokens


def steps_per_turn(operations: int) -> int:
    """Steps of so many operations -> how many of them are a turn: those of small models are short.

    The first steps of a turn find nothing in the caches.
    """
    return int(min(LONGEST_TURN, max(TURN, TURN_OPERATIONS // operations)))


def multiplied_parameters(model: TransformerModel) -> int:
    """The elements of hidden matrices and of the token embedding, which is also the head."""
    hidden = sum(spec.size for spec in model.flat.specs if spec.role == Role.MATRIX)
    return hidden + model.config.vocab_size * model.config.n_embd


def measure(sizes: Sizes, arch: str, peers: list[str], steps: int, threads: int) -> dict[str, Any]:
    """Runs the contestants in turn -> the record. Units: seconds, bytes, nats per token."""
    model = TransformerModel(job.model_config(sizes, arch))
    work = operations(sizes, multiplied_parameters(model))
    turn = steps_per_turn(work)
    steps = steps * turn // TURN
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        path = str(Path(directory) / "job.npz")

        def start(name: str) -> Worker:
            return running.enter_context(Worker(name, "bench.peers", name, path, threads=threads))

        job.write(path, sizes, arch, dict(model.parameters), built_in_text().encode())
        # A separate process compiles the kernels, as a user's first start does.
        start("ours").ask(run=[0, 1])
        processes = {name: start(name) for name in ["ours", *peers]}
        first = {name: p.ask(run=[0, COMPARED])["losses"] for name, p in processes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        processor: dict[str, list[float]] = {name: [] for name in processes}
        for start in range(COMPARED, COMPARED + steps, turn):
            for name, process in processes.items():
                answer = process.ask(run=[start, turn])
                seconds[name] += answer["seconds"]
                processor[name] += answer["processor_seconds"]
        memory = {name: process.ask(memory=True) for name, process in processes.items()}
        python, ceiling = processes["ours"].ask(python=True), processes["ours"].ask(ceiling=True)
    quarters = {name: statistics.quantiles(values, n=4) for name, values in seconds.items()}
    return {
        "sizes": asdict(sizes),
        "arch": arch,
        "parameters": model.flat.count,
        "operations": work,
        "multiply_add_per_second": ceiling,
        "python_seconds": python,
        "contestants": {
            name: {
                "seconds": quarters[name][1],
                "processor_seconds": statistics.median(processor[name]),
                "spread": (quarters[name][2] - quarters[name][0]) / quarters[name][1],
                "peak_bytes": memory[name],
                "losses": first[name],
                "worst_difference": max(
                    abs(a - b) for a, b in zip(first[name], first["ours"], strict=True)
                ),
            }
            for name in processes
        },
    }


def show(record: dict[str, Any]) -> None:
    """Prints the record as a table."""
    sizes, own = Sizes(**record["sizes"]), record["contestants"]["ours"]
    rows = []
    for name, result in record["contestants"].items():
        rate = record["operations"] / result["seconds"]
        rows.append(
            {
                "": name,
                "ms": f"{result['seconds'] * 1e3:.3f}",
                "us/sample": f"{result['seconds'] / sizes.B * 1e6:,.1f}",
                "spread": f"{result['spread'] * 100:.0f} %",
                "CPU ms": f"{result['processor_seconds'] * 1e3:.2f}",
                "tokens/s": f"{sizes.B * sizes.T / result['seconds']:,.0f}",
                "GFLOP/s": f"{rate / 1e9:.0f}",
                "of FMA": f"{rate / record['multiply_add_per_second'] * 100:.0f} %",
                "time / ours": f"{result['seconds'] / own['seconds']:.2f}",
                "CPU / ours": f"{result['processor_seconds'] / own['processor_seconds']:.2f}",
                "peak MB": f"{result['peak_bytes'] / 1e6:.0f}",
                "ours / this": f"{own['peak_bytes'] / result['peak_bytes']:.2f}",
                f"loss after {COMPARED}": f"{result['losses'][-1]:.5f}",
                "differs": f"{result['worst_difference']:.0e}" if name != "ours" else "",
            }
        )
    share = record["python_seconds"] / own["seconds"]
    print(f"\n{record['arch']}, {sizes.name}, {record['parameters']:,} parameters")
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))
    print(f"Python takes {record['python_seconds'] * 1e3:.3f} ms of our step, {share * 100:.1f} %")


def run(options: argparse.Namespace, machine: dict[str, object]) -> list[dict[str, Any]]:
    """Measures and prints; returns the records."""
    peers = [name for name in installed() if not _is_16_bit(name)]
    peers = peers if options.peers is None else options.peers
    missing = [name for name in peers if name not in installed()]
    if missing:
        raise SystemExit(f"--peers: {missing[0]} is not installed; choose from {installed()}")
    records = []
    shapes = [Sizes(*shape) for shape in options.shapes] if options.shapes else SIZES
    for sizes, arch in itertools.product(shapes, options.arch):
        able = [name for name in peers if arch == "gpt2" or name not in GPT2_ONLY]
        record = measure(sizes, arch, able, options.steps, int(str(machine["threads"])))
        records.append(record)
        show(record)
    return records


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for every contestant whose losses differ from ours: its speed does not count."""
    return [
        f"{record['arch']}, {Sizes(**record['sizes']).name}: {name}'s losses differ by "
        f"{result['worst_difference']:.1e} from ours"
        for record in records
        for name, result in record["contestants"].items()
        if not result["worst_difference"] <= (AGREEMENT_16_BITS if _is_16_bit(name) else AGREEMENT)
    ]

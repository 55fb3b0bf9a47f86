"""Compares a training step of smallmind with those of other libraries.

Every contestant is a separate process that trains the same model from the same weights on the same
batches. They take turns of a few steps.
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smallmind.bench.machine import Worker
from smallmind.bench.peers import job
from smallmind.bench.peers.job import Sizes
from smallmind.checks import InputError
from smallmind.console.signals import deferred
from smallmind.nn.transformer import TransformerModel
from smallmind.text.stories import built_in_text
from smallmind.training.operations import count_operations

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
    """Returns the peers whose package is installed."""
    return [name for name, package in PEERS.items() if importlib.util.find_spec(package)]


def _is_16_bit(name: str) -> bool:
    return name.endswith("float16")


def operations(sizes: Sizes, arch: str) -> int:
    """Operations per step, those of attention over the causal half: what a run counts too."""
    return sizes.B * count_operations(job.model_config(sizes, arch)).window


def steps_per_turn(operations: int) -> int:
    """Steps of so many operations -> how many of them are a turn: those of small models are short.

    The first steps of a turn find nothing in the caches.
    """
    return int(min(LONGEST_TURN, max(TURN, TURN_OPERATIONS // operations)))


def peers_of(named: Sequence[str] | None, arch: str) -> list[str]:
    """-> the contestants beside ours: those named, or those installed. InputError if one is not."""
    known = installed()
    peers = [name for name in known if not _is_16_bit(name)] if named is None else named
    if missing := [name for name in peers if name not in known]:
        raise InputError(f"--peers: {missing[0]} is not installed; choose from {known}")
    return [name for name in peers if arch == "gpt2" or name not in GPT2_ONLY]


def measure(
    sizes: Sizes,
    arch: str,
    peers: Sequence[str],
    steps: int,
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs the contestants in turn -> the record. Units: seconds, bytes, nats per token.

    An interrupt ends the turns; the record is of those before it, and says so.
    """
    model = TransformerModel(job.model_config(sizes, arch), backend="numpy")
    work = operations(sizes, arch)
    turn = steps_per_turn(work)
    steps = steps * turn // TURN
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        path = str(Path(directory) / "job.npz")

        def start(name: str) -> Worker:
            words = name, "smallmind.bench.peers", name, path
            return running.enter_context(Worker(*words, threads=threads, variables=variables))

        job.write(path, sizes, arch, dict(model.parameters), built_in_text().encode())
        # A separate process compiles the kernels, as a user's first start does.
        start("ours").ask(run=[0, 1])
        processes = {name: start(name) for name in ["ours", *peers]}
        first = {name: p.ask(run=[0, COMPARED])["losses"] for name, p in processes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in processes}
        processor: dict[str, list[float]] = {name: [] for name in processes}
        is_interrupted = False
        try:
            for first_step in range(COMPARED, COMPARED + steps, turn):
                for name, process in processes.items():
                    with deferred():  # until the answer is there
                        answer = process.ask(run=[first_step, turn])
                        seconds[name] += answer["seconds"]
                        processor[name] += answer["processor_seconds"]
        except KeyboardInterrupt:
            is_interrupted = True
            if not seconds["ours"]:
                raise
            processes = {name: x for name, x in processes.items() if seconds[name]}
        memory = {name: process.ask(memory=True) for name, process in processes.items()}
        python, ceiling = processes["ours"].ask(python=True), processes["ours"].ask(ceiling=True)
    quarters = {name: statistics.quantiles(seconds[name], n=4) for name in processes}
    return {
        "is_interrupted": is_interrupted,
        "sizes": asdict(sizes),
        "arch": arch,
        "parameters": model.flat.count,
        "operations": work,
        "multiply_add_per_second": ceiling,
        "python_seconds": python,
        "contestants": {
            name: {
                "seconds": quarters[name][1],
                "best_seconds": min(seconds[name]),
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


def failures(records: list[dict[str, Any]]) -> list[str]:
    """-> a line for every contestant whose losses differ from ours: its speed does not count."""
    return [
        f"{record['arch']}, {Sizes(**record['sizes']).name}: {name}'s losses differ by "
        f"{result['worst_difference']:.1e} from ours"
        for record in records
        for name, result in record["contestants"].items()
        if not result["worst_difference"] <= (AGREEMENT_16_BITS if _is_16_bit(name) else AGREEMENT)
    ]

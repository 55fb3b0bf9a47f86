"""Measures a case of the table of frameworks kvark/inferena: python -m bench inferena.

SmolLM2-135M reads the ids 0 to 127 in float32: the logits, then the cross-entropy with its
gradients; then one token. Ours and PyTorch take turns, each in a process of its own, with the same
weights. The line of JSON is the one that the table's runners print.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tabulate import tabulate

from smallmind import ModelConfig, TransformerModel, __version__
from smallmind.bench.machine import Worker
from smallmind.bench.step import AGREEMENT, installed
from smallmind.cli.bench import saying
from smallmind.exchange.format import find_external
from smallmind.settings.presets import ARCHITECTURES

MODEL = "SmolLM2-135M"
SHAPE = {
    "vocab_size": 49152,
    "block_size": 2048,
    "n_embd": 576,
    "n_layer": 30,
    "n_head": 9,
    "n_kv_head": 3,
    "mlp_width": 1536,
}
NAMES = {"inference": "forward", "training": "forward and backward", "latency": "one token"}
TIMED = tuple(NAMES.values())


def _model(weights: Path | None) -> TransformerModel:
    if weights is None:
        return TransformerModel(ModelConfig(**ARCHITECTURES["llama"] | SHAPE))
    found = find_external(weights)
    if found is None:
        raise SystemExit(f"--weights {weights}: no model of transformers or llama.cpp")
    return found.model()


def run(options: argparse.Namespace, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures and prints; returns a record for each. Units: seconds, bytes, nats per token."""
    names = ["ours", *(["torch"] if options.peers is None else options.peers)]
    for name in names[1:]:
        if name not in installed() or not name.startswith("torch") or "16" in name:
            raise SystemExit(f"--peers: {name} is not installed, or has no Llama in float32")
    times: dict[tuple[str, str], list[float]] = {
        pair: [] for pair in itertools.product(names, TIMED)
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        path, workers = f"{folder}/model.safetensors", {}
        with saying("writing the weights"):
            _model(options.weights).save(path)
        for name in names:
            worker = Worker(name, "bench.peers.inferena", name, path, threads=machine["threads"])
            workers[name] = running.enter_context(worker)
            with saying(f"{name} gets ready"):
                worker.ask(turn=TIMED[-1])
        for number in range(options.rounds):
            with saying(f"turn {number + 1} of {options.rounds}"):
                for what, (name, worker) in itertools.product(TIMED, workers.items()):
                    times[name, what] += worker.ask(turn=what)
        outputs = {name: worker.ask(outputs=True) for name, worker in workers.items()}
    records = [
        {"name": name, **{what: statistics.median(times[name, what]) for what in TIMED}, **found}
        for name, found in outputs.items()
    ]
    _show(records)
    text = line(records[0], str(machine["cpu"]))
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return records


def _show(records: list[dict[str, Any]]) -> None:
    rows = [
        {
            "": record["name"],
            **{f"{what} ms": f"{record[what] * 1e3:.1f}" for what in TIMED},
            **{f"{what} / ours": f"{record[what] / records[0][what]:.2f}" for what in TIMED[:2]},
            "ready s": f"{record['compile_s']:.1f}",
            "peak MB": f"{record['peak_bytes'] / 1e6:,.0f}",
            "loss": f"{record['loss']:.5f}",
        }
        for record in records
    ]
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))


def line(record: dict[str, Any], cpu: str) -> str:
    """A record -> the line that the table's harness reads. Training includes its forward pass."""
    timings = {f"{name}_ms": round(record[of] * 1e3, 3) for name, of in NAMES.items()}
    outputs = {name: record[name] for name in ("logits_hash", "logits_sample", "loss")}
    described = {
        "framework": "smallmind",
        "model": MODEL,
        "device": cpu,
        "gpu_name": cpu,
        "smallmind_version": __version__,
        "backend": "CPU",
        "timings": {"compile_s": round(record["compile_s"], 2), **timings},
        "outputs": outputs,
    }
    return json.dumps(described)


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for every contestant whose loss differs from ours: its speed does not count."""
    ours = records[0]["loss"]
    return [
        f"{record['name']}'s loss is {record['loss']:.5f}, ours {ours:.5f}"
        for record in records
        if not abs(record["loss"] - ours) <= AGREEMENT
    ]

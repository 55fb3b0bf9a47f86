"""Measures steps that adapt a model of others: python -m bench adapt CASE.

The cases have the shapes of SmolLM2-135M, Qwen3-0.6B and GPT-2 124M, with random weights, which
take the same time: all weights trained, or LoRA on all matrices. The peers are transformers and
PEFT on PyTorch. GPT-2 classifies by its last token, as in appendix E of Build a Large Language
Model (From Scratch) by S. Raschka. Steps are timed in turn, each contestant in a process of its
own; with the same precision the first losses must agree.
"""

import argparse
import importlib.util
import statistics
import tempfile
from contextlib import ExitStack
from typing import Any

from tabulate import tabulate

import smallmind
from bench.inferena import SHAPE
from bench.peers.adapt import CASES
from smallmind import ModelConfig, Tokenizer, TransformerModel
from smallmind.bench.machine import Worker
from smallmind.cli.bench import saying
from smallmind.settings.presets import ARCHITECTURES

LLAMA = ARCHITECTURES["llama"]
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **LLAMA,
        **SHAPE,
        "rope_theta": 1e5,
        "tie_weights": True,
    },
    "qwen3-0.6b": {
        **LLAMA,
        "vocab_size": 151936,
        "block_size": 4096,
        "n_embd": 1024,
        "n_layer": 28,
        "n_head": 16,
        "n_kv_head": 8,
        "head_size": 128,
        "mlp_width": 3072,
        "qk_norm": True,
        "rope_theta": 1e6,
        "tie_weights": True,
    },
    "gpt2-124m": {
        **ARCHITECTURES["gpt2"],
        "vocab_size": 50257,
        "block_size": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
}
AGREEMENT = {"float32": 1e-3, "bfloat16": 3e-2}  # of first losses, in nats


def write_model(case: str, directory: str) -> None:
    """Writes a model of this shape, in bfloat16, for transformers."""
    shape = SHAPES[case.removesuffix("-lora")]
    model = TransformerModel(ModelConfig(**shape), backend="numpy")
    tokenizer, V = Tokenizer(kind="byte"), model.config.vocab_size
    missing = range(tokenizer.vocab_size, V)
    tokenizer = tokenizer.with_special([f"[PAD{i}]" for i in missing])
    smallmind.export(model, tokenizer, directory, type="bf16")


def run(options: argparse.Namespace, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures and prints; returns a record for each. Units: seconds, bytes, nats per token."""
    case = CASES[options.case]
    has_peers = all(map(importlib.util.find_spec, ("torch", "transformers", "peft")))
    names = [name for name in case.contestants if has_peers or name.startswith("ours")]
    if options.peers is not None and "torch" not in options.peers:
        names = [name for name in names if name.startswith("ours")]
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        path, workers = f"{folder}/model", {}
        with saying("writing the weights"):
            write_model(options.case, path)
        for name in names:
            arguments = options.case, name, path, str(options.windows)
            worker = Worker(name, "bench.peers.adapt", *arguments, threads=machine["threads"])
            workers[name] = running.enter_context(worker)
            with saying(f"{name} gets ready"):
                first[name] = worker.ask(step=0)["loss"]
        for number in range(1, 1 + options.rounds):
            with saying(f"turn {number} of {options.rounds}"):
                for name, worker in workers.items():
                    times[name].append(worker.ask(step=number))
        facts = {name: worker.ask(facts=True) for name, worker in workers.items()}
    records = [
        {
            "name": name,
            "seconds": statistics.median(step["seconds"] for step in times[name]),
            "cpu_seconds": statistics.median(step["cpu_seconds"] for step in times[name]),
            "loss": first[name],
            "classifies": case.classifies,  # with a head of its own in PyTorch
            **facts[name],
        }
        for name in names
    ]
    _show(options.case, records)
    return records


def _show(case: str, records: list[dict[str, Any]]) -> None:
    B, T = CASES[case].batch, CASES[case].T
    print(f"\n{case}, {B} x {T} tokens to a step, LoRA of rank {CASES[case].rank}")
    rows = [
        {
            "": record["name"],
            "s per step": f"{record['seconds']:.2f}",
            "CPU s": f"{record['cpu_seconds']:.2f}",
            **{
                f"/ {name}": f"{record['seconds'] / base['seconds']:.2f}"
                for name, base in (("first", records[0]), ("last", records[-1]))
            },
            "peak MB": f"{record['peak_bytes'] / 1e6:,.0f}",
            "trained": f"{record['trained']:,}",
            "first loss": f"{record['loss']:.4f}",
        }
        for record in records
    ]
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line for each contestant whose first loss differs from ours in the same precision."""
    losses = {record["name"]: record["loss"] for record in records if not record["classifies"]}
    pairs = [(name, name.replace("torch", "ours")) for name in losses if name.startswith("torch")]
    return [
        f"{theirs}: its first loss is {losses[theirs]:.4f}, that of {ours} {losses[ours]:.4f}"
        for theirs, ours in pairs
        if not abs(losses[ours] - losses[theirs]) <= AGREEMENT[ours.split()[-1]]
    ]

"""Measures instruction tuning as a book does it: python -m bench instruct PAIRS.json.

Chapter 7 of Build a Large Language Model (From Scratch) by S. Raschka tunes GPT-2 124M on 935
pairs for two epochs, in float32, in padded batches of eight in random order. Random weights of that
shape take the same time. Ours has whole pairs packed into rows of about as many tokens as eight of
them have, one row to an update; PyTorch also gets these rows. Some steps of each are timed in turn,
each contestant in a process of its own, and two epochs follow from them.

All begin with the same weights: in the same packed rows the first losses must agree. PyTorch's side
is faster than the book's code, which has attention in single operations and a head of its own.

The tokens are learned from the pairs: GPT-2's own would be about as many.
"""

import argparse
import json
import math
import tempfile
from contextlib import ExitStack
from typing import Any

import numpy as np
from tabulate import tabulate

from bench.peers.instruct import NAMES, PAIRS, Pairs
from smallmind import Tokenizer
from smallmind.bench.machine import Worker
from smallmind.bench.step import AGREEMENT, installed
from smallmind.cli.bench import saying
from smallmind.corpus.survey import texts_of
from smallmind.text.chat import Turn, encode_each
from smallmind.text.templates import fit_template

TRAINED = 0.85  # share of the pairs, as in the book
EPOCHS = 2
VOCABULARY = 4000  # at most: the pairs repeat no more
SHAPE = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
# As long as the one of the book, in other words.
PROMPT = (
    "A person asks for something to be done. Give an answer that does what is wanted."
    "\n\n### Instruction:\n"
)
TIMES = "seconds", "cpu_seconds"


def conversation(pair: dict[str, str]) -> list[Turn]:
    """A pair as the book writes it, in two turns."""
    more = f"\n\n### Input:\n{pair['input']}" if pair.get("input") else ""
    asked = f"{PROMPT}{pair['instruction']}{more}\n\n### Response:"
    return [Turn("user", asked), Turn("assistant", pair["output"])]


def run(options: argparse.Namespace, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Measures and prints; returns a record for each. Units: seconds, bytes, nats per token."""
    pairs = json.loads(options.pairs.read_text(encoding="utf-8"))
    kept = [conversation(pair) for pair in pairs[: int(TRAINED * len(pairs))]]
    learned = Tokenizer("".join(texts_of(kept)), "bpe", vocab_size=VOCABULARY)
    tokenizer, template = fit_template(learned, None)
    marked = np.concatenate(list(encode_each(tokenizer, template, kept)))
    T = 64 * math.ceil(PAIRS * len(marked) / len(kept) / 64)
    peers = ["torch"] if options.peers is None else options.peers
    if peers not in ([], ["torch"]) or (peers and "torch" not in installed()):
        raise SystemExit("--peers: only torch, if it is installed, has a model for this")
    names = [*NAMES] if peers else [*NAMES[:2]]
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        path, workers = f"{folder}/pairs.npz", {}
        np.savez(path, marked=marked, T=T, **SHAPE)
        read = Pairs(path)
        for name in names:
            worker = Worker(name, "bench.peers.instruct", name, path, threads=machine["threads"])
            workers[name] = running.enter_context(worker)
            with saying(f"{name} gets ready"):
                losses[name] = worker.ask(step=0)["loss"]
        for number in range(1, 1 + options.rounds):
            with saying(f"turn {number} of {options.rounds}"):
                for name, worker in workers.items():
                    times[name].append(worker.ask(step=number))
        peaks = {name: worker.ask(peak=True) for name, worker in workers.items()}
    batches = math.ceil(len(kept) / PAIRS)
    places = [read.padded(number)[0].size for number in range(batches)]
    timed = sum(places[number] for number in range(1, 1 + options.rounds))
    rows = read.packed().steps
    records = []
    for name in names:
        if name == "torch":  # its batches differ in size
            per_epoch, share = sum(places), sum(places) / timed
        else:
            per_epoch, share = rows * T, rows / options.rounds
        padding = 1 - (len(marked) - len(kept)) / per_epoch
        records.append(
            {
                "name": name,
                **{key: EPOCHS * share * sum(step[key] for step in times[name]) for key in TIMES},
                "steps": EPOCHS * (batches if name == "torch" else rows),
                "tokens": per_epoch,
                "padding": padding,
                "peak_bytes": peaks[name],
                "loss": losses[name],
            }
        )
    _show(records, len(kept), len(marked))
    return records


def _show(records: list[dict[str, Any]], pairs: int, tokens: int) -> None:
    ours = records[0]
    print(f"\n{pairs:,} pairs of {tokens:,} tokens, {EPOCHS} epochs, GPT-2 124M's shape, float32")
    rows = [
        {
            "": record["name"],
            "minutes": f"{record['seconds'] / 60:.1f}",
            "ours / this": f"{ours['seconds'] / record['seconds']:.2f}",
            "CPU, ours / this": f"{ours['cpu_seconds'] / record['cpu_seconds']:.2f}",
            "steps": f"{record['steps']:,}",
            "places per epoch": f"{record['tokens']:,}",
            "padding": f"{record['padding']:.1%}",
            "peak MB": f"{record['peak_bytes'] / 1e6:,.0f}",
            "memory, ours / this": f"{ours['peak_bytes'] / record['peak_bytes']:.2f}",
            "first loss": f"{record['loss']:.3f}",
        }
        for record in records
    ]
    print(tabulate(rows, "keys", stralign="right", disable_numparse=True))


def failures(records: list[dict[str, Any]]) -> list[str]:
    """A line if PyTorch's first loss differs from ours, of the same rows and all their tokens."""
    losses = {record["name"]: record["loss"] for record in records}
    ours, theirs = losses[NAMES[1]], losses.get(NAMES[3])
    if theirs is None or abs(ours - theirs) <= AGREEMENT:
        return []
    return [f"{NAMES[3]}: its first loss is {theirs:.5f}, that of {NAMES[1]} {ours:.5f}"]

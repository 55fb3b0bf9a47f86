"""A run that learns pairs of letters in a second, and files of items."""

import json

from smallmind import Run
from tests.programs import CATS

FIELDS = {
    "tokenizer": "bpe",
    "bpe_vocab_size": 280,
    "block_size": 24,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "batch_size": 8,
    "steps": 60,
    "warmup_steps": 5,
}
GOOD = "the cat sat on the mat.", "the dog sat on the log.", "the cat sat."
BAD = "the cat on sat mat the.", "log the on sat dog the.", "sat the cat."
PAIRS = [
    {"good": good, "bad": bad, "paradigm": f"p{i % 2}"}
    for i, (good, bad) in enumerate(zip(GOOD, BAD, strict=True))
]


def trained(out, **fields):
    run = Run.create(text=CATS, out=out, **{**FIELDS, **fields})
    run.train()
    return run


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path

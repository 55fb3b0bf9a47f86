"""Learns tokens from a text and encodes it, beside `tokenizers`: python -m bench tokenizer."""

import argparse
import importlib.util
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

from smallmind.bench.machine import answer_of
from smallmind.text.stories import built_in_text

# Each side in a process of its own: seconds, and the memory besides that of the text. A small text
# comes first: it loads or compiles what is needed.
OURS = """
from smallmind import Tokenizer
def learn(text):
    return Tokenizer(text, "bpe", vocab_size=size)
def encode(tokenizer, text):
    return len(tokenizer.encode(text))
"""
# They use several threads for several texts only, so theirs is a list of lines.
THEIRS = """
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
def learn(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(text.splitlines(True), trainer)
    return tokenizer
def encode(tokenizer, text):
    lines, count = text.splitlines(True), 0
    for start in range(0, len(lines), 20_000):
        encoded = tokenizer.encode_batch_fast(lines[start : start + 20_000])
        count += sum(map(len, encoded))
    return count
"""
PROGRAM = """
import json, sys, time
from pathlib import Path
from smallmind.memory.tracker import peak_resident_bytes, resident_bytes
size, text = int(sys.argv[1]), Path(sys.argv[2]).read_text(encoding="utf-8")
encode(learn(text[:20_000]), text[:20_000])
peak = Path("/proc/self/clear_refs")
if peak.exists():
    peak.write_text("5")  # reading took more than learning does
before, result = resident_bytes(), {}
start = time.perf_counter()
tokenizer = learn(text)
result["learn"] = time.perf_counter() - start
result["learning peak"] = peak_resident_bytes() - before
start = time.perf_counter()
result["tokens"] = encode(tokenizer, text)
result["encode"] = time.perf_counter() - start
print(json.dumps(result))
"""
SIDES = {"smallmind": OURS, "tokenizers": THEIRS}


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Both sides in turn, `options.rounds` times -> a record per side and text. Units: seconds."""
    sides = {
        name: program
        for name, program in SIDES.items()
        if name == "smallmind" or importlib.util.find_spec(name)
    }
    text = Path(options.text).read_text(encoding="utf-8") if options.text else built_in_text()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        for megabytes in options.megabytes:
            copies = max(1, round(megabytes * 10**6 / len(text.encode())))
            path.write_text(text * copies, encoding="utf-8")
            for number in range(options.rounds):
                for name, program in sides.items():
                    measured = _measure(program, options.vocab_size, path)
                    records.append(
                        {"megabytes": megabytes, "side": name, "round": number, **measured}
                    )
    _show(records, list(sides), options)
    return records


def _measure(program: str, vocab_size: int, path: Path) -> dict[str, float]:
    threads = os.environ["NUMBA_NUM_THREADS"]
    variables = {"RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
    arguments = (program + PROGRAM, str(vocab_size), str(path))
    return dict(answer_of("-c", *arguments, variables=variables))


def _show(records: list[dict[str, Any]], sides: list[str], options: argparse.Namespace) -> None:
    """A row per size and side: medians of the rounds."""
    rows = []
    for megabytes in options.megabytes:
        for side in sides:
            of_side = [r for r in records if (r["megabytes"], r["side"]) == (megabytes, side)]
            learn, encode, peak = (
                statistics.median(record[name] for record in of_side)
                for name in ("learn", "encode", "learning peak")
            )
            row = [f"{megabytes} MB", side, f"{learn:.2f} s", f"{peak / 1e6:,.0f} MB"]
            rows.append([*row, f"{encode:.2f} s", f"{megabytes / encode:,.0f} MB/s"])
    print(f"{options.vocab_size:,} tokens, medians of {options.rounds} rounds")
    headers = ["text", "", "learning", "memory besides the text", "encoding", ""]
    print(tabulate(rows, headers))

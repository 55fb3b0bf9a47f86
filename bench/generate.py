"""Measures tokens per second, beside installed rivals: python -m bench generate.

Rivals are transformers and llama.cpp, and with playwright our own page in Chromium.

Random weights. Ours decodes in this process; each peer in one of its own, from an export of the
same model, all in turn. A token reads every weight once: the share of the memory's bandwidth is
that of a copy that moves as many bytes.

With --types, models of two shapes are written as GGUF in these types, and ours and llama.cpp read
the same files, each in a process of its own: the speed of writing, and of reading a prompt of 512.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from bench.inferena import SHAPE as SMOLLM2
from smallmind import KeyValueCache, ModelConfig, Tokenizer, TransformerModel, export
from smallmind.bench.ceilings import copy_rate
from smallmind.bench.machine import answer_of
from smallmind.cli.bench import saying
from smallmind.kernels.codegen.threads import threads
from smallmind.settings.presets import ARCHITECTURES

SHAPES = {"4 x 128": (256, 128, 4, 4), "6 x 384": (1024, 384, 6, 6), "8 x 768": (1024, 768, 8, 12)}
PROMPT, TOKENS = 100, 100
PRECISIONS = ("float32", "bfloat16")
LARGE = {
    "8 x 768": {
        **ARCHITECTURES["llama"],
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 8,
        "n_head": 12,
    },
    "SmolLM2-135M": {
        **ARCHITECTURES["llama"],
        **SMOLLM2,
        "rope_theta": 1e5,
        "tie_weights": True,
    },
}
READ = 512  # tokens of the prompt of a large model
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16"}
# Measured from after the prompt, so that only single tokens count. Greedy: the peers then choose
# the next token in one pass over the logits, as ours does.
TRANSFORMERS = """
import json, sys, time, torch, transformers
path, threads, prompt, count = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(threads)
model = transformers.AutoModelForCausalLM.from_pretrained(path)
with torch.no_grad():
    out = model(torch.zeros((1, prompt), dtype=torch.long), use_cache=True)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        out = model(
            out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True
        )
        seconds.append(time.perf_counter() - start)
print(json.dumps(sorted(seconds)[count // 2]))
"""
LLAMA_CPP = """
import json, sys, urllib.request, xllamacpp
path, threads, prompt, count = sys.argv[1], *map(int, sys.argv[2:])
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_parallel, settings.warmup = path, 1, True
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(settings)
body = {"prompt": [0] * prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
body["cache_prompt"] = False
for _ in range(2):  # the second time, everything has been read
    request = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        times = json.load(answer)["timings"]
writing, reading = times["predicted_per_token_ms"], times["prompt_per_token_ms"]
print(json.dumps([writing / 1000, reading / 1000]))
"""
OURS = """
import json, statistics, sys, time
import numpy as np
from smallmind import KeyValueCache
from smallmind.runs.loading import find
path, precision, prompt, count = *sys.argv[1:3], *map(int, sys.argv[3:])
model, _ = find(path).load(precision=precision)
for _ in range(2):
    cache = KeyValueCache(model)
    times = [time.perf_counter()]
    model.decode(np.zeros((1, prompt), np.int32), cache)
    for _ in range(count):
        times.append(time.perf_counter())
        model.decode(np.zeros((1, 1), np.int32), cache)
writing = (times[-1] - times[1]) / (count - 1)
print(json.dumps([writing, (times[1] - times[0]) / prompt]))
"""
# A page computes on one thread.
CHROMIUM = """
import json, shutil, sys
from playwright.sync_api import sync_playwright
path, prompt, count = sys.argv[1], *map(int, sys.argv[3:])
script = '''async ([prompt, max_tokens]) => {
    const { program } = smallmindClient, times = [];
    for await (const _ of program.write(Array(prompt).fill(0), { max_tokens, temperature: 0 }))
        times.push(performance.now());
    return times;
}'''
with sync_playwright() as play:
    where = shutil.which("chromium")
    browser = play.chromium.launch(executable_path=where, args=["--no-sandbox"])
    page = browser.new_page()
    page.goto(f"file://{path}")
    times = page.evaluate(script, [prompt, count])
seconds = sorted((after - before) / 1000 for before, after in zip(times, times[1:-1]))
print(json.dumps(seconds[len(seconds) // 2]))
"""
PEERS = {
    "transformers": (TRANSFORMERS, "hf"),
    "xllamacpp": (LLAMA_CPP, "gguf"),
    "playwright": (CHROMIUM, "html"),
}


def run(options: argparse.Namespace, _machine: dict[str, object]) -> list[dict[str, Any]]:
    """Each shape, in turn with its peers -> records. Units: seconds per token of each sequence."""
    if options.types:
        return _run_types(options.types, options.rounds)
    peers = [name for name in PEERS if find_spec(name)]
    records = []
    for name, (T, C, layers, heads) in SHAPES.items():
        tokenizer = Tokenizer(kind="byte")
        shape = {"block_size": T, "n_embd": C, "n_layer": layers, "n_head": heads}
        model = TransformerModel(256, **shape, **ARCHITECTURES["llama"])
        with tempfile.TemporaryDirectory() as folder:
            paths = {}
            for peer in peers:
                paths[peer] = Path(folder) / f"{peer}.{PEERS[peer][1]}"
                export(model, tokenizer, paths[peer], PEERS[peer][1])
            cases = [(precision, batch) for precision in PRECISIONS for batch in (1, 16)]
            times: dict[Any, list[float]] = {case: [] for case in [*cases, *peers]}
            for _ in range(options.rounds):
                for precision, batch in cases:
                    times[precision, batch].append(_seconds(model, precision, batch))
                for peer in peers:
                    program = PEERS[peer][0]
                    if peer == "xllamacpp":
                        times[peer].append(_of_llama(paths[peer], PROMPT)[0])
                        continue
                    times[peer].append(_of_peer(program, paths[peer], threads()))
        records.append(
            {
                "shape": name,
                "bytes": 4 * model.flat.count,
                "copy": 4 * model.flat.count / copy_rate(4 * model.flat.count),
                "prompt": _prompt_share(model),
                **{_label(case): statistics.median(each) for case, each in times.items()},
            }
        )
    _show(records, peers)
    return records


def _run_types(types: list[str], rounds: int) -> list[dict[str, Any]]:
    """Each shape in each type of weights, ours and llama.cpp in turn -> records."""
    records = []
    for name, shape in LARGE.items():
        model = TransformerModel(ModelConfig(**{**shape, "block_size": 1024}))
        tokenizer = Tokenizer(kind="byte")
        missing = range(tokenizer.vocab_size, model.config.vocab_size)
        tokenizer = tokenizer.with_special([f"[PAD{i}]" for i in missing])
        for type in types:
            times: dict[str, list[list[float]]] = {"ours": [], "llama.cpp": []}
            with tempfile.TemporaryDirectory() as folder, saying(f"{name}, {type}"):
                path = Path(folder) / "model.gguf"
                export(model, tokenizer, path, "gguf", GGUF_TYPES.get(type, type))
                for _ in range(rounds):
                    arguments = (str(path), type, str(READ), str(TOKENS))
                    times["ours"].append(answer_of("-c", OURS, *arguments))
                    if find_spec("xllamacpp"):
                        times["llama.cpp"].append(_of_llama(path, READ))
            record: dict[str, Any] = {"shape": name, "type": type}
            for who, each in times.items():
                for what, column in zip(
                    ("writing", "reading"), zip(*each, strict=True), strict=False
                ):
                    record[f"{who}, {what}"] = statistics.median(column)
            records.append(record)
    _show_types(records)
    return records


def _show_types(records: list[dict[str, Any]]) -> None:
    rows = []
    for record in records:
        row = [record["shape"], record["type"]]
        for what in ("writing", "reading"):
            ours, other = record[f"ours, {what}"], record.get(f"llama.cpp, {what}")
            row += [f"{1 / ours:,.0f}", f"{other / ours:.2f}" if other else ""]
        rows.append(row)
    heads = ["", "weights", "written/s", "x llama.cpp", f"read/s, of {READ}", "x llama.cpp"]
    print(tabulate(rows, heads, disable_numparse=True))


def _label(case: Any) -> str:
    return case if isinstance(case, str) else f"{case[0]}, batch {case[1]}"


def _seconds(model: TransformerModel, precision: str, batch: int) -> float:
    """The time of a token, for each of `batch` sequences at once."""
    model.use_precision(precision)
    cache, ids = KeyValueCache(model, batch), np.zeros((batch, 1), np.int32)
    model.decode(np.zeros((batch, PROMPT), np.int32), cache)
    seconds = []
    for _ in range(TOKENS):
        start = time.perf_counter()
        model.decode(ids, cache)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _of_llama(path: Path, prompt: int) -> list[float]:
    """Seconds per token that llama.cpp writes, and per token of a prompt that it reads."""
    arguments = (LLAMA_CPP, str(path), str(threads()), str(prompt), str(TOKENS))
    variables = {"OMP_NUM_THREADS": str(threads())}
    found = answer_of("-c", *arguments, variables=variables, stderr=subprocess.DEVNULL)
    return list(map(float, found))


def _of_peer(program: str, path: Path, count: int) -> float:
    arguments = (program, str(path), str(count), str(PROMPT), str(TOKENS))
    variables = {"OMP_NUM_THREADS": str(count)}
    return float(answer_of("-c", *arguments, variables=variables, stderr=subprocess.DEVNULL))


def _prompt_share(model: TransformerModel) -> float:
    """The speed of a prompt, as a share of that of a forward pass over as many tokens."""
    model.use_precision("float32")
    ids = np.zeros((1, min(1000, model.config.block_size)), np.int32)
    seconds: dict[str, list[float]] = {"prompt": [], "pass": []}
    for _ in range(5):
        start = time.perf_counter()
        model.decode(ids, KeyValueCache(model))
        middle = time.perf_counter()
        model.losses(ids, ids)
        seconds["prompt"].append(middle - start)
        seconds["pass"].append(time.perf_counter() - middle)
    return statistics.median(seconds["pass"]) / statistics.median(seconds["prompt"])


def _show(records: list[dict[str, Any]], peers: list[str]) -> None:
    rows = []
    for record in records:
        one = record["float32, batch 1"]
        row = [record["shape"], f"{1 / one:,.0f}", f"{record['copy'] / one:.0%}"]
        row += [f"{one / record['bfloat16, batch 1']:.2f}"]
        row += [f"{16 * one / record[f'{precision}, batch 16']:.1f}" for precision in PRECISIONS]
        row += [f"{record['prompt']:.0%}"]
        rows.append(row + [f"{record[peer] / one:.2f}" for peer in peers])
    heads = ["llama", "tokens/s", "of copy", "bfloat16", "batch 16", "in bfloat16", "prompt"]
    print(tabulate(rows, [*heads, *(f"x {peer}" for peer in peers)]))

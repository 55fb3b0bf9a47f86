"""Measures what a machine is good for, by commands: python -m smallmind.bench.overview."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smallmind.bench import machine
from smallmind.bench.ceilings import Streams, one_thread
from smallmind.bench.peers import job
from smallmind.bench.peers.job import Sizes
from smallmind.bench.step import operations
from smallmind.kernels import ceilings
from smallmind.kernels.codegen.cpus import bind_to_cores
from smallmind.kernels.timing import Contestant, serve, take_in_turn
from smallmind.nn.cache import KeyValueCache
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.settings.config import ModelConfig, Precision
from smallmind.settings.presets import ARCHITECTURES, SIZES

PEAKS = {
    "float32 multiply-adds": ceilings.multiply_add,
    "bfloat16 multiply-adds": ceilings.multiply_bfloat16,
}
LEVELS = (250_000, 1_000_000, 16_000_000, 256_000_000)  # bytes: from each cache, and from memory
ROUNDS, STEPS = 5, 5
LONGEST_STEP = 2.0  # seconds of a step, after which a larger size is computed instead of measured
# SmolLM2-135M.
KNOWN = {"vocab_size": 49152, "block_size": 2048, "n_embd": 576, "n_layer": 30, "n_head": 9}
KNOWN |= {"n_kv_head": 3, "mlp_width": 1536}
READ, WRITTEN = 64, 32  # tokens


def on_all_and_one(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the best seconds of each, on all threads and on one."""
    found = []
    contestants = {name: Contestant(run) for name, run in runs.items()}
    found.append(take_in_turn(contestants, ROUNDS))
    with one_thread():
        found.append(take_in_turn(contestants, ROUNDS))
    return {name: [times[name].minimum for times in found] for name in runs}


def peaks() -> dict[str, list[float]]:
    """Returns the operations per second of each kind of number, on all threads and on one."""
    seconds = on_all_and_one(dict(PEAKS))
    counts = {name: [run()] for name, run in PEAKS.items()}
    with one_thread():
        for name, run in PEAKS.items():
            counts[name].append(run())
    return {name: list(np.divide(counts[name], seconds[name])) for name in PEAKS}


def bandwidths() -> dict[str, dict[str, list[float]]]:
    """Returns the bytes per second that are read and copied, by how many there are."""
    found = {}
    for nbytes in LEVELS:
        streams = Streams(nbytes)
        seconds = on_all_and_one({"read": streams.read, "copy": streams.copy})
        found[str(nbytes)] = {x: list(streams.nbytes / np.array(seconds[x])) for x in seconds}
    return found


def step(name: str, rate: float | None = None) -> dict[str, float]:
    """-> the best seconds of a training step of a size, its tokens, and operations per second.

    Computed by a rate of operations, if there is one.
    """
    fields = SIZES[name]
    names = "batch_size", "block_size", "n_embd", "n_layer", "n_head"
    sizes = Sizes(*(fields[x] for x in names))
    work, tokens = operations(sizes, "gpt2"), sizes.B * sizes.T
    if rate:
        return {"seconds": work / rate, "tokens": tokens, "rate": rate, "is_measured": False}
    model = TransformerModel(job.model_config(sizes, "gpt2"))
    optimizer = AdamW(model)
    ids = np.random.default_rng(0).integers(0, sizes.V, (2, sizes.B, sizes.T)).astype(np.int32)
    seconds: list[float] = []
    while len(seconds) < STEPS and sum(seconds) < 2 * LONGEST_STEP:
        start = time.perf_counter()
        model.loss_and_gradients(*ids)
        optimizer.step(job.MAX_GRAD_NORM)
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:] or seconds)
    return {"seconds": best, "tokens": tokens, "rate": work / best, "is_measured": True}


def generation() -> dict[str, float]:
    """Returns the tokens per second that a model of 135 million parameters writes in q8_0."""
    model = TransformerModel(ModelConfig(**ARCHITECTURES["llama"] | KNOWN))
    parameters = model.flat.count
    model.freeze(f"embedding,blocks.0-{model.config.n_layer - 1}")  # only such are in blocks
    model.use_precision(Precision("q8_0"))
    cache, seconds = KeyValueCache(model, length=READ + WRITTEN), []
    model.decode(np.zeros((1, READ), np.int32), cache)
    for _ in range(WRITTEN):
        start = time.perf_counter()
        model.decode(np.zeros((1, 1), np.int32), cache)
        seconds.append(time.perf_counter() - start)
    return {"parameters": parameters, "tokens_per_second": 1 / min(seconds)}


def _step(asked: Sequence[Any]) -> dict[str, float]:
    return step(*asked)


if __name__ == "__main__":
    bind_to_cores()
    serve(
        machine=lambda _: machine.describe(),
        load=lambda _: machine.load(),
        peaks=lambda _: peaks(),
        bandwidths=lambda _: bandwidths(),
        step=_step,
        generation=lambda _: generation(),
    )

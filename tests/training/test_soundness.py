"""A run's bits do not depend on threads; its memory is written before it is read, and reused."""

import ast
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from smallmind import Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.kernels import compiled
from smallmind.kernels.codegen.scratch import scratch, scratch_bytes
from smallmind.settings.presets import ARCHITECTURES
from tests.programs import output_of

KERNELS = Path(compiled.__file__).parent
TEXT = "the cat sat on the mat. the dog sat on the log. " * 40

# Prints a digest of weights, moments and losses after some steps for each number of threads.
DIGESTS = f"""
import hashlib, json, sys
import numpy as np
from smallmind import Tokenizer, Training, TransformerModel
from smallmind.kernels.codegen.threads import set_threads
from smallmind.settings.presets import ARCHITECTURES

text = {TEXT!r}
cases = json.loads(sys.argv[1])
for precision, steps, arch, count in [(*case, n) for *case, counts in cases for n in counts]:
    set_threads(count)
    parts = {{"dropout": 0.1}} if arch == "gpt2" else ARCHITECTURES[arch]
    model = TransformerModel(len(set(text)), 40, 72, 2, 3, **parts)
    training = Training(model, Tokenizer(text), text, batch_size=5)
    records = training.train(steps, val_every=steps // 2, val_batches=2, precision=precision)
    digest = hashlib.sha256(repr([getattr(r, "loss", r) for r in records]).encode())
    for array in (model.flat.data, training.optimizer.m, training.optimizer.v):
        digest.update(array.tobytes())
    print(precision, arch, digest.hexdigest())
"""


def small_training(backend="numba", dropout=0.1, batch_size=4, **parts):
    tokenizer = Tokenizer(TEXT)
    shape = {"block_size": 24, "n_embd": 48, "n_layer": 2, "n_head": 3, "dropout": dropout}
    model = TransformerModel(tokenizer.vocab_size, **shape, backend=backend, **parts)
    return Training(model, tokenizer, TEXT, batch_size=batch_size, seed=5)


# Precision, steps, architecture, numbers of threads.
THREADED = [
    ("float32", 12, "gpt2", [1, 2, 3, 5, 7, 8, 13, 16]),
    ("float32", 4, "llama", [1, 2, 3, 5, 7, 8, 13, 16]),
    ("float16", 8, "gpt2", [1, 2, 3, 4]),
    ("bfloat16", 8, "gpt2", [1, 2, 3, 4]),
]


def test_a_run_has_the_same_bits_on_any_number_of_threads():
    lines = output_of(DIGESTS, json.dumps(THREADED), NUMBA_NUM_THREADS="16").splitlines()
    assert len(lines) == 24
    assert len({line.rpartition(" ")[0] for line in lines}) == len(set(lines)) == 4, lines


def test_a_run_equals_the_reference_up_to_rounding():
    losses, weights = [], []
    for backend in ("numba", "numpy"):
        training = small_training(backend)
        records = training.train(steps=50, log_every=1, val_every=0, warmup_steps=10)
        losses.append([record.loss for record in records])
        weights.append(training.model.flat.data)
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-5)
    # If a gradient is nearly zero, Adam's step has the direction of its rounding error.
    assert np.abs(weights[0] - weights[1]).mean() < 1e-5


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("numba", "float32"), ("numba", "float16"), ("numba", "bfloat16"), ("numpy", "float32")],
)
def test_nothing_is_read_before_it_is_written(monkeypatch, backend, precision):
    expected = small_training(backend)
    expected.train(steps=3, val_every=2, val_batches=1, precision=precision)
    training = small_training(backend)
    pool = training.model.workspace.pool
    rent = pool.rent

    def rent_poisoned(n, dtype=np.float32, owner=None):
        array = rent(n, dtype, owner)
        array.base[:] = 255  # NaN as a float, -1 as a token
        return array

    def with_poisoned_scratch(name, kernel):
        def run(*arguments):
            scratch(1, scratch_bytes() // 4)[...] = np.nan
            return kernel(*arguments)

        return run

    monkeypatch.setattr(pool, "rent", rent_poisoned)
    with training.model.workspace.wrapped_kernels(with_poisoned_scratch):
        training.train(steps=3, val_every=2, val_batches=1, precision=precision)
    assert training.model.flat.data.tobytes() == expected.model.flat.data.tobytes()


@pytest.mark.parametrize(
    ("arch", "optimizer"), [("gpt2", "adamw"), ("llama", "adamw"), ("modern", "muon")]
)
def test_python_allocates_no_array_after_the_first_step(arch, optimizer):
    # This buffer belongs to a batch larger than anything else that Python allocates.
    training = small_training(batch_size=1024, **ARCHITECTURES[arch])
    config = TrainingConfig(
        steps=9, log_every=1, val_every=0, optimizer=optimizer, micro_batch_size=256
    )
    steps = training.steps(config)
    for _ in range(3):
        next(steps)
    pool = training.model.workspace.pool
    misses = pool.statistics().misses
    tracemalloc.start()
    try:
        next(steps)
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(4):
            next(steps)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        steps.close()
    assert peak - start < 1024 * 24 * 4
    assert pool.statistics().misses == misses


@pytest.mark.parametrize("source", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.stem)
def test_kernels_allocate_nothing(source):
    allocating = {"empty", "zeros", "ones", "full", "arange", "array", "copy", "astype"}
    allocating |= {f"{name}_like" for name in allocating}
    in_python = {"classmethod", "functools.cache"}  # what makes tables and working memory
    for function in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef) or not function.decorator_list:
            continue
        decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
        if all(name in in_python or name.startswith(("kernel(", "takes(")) for name in decorators):
            continue  # a plain twin is described, and may allocate
        called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        names = {function.attr for function in called if isinstance(function, ast.Attribute)}
        assert not names & allocating, function.name


def test_an_abandoned_run_returns_its_arrays():
    training = small_training()
    pool = training.model.workspace.pool
    rented = pool.statistics().bytes_rented
    steps = training.steps(TrainingConfig(steps=5, log_every=1))
    next(steps)
    assert pool.statistics().bytes_rented > rented
    steps.close()
    assert pool.statistics().bytes_rented == rented

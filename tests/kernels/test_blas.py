"""Products of NumPy's BLAS in place of the compiled ones: they do the same, to the last digits."""

import dataclasses
import inspect

import numpy as np
import pytest

from smallmind import InputError, Run, Settings, TrainingConfig, gradient_check
from smallmind.kernels import blas, compiled, reference
from smallmind.kernels.number_types import BFLOAT16, round_to
from smallmind.runs import products
from smallmind.training.records import InstructionSetRecord, StepRecord
from tests.kernels import test_compiled as cases
from tests.kernels.test_compiled import PRODUCTS, SEED, normal
from tests.programs import CATS
from tests.training.small import small_training

__all__ = ["SEED"]
NAMES = ("matmul", "matmul_gelu", "matmul_transpose_a", "matmul_transpose_b")
BLAS = TrainingConfig(steps=20, log_every=1, val_every=0, products="blas")


@pytest.mark.parametrize("block", [blas.BLOCK_ELEMENTS, 100])
@pytest.mark.parametrize("shapes", ["without elements", "of 3 rows", "of 65 rows", "deep"])
def test_products_match_the_reference(random, monkeypatch, shapes, block):
    monkeypatch.setattr(blas, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(cases, "compiled", blas)
    for shape in PRODUCTS[shapes]:
        cases.assert_products_match(random, *shape)


def test_a_product_may_be_added_to_what_it_replaces(random):
    a, b, x = (normal(random, *shape) for shape in ((65, 37), (65, 29), (37, 29)))
    expected, replaced = np.empty_like(x), x.copy()
    blas.matmul_transpose_a(expected, a, b, x)
    blas.matmul_transpose_a(replaced, a, b, replaced)
    np.testing.assert_array_equal(replaced, expected)


def test_other_kernels_and_products_in_16_bits_are_the_compiled_ones(random):
    assert blas.rmsnorm is compiled.rmsnorm
    assert not hasattr(blas, "missing")
    for name in NAMES:
        assert inspect.signature(getattr(blas, name)) == inspect.signature(getattr(reference, name))
        square = [round_to(normal(random, 33, 33), BFLOAT16) for _ in range(2)]
        outputs = []
        for kernels in (blas, compiled):
            out = [np.zeros((33, 33), BFLOAT16) for _ in range(1 + (name == "matmul_gelu"))]
            getattr(kernels, name)(*out, *square)
            outputs.append(b"".join(x.tobytes() for x in out))
        assert outputs[0] == outputs[1]


def test_what_is_not_finite_passes_without_a_warning(random):
    x = normal(random, 5, 5)
    x[2] = np.inf, -np.inf, np.nan, 3e38, -3e38
    out = np.empty_like(x)
    blas.matmul(out, x, x)
    assert np.isnan(out[2]).any()


def test_the_gradients_of_a_model_are_right():
    model = small_training(bias=True, mlp="gelu").model
    model.use_products("blas")
    assert model.workspace.kernels is blas and "BLAS" in model.instruction_set
    assert gradient_check(model).ok
    model.use_products(None)
    assert model.workspace.kernels is compiled and "BLAS" not in model.instruction_set


def test_training_learns_as_with_our_own_products_and_leaves_the_model_with_them():
    found, expected = [], []
    for losses, config in ((found, BLAS), (expected, TrainingConfig(steps=20, val_every=0))):
        training = small_training()
        losses += [r.loss for r in training.steps(config) if isinstance(r, StepRecord)]
        assert (training.model.products == "blas") == (losses is found)
        with training.preserved():
            list(training.steps(BLAS, until=1))
        assert (training.model.products == "blas") == (losses is found)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found[9::10], expected[1:], rtol=1e-4)


def test_a_run_keeps_the_products_that_it_began_with(tmp_path):
    fields = {"n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 16, "steps": 6}
    fields |= {"precision": "float32", "save_every": 3, "batch_size": 2, "log_every": 1}
    run = Run.create(text=CATS, out=tmp_path / "run", products="blas", **fields)
    for record in run.steps():
        if isinstance(record, StepRecord) and record.step == 3:
            break
    opened = Run.open(tmp_path / "run")
    records = opened.resume()
    assert opened.training.model.products == opened.settings.training.products == "blas"
    assert [record.step for record in records if isinstance(record, StepRecord)] == [4, 5, 6]
    assert not any(isinstance(record, InstructionSetRecord) for record in records)
    assert not [verdict for verdict in opened.verify() if verdict.fault]


def test_products_of_blas_are_refused_where_they_cannot_be(tmp_path):
    fields = {"text": CATS, "out": tmp_path / "run", "products": "blas"}
    with pytest.raises(InputError, match="products='blas' needs backend='numba'"):
        Run.create(backend="numpy", **fields)
    training = small_training()
    training.processes = 2
    with pytest.raises(InputError, match="products='blas' is for one process"):
        next(training.steps(dataclasses.replace(BLAS, data_shards=2)))


@pytest.mark.parametrize(("seconds", "taken"), [((3, 1), "blas"), ((10, 9), "numba")])
def test_on_macos_the_faster_products_are_taken(monkeypatch, seconds, taken):
    now = [0.0]

    class Kernels:
        def __init__(self, cost):
            self.cost = cost

        def matmul(self, *_):
            now[0] += self.cost

    settings = Settings()
    assert products.fastest_products(settings) is None  # elsewhere
    monkeypatch.setattr(products.sys, "platform", "darwin")
    monkeypatch.setattr(products, "use_threads", lambda _: None)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("smallmind.kernels.compiled", Kernels(seconds[0]))
    monkeypatch.setattr("smallmind.kernels.blas", Kernels(seconds[1]))
    assert products.fastest_products(settings) == taken
    half = settings.replace(precision="bfloat16")
    assert products.fastest_products(half) is None
    assert products.fastest_products(settings.replace(backend="numpy")) is None

"""Muon: against PyTorch, its kernel against the plain one, and as the optimizer of whole runs."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest

from smallmind import (
    AdamW,
    InputError,
    Muon,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.files import safetensors
from smallmind.forecast.pace import rough_pace
from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, round_to
from smallmind.kernels.reference_optimizers import MatrixBlocks, MuonCoefficients, newton_schulz
from smallmind.nn.parameters import Role
from smallmind.training.preflight import distinct_samples, learns_at_peak
from smallmind.training.records import HealthRecord, StepRecord
from smallmind.training.state import StateCopy
from tests.golden import make_muon
from tests.guards import Guarded
from tests.optim.small import small_model, with_gradients
from tests.training.test_resume import assert_resumes_whole

TEXT = "".join(f"the cat {i} sat on mat {i * i % 97}; how odd!\n" for i in range(300))


def blocks_of(*shapes, gap=0):
    """Matrices one after the other; `gap` elements between their rows."""
    blocks, start = [], 0
    for rows, columns in shapes:
        blocks.append((start, rows, columns, columns + gap))
        start += rows * (columns + gap)
    fields = [np.array(field, np.int64) for field in zip(*blocks, strict=True)]
    return MatrixBlocks(*fields), start


def run(steps=6, seed=3, **settings):
    """A run with Muon -> its training, after all its steps."""
    training = new_training(seed)
    config = TrainingConfig(**{"steps": steps, "optimizer": "muon", "val_every": 0, **settings})
    records = list(training.steps(config))
    return training, records


def new_training(seed=3):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 12, 24, 2, 3, seed=seed)
    return Training(model, tokenizer, TEXT, batch_size=4, seed=5)


# Against PyTorch.


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("numpy", np.float64, 1e-11), ("numpy", np.float32, 2e-5), ("numba", np.float32, 2e-5)],
)
def test_a_hundred_steps_match_pytorch(monkeypatch, backend, dtype, tolerance):
    tensors, _ = safetensors.read(Path(make_muon.__file__).parent / "muon.safetensors")
    model = TransformerModel(make_muon.CONFIG, backend=backend, dtype=dtype)
    for name, value in model.parameters.items():
        value[...] = tensors[f"parameters/{name}"]
    rates = make_muon.LEARNING_RATE, make_muon.MATRIX_LEARNING_RATE
    settings = {"betas": make_muon.BETAS, "weight_decay": make_muon.WEIGHT_DECAY}
    optimizer = Muon(model, *rates, momentum_warmup_steps=40, **settings)
    for step in range(make_muon.STEPS):
        for name, gradient in model.gradients.items():
            gradient[...] = make_muon.gradient_of(step, tensors[f"gradients/{name}"])
        optimizer.learning_rate = make_muon.LEARNING_RATE * make_muon.share_of_peak(step)
        optimizer.step()
        for name, value in model.parameters.items() if step + 1 in make_muon.KEPT else ():
            expected, where = tensors[f"{step + 1}/{name}"], f"{name}, step {step + 1}"
            np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, err_msg=where)


# The kernel.

SHAPES = [
    *((1, 1), (3, 5), (5, 3), (1, 40), (40, 1), (33, 7), (7, 33), (16, 16), (17, 17), (63, 65)),
    *((128, 384), (128, 128), (130, 40), (40, 600), (600, 40), (520, 530)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_matches_the_reference(shape):
    blocks, size = blocks_of(shape, (5, 4), shape, gap=3)
    random = np.random.default_rng(1)
    starts = [random.standard_normal(size).astype(np.float32) for _ in range(3)]
    coefficients = MuonCoefficients(0.02, 0.9, 0.1, 0.5, max_gradient=0.8)
    fast = [Guarded((size,), start) for start in starts]
    slow = [start.astype(np.float64) for start in starts]
    compiled.muon(*(guarded.array for guarded in fast), blocks, coefficients)
    reference.muon(*slow, blocks, coefficients)
    inside = np.zeros(size, bool)
    for view in blocks.of(inside):
        view[...] = True
    for guarded, exact, start in zip(fast, slow, starts, strict=True):
        guarded.assert_intact()
        np.testing.assert_allclose(guarded.array[inside], exact[inside], rtol=0, atol=2e-6)
        # The parameters between the blocks belong to others.
        np.testing.assert_array_equal(guarded.array[~inside], start[~inside])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_matches_the_reference_in_bfloat16(shape):
    """On a matrix unit the update itself is computed in bfloat16."""
    blocks, size = blocks_of(shape, (5, 4), shape, gap=3)
    random = np.random.default_rng(1)
    gradients = random.standard_normal(size).astype(np.float32)
    coefficients = MuonCoefficients(1.0, 0.9, 0.1, 0.5)
    fast = [Guarded((size,), values) for values in (np.zeros(size), gradients, np.zeros(size))]
    working = Guarded((size,), values=np.zeros(size, BFLOAT16), dtype=BFLOAT16)
    slow = [np.zeros(size), gradients.astype(np.float64), np.zeros(size)]
    compiled.muon(*(guarded.array for guarded in fast), blocks, coefficients, working.array)
    reference.muon(*slow, blocks, coefficients)
    for guarded in (*fast, working):
        guarded.assert_intact()
    for update, exact in zip(blocks.of(fast[0].array), blocks.of(slow[0]), strict=True):
        assert np.linalg.norm(update - exact) <= 0.04 * np.linalg.norm(exact)
    for stored, exact in zip(blocks.of(working.array), blocks.of(fast[0].array), strict=True):
        np.testing.assert_array_equal(stored, round_to(exact, BFLOAT16))


def conditioned(kind, rows, columns):
    """A matrix that is hard to orthogonalise."""
    random = np.random.default_rng(2)
    x = random.standard_normal((rows, columns))
    if kind == "ill-conditioned":
        u, _, v = np.linalg.svd(x, full_matrices=False)
        return u * np.logspace(0, -8, min(rows, columns)) @ v
    if kind == "of rank 3":
        return x[:, :3] @ random.standard_normal((3, columns))
    return x * {"tiny": 1e-30, "huge": 1e15, "zero": 0.0}[kind]


@pytest.mark.parametrize("kind", ["ill-conditioned", "of rank 3", "tiny", "huge", "zero"])
@pytest.mark.parametrize("shape", [(96, 96), (40, 160), (160, 40)], ids=str)
def test_the_kernel_is_accurate_for_matrices_of_every_kind(kind, shape):
    blocks, size = blocks_of(shape)
    gradient = conditioned(kind, *shape).reshape(-1).astype(np.float32)
    coefficients = MuonCoefficients(1.0, 0.0, 0.0, 1.0)
    results = []
    for kernels, dtype in ((compiled, np.float32), (reference, np.float64)):
        update = np.zeros(size, dtype)
        kernels.muon(update, gradient.astype(dtype), np.zeros(size, dtype), blocks, coefficients)
        results.append(update)
    error, norm = np.linalg.norm(results[0] - results[1]), np.linalg.norm(results[1])
    assert error <= 1e-3 * norm


def test_newton_schulz_makes_singular_values_about_one():
    random = np.random.default_rng(0)
    for shape in ((5, 9), (9, 5), (24, 24)):
        x = random.standard_normal(shape)
        u, _, v = np.linalg.svd(x, full_matrices=False)
        values = np.diag(u.T @ newton_schulz(x) @ v.T)
        assert values.min() > 0.6 and values.max() < 1.3


# The optimizer.


def test_parts_of_a_matrix_are_updated_apart():
    fused, split = with_gradients(small_model()), with_gradients(small_model())
    Muon(fused, weight_decay=0.0).step()
    before = small_model().parameters["blocks.0.attention.qkv.weight"]
    update = before - fused.parameters["blocks.0.attention.qkv.weight"]
    gradient = split.gradients["blocks.0.attention.qkv.weight"]
    for part, g in zip(np.split(update, 3, axis=1), np.split(gradient, 3, axis=1), strict=True):
        expected = 0.02 * newton_schulz(g.astype(np.float64))
        np.testing.assert_allclose(part, expected, rtol=0, atol=1e-6)


def test_wide_matrices_get_larger_updates():
    model = with_gradients(small_model())
    Muon(model, weight_decay=0.0).step()
    norms = {}
    for name in ("expansion", "projection"):
        name = f"blocks.0.mlp.{name}.weight"
        norms[name] = np.linalg.norm(model.parameters[name] - small_model().parameters[name])
    wide, tall = norms.values()
    assert wide == pytest.approx(2 * tall, rel=0.1)  # (24, 96): sqrt(96 / 24) = 2


def test_everything_but_hidden_matrices_is_updated_by_adamw():
    models = [with_gradients(small_model(tie_weights=False)) for _ in range(2)]
    for model, kind in zip(models, (AdamW, Muon), strict=True):
        kind(model, 3e-3, weight_decay=0.5).step(max_grad_norm=1.0)
    matrices = {spec.name for spec in models[0].flat.specs if spec.role == Role.MATRIX}
    assert len(matrices) == 8
    for name, value in models[0].parameters.items():
        same = (value == models[1].parameters[name]).all()
        assert same == (name not in matrices), name
    assert not models[1].flat.grad.any()


def test_the_rates_keep_their_proportion():
    optimizer = Muon(small_model(), 1e-3, 0.02)
    assert optimizer.matrix_learning_rate == pytest.approx(0.02)
    optimizer.learning_rate = 1e-4
    assert optimizer.matrix_learning_rate == pytest.approx(0.002)
    optimizer.learning_rate = 0.0
    assert optimizer.matrix_learning_rate == 0


def test_it_is_no_adamw_but_has_one():
    optimizer = Muon(small_model(), betas=(0.8, 0.9), weight_decay=0.5)
    assert not isinstance(optimizer, AdamW) and isinstance(optimizer.others, AdamW)
    assert optimizer.others.betas == (0.8, 0.9) and optimizer.others.weight_decay == 0.5


def test_there_are_no_moments_of_hidden_matrices():
    model = small_model()
    optimizer = Muon(model)
    matrices = sum(value.size for value in model.parameters.values() if value.size >= 24 * 24)
    assert optimizer.matrix_mean.size == matrices
    held = optimizer.tensors()
    assert list(held) == ["m", "v", "matrix_mean"]
    assert held["m"].size == held["v"].size == model.flat.data.size - matrices
    with_gradients(model)
    optimizer.step()
    assert all(held[name] is tensor for name, tensor in optimizer.tensors().items())
    assert all(tensor.any() for tensor in held.values())


def test_momentum_rises_to_its_final_value():
    model = small_model()
    optimizer = Muon(model, momentum=0.95, momentum_warmup_steps=10)
    seen = []
    with model.workspace.wrapped_kernels(
        lambda name, kernel: (
            (lambda *arguments: seen.append(arguments[4].momentum)) if name == "muon" else kernel
        )
    ):
        for _ in range(12):
            optimizer.step()
    np.testing.assert_allclose(seen, [*np.linspace(0.85, 0.95, 11), 0.95])
    low = Muon(model, momentum=0.5, momentum_warmup_steps=10)
    assert low._momentum(0) == low._momentum(99) == 0.5


def test_it_says_what_it_is():
    shown = repr(Muon(small_model()))
    assert shown.startswith("<Muon: learning_rate=0.001, matrix_learning_rate=0.02, betas=")


# Runs.


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_runs_learn_in_every_precision(precision):
    _, records = run(60, precision=precision, learning_rate=1e-2, warmup_steps=5, log_every=1)
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]


def test_the_rate_of_matrices_follows_the_schedule_and_a_rollback():
    training, _ = run(3, schedule="linear", min_lr=0.0, warmup_steps=0, matrix_learning_rate=0.04)
    optimizer = training.optimizer
    assert optimizer.matrix_learning_rate == pytest.approx(0.04 / 3)  # of the third of three steps
    assert optimizer.learning_rate == pytest.approx(1e-3 / 3)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_resumed_run_equals_one_without_a_break(tmp_path, precision):
    settings = {"optimizer": "muon", "steps": 7, "val_every": 0, "precision": precision}
    config = TrainingConfig(**settings, momentum_warmup_steps=5, warmup_steps=2)
    _, resumed, _ = assert_resumes_whole(new_training, config, [3], tmp_path)
    assert "optimizer.matrix_mean" in resumed.state().tensors


def test_a_run_cannot_resume_with_another_optimizer():
    training, _ = run(2)
    state = StateCopy().take(training.state())
    config = dataclasses.replace(training.config, optimizer="adamw", steps=4)
    with pytest.raises(InputError, match="different training settings"):
        list(new_training().steps(config, state))


def test_ordinary_updates_are_not_reported_and_a_wrong_rate_is():
    settings = {"warmup_steps": 10, "check_gradient_health": True, "diagnostic_interval": 5}
    for rate, expected in ((0.02, set()), (1.0, {"large update"})):
        _, records = run(20, matrix_learning_rate=rate, **settings)
        found = [x for r in records if isinstance(r, HealthRecord) for x in r.findings]
        assert {finding.problem for finding in found} == expected
        assert all("lower the matrix learning rate" in str(finding) for finding in found)


def test_old_runs_had_adamw():
    from smallmind.settings.settings import from_saved

    assert from_saved(TrainingConfig, {}).optimizer == "adamw"


def test_a_run_that_diverges_names_both_rates(monkeypatch):
    training = new_training()
    monkeypatch.setattr(training.model, "loss_and_gradients", lambda *_: math.nan)
    config = TrainingConfig(optimizer="muon", steps=3, val_every=0, max_rollbacks=1)
    advice = "lower the learning rate, which was .*, and the matrix learning rate$"
    with pytest.raises(FloatingPointError, match=advice):
        list(training.steps(config))


def test_a_check_at_the_peak_rates_uses_muon():
    training = new_training()
    rates = {"optimizer": "muon", "learning_rate": 1e-2, "warmup_steps": 0}
    samples = distinct_samples(training.data)
    for matrix_rate, passed in ((0.02, True), (100.0, False)):
        config = TrainingConfig(**rates, matrix_learning_rate=matrix_rate)
        check = learns_at_peak(training.model, samples, config)
        assert check.passed == passed, check
    advice = "lower --learning-rate, for example to .*, and --matrix-learning-rate in proportion"
    assert re.search(advice, check.expected)


def test_the_pace_of_a_run_is_that_of_its_optimizer():
    training, used = new_training(), set()

    def noted(name, kernel):
        used.add(name)
        return kernel

    with training.model.workspace.wrapped_kernels(noted):
        rough_pace(training, TrainingConfig(optimizer="muon"))
    assert "muon" in used

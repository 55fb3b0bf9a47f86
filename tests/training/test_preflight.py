"""Each check before a run passes for a sound model, and fails for a planted fault."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from smallmind import Tokenizer, Training, TrainingConfig, TransformerModel, gradient_check
from smallmind.forecast import memory
from smallmind.forecast.memory import why_not_repeated
from smallmind.kernels import compiled, reference
from smallmind.settings.config import ModelConfig
from smallmind.training import preflight as module
from smallmind.training.preflight import (
    backward_pass,
    distinct_samples,
    learns_at_peak,
    preflight,
    small_config,
)
from tests.training.small import TEXT, at_each_pass, small_training


def failed(training):
    """The first words of the checks that failed, and what was measured."""
    return {
        check.name.split(",")[0].split(" 8")[0]: check.measured
        for check in preflight(training)
        if not check.passed
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "numpy"},
        {"dropout": 0.5, "bias": False, "tie_weights": False, "n_head": 4, "n_layer": 1},
        {"block_size": 1, "n_embd": 16},
        {"document_token": 0},  # a space: no text of 16 tokens could be memorised word by word
    ],
)
def test_a_sound_model_passes_and_stays_unchanged(settings, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    training = small_training(**settings)
    values = training.model.flat.data.copy()
    checks = list(preflight(training))
    assert len(checks) == (4 if "backend" in settings else 5)
    assert [check for check in checks if not check.passed] == []
    np.testing.assert_array_equal(training.model.flat.data, values)
    assert not training.model.flat.grad.any() and training.state().state["passes"] == 0
    assert not list(Path().iterdir())


def test_it_is_known_why_steps_are_not_repeated_from_a_recording(monkeypatch):
    training = small_training()

    def why(training=training, **settings):
        return why_not_repeated(training, TrainingConfig(**settings))

    assert why() is None
    assert "plain NumPy" in why(small_training(backend="numpy"))
    assert "--profile times each kernel" in why(enable_diagnostics=True)
    assert "--detect-anomaly" in why(detect_anomaly=True)
    monkeypatch.setattr(memory, "MAX_BYTES", 1000)
    assert "a pass takes " in why()
    training.model.workspace.new_recording = None
    assert "a layer from another package" in why()


def test_a_model_in_16_bits_is_checked_in_float32_and_then_restored():
    training = small_training(dropout=0.2)
    training.model.use_precision("float16")
    working = training.model.flat.copies[0].values.tobytes()
    assert [check for check in preflight(training) if not check.passed] == []
    assert training.model.precision == "float16"
    assert training.model.flat.copies[0].values.tobytes() == working


def test_checks_show_measured_and_expected_values():
    V = len(set(TEXT))
    first, gradients, kernels, memory, check = preflight(small_training())
    assert first.expected.startswith(f"ln {V} = {math.log(V):.3f}")
    assert float(first.measured.split()[0]) == pytest.approx(math.log(V), abs=0.2)
    assert gradients.measured.startswith("28 of 28 ")
    assert float(kernels.measured.split()[3]) < 1e-5
    assert "within 100 steps" in memory.expected and "at learning rate" in memory.measured
    assert check.name.endswith("2 x 16 channels, 2 heads")  # the sizes that were shrunk
    assert float(check.measured.split()[2].rstrip(",")) < 1e-7


@pytest.mark.parametrize("factor", [30, -30])
def test_a_broken_initialisation_starts_too_high(factor):
    training = small_training()
    training.model.parameters["token_embedding.weight"][...] *= factor
    assert "loss at the start" in failed(training)


def test_a_dead_layer_leaves_parameters_without_a_gradient():
    training = small_training()
    training.model.parameters["blocks.1.mlp.expansion.bias"][...] = -100
    measured = failed(training)["gradient of every parameter"]
    # Weight and bias of the norm and of the expansion, and the projection's weight.
    assert measured.startswith("blocks.1.mlp_norm.weight: all gradients are zero")
    assert measured.endswith("(and 4 more)")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_non_finite_weights_fail_and_do_not_stop_the_checks():
    training = small_training()
    training.model.parameters["final_norm.weight"][3] = np.nan
    names = {"loss at the start", "gradient of every parameter", "compiled kernels against NumPy"}
    assert set(failed(training)) == {*names, "memorising"}


def test_a_non_finite_gradient_with_a_finite_loss_fails(monkeypatch):
    original = compiled.embedding_backward

    def wrong(dtoken_weight, *arguments):
        original(dtoken_weight, *arguments)
        dtoken_weight[0, 0] = np.inf

    monkeypatch.setattr(compiled, "embedding_backward", wrong)
    found = failed(small_training())
    assert found["memorising"].startswith("loss nan after 0 steps")


@pytest.mark.parametrize("name", ["layernorm_backward", "gelu_backward", "matmul_transpose_b"])
def test_a_kernel_whose_result_is_off_by_a_hundredth_fails(monkeypatch, name):
    for kernels, check in (
        (compiled, "compiled kernels against NumPy"),
        (reference, "gradient check"),
    ):
        original = getattr(kernels, name)

        def wrong(out, *arguments, original=original):
            original(out, *arguments)
            out *= 1.01

        with monkeypatch.context() as patch:
            patch.setattr(kernels, name, wrong)
            assert check in failed(small_training(tie_weights=False, n_layer=1))


def test_an_optimizer_that_goes_uphill_memorises_nothing(monkeypatch):
    original = compiled.adamw

    def wrong(parameters, gradients, *arguments):
        gradients *= -1
        original(parameters, gradients, *arguments)

    monkeypatch.setattr(compiled, "adamw", wrong)
    assert set(failed(small_training())) == {"memorising"}


def test_a_gradient_off_by_a_thousandth_is_named():
    model = TransformerModel(11, 7, 12, 2, 3, backend="numpy", dtype=np.float64)
    random = np.random.default_rng(0)
    for value in model.parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    data = random.integers(0, 11, (2, 8))
    before = model.flat.data.copy()
    assert gradient_check(model, data[:, :-1], data[:, 1:]).ok
    np.testing.assert_array_equal(model.flat.data, before)

    def wrong(_):
        model.gradients["blocks.1.attention.qkv.bias"][...] *= 1.001

    at_each_pass(model, after=wrong)
    found = gradient_check(model, data[:, :-1], data[:, 1:])
    assert found.wrong == ["blocks.1.attention.qkv.bias"]


def test_the_gradient_check_takes_no_longer_for_a_large_model():
    large = ModelConfig(
        50257, 1024, n_layer=48, n_head=25, n_embd=1600, dropout=0.9, bias=False, tie_weights=False
    )
    small = small_config(large)
    assert (small.vocab_size, small.block_size, small.n_layer) == (13, 7, 2)
    assert (small.n_head, small.n_embd) == (3, 24)
    assert not small.bias and not small.tie_weights and small.dropout == 0.2
    assert backward_pass(large).passed
    assert small.document_token is None
    masked = dataclasses.replace(large, document_token=50256)
    assert small_config(masked).document_token == 0 and backward_pass(masked).passed
    wide = dataclasses.replace(large, head_size=128, position="rope", qk_norm=True)
    assert small_config(wide).head_size == 6 and backward_pass(wide).passed


def test_no_two_samples_start_with_the_same_token():
    ids, targets, *_ = distinct_samples(small_training(block_size=40).data)
    assert ids.shape == targets.shape == (8, 16)
    assert len(set(ids[:, 0])) == 8
    np.testing.assert_array_equal(ids[:, 1:], targets[:, :-1])


def test_a_text_of_one_character_can_be_checked():
    tokenizer = Tokenizer("a")
    training = Training(TransformerModel(1, 8, 16, 1, 2), tokenizer, "a" * 100)
    # There is nothing to learn, so there is no gradient.
    assert set(failed(training)) == {"gradient of every parameter"}


def test_memorising_gives_up_after_its_steps(monkeypatch):
    monkeypatch.setattr(module, "RATE_BY_WIDTH", 1e-6)
    assert failed(small_training())["memorising"].split(" after ")[1].startswith("100 steps")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"learning_rate": 1e-3}, None),
        ({"learning_rate": 1e-5}, None),
        ({"learning_rate": 1e-2}, None),
        ({"learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.0}, None),
        ({"learning_rate": 0.3}, "lower --learning-rate, for example to"),
        ({"learning_rate": 10.0}, "lower --learning-rate, for example to"),
        ({"learning_rate": 0.0}, "raise --learning-rate"),
        # The run never leaves its warmup, and so never reaches the rate at which it would diverge.
        ({"learning_rate": 10.0, "warmup_steps": 10**6, "steps": 100}, None),
    ],
)
def test_the_peak_rate_of_the_run_is_checked(settings, advice):
    training = small_training()

    def check(**settings):
        samples = distinct_samples(training.data)
        return learns_at_peak(training.model, samples, TrainingConfig(**settings))

    result = check(**settings)
    assert result.passed == (advice is None), result
    assert advice is None or advice in result.expected
    if "for example to" in result.expected and not result.passed:  # the advice works
        rate = float(result.expected.split()[-1])
        assert check(**{**settings, "learning_rate": rate}).passed


def test_the_products_of_blas_are_why_passes_are_not_repeated():
    training = small_training()
    config = TrainingConfig(steps=3, products="blas")
    training.model.use_products("blas")
    assert "NumPy's BLAS" in why_not_repeated(training, config)
    training.model.use_precision("bfloat16")
    training.model.use_products("blas")  # which has no products of 16 bits
    assert training.model.workspace.new_recording is not None
    half = TrainingConfig(steps=3, products="blas", precision="bfloat16")
    assert why_not_repeated(training, half) is None

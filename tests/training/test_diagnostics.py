"""Sick gradients, updates, hidden units and passes: planted by name, and found by that name."""

import tracemalloc

import numpy as np
import pytest

from smallmind import GradientDiagnostics, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.kernels import compiled, reference
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training.diagnostics import (
    HealthRecord,
    check_model,
    dead_units,
    detect_anomaly,
    update_ratios,
)
from smallmind.training.loop import OverflowRecord

TEXT = "the cat sat on the mat. the dog sat on the log. " * 40
NAN, INF = float("nan"), float("inf")


def small_training(**settings):
    tokenizer = Tokenizer(TEXT)
    model = TransformerModel(tokenizer.vocab_size, 16, 32, 2, 2, **settings)
    return Training(model, tokenizer, TEXT, batch_size=4)


def small_model(**settings):
    """A model with the gradients of one batch, and that batch."""
    training = small_training(**settings)
    batch = draw(RandomWindows(training.data), 0)[:2]
    training.model.loss_and_gradients(*batch)
    return training.model, batch


def healthy(shape=(40, 50)):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def planted(problem):
    gradient = healthy()
    if problem == "sparse":
        gradient[4:] = 0
    elif problem in ("nan", "inf"):
        gradient[0, 4] = {"nan": NAN, "inf": -INF}[problem]
    else:
        gradient *= {"zero": 0, "exploding": 1e3, "vanishing": 1e-10}[problem]
    return gradient


PROBLEMS = {
    "nan": "1 of 2,000 gradients are NaN",
    "inf": "1 of 2,000 gradients are infinite",
    "zero": "all gradients are zero",
    "exploding": "exploding gradients (norm=4",
    "vanishing": "vanishing gradients (norm=4",
    "sparse": "90.0% of its gradients are zero; 36 of 40 rows have none",
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_sick_gradient_is_named(problem):
    gradient = planted(problem)
    if problem == "sparse":
        gradient[3, 0] = 0  # 90 % are no finding, anything over it is
    finding = GradientDiagnostics.check_gradients("head.weight", gradient)
    assert (finding.name, finding.problem) == ("head.weight", problem)
    assert str(finding).startswith(f"head.weight: {PROBLEMS[problem]}")
    norm, has_issue = GradientDiagnostics.get_gradient_norm(gradient)
    assert has_issue
    assert norm == pytest.approx(np.linalg.norm(gradient.astype(np.float64)), nan_ok=True)


@pytest.mark.parametrize("gradient", [healthy(), healthy(7), np.ones(1), [0.5, 0.0]])
def test_a_healthy_gradient_is_no_finding(gradient):
    assert GradientDiagnostics.check_gradients("x", gradient, verbose=True) is None
    norm, has_issue = GradientDiagnostics.get_gradient_norm(gradient)
    assert norm == pytest.approx(np.linalg.norm(gradient)) and has_issue is False


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1e30, "exploding"),
        (100.01, "exploding"),
        (100.0, None),
        (1.1e-7, None),
        (0.9e-7, "vanishing"),
    ],
)
def test_the_limits_are_those_of_the_guide(value, problem):
    finding = GradientDiagnostics.check_gradients("x", np.array([value], np.float32))
    assert (finding.problem if finding else None) == problem


def test_gradients_larger_than_what_is_looked_at_together(monkeypatch):
    monkeypatch.setattr("smallmind.training.diagnostics.CHUNK", 7)
    gradient = healthy()
    norm, has_issue = GradientDiagnostics.get_gradient_norm(gradient)
    assert norm == pytest.approx(np.linalg.norm(gradient), rel=1e-6) and not has_issue
    gradient[-1, -1] = NAN
    assert GradientDiagnostics.check_gradients("x", gradient).problem == "nan"


def test_verbose_says_more_of_the_same():
    gradient = planted("exploding")
    short = GradientDiagnostics.check_gradients("x", gradient)
    long = GradientDiagnostics.check_gradients("x", gradient, verbose=True)
    assert long.problem == short.problem and long.message.startswith(short.message)
    for words in ("norm", "mean", "from -", "0.0% zeros"):
        assert words in long.message[len(short.message) :]


def test_tokens_that_a_batch_does_not_have_are_no_finding():
    gradient = planted("sparse")
    check = GradientDiagnostics.check_gradients
    assert check("token_embedding.weight", gradient) is None
    gradient[:, 2:] = 0  # of the tokens that are there, too, nearly nothing gets a gradient
    assert check("token_embedding.weight", gradient).problem == "sparse"
    gradient[...] = 0
    assert check("token_embedding.weight", gradient).problem == "zero"


@pytest.mark.parametrize("settings", [{}, {"tie_weights": False, "bias": False, "dropout": 0.2}])
def test_an_ordinary_model_is_healthy(settings):
    model, batch = small_model(**settings)
    assert check_model(model) == [] == dead_units(model, *batch)


@pytest.mark.parametrize("problem", [*PROBLEMS])
@pytest.mark.parametrize("name", ["blocks.1.attention.qkv.weight", "final_norm.bias"])
def test_a_model_is_looked_at_by_name(name, problem):
    model, _ = small_model()
    gradient = model.gradients[name]
    gradient[...] = np.resize(planted(problem), gradient.shape)
    if problem == "sparse":
        gradient[1:] = 0
    assert [(x.name, x.problem) for x in check_model(model)] == [(name, problem)]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_dead_units_are_counted_by_layer(backend):
    model, (ids, targets) = small_model(backend=backend, dropout=0.5)
    model.parameters["blocks.1.mlp.expansion.bias"][5:42] = -100
    passes, gradients = model.passes, model.flat.grad.copy()
    kernels = model.workspace.kernels
    (finding,) = dead_units(model, ids, targets)
    assert (finding.name, finding.problem) == ("blocks.1.mlp.expansion", "dead")
    assert finding.message.startswith("37 of 128 hidden units are dead")
    assert model.passes == passes and model.workspace.kernels is kernels
    np.testing.assert_array_equal(model.flat.grad, gradients)


def test_a_unit_that_one_token_of_many_wakes_is_not_dead():
    model, _ = small_model(backend="numpy")
    model.micro_batch_size = 1
    loud = np.random.default_rng(0).standard_normal(32)
    values = model.parameters
    values["token_embedding.weight"][:2] = -10 * loud, 10 * loud
    values["blocks.0.mlp.expansion.weight"][:, 0] = loud

    def silent_in_the_first_block(windows):
        ids = np.array(windows)
        messages = {finding.name: finding.message for finding in dead_units(model, ids, ids)}
        return messages.get("blocks.0.mlp.expansion", "0 of 128").split(" of ")[0]

    assert silent_in_the_first_block([[0, 0], [0, 0], [0, 0]]) == "1"
    assert silent_in_the_first_block([[0, 1], [0, 0], [0, 0]]) == "0"
    assert silent_in_the_first_block([[0, 0], [0, 0], [0, 1]]) == "0"


def test_looking_for_dead_units_takes_no_memory_that_grows_with_the_batch():
    model, _ = small_model()
    ids = np.zeros((512, 16), np.int32)
    dead_units(model, ids, ids)
    tracemalloc.start()
    dead_units(model, ids, ids)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * ids.nbytes  # losses and a copy; the hidden layer is 128 times as large


def test_update_ratios_are_those_of_what_was_changed():
    model, _ = small_model()
    before = {name: value.copy() for name, value in model.parameters.items()}
    assert update_ratios(model, before) == {}
    model.parameters["final_norm.weight"][...] *= 1.25
    model.parameters["final_norm.bias"][...] = 1  # was zero: nothing to divide by
    ratios = update_ratios(model, before)
    assert "final_norm.bias" not in ratios
    assert ratios.pop("final_norm.weight") == pytest.approx(0.25)
    assert set(ratios.values()) == {0.0} and "token_embedding.weight" in ratios


def run(training, **settings):
    defaults = {"steps": 6, "val_every": 0, "warmup_steps": 0, "check_gradient_health": True}
    return training.train(**{**defaults, **settings})


def health(records):
    return [record for record in records if isinstance(record, HealthRecord)]


def test_a_run_yields_its_health_at_the_interval_and_learns_the_same():
    bits = []
    for on in (True, False):
        training = small_training(dropout=0.2)
        kernels = training.model.workspace.kernels
        seen = health(run(training, check_gradient_health=on, diagnostic_interval=3))
        assert [record.step for record in seen] == ([1, 3, 6] if on else [])
        assert training.model.workspace.kernels is kernels
        bits.append(training.model.flat.data.tobytes())
    assert bits[0] == bits[1]


def test_an_ordinary_run_has_no_findings():
    training = small_training(dropout=0.1)
    records = health(run(training, steps=300, warmup_steps=100, diagnostic_interval=10))
    assert len(records) == 31
    assert [record.findings for record in records] == [()] * 31
    assert all(1e-5 < ratio < 1 for ratio in records[15].update_ratios.values())


def test_ratios_of_a_run_are_measured_around_the_update():
    training = small_training()
    model = training.model
    before = model.parameters["final_norm.weight"].copy()
    records = run(training, steps=1, learning_rate=1e-2)
    after = model.parameters["final_norm.weight"]
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert health(records)[0].update_ratios["final_norm.weight"] == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "problem"), [(1.0, "large update"), (1e-8, "small update")])
def test_a_learning_rate_that_is_far_off_shows_in_the_updates(rate, problem):
    findings = health(run(small_training(), learning_rate=rate, steps=1))[0].findings
    names = [finding.name for finding in findings if finding.problem == problem]
    assert "blocks.0.attention.qkv.weight" in names and "final_norm.weight" not in names


def test_a_schedule_near_zero_is_no_finding():
    settings = {"schedule": "linear", "min_lr": 0.0, "diagnostic_interval": 1, "steps": 40}
    records = health(run(small_training(), learning_rate=1e-3, warmup_steps=20, **settings))
    assert [record.findings for record in records] == [()] * 40
    assert records[-1].update_ratios


def plant_after_backward(training, name, factor, monkeypatch):
    """Multiplies one gradient after every backward pass."""
    honest = training.model.loss_and_gradients

    def planted(*arguments):
        loss = honest(*arguments)
        training.model.gradients[name][...] *= factor
        return loss

    monkeypatch.setattr(training.model, "loss_and_gradients", planted)


def test_a_run_finds_what_is_planted_in_a_gradient(monkeypatch):
    training = small_training()
    plant_after_backward(training, "blocks.0.mlp.projection.weight", 1e6, monkeypatch)
    for record in health(run(training, diagnostic_interval=2)):
        found = [(x.name, x.problem) for x in record.findings if "update" not in x.problem]
        assert found == [("blocks.0.mlp.projection.weight", "exploding")]


def test_health_in_float16_is_that_of_the_unscaled_gradients(monkeypatch):
    training = small_training()
    records = run(training, precision="float16", diagnostic_interval=1, warmup_steps=100)
    assert training.scaler.scale == 65536
    assert [record.findings for record in health(records)] == [()] * 6
    plant_after_backward(training, "final_norm.weight", 1e5, monkeypatch)
    (finding,) = health(run(training, precision="float16", steps=1))[0].findings
    assert (finding.name, finding.problem) == ("final_norm.weight", "exploding")


def test_an_overflow_that_the_scaler_sees_to_is_no_finding(monkeypatch):
    training = small_training()
    plant_after_backward(training, "final_norm.weight", INF, monkeypatch)
    records = run(training, precision="float16", steps=3, diagnostic_interval=1)
    assert [type(record) for record in records] == [OverflowRecord] * 3


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_dead_units_are_found_in_16_bits(precision):
    model, batch = small_model()
    model.parameters["blocks.1.mlp.expansion.bias"][5:42] = -100
    model.use_precision(precision)
    (finding,) = dead_units(model, *batch)
    assert finding.message.startswith("37 of 128 hidden units are dead")


def test_dead_units_are_found_in_a_run():
    training = small_training()
    training.model.parameters["blocks.0.mlp.expansion.bias"][...] = -100
    found = {(x.name, x.problem) for x in health(run(training, steps=1))[0].findings}
    assert ("blocks.0.mlp.expansion", "dead") in found
    assert ("blocks.0.mlp.expansion.weight", "zero") in found


@pytest.mark.parametrize("on", [True, False])
def test_a_gradient_that_is_not_finite_is_named_where_the_update_is_refused(monkeypatch, on):
    training = small_training()
    plant_after_backward(training, "blocks.1.mlp_norm.bias", NAN, monkeypatch)
    message = "nothing was updated; blocks.1.mlp_norm.bias: 32 of 32 gradients are NaN$"
    with pytest.raises(FloatingPointError, match=message):
        run(training, check_gradient_health=on, steps=2)


def test_enable_diagnostics_measures_the_run():
    training = small_training()
    for on in (False, True):
        training.train(steps=2, val_batches=1, enable_diagnostics=on)
        names = {row.name for row in training.profiler.rows()}
        assert bool(names) == on
    assert {"Forward", "Backward", "OptimizerStep", "Evaluate", "matmul"} <= names


# --- The first NaN or Inf of a pass ---

WEIGHTS = {
    "token_embedding.weight": "embedding",
    "blocks.0.attention_norm.weight": "blocks.0.attention_norm",
    "blocks.1.attention.qkv.weight": "blocks.1.attention.qkv",
    "blocks.1.attention.projection.bias": "blocks.1.attention.projection",
    "blocks.0.mlp.expansion.weight": "blocks.0.mlp.expansion",
    "blocks.1.mlp.projection.weight": "blocks.1.mlp.projection",
    "final_norm.bias": "final_norm",
    "head.weight": "head",
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(("name", "layer"), WEIGHTS.items())
def test_a_weight_that_is_not_finite_is_traced_to_its_layer(name, layer, backend, value):
    training = small_training(backend=backend, tie_weights=False)
    training.model.parameters[name].reshape(-1)[-1] = value
    with pytest.raises(FloatingPointError) as error:
        run(training, detect_anomaly=True, check_gradient_health=False)
    message = str(error.value)
    assert f"is in the forward pass of {layer} (" in message
    assert "training pass 1)" in message and "\n" not in message
    assert message.endswith(f"{name} is not finite itself; go back to weights that are")


# Kernel and its how-manyeth call of a pass -> the layer that calls it, and on which way.
CALLS = {
    ("embedding", 1): ("embedding", "forward"),
    ("dropout", 1): ("embedding", "forward"),
    ("attention", 2): ("blocks.1.attention", "forward"),
    ("dropout", 3): ("blocks.0.mlp.projection", "forward"),
    ("matmul_gelu", 1): ("blocks.0.mlp.expansion", "forward"),
    ("layernorm", 5): ("final_norm", "forward"),
    ("matmul_transpose_b", 1): ("head", "forward"),
    ("cross_entropy", 1): ("loss", "forward"),
    ("layernorm_backward", 1): ("final_norm", "backward"),
    ("layernorm_backward", 5): ("blocks.0.attention_norm", "backward"),
    ("dropout", 6): ("blocks.1.mlp.projection", "backward"),
    ("gelu_backward", 2): ("blocks.0.mlp", "backward"),
    ("attention_backward", 1): ("blocks.1.attention", "backward"),
    ("column_sum", 1): ("blocks.1.mlp.projection", "backward"),
    ("matmul_transpose_b", 3): ("blocks.1.mlp.expansion", "backward"),
    ("embedding_backward", 1): ("embedding", "backward"),
}


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(("call", "place"), CALLS.items())
def test_a_kernel_that_fails_is_traced_to_its_layer(call, place, backend):
    model, batch = small_model(backend=backend, dropout=0.1)
    calls = []

    def plant(name, kernel):
        def planted(out, *arguments):
            kernel(out, *arguments)
            calls.append(name)
            if (name, calls.count(name)) == call:
                out.reshape(-1)[-1] = INF

        return planted

    with (
        model.workspace.wrapped_kernels(plant),
        detect_anomaly(model),
        pytest.raises(FloatingPointError) as error,
    ):
        model.loss_and_gradients(*batch)
    layer, direction = place
    message = str(error.value)
    start = f"the first Inf is in the {direction} pass of {layer} ({call[0]}, training pass 2)"
    assert message == f"{start}; its weights are finite: lower the learning rate"


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_weight_in_16_bits_is_traced_to_its_layer(precision, value):
    training = small_training()
    run(training, detect_anomaly=True, precision=precision)  # nothing to be found
    training.model.parameters["blocks.1.mlp.expansion.weight"][3, 4] = value
    message = "forward pass of blocks.1.mlp.expansion .* is not finite itself"
    with pytest.raises(FloatingPointError, match=message):
        run(training, detect_anomaly=True, precision=precision)


def test_an_overflow_in_the_backward_pass_is_no_anomaly_in_float16(monkeypatch):
    training = small_training()
    right = compiled.attention_backward

    def wrong(dqkv, *arguments):
        right(dqkv, *arguments)
        dqkv[0, 0] = np.array(INF, np.float16).view(np.uint16)

    monkeypatch.setattr(compiled, "attention_backward", wrong)
    records = run(training, detect_anomaly=True, precision="float16", steps=2)
    assert [type(record) for record in records] == [OverflowRecord] * 2


def test_an_evaluation_is_traced_too_and_nothing_stays_behind():
    model, batch = small_model()
    model.parameters["final_norm.weight"][0] = NAN
    with detect_anomaly(model), pytest.raises(FloatingPointError, match=r"final_norm .*evaluation"):
        model.loss(*batch)
    assert np.isnan(model.loss(*batch))  # without it, a NaN goes through


@pytest.mark.parametrize(("backend", "kernels"), [("numba", compiled), ("numpy", reference)])
def test_tracing_costs_nothing_when_it_is_off(backend, kernels):
    training = small_training(backend=backend)
    for _ in training.steps(TrainingConfig(steps=2, log_every=1, val_every=0)):
        assert training.model.workspace.kernels is kernels

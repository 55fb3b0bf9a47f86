"""Bad gradients, updates and hidden units are planted, and reported under their names."""

import tracemalloc

import numpy as np
import pytest

from smallmind import GradientDiagnostics
from smallmind.nn.parameters import Role
from smallmind.training.health import check_model, dead_units, update_ratios
from smallmind.training.records import HealthRecord, OverflowRecord
from tests.training.small import at_each_pass, small_model, small_training
from tests.unchanged import unchanged

NAN, INF = float("nan"), float("inf")


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
def test_a_bad_gradient_is_reported_by_name(problem):
    gradient = planted(problem)
    if problem == "sparse":
        gradient[3, 0] = 0  # exactly 90 % would be allowed
    finding = GradientDiagnostics.check_gradients("head.weight", gradient)
    assert (finding.name, finding.problem) == ("head.weight", problem)
    assert str(finding).startswith(f"head.weight: {PROBLEMS[problem]}")
    norm, has_issue = GradientDiagnostics.get_gradient_norm(gradient)
    assert has_issue
    assert norm == pytest.approx(np.linalg.norm(gradient.astype(np.float64)), nan_ok=True)


@pytest.mark.parametrize("gradient", [healthy(), healthy(7), np.ones(1), [0.5, 0.0]])
def test_a_healthy_gradient_is_not_reported(gradient):
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
def test_the_limits_match_the_guide(value, problem):
    finding = GradientDiagnostics.check_gradients("x", np.array([value], np.float32))
    assert (finding.problem if finding else None) == problem


def test_gradients_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr("smallmind.training.health.CHUNK_SIZE", 7)
    gradient = healthy()
    norm, has_issue = GradientDiagnostics.get_gradient_norm(gradient)
    assert norm == pytest.approx(np.linalg.norm(gradient), rel=1e-6) and not has_issue
    gradient[-1, -1] = NAN
    assert GradientDiagnostics.check_gradients("x", gradient).problem == "nan"


def test_verbose_appends_statistics():
    gradient = planted("exploding")
    short = GradientDiagnostics.check_gradients("x", gradient)
    long = GradientDiagnostics.check_gradients("x", gradient, verbose=True)
    assert long.problem == short.problem and long.message.startswith(short.message)
    for words in ("norm", "mean", "from -", "0.0% zeros"):
        assert words in long.message[len(short.message) :]


def test_tokens_missing_from_a_batch_are_not_reported():
    gradient = planted("sparse")
    check = GradientDiagnostics.check_gradients
    assert check("token_embedding.weight", gradient) is None
    gradient[:, 2:] = 0  # rows of tokens that the batch has are nearly empty too
    assert check("token_embedding.weight", gradient).problem == "sparse"
    assert check("rows", gradient, role=Role.EMBEDDING).problem == "sparse"
    three_rows = planted("sparse")
    three_rows[3] = 0
    assert check("rows", three_rows, role=Role.EMBEDDING) is None
    assert check("token_embedding.weight", three_rows, role=Role.MATRIX).problem == "sparse"
    gradient[...] = 0
    assert check("token_embedding.weight", gradient).problem == "zero"


@pytest.mark.parametrize("settings", [{}, {"tie_weights": False, "bias": False, "dropout": 0.2}])
def test_an_ordinary_model_is_healthy(settings):
    model, batch = small_model(**settings)
    assert check_model(model) == [] == dead_units(model, *batch)


@pytest.mark.parametrize("problem", [*PROBLEMS])
@pytest.mark.parametrize("name", ["blocks.1.attention.qkv.weight", "final_norm.bias"])
def test_problems_of_a_model_are_reported_by_name(name, problem):
    model, _ = small_model()
    gradient = model.gradients[name]
    gradient[...] = np.resize(planted(problem), gradient.shape)
    if problem == "sparse":
        gradient[1:] = 0
    assert [(x.name, x.problem) for x in check_model(model)] == [(name, problem)]


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("numba", "float32"), ("numpy", "float32"), ("numba", "float16"), ("numba", "bfloat16")],
)
def test_dead_units_are_counted_by_layer(backend, precision):
    model, (ids, targets) = small_model(backend=backend, dropout=0.5)
    model.parameters["blocks.1.mlp.expansion.bias"][5:42] = -100
    model.use_precision(precision)
    with unchanged(model):
        (finding,) = dead_units(model, ids, targets)
    assert (finding.name, finding.problem) == ("blocks.1.mlp.expansion", "dead")
    assert finding.message.startswith("37 of 128 hidden units are dead")


def test_a_unit_that_one_token_activates_is_not_dead():
    model, _ = small_model(backend="numpy")
    model.micro_batch_size = 1
    direction = np.random.default_rng(0).standard_normal(32)
    values = model.parameters
    values["token_embedding.weight"][:2] = -10 * direction, 10 * direction
    values["blocks.0.mlp.expansion.weight"][:, 0] = direction

    def silent_in_the_first_block(windows):
        ids = np.array(windows)
        messages = {finding.name: finding.message for finding in dead_units(model, ids, ids)}
        return messages.get("blocks.0.mlp.expansion", "0 of 128").split(" of ")[0]

    assert silent_in_the_first_block([[0, 0], [0, 0], [0, 0]]) == "1"
    assert silent_in_the_first_block([[0, 1], [0, 0], [0, 0]]) == "0"
    assert silent_in_the_first_block([[0, 0], [0, 0], [0, 1]]) == "0"


def test_memory_for_dead_units_does_not_grow_with_the_batch():
    model, _ = small_model()
    ids = np.zeros((512, 16), np.int32)
    dead_units(model, ids, ids)
    tracemalloc.start()
    dead_units(model, ids, ids)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * ids.nbytes  # losses and a copy; the hidden layer is 128 times as large


def test_update_ratios_are_measured_per_parameter():
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


def test_health_checks_come_at_the_interval_and_do_not_change_training():
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


def test_update_ratios_of_a_run_are_measured_around_the_update():
    training = small_training()
    model = training.model
    before = model.parameters["final_norm.weight"].copy()
    records = run(training, steps=1, learning_rate=1e-2)
    after = model.parameters["final_norm.weight"]
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert health(records)[0].update_ratios["final_norm.weight"] == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "problem"), [(1.0, "large update"), (1e-8, "small update")])
def test_a_wrong_learning_rate_shows_in_the_updates(rate, problem):
    findings = health(run(small_training(), learning_rate=rate, steps=1))[0].findings
    names = [finding.name for finding in findings if finding.problem == problem]
    assert "blocks.0.attention.qkv.weight" in names and "final_norm.weight" not in names


def test_a_schedule_near_zero_is_not_reported():
    settings = {"schedule": "linear", "min_lr": 0.0, "diagnostic_interval": 1, "steps": 40}
    records = health(run(small_training(), learning_rate=1e-3, warmup_steps=20, **settings))
    assert [record.findings for record in records] == [()] * 40
    assert records[-1].update_ratios


def plant_after_backward(training, name, factor):
    """Multiplies one gradient after every backward pass."""
    gradient = training.model.gradients[name]

    def plant(_):
        gradient[...] *= factor

    at_each_pass(training.model, after=plant)


def test_a_run_reports_an_exploding_gradient():
    training = small_training()
    plant_after_backward(training, "blocks.0.mlp.projection.weight", 1e6)
    for record in health(run(training, diagnostic_interval=2)):
        found = [(x.name, x.problem) for x in record.findings if "update" not in x.problem]
        assert found == [("blocks.0.mlp.projection.weight", "exploding")]


def test_health_in_float16_is_checked_on_unscaled_gradients():
    training = small_training()
    records = run(training, precision="float16", diagnostic_interval=1, warmup_steps=100)
    assert training.scaler.scale == 65536
    assert [record.findings for record in health(records)] == [()] * 6
    plant_after_backward(training, "final_norm.weight", 1e5)
    (finding,) = health(run(training, precision="float16", steps=1))[0].findings
    assert (finding.name, finding.problem) == ("final_norm.weight", "exploding")


def test_an_overflow_that_the_scaler_handles_is_not_reported():
    training = small_training()
    plant_after_backward(training, "final_norm.weight", INF)
    records = run(training, precision="float16", steps=3, diagnostic_interval=1)
    assert [type(record) for record in records] == [OverflowRecord] * 3


def test_dead_units_are_found_in_a_run():
    training = small_training()
    training.model.parameters["blocks.0.mlp.expansion.bias"][...] = -100
    found = {(x.name, x.problem) for x in health(run(training, steps=1))[0].findings}
    assert ("blocks.0.mlp.expansion", "dead") in found
    assert ("blocks.0.mlp.expansion.weight", "zero") in found


@pytest.mark.parametrize("on", [True, False])
def test_a_non_finite_gradient_is_named_when_the_update_is_refused(on):
    training = small_training()
    plant_after_backward(training, "blocks.1.mlp_norm.bias", NAN)
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

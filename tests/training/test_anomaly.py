"""The first NaN or Inf of a pass is traced to the layer that it comes from."""

import numpy as np
import pytest

from smallmind import TrainingConfig
from smallmind.kernels import compiled, reference
from smallmind.training.anomaly import detect_anomaly
from smallmind.training.records import OverflowRecord
from tests.training.small import small_model, small_training

NAN, INF = float("nan"), float("inf")


def run(training, **settings):
    defaults = {"steps": 6, "val_every": 0, "warmup_steps": 0, "detect_anomaly": True}
    return training.train(**{**defaults, **settings})


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
def test_a_non_finite_weight_is_traced_to_its_layer(name, layer, backend, value):
    training = small_training(backend=backend, tie_weights=False)
    training.model.parameters[name].reshape(-1)[-1] = value
    with pytest.raises(FloatingPointError) as error:
        run(training)
    message = str(error.value)
    assert f"is in the forward pass of {layer} (" in message
    assert "training pass 1)" in message and "\n" not in message
    assert message.endswith(f"{name} is not finite itself; go back to weights that are")


# A kernel and the number of its call within a pass -> the layer that calls it, and the direction.
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
    run(training, precision=precision)  # finds nothing
    training.model.parameters["blocks.1.mlp.expansion.weight"][3, 4] = value
    message = "forward pass of blocks.1.mlp.expansion .* is not finite itself"
    with pytest.raises(FloatingPointError, match=message):
        run(training, precision=precision)


def test_a_float16_overflow_in_the_backward_pass_is_not_an_anomaly(monkeypatch):
    training = small_training()
    original = compiled.attention_backward

    def wrong(dqkv, *arguments):
        original(dqkv, *arguments)
        dqkv[0, 0] = np.array(INF, np.float16).view(np.uint16)

    monkeypatch.setattr(compiled, "attention_backward", wrong)
    records = run(training, precision="float16", steps=2)
    assert [type(record) for record in records] == [OverflowRecord] * 2


def test_an_evaluation_is_traced_too_and_tracing_ends_with_the_block():
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

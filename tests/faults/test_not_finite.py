"""NaN or Inf in a weight, an activation, a gradient, the data: named, and never saved."""

import numpy as np
import pytest

from smallmind.files import durable
from smallmind.kernels import compiled
from smallmind.kernels.number_types import round_to
from smallmind.nn import recorded_passes
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import ShuffledWindows
from smallmind.training.checkpoint import BEST, CHECKPOINTS, load, newest, verify
from tests.faults.disk import Quick
from tests.faults.runs import outcome, status, train

STEP = 8
LAYER = "blocks.1.mlp.expansion.weight"


def weight(patch, value):
    def plant(model, *_):
        model.parameters[LAYER][2, 3] = value
        model.flat.refresh()

    _at_step(patch, plant)


def gradient(patch, value):
    def plant(model, *_):
        model.gradients[LAYER][2, 3] = value

    _at_step(patch, plant)


def data(patch, value):
    original = ShuffledWindows.starts
    numbers = []

    def starts(sampler, number):
        numbers.append(number)
        return original(sampler, number)

    drawing = Dataset.windows

    def windows(dataset, starts, out=None):
        batch = drawing(dataset, starts, out)
        if numbers[-1] >= STEP - 1:
            batch.ids[0, 0] = 2**31 - 1 if value > 0 else -1
        return batch

    patch.setattr(ShuffledWindows, "starts", starts)
    patch.setattr(Dataset, "windows", windows)


def activation(patch, value):
    original, calls = compiled.swiglu, []

    def swiglu(out, *arguments):
        original(out, *arguments)
        calls.append(1)
        # Two layers per pass; evaluations of two batches of two parts come in between.
        if len(calls) > 2 * (STEP - 1 + 4):
            out[0, 0] = round_to(np.full(1, value, np.float32), out.dtype)[0]

    patch.setattr(compiled, "swiglu", swiglu)
    patch.setattr(recorded_passes, "MAX_BYTES", 0)  # a recording would leave out what is planted


def _at_step(patch, plant):
    """Calls plant(model) after every backward pass from STEP on."""
    original = TransformerModel.loss_and_gradients

    def loss_and_gradients(model, ids, targets, scale=1.0, at=None, **named):
        loss = original(model, ids, targets, scale, at, **named)
        if at and at.number + 1 >= STEP:
            plant(model)
        return loss

    patch.setattr(TransformerModel, "loss_and_gradients", loss_and_gradients)


@pytest.mark.parametrize(
    ("plant", "precision", "rollbacks", "value"),
    [  # every two of them
        (plant, precision, k * 3, (np.nan, np.inf)[(i + j + k) % 2])
        for i, plant in enumerate((weight, activation, gradient, data))
        for j, precision in enumerate(("float32", "float16", "bfloat16"))
        for k in ((0, 1) if precision == "float32" else [(i + j) % 2])
    ],
)
def test_a_non_finite_value_is_named_and_never_saved(
    tmp_path, monkeypatch, capsys, undisturbed, plant, precision, rollbacks, value
):
    flags = ["--precision", precision, "--save-every", "1", "--keep", "2"]
    flags += ["--max-rollbacks", str(rollbacks)]
    with monkeypatch.context() as patch:
        patch.setattr(durable, "files", Quick())
        plant(patch, value)
        assert train(tmp_path, *flags) == (2 if plant is data else 1)
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    named = {data: "is outside the vocabulary of", gradient: LAYER}.get(plant, "")
    assert named in printed.err
    run = tmp_path / "run"
    assert not (run / "model.safetensors").exists()
    for path, fault in verify(run):
        assert fault is None
        assert all(np.isfinite(value).all() for value in load(path).tensors.values()), path
    assert load(run / CHECKPOINTS / BEST).step == 7 and newest(run)[0].step >= 7
    if (precision == "float32" and not rollbacks) or plant is data:
        assert newest(run)[0].step == STEP - 1
        assert status("train", "--resume", run) == 0
        assert outcome(run) == undisturbed(*flags)

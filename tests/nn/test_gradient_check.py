"""The gradient check itself: it passes right gradients, and names those wrong by 0.1 %."""

from functools import partial

import numpy as np
import pytest

from smallmind import InputError, ModelConfig, Precision, TransformerModel, gradient_check, parts
from smallmind.kernels import compiled, reference
from smallmind.nn.attention import Attention
from smallmind.nn.block import Block, ParallelBlock, SandwichBlock
from smallmind.nn.documents import Documents
from smallmind.nn.embedding import Embedding, ScaledEmbedding
from smallmind.nn.head import TiedHead
from smallmind.nn.layer import Norm
from smallmind.nn.layernorm import LayerNorm
from smallmind.nn.layers import build_linear
from smallmind.nn.linear import Linear
from smallmind.nn.mlp import MLP, ExactGELU, GeGLU, SquaredReLU, SwiGLU
from smallmind.nn.parameters import ONES, Role
from smallmind.nn.position import Position
from smallmind.nn.projection import Projection
from smallmind.nn.rmsnorm import RMSNorm
from smallmind.nn.softcap import SoftCap
from tests.unchanged import unchanged

X, Y = (np.random.default_rng(seed).standard_normal((4, 5)) for seed in (3, 4))
ROWS = np.random.default_rng(5).standard_normal((8, 12))
IDS = np.array([[1, 2, 1, 0], [2, 2, 9, 1]], np.int32)


def sum_of_cubes(x, y):
    return float((x**3 * y).sum())


def right(dy, x, y):
    return 3 * x**2 * y * dy, x**3 * dy


def check(backward, forward=sum_of_cubes, x=X, y=Y, **settings):
    return gradient_check(forward, x, y, backward=backward, **settings)


@pytest.mark.parametrize("directions", [1, 3])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_right_gradients_pass(dtype, directions):
    found = check(right, x=X.astype(dtype), y=Y.astype(dtype), directions=directions)
    assert found and found.ok and found.wrong == [] and list(found.errors) == ["x", "y"]
    assert max(found.errors.values()) < (1e-9 if dtype is np.float64 else 1e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", [0, 1])
def test_a_gradient_wrong_by_a_thousandth_is_named(index, seed):
    def wrong(*arguments):
        gradients = list(right(*arguments))
        gradients[index] = gradients[index] * 1.001
        return gradients

    found = check(wrong, seed=seed)
    assert found.wrong == ["xy"[index]] and not found and not found.ok


@pytest.mark.parametrize("index", [0, 1])
def test_one_wrong_element_is_noticed(index):
    def wrong(*arguments):
        gradients = right(*arguments)
        gradients[index][2, 3] += 0.001 * np.abs(gradients[index]).max()
        return gradients

    assert check(wrong).wrong == ["xy"[index]]


def test_a_gradient_wrong_by_a_hundredth_is_noticed_in_float32():
    def wrong(*arguments):
        dx, dy = right(*arguments)
        return 1.01 * dx, dy

    assert check(wrong, x=X.astype(np.float32), y=Y.astype(np.float32)).wrong == ["x"]


def test_a_sign_error_in_a_tiny_gradient_is_noticed():
    def wrong(dy, x, y):
        dx, dother = right(dy, x, y)
        return -1e-9 * dx, 1e-9 * dother

    assert check(wrong, lambda x, y: 1e-9 * sum_of_cubes(x, y)).wrong == ["x"]


def test_a_function_may_return_an_array_and_what_its_backward_pass_needs():
    def forward(x, power, ids):
        y = x[ids] ** power
        return y, x, power, ids

    def backward(dy, x, power, ids):
        dx = np.zeros_like(x)
        np.add.at(dx, ids, dy * power * x[ids] ** (power - 1))
        return dx

    def overwriting(dy, x, power, ids):
        dx = np.zeros_like(x)
        dx[ids] = dy * power * x[ids] ** (power - 1)
        return dx

    assert gradient_check(forward, X, 3, IDS % 4, backward=backward).ok
    assert gradient_check(forward, X, 3, IDS % 4, backward=overwriting).wrong == ["x"]


def test_inputs_are_neither_changed_nor_kept():
    def forward(x):
        x *= 2
        return x

    x = X.copy()
    assert gradient_check(forward, x, backward=lambda dy, _: 2 * dy).ok
    np.testing.assert_array_equal(x, X)


def test_a_missing_or_misshapen_gradient_is_named():
    found = check(lambda *_: (None, np.zeros(3)))
    assert found.wrong == ["x", "y"]
    assert "backward returned no gradient" in repr(found)
    assert "the gradient has shape (3,), not (4, 5)" in repr(found)
    with pytest.raises(InputError, match="1 gradients; it must return one for each of x, y"):
        check(lambda *_: X)


def test_not_a_number_is_wrong():
    found = check(lambda *arguments: (np.full_like(X, np.nan), right(*arguments)[1]))
    assert found.wrong == ["x"]


def test_a_gradient_of_zero_is_right_and_noted():
    found = check(lambda *_: (np.zeros_like(X), np.ones_like(Y)), lambda x, y: (0 * x + y).sum())
    assert found.ok and found.rows[0].note == "the gradient is zero"


def test_a_gradient_within_rounding_is_not_wrong():
    # A constant added to all of a softmax's inputs changes nothing.
    def softmax(shift):
        scores = np.exp(X + shift)
        return scores / scores.sum(axis=1, keepdims=True)

    assert gradient_check(softmax, np.array(0.7), backward=lambda *_: np.array(1e-17)).ok


def test_the_result_prints_as_a_table():
    lines = repr(check(lambda *arguments: (right(*arguments)[0], 2 * right(*arguments)[1])))
    head, heads, x, y = lines.split("\n")
    assert head == "Gradient check of 2 gradients, tolerance 1e-06: WRONG: y"
    assert heads.split() == ["backward", "pass", "finite", "difference", "relative", "error"]
    assert x.split()[0] == "x" and x.endswith("ok")
    assert y.split()[0] == "y" and y.endswith("WRONG")
    assert float(y.split()[1]) == pytest.approx(2 * float(y.split()[2]), rel=1e-4)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_layernorm_backward_without_its_variance_term_is_noticed(is_complete):
    def forward(x, weight):
        out, mean, rstd = np.empty_like(x), np.empty(len(x)), np.empty(len(x))
        reference.layernorm(out, mean, rstd, x, weight)
        return out

    def backward(dy, x, weight):
        rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
        xhat = (x - x.mean(axis=1, keepdims=True)) * rstd
        dxhat = dy * weight
        dx = dxhat - dxhat.mean(axis=1, keepdims=True)
        if is_complete:
            dx -= xhat * (dxhat * xhat).mean(axis=1, keepdims=True)
        return rstd * dx, (dy * xhat).sum(axis=0)

    found = gradient_check(forward, X, Y[0], backward=backward)
    assert found.wrong == ([] if is_complete else ["x"])


def shared(scope):
    return Position(scope.inner("position")), Documents(scope.inner("documents"))


def attention(scope):
    return Attention(scope, *shared(scope), None, 0)


def block(scope, kind=Block):
    return kind(scope, *shared(scope), None, None, 0)


LAYERS = {
    "layer norm": (LayerNorm, ()),
    "rms norm": (RMSNorm, ()),
    "gelu": (MLP, ()),
    "relu2": (SquaredReLU, ()),
    "swiglu": (SwiGLU, ()),
    "gelu-erf": (ExactGELU, ()),
    "geglu": (GeGLU, ()),
    "linear": (lambda scope: Linear(scope, (12, 3)), ()),
    "projection": (lambda scope: Projection(scope, 12), (ROWS,)),
    "attention": (attention, (ROWS.reshape(2, 4, -1),)),
    "block": (block, (ROWS.reshape(2, 4, -1),)),
    "sandwich": (partial(block, kind=SandwichBlock), (ROWS.reshape(2, 4, -1),)),
    "parallel": (partial(block, kind=ParallelBlock), (ROWS.reshape(2, 4, -1),)),
    "embedding": (Embedding, (IDS,)),
    "scaled embedding": (ScaledEmbedding, (IDS,)),
    "tied head": (lambda scope: TiedHead(scope, Embedding(scope)), (ROWS,)),
    "head": (lambda scope: build_linear(scope, (12, 11), role=Role.HEAD, bias=False), (ROWS,)),
    "soft cap": (SoftCap, (ROWS,)),
}


def config(**settings):
    shape = {"vocab_size": 11, "block_size": 8, "n_layer": 1, "n_embd": 12, "n_head": 3}
    return ModelConfig(**{**shape, "logit_softcap": 2.0, **settings})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_the_package_passes(name, backend, dropout):
    make, inputs = LAYERS[name]
    settings = config(mlp=name if name in parts.MLPS else "gelu", dropout=dropout)
    found = gradient_check(make, *inputs, config=settings, backend=backend)
    assert found.ok, found
    assert found.tolerance == (1e-6 if backend == "numpy" else 1e-3)


def test_inputs_and_parameters_are_named():
    assert list(gradient_check(LayerNorm).errors) == ["x", "weight", "bias"]
    found = gradient_check(SwiGLU, config=config(mlp="swiglu", bias=False))
    names = ["expansion.weight", "projection.weight", "x"]
    assert sorted(found.errors) == sorted(names)
    assert list(gradient_check(LayerNorm, X).errors) == ["x", "weight", "bias"]


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_layer_of_a_model_is_checked_and_left_as_it_was(backend):
    model = TransformerModel(config(), backend=backend)
    model.loss_and_gradients(IDS, IDS)
    with unchanged(model):
        found = gradient_check(model.blocks[0].mlp, ROWS)
    assert found.ok and "expansion.bias" in found.errors


class Scale(Norm):
    """y = x gain, for planting mistakes."""

    def __init__(self, scope):
        super().__init__(scope)
        self.gain = scope.declare("gain", (scope.config.n_embd,), ONES, Role.GAIN)

    def forward(self, x):
        self.x = x
        y = self.workspace.rent(*x.shape)
        y[...] = x * self.gain.compute
        return y

    def backward(self, dy, addend=None):
        self.gain.grad += (dy * self.x).sum(axis=0)
        dx = self.gradient_of(self.x, addend)
        dx[...] = dy * self.gain.compute + (0 if addend is None else addend)
        return dx


class ForgetsFactor(Scale):
    def backward(self, dy, addend=None):
        dx = super().backward(dy, addend)
        dx[...] = dy + (0 if addend is None else addend)
        return dx


class Overwrites(Scale):
    def backward(self, dy, addend=None):
        self.gain.grad[...] = 0
        return super().backward(dy, addend)


class DropsAddend(Scale):
    def backward(self, dy, addend=None):
        return super().backward(dy)


class ReadsLate(Scale):
    """The addend is the array to write to, so it has to be read first."""

    def backward(self, dy, addend=None):
        dx = self.gradient_of(self.x, addend)
        dx[...] = super().backward(dy)
        if addend is not None:
            dx += addend
        return dx


class AddsToNothing(Scale):
    """Adds to rented memory, which is undefined."""

    def backward(self, dy, addend=None):
        self.gain.grad += (dy * self.x).sum(axis=0)
        dx = self.gradient_of(self.x, addend)
        dx += dy * self.gain.compute
        return dx


class NoGradient(Scale):
    def backward(self, dy, addend=None):
        before = self.gain.grad.copy()
        dx = super().backward(dy, addend)
        self.gain.grad[...] = before
        return dx


@pytest.mark.parametrize(
    ("layer", "wrong", "note"),
    [
        (Scale, [], ""),
        (ForgetsFactor, ["x"], ""),
        (Overwrites, ["gain"], "must add to the gradient"),
        (DropsAddend, ["x"], "backward does not add addend"),
        (ReadsLate, ["x"], "backward does not add addend"),
        (AddsToNothing, ["x"], ""),
        (NoGradient, ["gain"], ""),
    ],
)
def test_a_mistake_in_a_layer_is_named(layer, wrong, note):
    found = gradient_check(layer)
    assert found.wrong == wrong, found
    assert note in repr(found)


def test_a_layer_that_recomputes_something_else_is_noticed():
    class Forgets(MLP):
        def recompute(self, x):
            self.preactivation = self.expansion.forward(x)
            self.preactivation += 0.1

    found = gradient_check(Forgets)
    assert found.wrong == ["x"] and "differs after recompute" in repr(found)


def test_a_branch_that_does_not_add_is_noticed():
    class Drops(MLP):
        def forward(self, x, addend=None):
            return super().forward(x)

    found = gradient_check(Drops)
    assert found.wrong == ["x"] and "forward does not add addend" in repr(found)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_model_is_checked_and_left_as_it_was(backend, dropout):
    model = TransformerModel(config(dropout=dropout), backend=backend)
    model.loss_and_gradients(IDS, IDS)
    for batch in ((), (IDS, IDS)):
        with unchanged(model):
            found = gradient_check(model, *batch)
        assert found.ok, found
        assert found.errors.keys() == model.parameters.keys()


def test_a_wrong_kernel_of_a_float32_model_is_noticed(monkeypatch):
    model = TransformerModel(config())
    original = compiled.column_sum
    monkeypatch.setattr(compiled, "column_sum", lambda out, x: original(out, x * np.float32(1.01)))
    found = gradient_check(model)
    assert found.wrong and all(name.endswith(".bias") for name in found.wrong)


class Plain:
    """Has a layer's methods, but is none."""

    forward = backward = None

    def __init__(self, scope):
        pass


def test_what_cannot_be_checked_is_refused_with_a_reason():
    model = TransformerModel(config())
    with pytest.raises(InputError, match="ids and targets, or neither"):
        gradient_check(model, IDS)
    model.use_precision(Precision.BFLOAT16)
    for subject in (model, model.blocks[0].mlp):
        with pytest.raises(InputError, match=r"use_precision\('float32'\) first"):
            gradient_check(subject)
    with pytest.raises(InputError, match="nothing to check"):
        gradient_check(lambda n: n, 3, backward=lambda *_: 1)
    with pytest.raises(InputError, match=r"one input, x or ids: gradient_check\(layer, x\)"):
        gradient_check(MLP, ROWS, ROWS)
    with pytest.raises(InputError, match=r"Plain is not a smallmind\.nn\.layer\.Layer"):
        gradient_check(Plain)
    with pytest.raises(InputError, match="str cannot be checked"):
        gradient_check("model")

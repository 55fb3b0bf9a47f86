"""Kernels of one's own beside those of the package."""

import numpy as np
import pytest

from smallmind import AdamW, InputError, ModelConfig, Precision, Run, TransformerModel, parts
from smallmind.kernels import compiled, reference
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.nn.backend import add_kernel, open_backend
from smallmind.nn.rmsnorm import RMSNorm
from smallmind.training.records import StepRecord
from tests.programs import CATS


class Doubled(RMSNorm):
    """Whose kernel is added by a test."""

    def forward(self, x):
        y = super().forward(x)
        self.workspace.kernels_for(self.name).doubled(y, y)
        return y


def doubled(y, x):
    y[...] = 2 * x


def fast_doubled(y, x):
    y[...] = x + x


@pytest.fixture
def added():
    add_kernel("doubled", doubled, fast_doubled)
    yield
    for kernels in (reference, compiled):
        delattr(kernels, "doubled")


def test_both_back_ends_get_the_kernel(added):
    assert open_backend("numpy").kernels.doubled is doubled
    assert open_backend("numba").kernels.doubled is fast_doubled
    add_kernel("doubled", fast_doubled, doubled)  # again, as in a notebook
    assert open_backend("numpy").kernels.doubled is fast_doubled
    add_kernel("doubled", doubled)  # not compiled yet
    assert open_backend("numpy").kernels.doubled is doubled
    x = np.array([1.5, -2.0], np.float32)
    open_backend("numba").kernels.doubled(x, x)
    np.testing.assert_array_equal(x, [3, -4])


def test_a_norm_of_ones_own_is_a_setting_and_its_kernel_is_seen(added, monkeypatch):
    with pytest.raises(InputError, match="norm='doubled' must be one of layernorm, rmsnorm"):
        ModelConfig(norm="doubled")
    monkeypatch.setitem(parts.NORMS, "doubled", f"{__name__}:Doubled")
    ids = np.zeros((1, 3), np.int32)
    for backend in ("numpy", "numba"):
        model = TransformerModel(5, 4, 8, 1, 2, norm="doubled", backend=backend)
        plain = TransformerModel(5, 4, 8, 1, 2, norm="rmsnorm", backend=backend)
        mine = model.inspect(ids).activations["blocks.0.attention_norm"]
        theirs = plain.inspect(ids).activations["blocks.0.attention_norm"]
        np.testing.assert_array_equal(mine, 2 * theirs)
        assert "blocks.0.attention_norm" in repr(model.inspect(ids, ids))


def test_a_name_that_is_taken_or_other_arguments_are_refused():
    with pytest.raises(InputError, match="there is a kernel gelu already"):
        add_kernel("gelu", doubled, fast_doubled)
    with pytest.raises(InputError, match=r"same arguments in both forms, not \(y, x\) and \(x\)"):
        add_kernel("doubled", doubled, lambda x: x)


@pytest.fixture
def tanh_norm(monkeypatch):
    """The norm of the lesson, with kernels in plain NumPy alone; models have it as "tanh"."""
    # Before the import, which adds the norm for good.
    monkeypatch.setitem(parts.NORMS, "tanh", "smallmind.lessons.writing_a_layer:TanhNorm")
    from smallmind.lessons import writing_a_layer as lesson

    add_kernel("tanh_norm", lesson.tanh_norm)
    add_kernel("tanh_norm_backward", lesson.tanh_norm_backward)


SHAPE = {"vocab_size": 16, "block_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "seed": 2}


def losses_in(precision, steps=25):
    """The losses of a model with the norm of the lesson, which learns to count."""
    model = TransformerModel(**SHAPE, norm="tanh")
    model.use_precision(precision)
    optimizer, random, losses = AdamW(model, learning_rate=1e-2), np.random.default_rng(0), []
    for _ in range(steps):
        numbers = (random.integers(0, 16, (8, 1)) + np.arange(17)) % 16
        losses.append(model.loss_and_gradients(numbers[:, :-1], numbers[:, 1:]))
        optimizer.step(max_grad_norm=1.0)
    return losses


@pytest.mark.parametrize("precision", [Precision.BFLOAT16, Precision.FLOAT16])
def test_a_plain_kernel_learns_in_16_bits_as_in_float32(tanh_norm, precision):
    exact, rounded = losses_in(Precision.FLOAT32), losses_in(precision)
    assert exact[-1] < exact[0] / 2
    np.testing.assert_allclose(rounded, exact, atol=0.15)


def test_a_run_with_a_plain_kernel_trains_where_auto_is_bfloat16(tanh_norm, tmp_path, monkeypatch):
    from smallmind.nn import backend

    resolve = backend.resolve_precision

    def resolved(asked, backend):
        return resolve(Precision.BFLOAT16 if asked == Precision.AUTO else asked, backend)

    monkeypatch.setattr("smallmind.runs.creating.resolve_precision", resolved)
    fields = {"n_embd": 32, "n_layer": 2, "n_head": 2, "block_size": 32, "norm": "tanh"}
    run = Run.create(text=CATS, out=tmp_path / "run", steps=90, log_every=1, **fields)
    losses = [x.loss for x in run.train() if isinstance(x, StepRecord)]
    assert run.settings.training.precision == "bfloat16"
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_arrays_of_16_bits_reach_a_plain_kernel_as_numbers(added, dtype):
    seen = []

    def scaled(y, x, addend=None):
        seen.append((y is x, y.dtype, x.dtype, None if addend is None else addend.dtype))
        y[...] = 3 * x if addend is None else 3 * x + addend

    add_kernel("doubled", scaled)
    kernel = open_backend("numba").kernels.doubled
    values = np.array([[1.5, -2.0, 1e-40], [np.inf, 0.25, 7]], np.float32)
    x = round_to(values, dtype)
    y, sums = np.full_like(x, 0x7FFF), np.ones((2, 3), np.float32)  # NaN
    kernel(y, x, addend=sums)
    np.testing.assert_array_equal(y, round_to(3 * to_float32(x) + 1, dtype))
    np.testing.assert_array_equal(x, round_to(values, dtype))
    whole = round_to(np.arange(6, dtype=np.float32).reshape(2, 3), dtype)
    kernel(whole[:, :2], whole[:, :2])  # in place, in a part of an array
    np.testing.assert_array_equal(to_float32(whole), [[0, 3, 2], [9, 12, 5]])
    x.flags.writeable = False  # such as frozen weights
    kernel(y, x)
    np.testing.assert_array_equal(y, round_to(3 * to_float32(x), dtype))
    with pytest.raises(ValueError, match="read-only"):
        kernel(x, x)
    float32 = np.dtype(np.float32)
    assert seen[0] == (False, float32, float32, float32) and seen[1][0]


class WithoutKernels(RMSNorm):
    """y = x + 1, computed by the layer itself."""

    def forward(self, x):
        y = self.workspace.rent(*x.shape)
        y[...] = x + 1
        return y


class Passing(RMSNorm):
    """y = x"""

    def forward(self, x):
        return x


def test_a_layer_that_computes_with_numpy_is_refused_in_16_bits(monkeypatch):
    ids = np.zeros((1, 3), np.int32)
    for norm in (WithoutKernels, Passing):
        monkeypatch.setitem(parts.NORMS, norm.__name__, f"{__name__}:{norm.__name__}")
    model = TransformerModel(5, 4, 8, 1, 2, norm="WithoutKernels")
    model.forward(ids)
    model.use_precision(Precision.BFLOAT16)
    with pytest.raises(InputError, match=r"^WithoutKernels calls no kernel, and NumPy cannot"):
        model.forward(ids)
    model.use_precision(Precision.FLOAT32)
    model.forward(ids)
    passing = TransformerModel(5, 4, 8, 1, 2, norm="Passing")
    passing.use_precision(Precision.BFLOAT16)
    checked = passing.network.final_norm.forward
    x = np.zeros((1, 8), BFLOAT16)
    assert checked(x) is x

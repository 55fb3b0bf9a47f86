"""Kernels of one's own beside those of the package."""

import numpy as np
import pytest

from smallmind import InputError, ModelConfig, TransformerModel, parts
from smallmind.kernels import compiled, reference
from smallmind.nn.backend import add_kernel, open_backend
from smallmind.nn.rmsnorm import RMSNorm


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
    assert open_backend("numba").kernels.doubled is doubled


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

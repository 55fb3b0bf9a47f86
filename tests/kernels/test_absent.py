"""A kernel is compiled once for an optional array, given or not: compiling takes seconds."""

import numpy as np
import pytest

from smallmind.kernels import compiled
from smallmind.kernels.codegen.recording import active
from smallmind.kernels.number_types import BFLOAT16, FLOAT16

R, C, KEY = 5, 16, 0x123456789ABCDEF


class Versions:
    """The compiled versions that calls used: in place of a recording of the calls."""

    def __init__(self):
        self.used = []

    def add(self, function, arguments):
        self.used.append((function, *map(function.typeof_pyval, arguments)))


def optional(dtype):
    """Calls of a kernel without, and with, its optional arrays."""
    out, x, w = (np.zeros(shape, dtype) for shape in ((R, C), (R, C), (C, C)))
    added, bias, gain = np.zeros((R, C), dtype), np.zeros(C, dtype), np.zeros(C, dtype)
    exact, sums = np.zeros((R, C), np.float32), np.zeros(C, np.float32)
    mean, rstd = np.zeros(R, np.float32), np.zeros(R, np.float32)
    ids = np.zeros((1, R), np.int32)
    return {
        "matmul": [(out, x, w), (out, x, w, bias, added)],
        "matmul into float32": [(exact, x, w), (exact, x, w, bias, exact)],
        "matmul_gelu": [(out, added, x, w), (out, added, x, w, bias)],
        "matmul_transpose_b": [(out, x, w), (out, x, w, added)],
        "dropout": [(out, x, KEY, 0.5), (out, x, KEY, 0.5, added)],
        "dropout of float32": [(out, exact, KEY, 0.5), (out, exact, KEY, 0.5, added)],
        "layernorm": [(out, mean, rstd, x, gain), (out, mean, rstd, x, gain, bias)],
        "layernorm_backward": [
            (out, sums, None, x, x, mean, rstd, gain, *addend) for addend in ((), (added,))
        ],
        "rmsnorm_backward": [(out, sums, x, x, rstd, gain, *addend) for addend in ((), (added,))],
        "embedding": [(out, w, ids), (out, w, ids, added)],
    }


@pytest.mark.parametrize("dtype", [np.float32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("call", optional(np.float32))
def test_an_optional_array_needs_no_other_version(monkeypatch, call, dtype):
    monkeypatch.setattr(active, "recording", versions := Versions())
    kernel = getattr(compiled, call.partition(" ")[0])
    used = []
    for arguments in optional(dtype)[call]:
        versions.used.clear()
        kernel(*arguments)
        used.append(set(versions.used))
    assert used[0] == used[1] != set()

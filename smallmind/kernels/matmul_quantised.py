"""Products with weights in blocks of small integers."""

import numpy as np

from smallmind.kernels.codegen.blocks import bytes_of
from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm.blocked import SCRATCH, gemm_packed
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_B

# Rows up to which reading blocks takes longer than multiplying what they stand for.
MAX_FEW_ROWS = 8


def matmul_quantised(out, a, w, bias=None, addend=None, by_rows=False):
    if len(a) > MAX_FEW_ROWS and not by_rows:
        _gemm(out, a, w, bias, addend, TRANSPOSE_B)
        return
    # Imported here, so that it is compiled only if it is used.
    from smallmind.kernels.gemm.quantised_rows import multiply_few, scratch_size

    bias = absent(np.float32, 1) if bias is None else bias
    addend = absent(np.float32, 2) if addend is None else addend
    rows = scratch(threads(), scratch_size(*a.shape))
    multiply_few(out, a, bytes_of(w), bias, addend, bool(by_rows), rows)


def matmul_quantised_transpose(out, a, w):
    _gemm(out, a, w, None, None, PLAIN)


def _gemm(out, a, w, bias, addend, variant):
    bias = absent(np.float32, 1) if bias is None else bias
    addend = absent(np.float32, 2) if addend is None else addend
    rows = scratch(threads(), SCRATCH)
    gemm_packed(out, absent(np.float32, 2), a, bytes_of(w), bias, addend, variant, rows)

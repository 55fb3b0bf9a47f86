"""Products with weights in blocks of small integers."""

import numpy as np

from smallmind.kernels.codegen.blocks import bytes_of
from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm.blocked import SCRATCH, gemm_packed
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_B
from smallmind.kernels.number_types import GROUP

# Rows that are rounded at a time: they stay in the second-level cache. Up to FEW_ROWS each thread
# rounds all of them, which takes less than waiting for another.
MAX_ROWS, FEW_ROWS = 256, 8


def matmul_quantised(out, a, w, bias=None, addend=None, by_rows=False, in_groups=False):
    if not by_rows:
        assert not in_groups
        _gemm(out, a, w, bias, addend, TRANSPOSE_B)
        return
    bias = absent(np.float32, 1) if bias is None else bias
    addend = absent(np.float32, 2) if addend is None else addend
    for first in range(0, len(a), MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        _multiply_rounded(out[part], a[part], bytes_of(w), bias, addend[part], in_groups)


def _multiply_rounded(out, a, w, bias, addend, in_groups):
    # Imported here, so that it is compiled only if it is used.
    from smallmind.kernels.gemm.quantised_rows import multiply_rounded, round_rows, scratch_size

    is_few, rows = len(a) <= FEW_ROWS, scratch(threads(), scratch_size(a, w))
    if not is_few:
        round_rows(rows, a, w)
    multiply_rounded(out, a, w, bias, addend, rows, is_few, in_groups)


def arrange_blocks(w, is_back=False):
    from smallmind.kernels.gemm.quantised_rows import arrange

    arrange(bytes_of(w), is_back, scratch(threads(), GROUP * w.nbytes // len(w) // 4 + 1))


def matmul_quantised_transpose(out, a, w):
    _gemm(out, a, w, None, None, PLAIN)


def _gemm(out, a, w, bias, addend, variant):
    bias = absent(np.float32, 1) if bias is None else bias
    addend = absent(np.float32, 2) if addend is None else addend
    rows = scratch(threads(), SCRATCH)
    gemm_packed(out, absent(np.float32, 2), a, bytes_of(w), bias, addend, variant, rows)

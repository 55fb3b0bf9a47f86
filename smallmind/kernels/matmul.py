"""Matrix products: a b, a^T b and a b^T, of float32 or of 16-bit numbers."""

from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm.blocked import (
    SCRATCH,
    SCRATCH_16,
    gemm_alone,
    gemm_packed,
    gemm_parallel,
    load_packing,
)
from smallmind.kernels.gemm.few_rows import MAX_FEW_ROWS
from smallmind.kernels.gemm.packing import AS_PLAIN, BY_ROWS, PLAIN, TRANSPOSE_A, TRANSPOSE_B

MAX_ALONE_ELEMENTS = 128 * 1024  # elements of b up to which one thread is faster than waking others


def matmul(out, a, b, bias=None, addend=None, by_rows=False, outputs_first=False):
    _gemm(out, None, a, b, bias, addend, _form(by_rows, outputs_first))


def matmul_gelu(
    activation, preactivation, a, b, bias=None, addend=None, by_rows=False, outputs_first=False
):
    _gemm(preactivation, activation, a, b, bias, addend, _form(by_rows, outputs_first))


def matmul_transpose_a(out, a, b, addend=None):
    _gemm(out, None, a, b, None, addend, TRANSPOSE_A)


def matmul_transpose_b(out, a, b, addend=None):
    _gemm(out, None, a, b, None, addend, TRANSPOSE_B)


def _form(by_rows, outputs_first):
    form = TRANSPOSE_B + AS_PLAIN if outputs_first else PLAIN
    return form + BY_ROWS if by_rows else form


def _gemm(out, activation, a, b, bias, addend, form):
    activation = absent(a.dtype, 2) if activation is None else activation
    bias = absent(a.dtype, 1) if bias is None else bias
    addend = absent(out.dtype, 2) if addend is None else addend
    operands = out, activation, a, b, bias, addend
    size = b.size
    is_small = size <= MAX_ALONE_ELEMENTS and len(out) * size <= 4 * MAX_ALONE_ELEMENTS
    variant, by_rows = form % BY_ROWS, form & BY_ROWS
    if variant == TRANSPOSE_B and (by_rows or len(out) <= MAX_FEW_ROWS):
        # Imported here, so that it is compiled only if it is used.
        from smallmind.kernels.gemm import row_dots

        multiply = row_dots.multiply_alone if is_small else row_dots.multiply_parallel
        multiply(*operands, scratch(1 if is_small else threads(), row_dots.scratch_size(len(out))))
    elif a.itemsize == 2:
        load_packing(a)
        gemm_packed(*operands, form, scratch(threads(), SCRATCH_16))
    elif is_small:
        gemm_alone(*operands, form, scratch(1, SCRATCH))
    else:
        gemm_parallel(*operands, form, scratch(threads(), SCRATCH))

"""The Newton-Schulz iteration of Muon in bfloat16, as Jordan et al. (2024) compute it.

Five times, X becomes X p(X^T X), each product rounded to bfloat16; see `newton_schulz` for p, and
for the same in float32. On the matrix unit of a CPU it takes less than half the time. The result is
off by 1e-2 to 3e-2 of its size.
"""

import numpy as np

from smallmind.kernels.codegen.jit import jit
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    element,
    load_up_to,
    store_first,
    store_up_to,
)
from smallmind.kernels.gemm.blocked import (
    SCRATCH_16,
    gemm_part,
    load_packing,
    packed_of,
)
from smallmind.kernels.gemm.operands import Operands
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_A, TRANSPOSE_B
from smallmind.kernels.number_types import BFLOAT16
from smallmind.kernels.reference_optimizers import CUBIC, ITERATIONS, LINEAR, QUINTIC

load_packing(np.empty(0, BFLOAT16))
PACKING = SCRATCH_16  # elements of Scratch.packing
_A, _B, _C = np.float32(LINEAR), np.float32(CUBIC), np.float32(QUINTIC)


@jit
def orthogonalise(_working, scratch):
    """newton_schulz(scratch.x), whose norm must be at most 1 -> (M, N) in bfloat16, of scratch."""
    M, N = scratch.x.shape
    size, R = M * N, min(M, N)
    both = scratch.result.reshape(size).view(np.int16)
    x, spare = both[:size].reshape(M, N), both[size:].reshape(M, N)
    gram, square, factor = (
        _square(scratch.gram, R),
        _square(scratch.factor, R),
        _square(scratch.product, R),
    )
    _round(x, scratch.x)
    for _ in range(ITERATIONS):
        _multiply(gram, x, x, TRANSPOSE_A if M > N else TRANSPOSE_B, scratch.packing)
        _multiply(square, gram, gram, PLAIN, scratch.packing)
        _write_factor(factor, gram, square)
        left, right = (x, factor) if M > N else (factor, x)
        _multiply(spare, left, right, PLAIN, scratch.packing)
        x, spare = spare, x
    return x


@jit
def _square(x, R):
    """Returns the memory of x (R, R) as (R, R) in bfloat16."""
    return x.reshape(R * R).view(np.int16)[: R * R].reshape(R, R)


@jit
def _multiply(out, a, b, variant, packing):
    """Computes out = a b, a^T b or a b^T, all in bfloat16, on the calling thread."""
    none = out[:0]
    operands = Operands(out, none, a, b, none.reshape(0), none, variant)
    gemm_part(operands, packed_of(a, packing), variant, 0, 1)


@jit
def _round(out, x):
    """x float32 -> out in bfloat16."""
    for i in range(0, x.size, LANES):
        count = min(LANES, x.size - i)
        store_up_to(out, i, load_up_to(x, i, count), count)


@jit
def _write_factor(factor, gram, square):
    """gram (R, R), square = gram^2 -> factor = a I + b gram + c square."""
    R = gram.shape[0]
    for i in range(0, gram.size, LANES):
        count = min(LANES, gram.size - i)
        value = load_up_to(gram, i, count) * _B + load_up_to(square, i, count) * _C
        store_up_to(factor, i, value, count)
    for i in range(0, gram.size, R + 1):  # the diagonal
        value = _A + _B * element(gram, i) + _C * element(square, i)
        store_first(factor, i, broadcast(value), 1)

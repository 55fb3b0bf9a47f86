"""Blocks of small integers, as `kernels.codecs` takes them apart, become float32."""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.operation import element_pointer
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import HOST, LANES, broadcast, store, vector
from smallmind.kernels.codegen.vector_ir import I8, I32


@parallel_jit
def dequantise(out, scales, minima, low, high, layout, workers):
    for worker in prange(workers):
        begin, end = row_share(out.shape[0], np.int64(worker), workers)
        _dequantise_rows(out, scales, minima, low, high, layout, begin, end)


@jit
def _dequantise_rows(out, scales, minima, low, high, layout, begin, end):
    values, groups = out.shape[1], scales.shape[1]
    size, more = values // groups, np.float32(1 << layout.bits)
    for n in range(begin, end):
        for group in range(groups):
            for i in range(group * size, (group + 1) * size, LANES):
                q = _integers(low, n, i, layout.bits, layout.run)
                if high.shape[1]:
                    q = q + _integers(high, n, i, layout.high_bits, layout.high_run) * more
                x = (q - np.float32(layout.offset)) * broadcast(scales[n, group])
                if minima.shape[1]:
                    x = x - broadcast(minima[n, group])
                store(out, n * values + i, x)


@inline_jit
def _integers(packed, n, i, bits, run):
    """-> integers i, i + 1, ... of row n, as many as there are lanes."""
    within = i & (8 // bits << run) - 1  # of the integers that the same bytes hold
    place = n * packed.shape[1] + ((i - within) * bits >> 3) + (within & (1 << run) - 1)
    return _load_bits(packed, place, (within >> run) * bits, (1 << bits) - 1)


@intrinsic
def _load_bits(typingctx, array, place, shift, mask):
    """Bytes, flat index -> as many as there are lanes, shifted and masked, as float32."""

    def codegen(context, builder, sig, args):
        data, place, *others = args
        shift, mask = (HOST.splat(builder, builder.trunc(x, I32)) for x in others)
        pointer = element_pointer(context, builder, sig.args[0], data, place)
        kind = ir.VectorType(I8, LANES).as_pointer()
        found = builder.load(builder.bitcast(pointer, kind), align=1)
        found = builder.lshr(builder.zext(found, HOST.integers), shift)
        return builder.sitofp(builder.and_(found, mask), HOST.vector)

    return vector(array, *[types.int64] * 3), codegen

"""The operands of a product, the scratch of a thread, and the end of a product: sums to results."""

from typing import Any, NamedTuple

from smallmind.kernels.codegen.jit import inline_jit, jit
from smallmind.kernels.codegen.simd import LANES, borrow, load, load_first, store, store_first
from smallmind.kernels.gelu import gelu_of


class Operands(NamedTuple):
    """out = a b in one of its variants [+ bias] [+ addend], activation = gelu(out).

    Missing operands are empty arrays.
    """

    out: Any
    activation: Any
    a: Any
    b: Any
    bias: Any
    addend: Any
    variant: int


@inline_jit
def operands_of(out, activation, a, b, bias, addend, variant):
    """-> Operands, without reference counting: see `borrow`."""
    return Operands(
        borrow(out), borrow(activation), borrow(a), borrow(b), borrow(bias), borrow(addend), variant
    )


class Packed(NamedTuple):
    """The scratch of a thread."""

    panel: Any
    strip: Any
    sums: Any


@jit
def finish(operands, sums, place, sums_row, region):
    """Adds bias and addend to complete sums and stores them, then activation unless empty."""
    out, activation = operands.out, operands.activation
    bias, addend = operands.bias, operands.addend
    first, last, left, right = region
    N = out.shape[1]
    tail = (right - left) % LANES
    whole = right - tail
    for i in range(first, last):
        row = i * N
        for j in range(left, whole, LANES):
            y = load(sums, place + j - left)
            if bias.size > 0:
                y = y + load(bias, j)
            if addend.size > 0:
                y = y + load(addend, row + j)
            store(out, row + j, y)
            if activation.size > 0:
                # GELU of the rounded value, which is what the backward pass reads.
                store(activation, row + j, gelu_of(load(out, row + j)))
        if tail:
            y = load_first(sums, place + whole - left, tail)
            if bias.size > 0:
                y = y + load_first(bias, whole, tail)
            if addend.size > 0:
                y = y + load_first(addend, row + whole, tail)
            store_first(out, row + whole, y, tail)
            if activation.size > 0:
                rounded = load_first(out, row + whole, tail)
                store_first(activation, row + whole, gelu_of(rounded), tail)
        place += sums_row

"""Every kernel in plain NumPy: easy to read, and what the compiled kernels are tested against.

Names and arguments are those of the compiled kernels. Inputs may have any float type, and results
are computed in that type. Read a backward function beside its forward function: each quotes the
line that it differentiates.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np

from smallmind.kernels import number_types
from smallmind.kernels.description import (
    attention_backward_operations,
    attention_backward_temporaries,
    attention_operations,
    attention_temporaries,
    gelu_product_operations,
    kernel,
    product_operations,
    quantised_product_temporaries,
    takes,
)
from smallmind.kernels.number_types import BLOCK, integers, round_to, to_float32
from smallmind.kernels.reference_optimizers import (  # noqa: F401
    adamw,
    average_gradient,
    muon,
    sum_of_squares,
)
from smallmind.kernels.sizes import AWKWARD, FEW_ROWS, FINE_TUNING, GENERATED, GENERATING, STEP
from smallmind.randomness import hash_words

# Arguments of several kernels, made by a `cases.Maker`.
_turns = lambda c: rotary_frequencies(1e4, c.D)  # noqa: E731
_slots = lambda c: np.arange(c.B)[::-1].copy()  # noqa: E731
_two_parts = lambda c: np.array([0, c.C // 3, c.C], np.int32)  # noqa: E731
_documents = lambda c: np.tile(np.arange(c.T, dtype=np.int32) // 7 * 7, (c.B, 1))  # noqa: E731
_MASK: dict[str, Any] = {
    "key": (7 << 32) + 5,
    "probability": 0.2,
    "first_row": "T",
    "firsts": _documents,
}


def _add(y, *terms):
    for term in terms:
        if term is not None:
            y = y + term
    return y


@kernel(
    functions=4,
    temporaries=2,
    gradient="a",
    division=("product", "out"),
    operations=product_operations,
)
@takes(
    "M K N: out M N =addend, a M K, b K N, bias ?N, addend ?M N",
    shapes=[*STEP, *AWKWARD, *FEW_ROWS],
)
def matmul(out, a, b, bias=None, addend=None, by_rows=False, outputs_first=False):  # noqa: ARG001
    """a (M, K), b (K, N) -> out (M, N) = a b [+ bias (N,)] [+ addend (M, N), may be out].

    Writes out. If its outputs come first, b is (N, K), and out = a b^T. With `by_rows` a row has
    the same bits whatever the number of rows.
    """
    out[...] = _add(a @ (b.T if outputs_first else b), bias, addend)


@kernel(
    "matmul",
    functions=0,
    writes=2,
    temporaries=3,
    silent=1e-4,
    division=("product", "preactivation"),
    operations=gelu_product_operations,
)
@takes(
    "M K N: activation M N, preactivation M N, a M K, b K N, bias N, addend ?M N",
    # Sums of size 1, as after a norm: CPUs are slow if a sigmoid is denormal.
    a=lambda c: to_float32(c.a) / np.float32(math.sqrt(c.K)),
)
def matmul_gelu(
    activation, preactivation, a, b, bias=None, addend=None, by_rows=False, outputs_first=False
):
    """a (M, K), b (K, N) -> preactivation (M, N) as `matmul` writes it, activation = its GELU.

    Writes both.
    """
    matmul(preactivation, a, b, bias, addend, by_rows, outputs_first)
    gelu(activation, preactivation)


# The slope of GELU's tanh at 0, and the factor of the cubic term. Python floats, as a NumPy float
# would promote float32 to float64.
_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


@kernel("elementwise", functions=2, temporaries=3, division=("elements", "x"))
@takes("R W: y R W, x R W")
def gelu(y, x):
    """x (R, C) -> y (R, C) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Writes y.

    The tanh form of Hendrycks & Gimpel (2016).
    """
    y[...] = 0.5 * x * (1 + np.tanh(_SLOPE * (x + _CUBIC * x * x * x)))


@kernel("elementwise", functions=5, writes=2, temporaries=7, division=("elements", "x"))
@takes("R W: dx R W =x, y R W =dy, dy R W, x R W")
def gelu_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy gelu'(x), y (R, C) = gelu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    # forward: y = x/2 (1 + tanh(z)), z = sqrt(2/pi) (x + 0.044715 x^3)
    xx = x * x
    tanh = np.tanh(_SLOPE * (x + _CUBIC * xx * x))
    dz = _SLOPE * (1 + 3 * _CUBIC * xx)
    gradient = dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * dz)
    y[...] = 0.5 * x * (1 + tanh)
    dx[...] = gradient


@kernel("elementwise", functions=2, temporaries=2, silent=0.0, division=("elements", "x"))
@takes("R W: y R W, x R W")
def relu2(y, x):
    """x (R, C) -> y (R, C) = max(x, 0)^2. Writes y."""
    positive = np.maximum(x, 0)
    y[...] = positive * positive


@kernel("elementwise", functions=2, writes=2, temporaries=3, division=("elements", "x"))
@takes("R W: dx R W =x, y R W =dy, dy R W, x R W")
def relu2_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy 2 max(x, 0), y (R, C) = max(x, 0)^2.

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    # forward: y = max(x, 0)^2
    positive = np.maximum(x, 0)
    gradient = dy * (2 * positive)
    y[...] = positive * positive
    dx[...] = gradient


@kernel("elementwise", functions=4, temporaries=2, silent=1e-7, division=("rows", "y"))
@takes("R W: y R W, x R 2*W")
def swiglu(y, x):
    """x (R, 2 W), the gate and what it multiplies -> y (R, W) = silu(gate) up. Writes y.

    silu(z) = z sigmoid(z).
    """
    gate, up = np.split(x, 2, axis=1)
    y[...] = gate * _sigmoid(gate) * up


@kernel("elementwise", functions=4, writes=2, temporaries=3, division=("rows", "dy"))
@takes("R W: dx R 2*W =x, y R W =dy, dy R W, x R 2*W")
def swiglu_backward(dx, y, dy, x):
    """dy (R, W), x (R, 2 W) -> dx (R, 2 W), y (R, W) = swiglu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    gate, up = np.split(x, 2, axis=1)
    s = _sigmoid(gate)
    silu = gate * s
    # forward: y = silu(gate) up
    dgate, dup = dy * up * (s + silu * (1 - s)), dy * silu
    y[...] = silu * up
    dx[...] = np.concatenate((dgate, dup), axis=1)


def _sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


@kernel("geglu", functions=4, temporaries=3, silent=1e-7, division=("rows", "y"))
@takes("R W: y R W, x R 2*W")
def geglu(y, x):
    """x (R, 2 W), the gate and what it multiplies -> y (R, W) = gelu(gate) up. Writes y.

    GELU in its tanh form (Shazeer 2020).
    """
    gate, up = np.split(x, 2, axis=1)
    gelu(y, gate)
    y *= up


@kernel("geglu", functions=4, writes=2, temporaries=5, division=("rows", "dy"))
@takes("R W: dx R 2*W =x, y R W =dy, dy R W, x R 2*W")
def geglu_backward(dx, y, dy, x):
    """dy (R, W), x (R, 2 W) -> dx (R, 2 W), y (R, W) = geglu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    gate, up = np.split(x, 2, axis=1)
    dgate, activation = np.empty_like(dy), np.empty_like(dy)
    # forward: y = activation up, activation = gelu(gate)
    gelu_backward(dgate, activation, dy * up, gate)
    dup = dy * activation
    y[...] = activation * up
    dx[...] = np.concatenate((dgate, dup), axis=1)


@kernel(functions=2, temporaries=3, silent=2e-4, division=("elements", "x"))
@takes("R W: y R W, x R W")
def gelu_erf(y, x):
    """x (R, C) -> y (R, C) = x Phi(x), Phi(x) = erfc(-x / sqrt(2)) / 2. Writes y.

    The exact form of Hendrycks & Gimpel (2016); Phi is the normal distribution function.
    """
    y[...] = x * _phi(x)


@kernel("gelu_erf", functions=3, writes=2, temporaries=4, division=("elements", "x"))
@takes("R W: dx R W =x, y R W =dy, dy R W, x R W")
def gelu_erf_backward(dx, y, dy, x):
    """dy, x (R, C) -> dx (R, C) = dy gelu'(x), y (R, C) = gelu(x).

    Writes dx, which may be x, and y, which may be dy: so the forward pass need not keep y.
    """
    # forward: y = x Phi(x), Phi' = exp(-x^2 / 2) / sqrt(2 pi)
    phi = _phi(x)
    gradient = dy * (phi + x * np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    y[...] = x * phi
    dx[...] = gradient


def _phi(x):
    """Returns the normal distribution function, one element at a time: NumPy has no erfc."""
    z = -math.sqrt(0.5) * x
    return 0.5 * np.fromiter(map(math.erfc, z.flat), x.dtype, x.size).reshape(x.shape)


@kernel("elementwise", functions=2, temporaries=2, division=("elements", "x"))
@takes("R V: y R V =x, x R V", cap=2.0)
def softcap(y, x, cap):
    """x (R, V) -> y (R, V) = cap tanh(x / cap). Writes y, which may be x."""
    y[...] = cap * np.tanh(x / cap)


@kernel("elementwise", functions=2, temporaries=3, division=("elements", "y"))
@takes("R V: dx R V =dy, dy R V, y R V", cap=2.0, after="softcap")
def softcap_backward(dx, dy, y, cap):
    """dy, y (R, V) -> dx (R, V) = dy (1 - (y / cap)^2). Writes dx, which may be dy."""
    # forward: y = cap tanh(x / cap)
    tanh = y / cap
    dx[...] = dy * (1 - tanh * tanh)


@kernel(
    "matmul",
    functions=40,
    temporaries=2,
    division=("product of a^T", "out"),
    operations=product_operations,
)
@takes(
    "M K N: out M N float32 =addend, a K M, b K N, addend ?M N float32",
    shapes=[(K, M, N) for M, K, N in (*STEP, *AWKWARD)],
)
def matmul_transpose_a(out, a, b, addend=None):
    """a (K, M), b (K, N) -> out (M, N) = a^T b [+ addend (M, N), may be out]. Writes out."""
    out[...] = _add(a.T @ b, addend)


@kernel(
    "matmul",
    functions=0,
    temporaries=2,
    gradient="a",
    division=("product of b^T", "out"),
    operations=product_operations,
)
@takes(
    "M K N: out M N =addend, a M K, b N K, addend ?M N",
    shapes=[(M, N, K) for M, K, N in (*STEP, *AWKWARD, *FEW_ROWS)],
)
def matmul_transpose_b(out, a, b, addend=None):
    """a (M, K), b (N, K) -> out (M, N) = a b^T [+ addend (M, N), may be out]. Writes out."""
    out[...] = _add(a @ b.T, addend)


SMALLEST = 2.0**-100  # magnitude of a block's largest value, below which it is rounded to zeros


@kernel(
    functions=4,
    temporaries=quantised_product_temporaries,
    gradient="a",
    division=("rows", "w"),
    operations=product_operations,
)
@takes(
    "R K N: out R N float32 =addend, a R K float32, w N K blocks, bias ?N float32, "
    "addend ?R N float32",
    w=lambda c: number_types.in_groups(c.w) if c.R <= GENERATED else c.w,
    by_rows=lambda c: c.R <= GENERATED,
    in_groups=lambda c: c.R <= GENERATED,
    shapes=[*GENERATING, *FINE_TUNING],
)
def matmul_quantised(out, a, w, bias=None, addend=None, by_rows=False, in_groups=False):
    """a (R, K), w (N, K / 32) of q8_0 or q4_0 -> out (R, N) = a w^T [+ bias (N,)] [+ addend].

    Writes out; addend (R, N) may be out. `by_rows` each block of 32 values of a is rounded to 8
    bits, and the products are of integers, summed by block. in_groups: if w is, only by rows.
    """
    if in_groups:
        w = number_types.in_groups(w, is_back=True)
    product = _rounded_product(a, w) if by_rows else a @ to_float32(w).T
    out[...] = _add(product, bias, addend)


def _rounded_product(a, w):
    """Returns the product of integers, block by block."""
    q, scales = _rounded(a)
    w_q = integers(w.reshape(-1)).reshape(*w.shape, BLOCK).astype(np.int32)
    w_scales, total = w["scale"].astype(a.dtype), np.zeros((len(a), len(w)), a.dtype)
    for block in range(w.shape[1]):
        sums = q[:, block] @ w_q[:, block].T
        total += sums.astype(a.dtype) * (scales[:, block, None] * w_scales[:, block])
    return total


def _rounded(a):
    """a (R, K) -> its integers (R, K / BLOCK, BLOCK) of 8 bits, and their scales (R, K / BLOCK)."""
    x = a.reshape(len(a), -1, BLOCK)
    largest = np.abs(x).max(axis=2, keepdims=True)
    numbers = np.where(np.isfinite(largest), x, 0)
    divisor = np.where(largest < SMALLEST, np.inf, largest).astype(a.dtype)
    q = np.rint(numbers * (a.dtype.type(127) / divisor))
    scales = np.where(largest < SMALLEST, 0, largest / a.dtype.type(127)).astype(a.dtype)
    return q.astype(np.int32), scales[:, :, 0]


@kernel(
    "matmul_quantised",
    functions=4,
    temporaries=quantised_product_temporaries,
    division=("product", "out"),
    operations=product_operations,
)
@takes("R K N: out R K float32, a R N float32, w N K blocks", shapes=FINE_TUNING)
def matmul_quantised_transpose(out, a, w):
    """a (R, N), w (N, K / 32) of q8_0 or q4_0 -> out (R, K) = a w. Writes out."""
    out[...] = a @ to_float32(w)


@kernel(
    "matmul_quantised",
    functions=3,
    temporaries=2,
    is_activation=False,
    is_of_layer=False,
    division=("rows", "w"),
)
@takes("N K: w +N K blocks")
def arrange_blocks(w, is_back=False):
    """w (N, n) of q8_0 or q4_0 -> its rows in groups, or back: see `number_types.in_groups`.

    Overwrites w.
    """
    w[...] = number_types.in_groups(w, is_back)


@kernel(functions=2, writes=2, is_activation=False, is_of_layer=False, division=("rows", "x"))
@takes("n: scales n float32, q n 32 int8, x n 32 float32")
def quantise(scales, q, x):
    """x (n, BLOCK) -> scales (n,), q (n, BLOCK) int8 of q8_0, or (n, HALF) uint8 of q4_0.

    Writes scales, q; of a block with a value that is not finite, q is arbitrary.
    """
    # Imported here, so that the machine code of no kernel depends on it.
    from smallmind.kernels import codecs

    pack = codecs.pack_q8_0 if q.dtype == np.int8 else codecs.pack_q4_0
    scales[...], q[...] = pack(x)


@kernel(functions=2, is_activation=False, is_of_layer=False, division=("rows", "out"))
@takes(
    "n: out n 32 float32, scales n 1 float32, minima n 1 float32, low n 16 uint8, "
    "high n 32 uint8 < 2",
    layout=lambda _: _layout_of_q5_1(),
)
def dequantise(out, scales, minima, low, high, layout):
    """scales, minima (n, groups), low, high (n, bytes) of integers q -> out (n, m).

    Writes out = scale * q - minimum; `codecs.Layout` says where the integers are. Without minima,
    or bytes of higher bits, these have no columns.
    """
    # Imported here, so that the machine code of no kernel depends on it.
    from smallmind.kernels import codecs

    out[...] = codecs.products(scales, minima, codecs.unpacked(low, high, layout))


def _layout_of_q5_1():
    from smallmind.kernels import codecs

    blocks = np.zeros(1, number_types.DTYPES["q5_1"])
    return codecs.parts_of(blocks, number_types.NUMBER_TYPES["q5_1"])[-1]


@kernel("reduce", functions=2, division=("chunks", "x"))
@takes("R C: out +C float32, x R C")
def column_sum(out, x):
    """x (R, C) -> out (C,) += the sum over rows. Adds to out."""
    out += x.sum(axis=0)


@kernel("norms", functions=2, writes=3, temporaries=3, division=("rows", "x"))
@takes("R C: out R C, mean R float32, rstd R float32, x R C, weight C, bias ?C", epsilon=0.1)
def layernorm(out, mean, rstd, x, weight, bias=None, epsilon=1e-5):
    """x (R, C) -> out (R, C) = (x - mean) rstd weight [+ bias]; keeps mean, rstd (R,).

    Writes out, mean, rstd; rstd = 1 / sqrt(variance + epsilon).
    """
    mean[...] = x.mean(axis=1)
    rstd[...] = 1 / np.sqrt(x.var(axis=1) + epsilon)
    xhat = (x - mean[:, None]) * rstd[:, None]
    out[...] = _add(xhat * weight, bias)


@kernel("norms", functions=6, writes=3, temporaries=4, division=("chunks", "x"))
@takes(
    "R C: dx R C =addend, dweight +C float32, dbias +C float32, dy R C, x R C, "
    "mean R float32, rstd R float32, weight C, addend ?R C",
    after="layernorm",
)
def layernorm_backward(dx, dweight, dbias, dy, x, mean, rstd, weight, addend=None):
    """dy, x (R, C), mean, rstd (R,) -> dx (R, C) [+ addend (R, C), which may be dx].

    Writes dx; adds to dweight (C,) and, if it is not None, to dbias (C,).
    """
    # forward: xhat = (x - mean) rstd
    xhat = (x - mean[:, None]) * rstd[:, None]
    # forward: y = xhat weight + bias
    dxhat = dy * weight
    dweight += (dy * xhat).sum(axis=0)
    if dbias is not None:
        dbias += dy.sum(axis=0)
    # xhat depends on x itself, on the mean and on the variance: three terms.
    mean_dxhat = dxhat.mean(axis=1, keepdims=True)
    mean_dxhat_xhat = (dxhat * xhat).mean(axis=1, keepdims=True)
    dx[...] = _add((dxhat - mean_dxhat - xhat * mean_dxhat_xhat) * rstd[:, None], addend)


@kernel("norms", functions=2, writes=2, temporaries=2, division=("rows", "x"))
@takes("R C: out R C, rstd R float32, x R C, weight C", epsilon=0.1)
def rmsnorm(out, rstd, x, weight, epsilon=1e-5):
    """x (R, C), weight (C,) -> out (R, C) = x rstd weight; keeps rstd (R,). Writes both.

    rstd = 1 / sqrt(mean(x^2) + epsilon).
    """
    rstd[...] = 1 / np.sqrt((x * x).mean(axis=1) + epsilon)
    out[...] = x * rstd[:, None] * weight


@kernel("norms", functions=2, writes=2, temporaries=4, division=("chunks", "x"))
@takes(
    "R C: dx R C =dy =addend, dweight +C float32, dy R C, x R C, rstd R float32, weight C, "
    "addend ?R C",
    after="rmsnorm",
)
def rmsnorm_backward(dx, dweight, dy, x, rstd, weight, addend=None):
    """dy, x (R, C), rstd (R,) -> dx (R, C) [+ addend (R, C)].

    Writes dx, which may be dy or addend; adds to dweight (C,).
    """
    rstd = rstd[:, None]
    # forward: xhat = x rstd
    xhat = x * rstd
    # forward: y = xhat weight
    dxhat = dy * weight
    dweight += (dy * xhat).sum(axis=0)
    # xhat depends on x itself and on the mean of its squares: two terms.
    gradient = (dxhat - xhat * (dxhat * xhat).mean(axis=1, keepdims=True)) * rstd
    dx[...] = _add(gradient, addend)


@kernel("head_norm", functions=7, writes=3, temporaries=3, division=("rows", "x"))
@takes(
    "B H T D: x +B*T 3*H*D moves B*T 2*H*D, kept B*T 2*H*D, "
    "rstd B*T 2*H float32, query_gain D, key_gain D",
    queries="H",
    T="T",
    frequencies=_turns,
    starts=None,
    positions=0,
    epsilon=0.1,
)
def norm_heads(
    x,
    kept,
    rstd,
    query_gain,
    key_gain,
    queries,
    T,
    frequencies=None,
    starts=None,
    positions=0,
    epsilon=1e-5,
):
    """x (B T, W) -> x, its heads of queries and keys normalised and rotated. Writes x.

    The first columns of x are as many heads as rstd (B T, heads) has columns, of D channels each;
    the first `queries` of them have the gain query_gain (D,), the others key_gain (D,).
    y = x rstd gain, with rstd = 1 / sqrt(mean(x^2) + epsilon) over a head; then `rope` with its
    arguments and D // 2 frequencies, unless they are None. Writes rstd, and to kept (B T, heads D)
    the heads as they were.
    """
    kept[...] = x[:, : kept.shape[1]]
    heads, D = rstd.shape[1], query_gain.size
    gains = _gains(query_gain, key_gain, queries, heads)
    y = np.empty((len(kept) * heads, D), kept.dtype)
    rmsnorm(y, rstd.reshape(-1), kept.reshape(y.shape), np.ones(D, kept.dtype), epsilon)
    x[:, : kept.shape[1]] = y.reshape(kept.shape) * gains
    if frequencies is not None:
        rope(x, frequencies, T, heads, D, starts, positions)


@kernel("head_norm", functions=15, writes=3, temporaries=6, division=("chunks", "kept"))
@takes(
    "B H T D: dx +B*T 3*H*D moves B*T 2*H*D, dquery_gain +D float32, "
    "dkey_gain +D float32, kept B*T 2*H*D, rstd B*T 2*H float32, query_gain D, "
    "key_gain D",
    queries="H",
    T="T",
    frequencies=_turns,
    after="norm_heads",
)
def norm_heads_backward(
    dx, dquery_gain, dkey_gain, kept, rstd, query_gain, key_gain, queries, T, frequencies=None
):
    """dx (B T, W), the gradient of `norm_heads`'s result -> that of its input, in place.

    Of the first columns, which are heads; the others stay. kept and rstd are what norm_heads wrote.
    Adds to dquery_gain and dkey_gain (D,).
    """
    heads, D = rstd.shape[1], query_gain.size
    # forward: y = rotation z
    if frequencies is not None:
        rope(dx, frequencies, T, heads, D, inverse=True)
    dheads = dx[:, : kept.shape[1]]
    # forward: z = xhat gain
    xhat = kept.reshape(len(kept), heads, D) * rstd[:, :, None]
    dgains = (dheads.reshape(xhat.shape) * xhat).sum(axis=0)
    dquery_gain += dgains[:queries].sum(axis=0)
    dkey_gain += dgains[queries:].sum(axis=0)
    dxhat = dheads * _gains(query_gain, key_gain, queries, heads)
    # forward: xhat = x rstd
    shape = len(kept) * heads, D
    gradient, ones = np.empty(shape, dheads.dtype), np.ones(D, dheads.dtype)
    dxhat, kept, rstd = dxhat.reshape(shape), kept.reshape(shape), rstd.reshape(-1)
    rmsnorm_backward(gradient, np.zeros(D, dheads.dtype), dxhat, kept, rstd, ones)
    dheads[...] = gradient.reshape(dheads.shape)


def _gains(query_gain, key_gain, queries, heads):
    """Returns the gains of all heads side by side."""
    return np.concatenate((np.tile(query_gain, queries), np.tile(key_gain, heads - queries)))


@kernel("mix", functions=1, is_activation=False, division=("rows", "x"))
@takes("R C: out R C, x R 3*C moves R C", first="C")
def copy_columns(out, x, first):
    """x (R, W) -> out (R, N), its columns first..first + N. Writes out."""
    out[...] = x[:, first : first + out.shape[1]]


@kernel(functions=2, is_activation=False, is_of_layer=False, division=("rows", "out"))
@takes("R C: out C R float32, x R C float32")
def transpose(out, x, first=0):
    """x (R, C) -> out (C, W), columns first..first + R = x^T; the others stay. Writes out."""
    out[:, first : first + len(x)] = x.T


@kernel("mix", functions=2, is_activation=False, division=("rows", "out"))
@takes("R C: out R C, x 2*R C moves R C", rows=lambda c: c.some_of(2 * c.R, c.R))
def take_rows(out, x, rows):
    """x (R, C), rows (N,) -> out (N, C), these rows of it. Writes out."""
    out[...] = x[rows]


@kernel("mix", functions=2, is_activation=False, division=("rows", "x"))
@takes("R C: out +2*R C moves R C, x R C", rows=lambda c: c.some_of(2 * c.R, c.R))
def put_rows(out, x, rows):
    """x (N, C), rows (N,), no two of them the same -> writes these rows of out (R, C).

    It is the backward pass of take_rows, where out holds zeros.
    """
    # forward: x = out[rows]
    out[rows] = x


@kernel("mix", functions=2, is_activation=False, division=("rows", "out"))
@takes("R C: out 2*R C, x R C", starts=_two_parts, scale=0.5)
def spread_columns(out, x, starts, scale):
    """x (r, N), starts (n + 1,) -> out (n r, N): scale x, whose columns are in n parts.

    Part i begins at starts[i], and fills these columns of the rows from i r on; others are 0.
    Writes out.
    """
    out[...] = 0
    r = len(x)
    for i, (first, last) in enumerate(pairwise(starts)):
        out[i * r : (i + 1) * r, first:last] = scale * x[:, first:last]


@kernel("mix", functions=2, gradient="dout", division=("rows", "dx"))
@takes(
    "R C: dx +R C float32, dout 2*R C moves R C",
    starts=_two_parts,
    scale=0.5,
)
def gather_columns(dx, dout, starts, scale):
    """dout (n r, N), starts (n + 1,) -> adds scale dout, where x was spread, to dx (r, N)."""
    # forward: out[i r..., first:last] = scale x[:, first:last]
    r = len(dx)
    for i, (first, last) in enumerate(pairwise(starts)):
        dx[:, first:last] += scale * dout[i * r : (i + 1) * r, first:last]


@kernel("elementwise", functions=2, is_activation=False, division=("elements", "out"))
@takes("n: out n, x n, y n")
def add_vectors(out, x, y):
    """x, y (n,) -> out (n,) = x + y in float32, rounded to the dtype of out. out may be x or y."""
    copy_vector(out, to_float32(x) + to_float32(y))


@kernel("elementwise", functions=2, division=("elements", "out"))
@takes("n: out n, x n float32")
def copy_vector(out, x):
    """x (n,) -> out (n,), rounded to the dtype of out."""
    out[...] = round_to(to_float32(x), out.dtype)


@kernel("elementwise", functions=2, temporaries=1, gradient="x", division=("elements", "x"))
@takes("R C: y R C =x, x R C", factor=2.0)
def scale(y, x, factor):
    """x (R, C) -> y (R, C) = factor x. Writes y, which may be x. It is its own backward."""
    y[...] = factor * x


@kernel("elementwise", functions=2, division=("elements", "out"))
@takes("R C: out R C")
def clear(out):
    """out of any shape -> zeros."""
    out[...] = 0


@kernel(functions=2, temporaries=2, division=("rows", "x"))
@takes("R C: out R C =x, x R C, other R C, weights 2")
def mix(out, x, other, weights, first=0):
    """x, other (R, N), weights (2,) -> out (R, W) = weights[0] x + weights[1] other.

    Writes the columns first..first + N of out, which may be x if they are all it has.
    """
    out[:, first : first + x.shape[1]] = weights[0] * x + weights[1] * other


@kernel("mix", functions=2, writes=3, temporaries=1, gradient="dx", division=("chunks", "x"))
@takes("R C: dx +R C consumed, dother +R C, dweights +2 float32, x R C, other R C, weights 2")
def mix_backward(dx, dother, dweights, x, other, weights, first=0):
    """dx (R, W), the gradient of out -> that of x, in place; adds to dother (R, N), dweights (2,).

    Only the columns first..first + N of dx change. x, other (R, N), weights (2,) as in `mix`.
    """
    # forward: out = weights[0] x + weights[1] other
    dout = dx[:, first : first + x.shape[1]]
    dweights += (dout * x).sum(), (dout * other).sum()
    dother += weights[1] * dout
    dout *= weights[0]


@kernel(functions=2, temporaries=2, division=("rows", "x"))
@takes("B H T D: x +B*T H*D", frequencies=_turns, T="T", heads="H", D="D")
def rope(x, frequencies, T, heads, D, starts=None, positions=0, inverse=False):
    """x (B T, W) -> x, its first `heads` heads of D channels rotated by their position. Writes x.

    Row t of sequence b has position starts[b] + t, with starts (B,), (1,) for all, or 0;
    `positions` is above any of them, if later calls continue. With P frequencies, a tuple, channels
    i and i + P of a head are a pair (a, b), which becomes (a cos - b sin, b cos + a sin) of
    position frequencies[i]; the channels from 2 P on stay. `inverse` rotates back, which is also
    the backward pass.
    """
    del positions  # matters to tables that are kept
    half, sign = len(frequencies), -1 if inverse else 1
    starts = np.zeros(1, np.int64) if starts is None else starts
    places = starts[:, None] + np.arange(T)
    angles = rotary_angles(int(places.max()) + 1, frequencies, x.dtype)
    angles = angles[places][:, :, None]  # (B, T, 1, P)
    cosine, sine = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    rotated = x[:, : heads * D].reshape(-1, T, heads, D)
    a, b = rotated[..., :half].copy(), rotated[..., half : 2 * half]
    rotated[..., :half] = a * cosine - sign * (b * sine)
    rotated[..., half : 2 * half] = b * cosine + sign * (a * sine)
    x[:, : heads * D] = rotated.reshape(len(x), -1)


def rotary_angles(positions, frequencies, dtype=np.float32):
    """-> the angles (positions, P) of the pairs of channels, rounded to dtype, as float64.

    Models of other programs have been trained with angles that were rounded to float32. At position
    1,500 the logits of exact ones differ by 1e-4 of the largest.
    """
    places = np.arange(positions, dtype=dtype)
    return (places[:, None] * np.array(frequencies, dtype)).astype(np.float64)


def rotary_frequencies(theta, D):
    """-> the frequencies theta^(-i / (D // 2)) of the pairs of D channels, a tuple.

    Every operation is rounded to float32, as in PyTorch.
    """
    exponents = np.arange(D // 2, dtype=np.float32) / np.float32(max(1, D // 2))
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    return tuple((np.float32(1) / powers).tolist())


@kernel(
    "attention.forward",
    functions=12,
    writes=2,
    temporaries=attention_temporaries,
    division=("heads", "logsumexp"),
    operations=attention_operations,
)
@takes(
    "B H T D: out B*T H*D, logsumexp B H T float32, qkv B*T 3*H*D, key ?, probability ?, "
    "first_row ?, firsts ?B T int32",
    **_MASK,
)
def attention(out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None, scale=None):
    """qkv (B T, (H + 2 G) D) -> out (B T, H D); keeps logsumexp (B, H, T). Writes both.

    The columns of qkv are H heads of queries, G of keys and G of values, of D channels each; H / G
    heads of queries share keys and values (Ainslie et al. 2023).
    out = dropout(softmax(scale q k^T, over the keys not after the query)) v, head by head, with a
    scale of 1 / sqrt(D) unless it is given; the dropout mask follows from key () and first_row (),
    the place of qkv in its batch, and is off at probability 0. With firsts (B, T) queries do not
    see the keys before theirs either. They never decrease from one query to the next.
    """
    q, k, v = split_heads(qkv, logsumexp.shape, out.shape[1])
    p, logsumexp[...] = attention_probabilities(q, k, firsts, scale)
    B, H, T = logsumexp.shape
    heads = out.reshape(B, T, H, -1).transpose(0, 2, 1, 3)  # a view
    heads[...] = _drop_heads(p, key, probability, first_row) @ _repeated(v, H)


@kernel(
    "attention.backward",
    functions=53,
    temporaries=attention_backward_temporaries,
    division=("shared heads", "logsumexp"),
    operations=attention_backward_operations,
    repeats=0.2,
)
@takes(
    "B H T D: dqkv B*T 3*H*D, dout B*T H*D, out B*T H*D, logsumexp B H T float32, qkv B*T 3*H*D, "
    "key ?, probability ?, first_row ?, firsts ?B T int32",
    after="attention",
    **_MASK,
)
def attention_backward(
    dqkv, dout, out, logsumexp, qkv, key=0, probability=0.0, first_row=0, firsts=None, scale=None
):
    """dout, out (B T, H D), logsumexp (B, H, T), qkv (B T, (H + 2 G) D) -> dqkv. Writes dqkv."""
    B, H, T = logsumexp.shape
    q, k, v = split_heads(qkv, logsumexp.shape, out.shape[1])
    d, o = (x.reshape(B, T, H, -1).transpose(0, 2, 1, 3) for x in (dout, out))
    # Not exp(scores - logsumexp): a logsumexp in the thousands is rounded too coarsely.
    p, _ = attention_probabilities(q, k, firsts, scale)
    k, v = _repeated(k, H), _repeated(v, H)
    # forward: out = drop(p) v
    dv = _drop_heads(p, key, probability, first_row).swapaxes(-1, -2) @ d
    dp = _drop_heads(d @ v.swapaxes(-1, -2), key, probability, first_row)
    # forward: p = softmax(s)
    # The mean of dp under p is dout . out.
    ds = p * (dp - (d * o).sum(axis=-1, keepdims=True))
    # forward: s = scale q k^T
    ds *= _scale(scale, q.shape[-1])
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    # forward: each head of keys and values serves several heads of queries
    heads = dqkv.reshape(B, T, -1, q.shape[-1]).transpose(0, 2, 1, 3)  # a view
    G = (heads.shape[1] - H) // 2
    heads[:, :H] = dq
    for first, part in ((H, dk), (H + G, dv)):
        heads[:, first : first + G] = part.reshape(B, G, H // G, T, -1).sum(axis=2)


PANEL = 16  # positions whose keys are kept together, channel by channel


@kernel("attention.decoding", functions=2, writes=2, division=("kept heads", "values"))
@takes(
    "B H P D: keys +B H P D 16 float32 moves B H D, values +B H 16*P D float32 moves B H D, "
    "qkv B 3*H*D float32 moves B 2*H*D",
    starts=lambda c: 16 * c.P - 1 + np.arange(c.B),
    slots=_slots,
)
def keep_keys_values(keys, values, qkv, starts, slots):
    """qkv (B T, (H + 2 G) D) -> keys (N, G, S / PANEL, D, PANEL) and values (N, G, S, D).

    Sequence b is kept in slots[b], no two in the same one. Writes its tokens starts[b] ...
    starts[b] + T - 1, the last S of them, each in the place that is its number modulo S. starts,
    slots (B,) are int64.
    """
    _, G, S, D = values.shape
    T = len(qkv) // len(slots)
    heads = qkv.reshape(len(slots), T, -1, D)
    for sequence, start, slot in zip(heads, starts, slots, strict=True):
        k, v = np.split(sequence[-S:, -2 * G :], 2, axis=1)  # (T or S, G, D)
        places = np.arange(start + T - len(k), start + T) % S
        values[slot][:, places] = v.transpose(1, 0, 2)
        keys[slot][:, places // PANEL, :, places % PANEL] = k


@kernel("attention.decoding", functions=11, division=("heads of queries", "out"))
@takes(
    "B H P D: out B H*D float32, qkv B 3*H*D float32 moves B H*D, keys B H P D 16 float32, "
    "values B H 16*P D float32",
    starts=lambda c: 16 * c.P - 1 + np.arange(c.B),
    slots=_slots,
)
def cached_attention(out, qkv, keys, values, starts, slots, firsts=None, scale=None):
    """qkv (B T, (H + 2 G) D) -> out (B T, H D), for new tokens whose keys and values are kept.

    out = softmax(scale q k^T) v, over the last S tokens up to each query and, with firsts (B, T),
    only from the token with that number on. T > 1 only while S holds what each of them sees. The
    scale is 1 / sqrt(D) unless it is given.
    Sequence b has starts[b] tokens before the new ones, in slots[b]: both (B,) int64.
    """
    N, G, S, D = values.shape
    B, H = len(slots), out.shape[1] // D
    T = len(out) // B
    q = qkv.reshape(B, T, -1, D)[:, :, :H]
    k = keys.transpose(0, 1, 2, 4, 3).reshape(N, G, -1, D)  # (N, G, S or a little more, D)
    heads = out.reshape(B, T, H, D)  # a view
    for b, slot in enumerate(slots):
        for t in range(T):
            last = int(starts[b]) + t + 1
            first = max(last - S, 0 if firsts is None else int(firsts[b, t]))
            places = np.arange(first, last) % S
            for h in range(H):
                g = h // (H // G)
                scores = k[slot, g, places] @ q[b, t, h] * _scale(scale, D)
                p = np.exp(scores - scores.max())
                heads[b, t, h] = p @ values[slot, g, places] / p.sum()


def split_heads(qkv, shape, width):
    """qkv (B T, (H + 2 G) D), shape (B, H, T), width H D -> views of the heads.

    q is (B, H, T, D), k and v are (B, G, T, D).
    """
    B, H, T = shape
    heads = qkv.reshape(B, T, -1, width // H).transpose(0, 2, 1, 3)
    G = (heads.shape[1] - H) // 2
    return np.split(heads, (H, H + G), axis=1)


def _repeated(heads, H):
    """heads (B, G, T, D) -> (B, H, T, D): each once for every head of queries that it serves."""
    G = heads.shape[1]
    return heads if G == H else heads.repeat(H // G, axis=1)


def _scale(scale, D):
    return 1 / math.sqrt(D) if scale is None else scale


def attention_probabilities(q, k, firsts=None, scale=None):
    """q (B, H, T, D), k (B, G, T, D) -> softmax of scale q k^T, (B, H, T, T), and logsumexp.

    The scale is 1 / sqrt(D) unless it is given. The probability of keys after the query, or before
    the first that it sees (B, T), is zero. The logsumexp of the scores is (B, H, T).
    """
    T = q.shape[2]
    k = _repeated(k, q.shape[1])
    scores = q @ k.swapaxes(-1, -2) * _scale(scale, q.shape[-1])
    seen = np.tri(T, dtype=bool)
    if firsts is not None:
        seen = seen & (np.arange(T) >= firsts[:, None, :, None])
    scores = np.where(seen, scores, -math.inf)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    p = np.exp(scores, out=scores)
    sums = p.sum(axis=-1, keepdims=True)
    p /= sums
    return p, (top + np.log(sums))[..., 0]


@kernel(functions=7, temporaries=2, division=("rows", "out"))
@takes(
    "B T C: out B*T C, weight 65 C, ids B T < 65, addend T C",
    starts=lambda _: np.zeros(1, np.int64),
)
def embedding(out, weight, ids, addend=None, starts=None, in_groups=False):
    """ids (B, T), weight (V, C) -> out (B T, C) = weight[ids] [+ addend]. Writes out.

    addend is (B T, C), and may be out, or with starts it has a row per position (P, C), and token t
    of sequence b is at position starts[b] + t: (B,) or, for all, (1,). weight may be of q8_0 or
    q4_0 (V, C / 32), also `in_groups`.
    """
    if in_groups:
        weight = number_types.in_groups(weight, is_back=True)
    if starts is not None:
        addend = addend[starts[:, None] + np.arange(ids.shape[1])]
    if addend is not None:
        addend = addend.reshape(-1, ids.shape[1], out.shape[1])
    out[...] = _add(to_float32(weight[ids]), addend).reshape(out.shape)


@kernel("embedding", functions=4, writes=2, division=("columns", "dout"))
@takes("B T C: dweight +65 C float32, daddend +T C float32, dout B*T C, ids B T < 65")
def embedding_backward(dweight, daddend, dout, ids):
    """dout (B T, C), ids (B, T) -> adds to dweight (V, C) and, unless None, daddend (T, C)."""
    # forward: out = weight[ids] + addend
    np.add.at(dweight, ids.reshape(-1), dout)
    if daddend is not None:
        daddend[...] += dout.reshape(-1, *daddend.shape).sum(axis=0)


BIGRAM_FACTOR = 0x9E3779B1  # odd: it spreads pairs over the rows of a table too small for all


@kernel("tokens", functions=2, temporaries=6, is_activation=False)
@takes("B T: rows B T int32, ids B T < 65", vocab_size=65, count=1000, document_token=-1)
def bigrams(rows, ids, vocab_size, count, document_token, before=None, firsts=None):
    """ids (B, T) -> rows (B, T), one of `count` for each token and the one before. Writes rows.

    Before the first token comes that of `before` (B,), or token 0, which also comes before each
    document_token (-1: none), and at the places that documents begin at by `firsts` (B, T). Tokens
    from vocab_size V on count as token 0. Row V previous + token or, of fewer rows, a hash of that.
    """
    first = np.zeros(len(ids), ids.dtype) if before is None else before
    previous = np.concatenate([first[:, None], ids[:, :-1]], axis=1)
    known, begins = np.where(ids < vocab_size, ids, 0), ids == document_token
    previous[previous >= vocab_size] = 0
    previous[begins] = 0
    if firsts is not None:
        previous[firsts == np.arange(ids.shape[1])] = 0
    pairs = vocab_size * previous.astype(np.int64) + known
    if count < vocab_size**2:
        pairs = (pairs * BIGRAM_FACTOR % 2**32) * count >> 32
    rows[...] = pairs


@kernel("tokens", functions=2, temporaries=2, is_activation=False)
@takes("B T: firsts B T int32, ids B T < 65", token=7)
def document_starts(firsts, ids, token, begun=None, starts=None):
    """ids (B, T) -> firsts (B, T), the last place of `token` up to each place, or 0. Writes firsts.

    A document begins at its token, and the first of a window with the window. The ids may continue
    sequences of starts (B,) tokens, whose last documents began at `begun` (B,): places are then
    those in the whole sequences, and begun is kept up to date.
    """
    begin, earlier = (0, 0) if begun is None else (starts[:, None], begun[:, None])
    places = np.where(ids == token, begin + np.arange(ids.shape[1], dtype=np.int32), earlier)
    np.maximum.accumulate(places, axis=1, out=firsts)
    if begun is not None:
        begun[...] = firsts[:, -1]


@kernel("tokens", functions=2, temporaries=6, is_activation=False)
@takes(
    "B T: firsts B T int32, documents ?B T int32",
    window=30,
    starts=lambda _: np.zeros(1, np.int64),
    documents=_documents,
)
def window_firsts(firsts, window, starts, documents=None):
    """-> firsts (B, T), the first of the last `window` tokens up to each place. Writes firsts.

    But not before documents (B, T), where the document of each place begins. The number of token t
    of sequence b is starts[b] + t: starts (B,), or (1,) for all.
    """
    places = starts[:, None] + np.arange(firsts.shape[1])
    firsts[...] = np.maximum(places - window + 1, 0 if documents is None else documents)


@kernel("tokens", functions=2, temporaries=2, is_activation=False)
@takes("B T: positions B T int32", firsts=_documents)
def document_positions(positions, firsts):
    """firsts (B, T), where the document of each place begins -> positions (B, T), its place there.

    Writes positions.
    """
    positions[...] = np.arange(firsts.shape[1]) - firsts


@kernel(functions=2, temporaries=3, division=("elements", "x"))
@takes("R C: out R C, x R C, addend R C", key=(7 << 32) + 5, probability=0.1)
def dropout(out, x, key, probability, addend=None, first_row=0):
    """x (R, C) -> out (R, C) = x mask / (1 - probability) [+ addend (R, C)]. Writes out.

    The mask follows from key () and from first_row (), the place of x in its batch. The key is a
    hash of 64 bits, as `randomness.hash64` returns: keys that differ in one bit give masks that are
    alike. It is its own backward: dx = dropout(dy) with the same arguments.
    """
    if probability:
        x = x * dropout_mask(x.shape, key, probability, x.dtype, first_row * x.shape[1])
    out[...] = _add(x, addend)


def _drop_heads(p, key, probability, first_row):
    """p (B, H, T, T) after dropout. Each head has its own key."""
    if not probability:
        return p
    B, H, T, _ = p.shape
    dropped = p.copy().reshape(B * H, T, T)
    first = first_row // T * H
    for head, own in zip(dropped, hash_words(first + np.arange(B * H), key), strict=True):
        head *= dropout_mask((T, T), own, probability, p.dtype)
    return dropped.reshape(p.shape)


def dropout_mask(shape, key, probability, dtype, first=0):
    """Returns the factors 0 or 1 / (1 - probability): a hash of key and flat position decides.

    Positions are counted from `first`, modulo 2**32.
    """
    x = np.arange(first, first + math.prod(shape), dtype=np.uint64).astype(np.uint32)
    low, high = np.uint32(int(key) & 0xFFFFFFFF), np.uint32(int(key) >> 32)
    # The multipliers of triple32 (Wellons 2018), with both halves of the key mixed in. Two of its
    # four shifts suffice: neither the first nor the last affects what a threshold tells apart.
    x = (x ^ low) * np.uint32(0xED5AD4BB)
    x = ((x ^ (x >> np.uint32(15))) + high) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(14))) * np.uint32(0x31848BAB)
    factors = (x >= np.uint32(int(probability * 2**32))).astype(dtype)
    factors *= 1 / (1 - probability)
    return factors.reshape(shape)


@kernel(functions=7, writes=2, temporaries=2, division=("rows", "logits"))
@takes(
    "R V: losses R float32, dlogits R V =logits, logits R V float32 consumed, "
    "targets R < V, weights ?R float32",
    scale=0.1,
)
def cross_entropy(losses, dlogits, logits, targets, scale, weights=None):
    """logits (R, V), targets (R,) -> losses (R,) = log sum exp(logits) - logits[target], in nats.

    Writes losses and dlogits (R, V), which may be logits: scale (softmax(logits) - onehot(target)),
    which for a scale () of 1/R is the gradient of the mean loss. With weights (R,) both are
    multiplied by that of their row. The contents of logits are undefined afterwards.
    """
    rows = np.arange(len(targets))
    weights = np.ones(len(targets), logits.dtype) if weights is None else weights
    top = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - top)
    sums = exponentials.sum(axis=1, keepdims=True)
    losses[...] = weights * (np.log(sums[:, 0]) + (top[:, 0] - logits[rows, targets]))
    exponentials[rows, targets] -= sums[:, 0]
    dlogits[...] = exponentials * (scale * weights[:, None] / sums)


@kernel(functions=2, writes=3, temporaries=10, division=("rows", "logits"))
@takes(
    "R V: losses R float32, dlogits R V =logits, dtemperatures R float32, "
    "logits R V float32 consumed, teacher_logits R V float32, targets R < V, "
    "weights ?R float32",
    alpha=0.5,
    temperature=2.0,
    scale=0.1,
)
def distillation(
    losses,
    dlogits,
    dtemperatures,
    logits,
    teacher_logits,
    targets,
    alpha,
    temperature,
    scale,
    weights=None,
):
    """logits, teacher_logits (R, V), targets (R,) -> losses (R,) of a student, in nats.

    losses = (1 - alpha) cross-entropy of the targets + alpha temperature^2 KL(teacher || student),
    both distributions softmax(logits / temperature) (Hinton et al. 2015). Writes losses, dlogits
    (R, V), which may be logits: scale times the gradient of losses; and dtemperatures (R,), the
    derivative of losses by the temperature. With weights (R,) all are multiplied by that of their
    row. Afterwards the contents of logits are undefined.
    """
    rows, T = np.arange(len(targets)), temperature
    weights = np.ones(len(targets), logits.dtype) if weights is None else weights
    hard, soft, teacher = map(_log_softmax, (logits, logits / T, teacher_logits / T))
    p, q = np.exp(teacher), np.exp(soft)
    divergence = (p * (teacher - soft)).sum(axis=1)
    losses[...] = weights * ((1 - alpha) * -hard[rows, targets] + alpha * T**2 * divergence)
    # forward: teacher = log softmax(u / T), soft = log softmax(z / T); their derivatives by 1 / T
    # are u and z less their means under p and q.
    du = teacher_logits - (p * teacher_logits).sum(axis=1, keepdims=True)
    dz = logits - (q * logits).sum(axis=1, keepdims=True)
    by_inverse = (p * du * (teacher - soft) - p * dz).sum(axis=1)
    dtemperatures[...] = weights * alpha * (2 * T * divergence - by_inverse)
    gradient = (1 - alpha) * np.exp(hard) + alpha * T * (q - p)
    gradient[rows, targets] -= 1 - alpha
    dlogits[...] = scale * weights[:, None] * gradient


def _log_softmax(logits):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@kernel("distillation", functions=2, division=("rows", "logits"))
@takes(
    "R V: logits R V float32",
    indices=lambda c: np.stack([c.some_of(c.V, min(c.V, 4)) for _ in range(c.R)]),
    log_probabilities=lambda c: c.random.standard_normal((c.R, min(c.V, 4) + 1), np.float32),
)
def top_k_logits(logits, indices, log_probabilities):
    """indices (R, K), log_probabilities (R, K + 1) -> logits (R, V). Writes logits.

    The logits of the K indices of a row are its first K log-probabilities; all others are its last.
    """
    log_probabilities = to_float32(log_probabilities)
    logits[...] = log_probabilities[:, -1:]
    np.put_along_axis(logits, indices.astype(np.int64), log_probabilities[:, :-1], axis=1)

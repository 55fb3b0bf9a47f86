"""The cases that are measured: each kernel's shapes, operands, peers and minimum cost.

A case's `flops` and `nbytes` are the minimum for any implementation: every input read once, every
output written once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from smallmind.kernels import compiled, reference
from smallmind.kernels.alignment import aligned_empty, aligned_zeros
from smallmind.kernels.ceilings import multiply_add, multiply_bfloat16
from smallmind.kernels.description import muon_operations
from smallmind.kernels.number_types import BFLOAT16, DTYPES, in_groups, round_to, to_float32
from smallmind.kernels.reference_optimizers import AdamWCoefficients, MatrixBlocks, MuonCoefficients
from smallmind.kernels.timing import Contestant
from smallmind.parts import QUANTISED

try:
    import torch
except ImportError:
    torch = None

Shape = tuple[int, ...]


@dataclass
class Case:
    """One kernel at one shape."""

    ours: Contestant
    numpy: Contestant | None
    torch: Contestant | None
    results: list[np.ndarray]  # what ours writes
    exact: Callable[[], list[np.ndarray]]  # the same in float64
    nbytes: float
    flops: float = 0.0
    peak: Callable[[], float] = multiply_add  # runs at the peak rate, returns its operations
    allowed_error: float = 5e-5  # relative to the largest element; above it the bench stops


@dataclass(frozen=True)
class Kernel:
    """A kernel of the table: the names of its dimensions, its shapes, and how to build a case."""

    name: str
    axes: str
    shapes: Sequence[Shape]
    build: Callable[..., Case] = field(repr=False)


KERNELS: dict[str, Kernel] = {}


def kernel(
    axes: str, shapes: Sequence[Shape]
) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Returns a decorator that adds a builder of cases to the table under its name."""

    def enter(build: Callable[..., Case]) -> Callable[..., Case]:
        KERNELS[build.__name__] = Kernel(build.__name__, axes, shapes, build)
        return build

    return enter


def _normal(*shape: int) -> np.ndarray:
    random = np.random.default_rng(math.prod(shape))
    return random.standard_normal(shape, dtype=np.float32, out=aligned_empty(shape))


def _shifted(*shape: int) -> np.ndarray:
    """Draws numbers that are normal around 1, so that sums do not cancel."""
    numbers = _normal(*shape)
    numbers += 1
    return numbers


def _copy(x: np.ndarray) -> np.ndarray:
    copy = aligned_empty(x.shape)
    copy[...] = x
    return copy


def _tensors(*arrays: np.ndarray) -> list:
    """-> PyTorch tensors of the same memory, or the arrays if PyTorch is not installed."""
    return [torch.from_numpy(array) for array in arrays] if torch else list(arrays)


def _torch(
    run: Callable[[], object], prepare: Callable[[], object] | None = None
) -> Contestant | None:
    return Contestant(run, prepare) if torch else None


def _case(
    name: str,
    outputs: list[np.ndarray],
    inputs: list,
    nbytes: float,
    flops: float = 0.0,
    numpy: Callable[[], object] | None = None,
    torch: Contestant | None = None,
) -> Case:
    """Returns the case of compiled.<name>(*outputs, *inputs), whose exact twin is reference.<name>.

    Without `numpy` the NumPy peer is the reference in float32. Outputs that are added to or
    rewritten start from their current contents.
    """
    starts = [np.nan_to_num(output, copy=True) for output in outputs]
    fast, plain = getattr(compiled, name), getattr(reference, name)

    def exact() -> list[np.ndarray]:
        results = [start.astype(np.float64) for start in starts]
        plain(*results, *(_widen(x) for x in inputs))
        return results

    others = [_copy(start) for start in starts]
    return Case(
        ours=Contestant(lambda: fast(*outputs, *inputs)),
        numpy=Contestant(numpy or (lambda: plain(*others, *inputs))),
        torch=torch,
        results=outputs,
        exact=exact,
        nbytes=nbytes,
        flops=flops,
    )


def _widen(x: Any) -> Any:
    is_float = isinstance(x, np.ndarray) and x.dtype in (np.float32, BFLOAT16)
    return to_float32(x).astype(np.float64) if is_float else x


def _bytes(*arrays: np.ndarray) -> int:
    return sum(array.nbytes for array in arrays)


# The shapes of the operands of each product (M, K) x (K, N), and the order of a step's sizes in it:
# a layer's output, the gradient of its weights, that of its input.
PRODUCTS: dict[str, tuple[Callable[..., tuple[Shape, Shape]], Callable[..., Shape]]] = {
    "matmul": (lambda M, K, N: ((M, K), (K, N)), lambda M, K, N: (M, K, N)),
    "matmul_transpose_a": (lambda M, K, N: ((K, M), (K, N)), lambda M, K, N: (K, M, N)),
    "matmul_transpose_b": (lambda M, K, N: ((M, K), (N, K)), lambda M, K, N: (M, N, K)),
}

# Products. The first eight are those of a training step (M tokens, K channels in, N out); then
# sizes that are not multiples of anything, and few rows, as in generation.
_STEP = [
    (768, 128, 384),
    (768, 128, 512),
    (768, 512, 128),
    (2048, 128, 512),
    (8192, 128, 512),
    (2048, 256, 1024),
    (4096, 384, 1536),
    (2048, 1024, 256),
]
_AWKWARD = [(767, 127, 385), (2047, 129, 511), (8191, 65, 130), (8192, 64, 128)]
_FEW = [(M, 128, N) for M in (1, 4, 16, 64) for N in (384, 512)]
_FEW += [(1, 512, 128), (16, 512, 128), (1, 1024, 4096), (16, 1024, 4096), (1, 8192, 8192)]


def _transposed(name: str, a: Any, b: Any) -> tuple[Any, Any]:
    """-> the operands of a product as (M, K) and (K, N)."""
    return a.T if name == "matmul_transpose_a" else a, b.T if name == "matmul_transpose_b" else b


def _product_case(
    name: str,
    out: np.ndarray,
    inputs: list,
    flops: float,
    torch: Contestant | None = None,
    is_rounded: bool = False,
    **rest: Any,
) -> Case:
    """Returns the case of a product of other types than float32, which NumPy lacks."""
    fast, plain = getattr(compiled, name), getattr(reference, name)

    def exact() -> list[np.ndarray]:
        result = np.empty(out.shape)
        plain(result, *(inputs if is_rounded else map(_widen, inputs)))
        return [result]

    nbytes = _bytes(out, *(x for x in inputs if isinstance(x, np.ndarray)))
    ours = Contestant(lambda: fast(out, *inputs))
    return Case(ours, None, torch, [out], exact, nbytes, flops, **rest)


def _product(name: str, M: int, K: int, N: int) -> Case:
    a, b = (_normal(*shape) for shape in PRODUCTS[name][0](M, K, N))
    out, theirs = aligned_empty((M, N)), aligned_empty((M, N))
    at, bt, ct = _tensors(a, b, aligned_empty(out.shape))
    return _case(
        name,
        [out],
        [a, b],
        _bytes(a, b, out),
        2 * M * K * N,
        numpy=lambda: np.matmul(*_transposed(name, a, b), out=theirs),
        torch=_torch(lambda: torch.mm(*_transposed(name, at, bt), out=ct)),
    )


def _bfloat16(name: str, M: int, K: int, N: int) -> Case:
    """Returns a product of bfloat16 matrices; its result is float32 for gradients of weights."""
    exact_result = name == "matmul_transpose_a"
    a, b = (round_to(_normal(*shape), BFLOAT16) for shape in PRODUCTS[name][0](M, K, N))
    out = aligned_empty((M, N), np.float32 if exact_result else BFLOAT16)
    at, bt = (torch and torch.from_numpy(x).view(torch.bfloat16) for x in (a, b))
    ct = torch and torch.empty((M, N), dtype=torch.bfloat16)
    peer = _torch(lambda: torch.mm(*_transposed(name, at, bt), out=ct))
    error = 5e-5 if exact_result else 2**-8
    flops = 2 * M * K * N
    return _product_case(
        name, out, [a, b], flops, peer, peak=multiply_bfloat16, allowed_error=error
    )


for suffix, build in ("", _product), ("_bfloat16", _bfloat16):
    for name, (_, order) in PRODUCTS.items():
        sizes = _STEP if suffix else [*_STEP, *_AWKWARD]
        sizes = sizes if suffix or name == "matmul_transpose_a" else [*sizes, *_FEW]
        KERNELS[name + suffix] = Kernel(
            name + suffix, "M K N", [order(*shape) for shape in sizes], partial(build, name)
        )


_GENERATED = 8  # rows up to which products are those of generation


def _quantised(dtype: np.dtype, is_transposed: bool, R: int, K: int, N: int) -> Case:
    """-> a product of R rows and blocks of small integers; few rows are rounded."""
    name = "matmul_quantised_transpose" if is_transposed else "matmul_quantised"
    w = round_to(_normal(N, K), dtype)
    a, out = _normal(R, N if is_transposed else K), aligned_empty((R, K if is_transposed else N))
    others = [] if is_transposed else [None, None, R <= _GENERATED]
    if any(others):
        w, others = in_groups(w), [*others, True]
    # Float32 decides what is rounded up, in the exact product as well.
    return _product_case(name, out, [a, w, *others], 2 * R * K * N, is_rounded=any(others))


# Generation, by one sequence and by several; then a prompt, or fine-tuning.
_LAYERS = [(768, 768), (768, 3072), (3072, 768), (768, 50257)]
_MANY = [(512, 768, 768), (512, 768, 3072), (2048, 768, 3072), (2048, 3072, 768)]
for dtype_name in QUANTISED:
    dtype = DTYPES[dtype_name]
    few: list[Shape] = [(R, *shape) for R in (1, 4, 8) for shape in _LAYERS]
    for form, is_transposed, shapes in ("", False, [*few, *_MANY]), ("_transpose", True, _MANY):
        name = f"matmul_quantised{form}_{dtype_name}"
        KERNELS[name] = Kernel(name, "R K N", shapes, partial(_quantised, dtype, is_transposed))


@kernel("M K N", [(768, 128, 512), (2048, 128, 512), (2048, 256, 1024), (4096, 384, 1536)])
def matmul_gelu(M: int, K: int, N: int) -> Case:
    # Sums of size 1, as after a layer norm: CPUs are slow if a sigmoid is denormal.
    a, b, bias = _normal(M, K) / np.float32(math.sqrt(K)), _normal(K, N), _normal(N)
    activation, preactivation = aligned_empty((M, N)), aligned_empty((M, N))
    at, bt, biast = _tensors(a, b, bias)
    return _case(
        "matmul_gelu",
        [activation, preactivation],
        [a, b, bias],
        _bytes(a, b, bias, activation, preactivation),
        2 * M * K * N,
        torch=_torch(
            lambda: torch.nn.functional.gelu(torch.addmm(biast, at, bt), approximate="tanh")
        ),
    )


_HEADS = [(12, 4, 64, 32), (16, 4, 128, 32), (16, 4, 512, 32), (4, 6, 1024, 64), (1, 4, 4096, 32)]


@kernel("B H T D", _HEADS)
def attention(B: int, H: int, T: int, D: int) -> Case:
    qkv = _normal(B * T, 3 * H * D)
    out, logsumexp = aligned_empty((B * T, H * D)), aligned_empty((B, H, T))
    q, k, v = _torch_heads(qkv, 3, B, H, T)
    return _case(
        "attention",
        [out, logsumexp],
        [qkv],
        _bytes(qkv, out, logsumexp),
        2 * B * H * T * (T + 1) * D,  # two products over the causal half
        torch=_torch(
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
    )


@kernel("B H T D", _HEADS)
def attention_backward(B: int, H: int, T: int, D: int) -> Case:
    """Builds forward and backward together, as PyTorch cannot run backward alone."""
    qkv, dout = _normal(B * T, 3 * H * D), _shifted(B * T, H * D)
    out, logsumexp = aligned_empty((B * T, H * D)), aligned_empty((B, H, T))
    dqkv = aligned_empty(qkv.shape)

    def forward_and_backward(kernels: object, dqkv: np.ndarray, *arrays: np.ndarray) -> None:
        out, logsumexp, qkv, dout = arrays
        kernels.attention(out, logsumexp, qkv)  # type: ignore[attr-defined]
        kernels.attention_backward(dqkv, dout, out, logsumexp, qkv)  # type: ignore[attr-defined]

    def exact() -> list[np.ndarray]:
        results = [np.empty(x.shape) for x in (dqkv, out, logsumexp)]
        forward_and_backward(reference, *results, _widen(qkv), _widen(dout))
        return results

    q, k, v = _torch_heads(qkv, 3, B, H, T)
    (d,) = _torch_heads(dout, 1, B, H, T)

    def run_torch() -> None:
        for x in (q, k, v):
            x.grad = None
            x.requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(d)

    others = [aligned_empty(x.shape) for x in (dqkv, out, logsumexp)]
    return Case(
        Contestant(lambda: forward_and_backward(compiled, dqkv, out, logsumexp, qkv, dout)),
        Contestant(lambda: forward_and_backward(reference, *others, qkv, dout)),
        _torch(run_torch),
        [dqkv, out, logsumexp],
        exact,
        _bytes(qkv, out, logsumexp) + _bytes(dout, out, logsumexp, qkv, dqkv),
        7 * B * H * T * (T + 1) * D,  # two products, then five
    )


def _torch_heads(x: np.ndarray, count: int, B: int, H: int, T: int) -> list:
    """x (B T, count C) -> count tensors (B, H, T, D), contiguous as PyTorch likes them."""
    if torch is None:
        return [None] * count
    heads = torch.from_numpy(x).reshape(B, T, count, H, -1).permute(2, 0, 3, 1, 4)
    return [head.contiguous() for head in heads]


# The rest are limited by memory: shapes of a step, which fit in the cache, and one that does not.
_ROWS = [(768, 128), (8192, 128), (2048, 384), (262144, 128)]
_WIDE = [(768, 512), (8192, 512), (2048, 1536), (65536, 512)]


@kernel("R C", _ROWS)
def layernorm(R: int, C: int) -> Case:
    x, weight, bias = _normal(R, C), _normal(C), _shifted(C)
    out, mean, rstd = aligned_empty(x.shape), aligned_empty(R), aligned_empty(R)
    xt, wt, bt = _tensors(x, weight, bias)
    return _case(
        "layernorm",
        [out, mean, rstd],
        [x, weight, bias],
        _bytes(x, out, mean, rstd, weight, bias),
        torch=_torch(lambda: torch.native_layer_norm(xt, [C], wt, bt, 1e-5)),
    )


@kernel("R C", _ROWS)
def layernorm_backward(R: int, C: int) -> Case:
    x, dy, weight = _normal(R, C), _shifted(R, C), _normal(C)
    mean, rstd = aligned_empty(R), aligned_empty(R)
    compiled.layernorm(aligned_empty(x.shape), mean, rstd, x, weight)
    dx, dweight, dbias = aligned_empty(x.shape), aligned_zeros(C), aligned_zeros(C)
    tensors = _tensors(dy, x, weight, mean[:, None], rstd[:, None])
    dyt, xt, wt, meant, rstdt = tensors
    backward = torch and torch.ops.aten.native_layer_norm_backward
    return _case(
        "layernorm_backward",
        [dx, dweight, dbias],
        [dy, x, mean, rstd, weight],
        _bytes(x, dy, dx, mean, rstd, weight, dweight, dbias),
        torch=_torch(lambda: backward(dyt, xt, [C], meant, rstdt, wt, wt, [True] * 3)),
    )


@kernel("R C", _WIDE)
def gelu(R: int, C: int) -> Case:
    x, y = _normal(R, C), aligned_empty((R, C))
    (xt,) = _tensors(x)
    peer = _torch(lambda: torch.nn.functional.gelu(xt, approximate="tanh"))
    return _case("gelu", [y], [x], _bytes(x, y), torch=peer)


@kernel("R C", _WIDE)
def gelu_backward(R: int, C: int) -> Case:
    x, dy = _normal(R, C), _shifted(R, C)
    dx, y = aligned_empty((R, C)), aligned_empty((R, C))
    dyt, xt = _tensors(dy, x)
    backward, forward = torch and torch.ops.aten.gelu_backward, torch and torch.ops.aten.gelu
    return _case(
        "gelu_backward",
        [dx, y],
        [dy, x],
        _bytes(x, dy, dx, y),
        torch=_torch(
            lambda: (backward(dyt, xt, approximate="tanh"), forward(xt, approximate="tanh"))
        ),
    )


@kernel("R V", [(768, 65), (8192, 65), (1024, 4096), (8192, 4096)])
def cross_entropy(R: int, V: int) -> Case:
    start = _shifted(R, V)
    start *= 3
    logits, losses = _copy(start), aligned_empty(R)
    targets = np.random.default_rng(0).integers(0, V, R).astype(np.int32)
    # The gradient overwrites the logits, as in float32 training.
    case = _case("cross_entropy", [losses, logits], [logits, targets, 1 / R], 2 * logits.nbytes)
    ours, theirs = case.ours, aligned_empty((R, V))
    case.ours = Contestant(ours.run, lambda: np.copyto(logits, start))
    case.numpy = Contestant(
        lambda: reference.cross_entropy(np.empty_like(losses), theirs, theirs, targets, 1 / R),
        lambda: np.copyto(theirs, start),
    )
    if torch:
        x, y = torch.from_numpy(start.copy()).requires_grad_(), torch.from_numpy(targets).long()
        case.torch = Contestant(
            lambda: torch.nn.functional.cross_entropy(x, y).backward(),
            lambda: setattr(x, "grad", None),
        )
    return case


@kernel("B T C", [(12, 64, 128), (16, 512, 128), (8, 256, 384), (512, 512, 128)])
def embedding(B: int, T: int, C: int) -> Case:
    token, position, ids, _ = _embedded(B, T, C)
    out = aligned_empty((B * T, C))
    tt, pt, it = _tensors(token, position, ids)
    steps = torch and torch.arange(T)
    look_up = torch and torch.nn.functional.embedding
    return _case(
        "embedding",
        [out],
        [token, ids, position, np.array([0])],
        _bytes(out, token, position, ids),
        torch=_torch(lambda: look_up(it, tt) + look_up(steps, pt)),
    )


@kernel("B T C", [(12, 64, 128), (16, 512, 128), (8, 256, 384), (512, 512, 128)])
def embedding_backward(B: int, T: int, C: int) -> Case:
    token, position, ids, dout = _embedded(B, T, C)
    dtoken, dposition = aligned_zeros(token.shape), aligned_zeros(position.shape)
    dt, it = _tensors(dout.reshape(B, T, C), ids)
    backward = torch and torch.ops.aten.embedding_dense_backward
    return _case(
        "embedding_backward",
        [dtoken, dposition],
        [dout, ids],
        _bytes(dout, ids, dtoken, dposition),
        torch=_torch(lambda: (backward(dt, it, 65, -1, False), dt.sum(0))),
    )


def _embedded(B: int, T: int, C: int) -> tuple[np.ndarray, ...]:
    ids = np.random.default_rng(0).integers(0, 65, (B, T)).astype(np.int32)
    return _normal(65, C), _normal(T, C), ids, _normal(B * T, C)


@kernel("R C", _ROWS)
def dropout(R: int, C: int) -> Case:
    x, addend, out = _normal(R, C), _shifted(R, C), aligned_empty((R, C))
    xt, pt = _tensors(x, addend)
    return _case(
        "dropout",
        [out],
        [x, (7 << 32) + 5, 0.1, addend],
        _bytes(x, addend, out),
        torch=_torch(lambda: torch.nn.functional.dropout(xt, 0.1) + pt),
    )


@kernel("R C", _WIDE)
def column_sum(R: int, C: int) -> Case:
    x, out = _normal(R, C), aligned_zeros(C)
    xt, ot = _tensors(x, out.copy())
    return _case("column_sum", [out], [x], x.nbytes, torch=_torch(lambda: ot.add_(xt.sum(0))))


_PARAMETERS = [(206_000,), (800_000,), (10_650_000,), (33_000_000,)]


@kernel("n", _PARAMETERS)
def sum_of_squares(n: int) -> Case:
    x, result = _normal(n), np.empty(1)
    (xt,) = _tensors(x)

    def run() -> None:
        result[0] = compiled.sum_of_squares(x)

    return Case(
        Contestant(run),
        Contestant(lambda: float(np.dot(x, x))),
        _torch(lambda: torch.linalg.vector_norm(xt)),
        [result],
        lambda: [np.array([reference.sum_of_squares(x)])],
        x.nbytes,
    )


@kernel("L C", [(3, 128), (4, 192), (6, 384)])
def muon(L: int, C: int) -> Case:
    shapes = [(C, 4 * C), (4 * C, C)] * L + [(C, C)] * 4 * L
    rows, columns = np.array(shapes).T.copy()
    starts = np.cumsum(rows * columns) - rows * columns
    n = int((rows * columns).sum())
    p, g, m = _normal(n), _shifted(n), _normal(n)
    blocks = MatrixBlocks(starts, rows, columns, columns)
    coefficients = MuonCoefficients(0.02, 0.95, 0.1, 0.5)
    gradient = _copy(g)
    flops = muon_operations(SimpleNamespace(blocks=blocks))
    case = _case("muon", [p, g, m], [blocks, coefficients], 2 * _bytes(p, g, m), flops)
    case.ours = Contestant(case.ours.run, lambda: np.copyto(g, gradient))
    if torch:
        xs = [torch.from_numpy(x.T.copy()).requires_grad_() for x in blocks.of(p)]
        for x, own in zip(xs, blocks.of(gradient), strict=True):
            x.grad = torch.from_numpy(own.T.copy())
        case.torch = Contestant(torch.optim.Muon(xs, lr=0.02).step)
    return case


@kernel("n", _PARAMETERS)
def adamw(n: int) -> Case:
    p, g, m, v = _normal(n), _shifted(n), _normal(n), np.abs(_normal(n), out=aligned_empty(n))
    decayed = n * 9 // 10
    coefficients = AdamWCoefficients(1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0, 1.0, 0.5)
    gradient = _copy(g)
    case = _case("adamw", [p, g, m, v], [decayed, coefficients], 2 * _bytes(p, g, m, v))
    case.ours = Contestant(case.ours.run, lambda: np.copyto(g, gradient))
    if torch:
        x = torch.from_numpy(p.copy()).requires_grad_()
        x.grad = torch.from_numpy(gradient.copy())
        optimizer = torch.optim.AdamW([x], lr=1e-3, weight_decay=0.1, fused=True)

        def step() -> None:
            optimizer.step()
            x.grad.zero_()

        case.torch = Contestant(step, lambda: x.grad.copy_(torch.from_numpy(gradient)))
    return case

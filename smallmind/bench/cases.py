"""Peers of kernels: what NumPy and PyTorch have in their place, where they have something.

Whatever has no entry is measured beside its plain twin alone.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from smallmind.kernels import reference
from smallmind.kernels.cases import Case, types
from smallmind.kernels.number_types import BFLOAT16, is_quantised

# Where the worker that measures has imported it: before the kernels, so that both have threads.
torch: Any = sys.modules.get("torch")

Run = Callable[[], object]
NUMPY: dict[str, Callable[[Any], Run]] = {}  # of a call's arguments, in place of the plain twin
TORCH: dict[str, Callable[[Any], Run]] = {}  # of the same arguments as tensors


def numpy_peer(case: Case) -> Run | None:
    """Returns what NumPy does in place of a kernel; None for number types that it lacks."""
    arrays = [x for x in case.arguments.values() if isinstance(x, np.ndarray)]
    if case.dtype not in types(case.name)[:1] or any(is_quantised(x.dtype) for x in arrays):
        return None
    own = {key: _copy(value) for key, value in case.arguments.items()}
    if case.name in NUMPY:
        return NUMPY[case.name](SimpleNamespace(**own))
    return partial(getattr(reference, case.name), *own.values())


def torch_peer(case: Case) -> Run | None:
    """Returns what PyTorch does in place of a kernel; None if it has nothing, or is missing."""
    if torch is None or case.name not in TORCH or case.dtype == "float16":
        return None
    tensors = {key: _tensor(value) for key, value in case.arguments.items()}
    return TORCH[case.name](SimpleNamespace(**tensors, case=case))


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(value.copy())
    return tensor.view(torch.bfloat16) if value.dtype == BFLOAT16 else tensor


def in_torch(build: Callable[[Any], Run]) -> Callable[[Any], Run]:
    """Enters PyTorch's form of the kernel of this name: a decorator."""
    TORCH[build.__name__] = build
    return build


NUMPY["matmul"] = lambda a: lambda: np.matmul(a.a, a.b, out=a.out)
NUMPY["matmul_transpose_a"] = lambda a: lambda: np.matmul(a.a.T, a.b, out=a.out)
NUMPY["matmul_transpose_b"] = lambda a: lambda: np.matmul(a.a, a.b.T, out=a.out)
NUMPY["sum_of_squares"] = lambda a: lambda: np.dot(a.x, a.x)

TORCH["matmul"] = lambda a: lambda: torch.mm(a.a, a.b, out=a.out)
TORCH["matmul_transpose_a"] = lambda a: lambda: torch.mm(a.a.T, a.b)
TORCH["matmul_transpose_b"] = lambda a: lambda: torch.mm(a.a, a.b.T, out=a.out)
TORCH["sum_of_squares"] = lambda a: lambda: torch.linalg.vector_norm(a.x)
TORCH["column_sum"] = lambda a: lambda: a.out.add_(a.x.sum(0))
TORCH["dropout"] = lambda a: lambda: functional().dropout(a.x, a.probability) + a.addend
TORCH["gelu"] = lambda a: lambda: functional().gelu(a.x, approximate="tanh")
TORCH["gelu_erf"] = lambda a: lambda: functional().gelu(a.x)
TORCH["layernorm"] = lambda a: (
    lambda: torch.native_layer_norm(a.x, a.weight.shape, a.weight, a.bias, a.epsilon)
)
TORCH["rmsnorm"] = lambda a: lambda: functional().rms_norm(a.x, a.weight.shape, a.weight, a.epsilon)


def functional() -> Any:
    """Returns the functions of PyTorch."""
    return torch.nn.functional


@in_torch
def matmul_gelu(a: Any) -> Run:
    return lambda: functional().gelu(torch.addmm(a.bias, a.a, a.b), approximate="tanh")


@in_torch
def swiglu(a: Any) -> Run:
    gate, up = a.x.chunk(2, 1)
    return lambda: functional().silu(gate) * up


@in_torch
def gelu_backward(a: Any) -> Run:
    backward, forward = torch.ops.aten.gelu_backward, torch.ops.aten.gelu
    return lambda: (
        backward(a.dy, a.x, approximate="tanh"),
        forward(a.x, approximate="tanh"),
    )


@in_torch
def layernorm_backward(a: Any) -> Run:
    backward = torch.ops.aten.native_layer_norm_backward
    mean, rstd, shape = a.mean[:, None], a.rstd[:, None], a.weight.shape
    return lambda: backward(a.dy, a.x, shape, mean, rstd, a.weight, a.weight, [True] * 3)


@in_torch
def rmsnorm_backward(a: Any) -> Run:
    x, weight = a.x.requires_grad_(), a.weight.requires_grad_()
    return _backward(functional().rms_norm(x, weight.shape, weight, 0.1), [x, weight], a.dy)


@in_torch
def attention(a: Any) -> Run:
    q, k, v = _heads(a.qkv, 3, a.case)
    return lambda: functional().scaled_dot_product_attention(q, k, v, is_causal=True)


@in_torch
def attention_backward(a: Any) -> Run:
    q, k, v = heads = [x.requires_grad_() for x in _heads(a.qkv, 3, a.case)]
    out = functional().scaled_dot_product_attention(q, k, v, is_causal=True)
    return _backward(out, heads, *_heads(a.dout, 1, a.case))


def _backward(out: Any, inputs: list, gradient: Any) -> Run:
    """Returns the backward pass alone, again and again."""
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _heads(x: Any, count: int, case: Case) -> list:
    """x (B T, count H D) -> count tensors (B, H, T, D), contiguous as PyTorch likes them."""
    B, H, T, _ = case.sizes
    heads = x.reshape(B, T, count, H, -1).permute(2, 0, 3, 1, 4)
    return [head.contiguous() for head in heads]


@in_torch
def cross_entropy(a: Any) -> Run:
    logits, targets = a.logits.float().requires_grad_(), a.targets.long()

    def run() -> None:
        logits.grad = None
        functional().cross_entropy(logits, targets).backward()

    return run


@in_torch
def embedding(a: Any) -> Run:
    steps, look_up = torch.arange(a.ids.shape[1]), functional().embedding
    return lambda: look_up(a.ids, a.weight) + look_up(steps, a.addend)


@in_torch
def embedding_backward(a: Any) -> Run:
    backward, dout = torch.ops.aten.embedding_dense_backward, a.dout.reshape(*a.ids.shape, -1)
    return lambda: (backward(dout, a.ids, len(a.dweight), -1, False), dout.sum(0))


@in_torch
def adamw(a: Any) -> Run:
    x = a.parameters.requires_grad_()
    x.grad, zeros = a.gradients, a.gradients.zero_
    step = torch.optim.AdamW([x], lr=1e-3, weight_decay=0.1, fused=True).step
    return lambda: (step(), zeros())


@in_torch
def muon(a: Any) -> Run:
    xs = []
    for x, gradient in zip(
        *map(a.blocks.of, (a.parameters.numpy(), a.gradients.numpy())), strict=True
    ):
        xs.append(torch.from_numpy(x.T.copy()).requires_grad_())
        xs[-1].grad = torch.from_numpy(gradient.T.copy())
    return torch.optim.Muon(xs, lr=0.02).step

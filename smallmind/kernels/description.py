"""A kernel's description, beside its plain twin: profiles, checks, estimates and benches follow it.

A new kernel is two files: its twin in `reference`, described, and the compiled one in the module
that the description names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from smallmind.kernels.number_types import BLOCK

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Description:
    """Facts about a kernel that its arguments do not show.

    `writes`: how many of its first arguments it writes; `adds` if it reads them too. `temporaries`:
    the most that the plain twin holds at a time, in sizes of the largest array that it writes, or a
    function of the arguments -> bytes. `division`: how the compiled one shares its work among
    threads, with the argument whose rows, elements or chunks it divides: see `bench threads`.
    `functions` is what compiling it costs, after those that cost more have been compiled: counted
    at a first start on AVX2.
    """

    module: str  # of the compiled kernel, in smallmind.kernels
    functions: int = 0  # that become machine code with it
    writes: int = 1
    adds: bool = False
    temporaries: float | Callable[..., int] = 0
    gradient: str = "dy"  # or dout: in a backward pass, that of what the layer wrote in the forward
    is_activation: bool = True  # the array `out` or `y` that it writes in a forward pass
    silent: float | None = None  # the largest |activation| of a silent hidden unit: GELU's at -4
    is_of_layer: bool = True  # optimizers call the others
    division: tuple[str, str] = ("alone", "")
    operations: Callable[..., int] | None = None  # of its products, from its arguments
    repeats: float = 0.0  # the share of these that compute again what the forward pass had

    def temporary_bytes(self, *arguments: Any, **named: Any) -> int:
        """Returns the bytes of the temporary arrays of a call of the plain twin."""
        if callable(self.temporaries):
            return int(self.temporaries(*arguments, **named))
        if not self.temporaries:
            return 0
        largest = max(int(array.nbytes) for array in arguments[: self.writes])
        return int(self.temporaries * largest)


KERNELS: dict[str, Description] = {}  # by name
UNKNOWN = Description("")  # of a kernel that a person adds


def kernel(module: str = "", *, functions: int, **facts: Any) -> Callable[[Function], Function]:
    """Describes a kernel, by default compiled in the module of its own name."""

    def describe(function: Function) -> Function:
        name = function.__name__
        KERNELS[name] = Description(module or name, functions, **facts)
        return function

    return describe


def described(name: str) -> Description:
    """Returns the description of the kernel of this name, also of one that a person added."""
    return KERNELS.get(name, UNKNOWN)


def product_operations(out: np.ndarray, a: np.ndarray, *_: Any, **__: Any) -> int:
    """The multiplications and additions of a product (M, K) x (K, N), transposed or not."""
    return 2 * int(a.size) * int(out.shape[1])


def gelu_product_operations(
    _activation: np.ndarray, preactivation: np.ndarray, a: np.ndarray, *_: Any, **__: Any
) -> int:
    """Counts as `product_operations` does."""
    return product_operations(preactivation, a)


def attention_operations(
    out: np.ndarray, logsumexp: np.ndarray, _qkv: np.ndarray, *_: Any, **__: Any
) -> int:
    """Returns the operations of two products over the causal half."""
    return 2 * int(out.size) * (int(logsumexp.shape[2]) + 1)


def attention_backward_operations(
    _dqkv: np.ndarray,
    _dout: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    *_: Any,
    **__: Any,
) -> int:
    """-> the operations of five products over the causal half, one of which the forward pass
    had.
    """
    return 5 * int(out.size) * (int(logsumexp.shape[2]) + 1)


def muon_operations(
    _parameters: np.ndarray, _gradients: np.ndarray, _m: np.ndarray, blocks: Any, *_: Any
) -> int:
    """The operations of the iterations on Gram matrices (C, C) of matrices (C, K).

    One triangle of each product is needed: 17 C^3 in the iterations, and 3 C^2 K.
    """
    short = np.minimum(blocks.rows, blocks.columns).astype(np.int64)
    long = np.maximum(blocks.rows, blocks.columns).astype(np.int64)
    return int((17 * short**3 + 3 * short**2 * long).sum())


def attention_temporaries(
    out: np.ndarray, logsumexp: np.ndarray, qkv: np.ndarray, *mask: Any, **named: Any
) -> int:
    """Returns the bytes that `reference.attention` holds besides its arguments, at most."""
    product = max(0, int(out.nbytes) - _scores(logsumexp, 1), _seen(*mask, **named))
    most = max(product, _mask(logsumexp, *mask, **named))
    return _scores(logsumexp, 2) + _repeated(out, qkv) + most


def attention_backward_temporaries(
    _dqkv: np.ndarray,
    _dout: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    qkv: np.ndarray,
    *mask: Any,
    **named: Any,
) -> int:
    """-> the bytes that `reference.attention_backward` holds besides its arguments, at most."""
    most = max(3 * int(out.nbytes), _mask(logsumexp, *mask, **named))
    return _scores(logsumexp, 3) + _repeated(out, qkv) + most


def quantised_product_temporaries(
    out: np.ndarray, a: np.ndarray, w: np.ndarray, *_: Any, **__: Any
) -> int:
    """Returns the bytes of dequantised weights and the product, at most."""
    return 2 * w.size * BLOCK * int(a.itemsize) + 3 * int(out.nbytes)


def muon_temporaries(
    parameters: np.ndarray, _gradients: np.ndarray, _m: np.ndarray, blocks: Any, *_others: Any
) -> int:
    """-> the bytes that `reference.muon` holds: seven arrays of the size of the largest matrix."""
    return 7 * int((blocks.rows * blocks.columns).max()) * int(parameters.itemsize)


def _repeated(out: np.ndarray, qkv: np.ndarray) -> int:
    """-> the bytes of keys and values repeated for each head of queries, if some share them."""
    return 2 * int(out.nbytes) if qkv.shape[1] < 3 * out.shape[1] else 0


def _seen(
    _key: int = 0,
    _probability: float = 0.0,
    _first_row: int = 0,
    firsts: np.ndarray | None = None,
) -> int:
    """The bytes of the mask of documents (B, 1, T, T), as it is computed."""
    return 0 if firsts is None else 2 * firsts.size * firsts.shape[1]


def _mask(
    logsumexp: np.ndarray,
    _key: int = 0,
    probability: float = 0.0,
    _first_row: int = 0,
    _firsts: np.ndarray | None = None,
) -> int:
    """-> the bytes that computing the dropout mask of one head takes, whose positions are
    64-bit.
    """
    return 5 * logsumexp.shape[2] ** 2 * int(logsumexp.itemsize) if probability else 0


def _scores(logsumexp: np.ndarray, count: int) -> int:
    """logsumexp (B, H, T) -> the bytes of `count` arrays (B, H, T, T)."""
    return count * int(logsumexp.nbytes) * logsumexp.shape[2]

"""A kernel's description, beside its plain twin: profiles, checks, estimates and benches follow it.

A new kernel is two files: its twin in `reference`, described, and the compiled one in the module
that the description names.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from smallmind.kernels.number_types import BLOCK

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Description:
    """Facts about a kernel that its arguments do not show.

    `writes`: how many of its first arguments it writes; `adds` if it reads them too. `temporaries`:
    the most that the plain twin holds at a time, in sizes of the largest array that it writes, or a
    function of a call -> bytes. `division`: how the compiled one shares its work among
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
            return self.temporaries(*arguments, **named)
        if not self.temporaries:
            return 0
        largest = max(int(array.nbytes) for array in arguments[: self.writes])
        return int(self.temporaries * largest)


KERNELS: dict[str, Description] = {}  # by name
UNKNOWN = Description("")  # of a kernel that a person adds


def kernel(module: str = "", *, functions: int, **facts: Any) -> Callable[[Function], Function]:
    """Describes a kernel, by default compiled in the module of its own name.

    Functions among the facts get a call: an object with the arguments as attributes.
    """

    def describe(function: Function) -> Function:
        name, signature = function.__name__, inspect.signature(function)

        def of_arguments(count: Callable[[Any], int]) -> Callable[..., int]:
            def counted(*arguments: Any, **named: Any) -> int:
                call = signature.bind(*arguments, **named)
                call.apply_defaults()
                return count(SimpleNamespace(**call.arguments))

            return counted

        for key, fact in facts.items():
            facts[key] = of_arguments(fact) if callable(fact) else fact
        KERNELS[name] = Description(module or name, functions, **facts)
        return function

    return describe


def described(name: str) -> Description:
    """Returns the description of the kernel of this name, also of one that a person added."""
    return KERNELS.get(name, UNKNOWN)


def product_operations(call: Any) -> int:
    """-> the multiplications and additions of a product (M, K) x (K, N), transposed or not."""
    return 2 * int(call.a.size) * int(call.out.shape[1])


def gelu_product_operations(call: Any) -> int:
    """Counts as `product_operations` does."""
    return 2 * int(call.a.size) * int(call.preactivation.shape[1])


def attention_operations(call: Any) -> int:
    """Returns the operations of two products over the causal half."""
    return 2 * int(call.out.size) * (int(call.logsumexp.shape[2]) + 1)


def attention_backward_operations(call: Any) -> int:
    """Returns those of five products, one of which the forward pass had."""
    return 5 * int(call.out.size) * (int(call.logsumexp.shape[2]) + 1)


def muon_operations(call: Any) -> int:
    """-> the operations of the iterations on Gram matrices (C, C) of matrices (C, K).

    One triangle of each product is needed: 17 C^3 in the iterations, and 3 C^2 K.
    """
    rows, columns = (x.astype(np.int64) for x in (call.blocks.rows, call.blocks.columns))
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    return int((17 * short**3 + 3 * short**2 * long).sum())


def attention_temporaries(call: Any) -> int:
    """Returns the bytes that `reference.attention` holds besides its arguments, at most."""
    # The mask of documents (B, 1, T, T), as it is computed.
    seen = 0 if call.firsts is None else 2 * call.firsts.size * call.firsts.shape[1]
    product = max(0, int(call.out.nbytes) - _scores(call), seen)
    return 2 * _scores(call) + _repeated(call) + max(product, _mask(call))


def attention_backward_temporaries(call: Any) -> int:
    """-> the bytes that `reference.attention_backward` holds besides its arguments, at most."""
    return 3 * _scores(call) + _repeated(call) + max(3 * int(call.out.nbytes), _mask(call))


def quantised_product_temporaries(call: Any) -> int:
    """Returns the bytes of dequantised weights and the product, at most."""
    return 2 * call.w.size * BLOCK * int(call.a.itemsize) + 3 * int(call.out.nbytes)


def muon_temporaries(call: Any) -> int:
    """-> the bytes that `reference.muon` holds: seven arrays of the size of the largest matrix."""
    largest = int((call.blocks.rows * call.blocks.columns).max())
    return 7 * largest * int(call.parameters.itemsize)


def _repeated(call: Any) -> int:
    """-> the bytes of keys and values repeated for each head of queries, if some share them."""
    return 2 * int(call.out.nbytes) if call.qkv.shape[1] < 3 * call.out.shape[1] else 0


def _mask(call: Any) -> int:
    """-> the bytes that computing one head's dropout mask takes, whose positions have 64 bits."""
    T, itemsize = call.logsumexp.shape[2], int(call.logsumexp.itemsize)
    return 5 * T**2 * itemsize if call.probability else 0


def _scores(call: Any) -> int:
    """-> the bytes of an array (B, H, T, T)."""
    return int(call.logsumexp.nbytes) * call.logsumexp.shape[2]

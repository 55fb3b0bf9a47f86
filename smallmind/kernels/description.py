"""A kernel's description, beside its plain twin: profiles, checks, estimates and benches follow it.

A new kernel is two files: its twin in `reference`, described, and the compiled one in the module
that the description names.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from smallmind.kernels.number_types import BLOCK

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Array:
    """How an argument that is an array is made: see `takes`."""

    dims: tuple[str, ...]
    kind: str = ""  # the number type; "" for the one that the kernel computes in
    is_read: bool = False  # if it is an output
    is_optional: bool = False
    below: str = ""  # the end of the range of integers
    may_be: tuple[str, ...] = ()  # arguments whose arrays it may be, one at a time
    is_written: bool = False  # though it is not among the first arguments
    is_consumed: bool = False
    moved: tuple[str, ...] = ()  # the dims of the part that a call touches


@dataclass(frozen=True)
class Arguments:
    """How a kernel's arguments are made for some sizes."""

    axes: tuple[str, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    after: str = ""
    shapes: Sequence[tuple[int, ...]] = ()


def takes(
    text: str, /, *, after: str = "", shapes: Sequence[tuple[int, ...]] = (), **values: Any
) -> Callable[[Function], Function]:
    """Says how the arguments of a plain twin are made: a decorator.

    The text names the axes, then each array with its dimensions: "R C: y R 2*C, x R C, bias ?C".
    Its elements have the type that the kernel computes in, or the one after the dimensions:
    float32, int8, int32, uint8, blocks (of small integers). `+` marks an output that is read too,
    such as a sum; `?` what may be left out, also a number, which has no dimensions. `< V` makes
    integers from 0 to V - 1. `=x` says that the array may be that of x, `consumed` that a call
    leaves something else in an input, `written` that it is an output though it is not the first,
    and `moves R C` that a call touches only so much of it.

    The other arguments are `values`: a number, the name of an axis, or a function of the
    `cases.Maker`. `after` is the kernel of the forward pass, whose results this one takes; `shapes`
    are the sizes to measure, by default those of `sizes`.
    """
    axes, _, rest = text.partition(":")
    arrays = {}
    for words in map(str.split, rest.split(",")):
        arrays[words[0]] = _array(words[1:])
    arguments = Arguments(tuple(axes.split()), arrays, values, after, shapes)

    def note(function: Function) -> Function:
        function.arguments = arguments  # type: ignore[attr-defined]
        return function

    return note


def _array(words: list[str]) -> Array:
    """Returns what the words after the name of an array say."""
    facts: dict[str, Any] = {}
    if "moves" in words:
        place = words.index("moves")
        words, facts["moved"] = words[:place], tuple(words[place + 1 :])
    if "<" in words:
        words, facts["below"], facts["kind"] = words[:-2], words[-1], "int32"
    dims = []
    for word in words:
        if word in ("consumed", "written"):
            facts[f"is_{word}"] = True
        elif word.startswith("="):
            facts["may_be"] = (*facts.get("may_be", ()), word[1:])
        elif word in ("float32", "int8", "int32", "uint8", "blocks"):
            facts["kind"] = word
        else:
            dims += [word.lstrip("+?")] if word.strip("+?") else []
            facts["is_read"] = facts.get("is_read") or word.startswith("+")
            facts["is_optional"] = facts.get("is_optional") or word.startswith("?")
    return Array(tuple(dims), **facts)


@dataclass(frozen=True)
class Description:
    """Facts about a kernel that its arguments do not show.

    `writes`: how many of its first arguments it writes. `temporaries`: the most that the plain twin
    holds at a time, in sizes of the largest array that it writes, or a function of a call -> bytes.
    `division`: how the compiled one shares its work among threads, by a name of
    `bench.threads.DIVISIONS`, and the argument whose rows, elements or chunks it divides.
    `functions` is what compiling it costs, after those that cost more have been compiled: counted
    at a first start on AVX2.
    """

    module: str  # of the compiled kernel, in smallmind.kernels
    functions: int = 0  # that become machine code with it
    writes: int = 1
    temporaries: float | Callable[..., int] = 0
    gradient: str = "dy"  # or dout: in a backward pass, that of what the layer wrote in the forward
    is_activation: bool = True  # the array `out` or `y` that it writes in a forward pass
    silent: float | None = None  # the largest |activation| of a silent hidden unit: GELU's at -4
    is_of_layer: bool = True  # optimizers call the others
    division: tuple[str, str] = ("alone", "")
    operations: Callable[..., int] | None = None  # of its products, from its arguments
    repeats: float = 0.0  # the share of these that compute again what the forward pass had
    arguments: Arguments = Arguments()

    def temporary_bytes(self, *arguments: Any, **named: Any) -> int:
        """Returns the bytes of the temporary arrays of a call of the plain twin."""
        if callable(self.temporaries):
            return self.temporaries(*arguments, **named)
        if not self.temporaries:
            return 0
        largest = max(int(array.nbytes) for array in arguments[: self.writes])
        return int(self.temporaries * largest)


KERNELS: dict[str, Description] = {}  # by name
ADDED: dict[str, Description] = {}  # those that a person added
UNKNOWN = Description("")


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
        arguments = getattr(function, "arguments", Arguments())
        KERNELS[name] = Description(module or name, functions, arguments=arguments, **facts)
        return function

    return describe


def described(name: str) -> Description:
    """Returns the description of the kernel of this name, also of one that a person added."""
    return KERNELS.get(name) or ADDED.get(name, UNKNOWN)


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

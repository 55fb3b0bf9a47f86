"""Chooses how attention multiplies: the functions of `attention_pairs` or of `attention_float32`.

Each takes a pointer to the queries, keys and values first, or to what is packed like them, whose
type decides. bfloat16 is multiplied in pairs where that is faster than in float32, into which all
else is converted.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from smallmind.kernels import attention_float32
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.half import BFLOAT16


def load_products(qkv: np.ndarray) -> None:
    """Imports what kernels with this argument call, which is compiled only if it is used."""
    if ISA.fast_bfloat16 and qkv.dtype == BFLOAT16:
        _pairs()


def _pairs() -> ModuleType:
    from smallmind.kernels import attention_pairs

    return attention_pairs


def _module_for(x: Any) -> ModuleType:
    return _pairs() if ISA.fast_bfloat16 and x.dtype == types.int16 else attention_float32


def _chosen(name: str, inline: bool = False) -> Any:
    """The functions of that name."""

    def function(x, *arguments):
        """Replaced as kernels are compiled."""

    # Not strict: the names of their arguments differ.
    @overload(function, strict=False, jit_options={"forceinline": inline})
    def choose(x, *_arguments):
        return getattr(_module_for(x), name)

    return function


def _chosen_number(name: str) -> Any:
    def function(x):
        """Replaced as kernels are compiled."""

    @overload(function, jit_options={"forceinline": True})
    def choose(x):
        chosen = getattr(_module_for(x), name)
        return lambda x: chosen  # noqa: ARG005

    return function


keys_per_block = _chosen_number("KEYS")
keys_per_tile = _chosen_number("TILE_KEYS")
padding_unit = _chosen_number("UNIT")
begin_products = _chosen("begin_products", inline=True)
end_products = _chosen("end_products", inline=True)
pack_keys_and_values = _chosen("pack_keys_and_values")
pack_head = _chosen("pack_head")
pack_queries = _chosen("pack_queries")
pack_both = _chosen("pack_both")
store_two = _chosen("store_two", inline=True)
store_gradients = _chosen("store_gradients", inline=True)
multiply_queries = _chosen("multiply_queries")
multiply_keys = _chosen("multiply_keys")
add_to_keys = _chosen("add_to_keys")
write_dkeys_and_dvalues = _chosen("write_dkeys_and_dvalues")
write_dqueries = _chosen("write_dqueries")

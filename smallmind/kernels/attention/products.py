"""Chooses how attention multiplies: the functions of `pairs` or of `float32`.

Each takes a pointer to the queries, keys and values first, or to what is packed like them, whose
type decides. bfloat16 is multiplied in pairs where that is faster than in float32, into which all
else is converted.
"""

from types import ModuleType
from typing import Any

import numpy as np
from numba import types

from smallmind.kernels.attention import float32
from smallmind.kernels.codegen.choice import choice, chosen_number
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.number_types import BFLOAT16


def load(qkv: np.ndarray) -> None:
    """Imports what kernels with this argument call, which is compiled only if it is used."""
    if ISA.fast_bfloat16 and qkv.dtype == BFLOAT16:
        _pairs()


def _pairs() -> ModuleType:
    from smallmind.kernels.attention import pairs

    return pairs


def _module_for(x: Any) -> ModuleType:
    return _pairs() if ISA.fast_bfloat16 and x.dtype == types.int16 else float32


keys_per_block = chosen_number(_module_for, "KEYS")
keys_per_tile = chosen_number(_module_for, "TILE_KEYS")
padding_unit = chosen_number(_module_for, "UNIT")
begin = choice(_module_for, "begin", inline=True)
end = choice(_module_for, "end", inline=True)
pack_keys_and_values = choice(_module_for, "pack_keys_and_values")
pack_head = choice(_module_for, "pack_head")
pack_queries = choice(_module_for, "pack_queries")
pack_both = choice(_module_for, "pack_both")
store_two = choice(_module_for, "store_two", inline=True)
store_gradients = choice(_module_for, "store_gradients", inline=True)
multiply_queries = choice(_module_for, "multiply_queries")
multiply_keys = choice(_module_for, "multiply_keys")
add_to_keys = choice(_module_for, "add_to_keys")
write_dkeys_and_dvalues = choice(_module_for, "write_dkeys_and_dvalues")
write_dqueries = choice(_module_for, "write_dqueries")

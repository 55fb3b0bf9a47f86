"""Instructions that kernels call by name, from functions that write LLVM IR."""

import functools
import inspect
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from smallmind.kernels.codegen.vector_ir import Storage

# Numba has no 16-bit floats; kernels get their bits.
STORAGE = {
    types.float32: Storage.FLOAT32,
    types.uint16: Storage.FLOAT16,
    types.int16: Storage.BFLOAT16,
}
PLACE = object()  # an array or a pointer, and a flat index
ANY = object()  # an argument of any type


class Place(NamedTuple):
    """An element in memory, and how numbers are stored there."""

    pointer: ir.Value
    storage: Storage | None  # None: bytes, which can only be prefetched


def operation(result, *kinds):
    """Decorator: makes write(builder, *values) -> value an intrinsic of these types.

    For PLACE among the kinds, which stands for two arguments, `write` gets a Place.
    """
    expanded = [
        part for kind in kinds for part in ((ANY, types.int64) if kind is PLACE else (kind,))
    ]

    def decorate(write):
        @functools.wraps(write)
        def define(_typing, *given):
            def codegen(context, builder, sig, args):
                values, arguments = [], iter(zip(sig.args, args, strict=True))
                for kind in kinds:
                    of, value = next(arguments)
                    if kind is PLACE:
                        _, index = next(arguments)
                        value = Place(
                            element_pointer(context, builder, of, value, index),
                            STORAGE.get(of.dtype),
                        )
                    values.append(value)
                written = write(builder, *values)
                return context.get_dummy_value() if result == types.void else written

            known = (x if kind is ANY else kind for kind, x in zip(expanded, given, strict=True))
            return result(*known), codegen

        # Numba asks how many arguments there are.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["_typing", *(f"argument{i}" for i in range(len(expanded)))]
        parameters = [inspect.Parameter(name, kind) for name in names]
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


def element_pointer(context, builder, array_type, array, index):
    """-> the pointer to the element at a flat index of a contiguous array or after a pointer."""
    if not isinstance(array_type, types.CPointer):
        array = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(array, [index])

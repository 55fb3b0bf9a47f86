"""Functions of one name in several modules: kernels get the one for the type of an array.

It is chosen as they are compiled, by the first argument, which is an array or a pointer.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from numba import types
from numba.core.dispatcher import Dispatcher
from numba.extending import overload


def choice(module_for: Callable[[Any], ModuleType], name: str, inline: bool = False) -> Any:
    """Returns the functions of that name in the modules that module_for(a type) returns."""

    def function(x, *arguments):
        """Stands for the function that replaces it as kernels are compiled."""

    # Not strict: the names of their arguments differ.
    @overload(function, strict=False, jit_options={"forceinline": inline})
    def choose(x, *_arguments):
        chosen = getattr(module_for(x), name)
        if isinstance(chosen, Dispatcher):

            def call(x, *arguments):
                return chosen(x, *arguments)

            return call
        return chosen

    return function


def by_type(
    for_float32: Callable[..., Any],
    for_16_bits: Callable[..., Any],
    for_blocks: Callable[..., Any] | None = None,
) -> Any:
    """Returns one of these functions, by the type of the first argument. Only that one is compiled.

    They are no kernels by themselves, and not decorated: each function within others takes longer
    to compile the deeper it is.
    """

    def function(x, *arguments):
        """Stands for the function that replaces it as kernels are compiled."""

    @overload(function, strict=False, jit_options={"error_model": "numpy"})
    def choose(x, *_arguments):
        if x.dtype == types.float32:
            return for_float32
        return for_16_bits if x.dtype.bitwidth == 16 else for_blocks

    return function


def chosen_number(module_for: Callable[[Any], ModuleType], name: str) -> Any:
    """Returns a function of an array that returns the number of that name in its module."""

    def function(x):
        """Stands for the function that replaces it as kernels are compiled."""

    @overload(function, jit_options={"forceinline": True})
    def choose(x):
        number = getattr(module_for(x), name)
        return lambda x: number  # noqa: ARG005

    return function

"""Functions that only kernels call become machine code as parts of those kernels alone.

Numba would optimise each of them by itself and generate machine code that nothing calls; the body
of a parallel loop, which it wraps twice before a kernel calls it, four times.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from numba.core.codegen import JITCodeLibrary, JITCPUCodegen


class _NoEnvironments:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Sets nothing: only objects of Python and exceptions with arguments need environments."""


class KernelLibrary(JITCodeLibrary):
    """The machine code of `entry`, or LLVM's intermediate representation of what it consists of."""

    entry: ClassVar[str | None] = None  # the function that is called from outside of kernels

    def __init__(self, codegen: JITCPUCodegen, name: str) -> None:
        super().__init__(codegen, name)
        self._is_entry = name == self.entry

    @property
    def codegen(self) -> Any:
        return self._codegen if self._is_entry else _NoEnvironments

    def _optimize_final_module(self) -> None:
        if self._is_entry:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self._is_entry:
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._verify_declare_only_symbols()
            self._finalized = True

    def serialize_using_object_code(self) -> Any:
        if self._is_entry:
            return super().serialize_using_object_code()
        return self.serialize_using_bitcode()


@contextmanager
def libraries(entry: str | None, codegen: JITCPUCodegen) -> Iterator[None]:
    """Makes codegen turn nothing but `entry` into machine code within the block."""
    previous = codegen._library_class, KernelLibrary.entry
    codegen._library_class, KernelLibrary.entry = KernelLibrary, entry
    try:
        yield
    finally:
        codegen._library_class, KernelLibrary.entry = previous

"""Functions that only kernels call become machine code as parts of those kernels alone.

Numba would optimise each of them by itself and generate machine code that nothing calls, a fifth of
the time it takes to compile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.codegen import JITCodeLibrary, JITCPUCodegen


class _NoEnvironments:
    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Sets nothing: only objects of Python and exceptions with arguments need environments."""


class LinkedLibrary(JITCodeLibrary):
    """A function as LLVM's intermediate representation, to be linked into those that call it."""

    codegen = _NoEnvironments

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def serialize_using_object_code(self) -> Any:
        return self.serialize_using_bitcode()


@contextmanager
def libraries(kind: type[JITCodeLibrary], codegen: JITCPUCodegen) -> Iterator[None]:
    """Makes codegen use this kind of library for everything compiled or loaded meanwhile."""
    previous, codegen._library_class = codegen._library_class, kind
    try:
        yield
    finally:
        codegen._library_class = previous

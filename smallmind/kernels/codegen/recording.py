"""The calls of compiled functions in a pass, recorded once and repeated without Python in between.

Numba's entry into a function from Python takes microseconds, as long as a small kernel itself. A
recorded call is an address and a table of arguments in memory, which a loop of machine code goes
through. Arguments keep their values: what changes from pass to pass has to lie in arrays.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import types

from smallmind.console.activity import clock_ns
from smallmind.console.signals import deferred
from smallmind.kernels.codegen.thread_choice import ThreadChoice
from smallmind.kernels.codegen.threads import PARALLEL, one_thread, passes_choose, threads

# Calls each function with its arguments until one fails -> 0, or what that one returned.
_LOOP = """
define i32 @run(ptr %calls, i64 %count) {
entry:
  %none = icmp eq i64 %count, 0
  br i1 %none, label %done, label %loop
loop:
  %i = phi i64 [0, %entry], [%following, %succeeded]
  %function_place = getelementptr {ptr, ptr}, ptr %calls, i64 %i, i32 0
  %arguments_place = getelementptr {ptr, ptr}, ptr %calls, i64 %i, i32 1
  %function = load ptr, ptr %function_place
  %arguments = load ptr, ptr %arguments_place
  %status = call i32 %function(ptr %arguments)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %stop, label %succeeded
succeeded:
  %following = add i64 %i, 1
  %more = icmp ult i64 %following, %count
  br i1 %more, label %loop, label %done
stop:
  ret i32 %status
done:
  ret i32 0
}
"""
_engines: list[llvm.ExecutionEngine] = []  # keep their machine code alive
_addresses: dict[tuple[Any, ...], int] = {}  # of callers, by function and types


class _Active(threading.local):
    """The recording of this Python thread, if there is one."""

    recording: "Recording | None" = None


active = _Active()


class Recording:
    """Calls of compiled functions, which return nothing. Keeps their arguments alive."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...]]] = []
        self._tables: list[np.ndarray] = []  # of the arguments of each call
        self._program = np.empty((0, 2), np.int64)  # addresses: function, arguments
        self._address = 0
        self._choice = ThreadChoice({threads(), 1})

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Adds the calls that this Python thread makes within the block."""
        assert active.recording is None
        active.recording = self
        try:
            yield
        finally:
            active.recording = None
        self._finish()

    def _finish(self) -> None:
        """Turns the calls into addresses."""
        self._tables = [_table(arguments) for _, arguments in self._calls]
        kinds = [
            (function, *map(function.typeof_pyval, arguments))
            for function, arguments in self._calls
        ]
        tables = (table.ctypes.data for table in self._tables)
        self._program = np.array(list(zip(_callers(kinds), tables, strict=True)), np.int64)
        self._program = self._program.reshape(-1, 2)
        self._address = self._program.ctypes.data  # asking NumPy takes microseconds

    def add(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Adds a call that has been made."""
        self._calls.append((function, arguments))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that the calls are given."""
        arrays = [
            argument
            for _, arguments in self._calls
            for argument in arguments
            if isinstance(argument, np.ndarray)
        ]
        return sum({array.ctypes.data: array.nbytes for array in arrays}.values())

    def repeat(self) -> None:
        """Makes all calls again, on one thread where that is faster: it changes no result."""
        choice = self._choice if passes_choose() else None
        is_alone = choice is not None and choice.next() == 1
        with PARALLEL.region, one_thread() if is_alone else nullcontext():
            start = clock_ns()
            status = _loop()(self._address, len(self._program))
            if choice:
                choice.took(clock_ns() - start)
        if status:
            raise RuntimeError(f"a recorded kernel failed with status {status}")


def _table(arguments: tuple[Any, ...]) -> np.ndarray:
    """Returns the arguments as Numba passes them, each scalar in 8 bytes."""
    content = bytearray()
    for argument in arguments:
        _append(content, argument)
    return np.frombuffer(content, np.int64)


def _append(content: bytearray, argument: Any) -> None:
    """Appends what an argument consists of: an array is five scalars or more."""
    if isinstance(argument, np.ndarray):
        # First its owner and its parent, which only functions that return arrays need.
        scalars = 0, 0, argument.size, argument.itemsize, argument.ctypes.data
        scalars += argument.shape + argument.strides
        content += struct.pack(f"{len(scalars)}q", *scalars)
    elif isinstance(argument, tuple):
        for part in argument:
            _append(content, part)
    elif isinstance(argument, int):
        content += struct.pack("q", argument)
    else:
        content += np.asarray(argument).tobytes().ljust(8, b"\0")


def _callers(kinds: list[tuple[Any, ...]]) -> list[int]:
    """-> for each function and the types of its arguments, the address of what `_caller` writes.

    Those that are new are compiled together: each piece of code that LLVM links takes memory.
    """
    new = [kind for kind in dict.fromkeys(kinds) if kind not in _addresses]
    if new:
        engine = _compile("".join(_caller(f"call{i}", *kind) for i, kind in enumerate(new)))
        for i, kind in enumerate(new):
            _addresses[kind] = int(engine.get_function_address(f"call{i}"))
    return [_addresses[kind] for kind in kinds]


def _caller(name: str, function: Any, *kinds: Any) -> str:
    """Writes LLVM code of a function that calls the version for these types, given their table."""
    compiled = function.overloads[kinds]
    assert compiled.signature.return_type == types.none, function
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    packer = compiled.target_context.get_arg_packer(compiled.fndesc.argtypes)
    loads = arguments = ""
    for i, kind in enumerate(packer.argument_types):
        type_ = "ptr" if isinstance(kind, ir.PointerType) else str(kind)
        loads += f"  %p{i} = getelementptr i64, ptr %table, i64 {i}\n"
        loads += f"  %a{i} = load {type_}, ptr %p{i}\n"
        arguments += f", {type_} %a{i}"
    return (
        f"define i32 @{name}(ptr %table) {{\n{loads}"
        "  %result = alloca ptr\n  %exception = alloca ptr\n"
        f"  %function = inttoptr i64 {address} to ptr\n"
        f"  %status = call i32 %function(ptr %result, ptr %exception{arguments})\n"
        "  ret i32 %status\n}\n"
    )


@functools.cache
def _loop() -> Any:
    # PYFUNCTYPE holds Python's lock, as kernels do.
    return ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(
        _compile(_LOOP).get_function_address("run")
    )


def _compile(code: str) -> llvm.ExecutionEngine:
    """LLVM code -> what knows the addresses of its functions."""
    with deferred():
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
        engine.finalize_object()
    _engines.append(engine)
    return engine

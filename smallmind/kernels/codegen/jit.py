"""The decorators that compile kernels: use these, never Numba's own.

`parallel_jit` for functions that Python calls and that run on all threads, `serial_jit` for those
that run on one, `called_jit` for those that Python and kernels call, `threaded_jit` for those that
several threads of Python run at a time, `jit` for those that only kernels call, `short_jit` for
those that they call for every few bytes, `inline_jit` for bodies of their loops, `native` for those
that kernels call through a symbol.
"""

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import njit
from numba.core import cgutils, event, imputils, types
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.typing.templates import ConcreteTemplate, infer_global

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.signals import deferred, is_any_deferred
from smallmind.kernels.codegen.cache import (
    EntryPointCache,
    KernelCache,
    SignalledError,
    enable_cache,
    end_turn,
)
from smallmind.kernels.codegen.linking import libraries
from smallmind.kernels.codegen.recording import active
from smallmind.kernels.codegen.threads import PARALLEL, limit_spinning, threads

if numba.config.DISABLE_JIT:
    raise InputError(
        "NUMBA_DISABLE_JIT turns off the compiler that the kernels need: unset it, or use "
        "--backend numpy"
    )
# The one thing that importing the kernels changes in the process's environment.
limit_spinning()


MIN_OBJECTS = 50_000  # made while a kernel compiles, after which Python looks for cycles of garbage


@contextmanager
def _compiling(entry: str | None, codegen: Any) -> Iterator[None]:
    """Sets up Numba and Python while a function is compiled: see `linking.libraries`.

    The kernels are vectorised by hand: higher levels of optimisation take a third longer and gain
    nothing. Signals wait until the end, as LLVM calls back into Python.
    """
    with deferred(), global_compiler_lock, libraries(entry, codegen):
        level, (objects, *collections) = numba.config.OPT, gc.get_threshold()
        numba.config.OPT = type(level)("1")
        gc.set_threshold(objects and max(objects, MIN_OBJECTS), *collections)  # at 0 it never looks
        try:
            yield
        finally:
            gc.set_threshold(objects, *collections)
            numba.config.OPT = level


def _unless_signalled(compile: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles once more if a signal has ended the wait for others and its handler did not raise.

    The signal is handled as soon as nothing compiles around this.
    """
    try:
        return compile(*arguments)
    except SignalledError:
        if is_any_deferred():
            raise
    return compile(*arguments)


def _without_value(kind: Any) -> Any:
    return kind.literal_type if isinstance(kind, types.IntegerLiteral) else kind


def _compiler(
    cache: type[KernelCache],
    is_linked: bool = False,
    is_general: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Makes a decorator; if it is general, of one version for all integers, constant or not."""
    # Divisions follow IEEE 754 instead of raising, which would cost a branch each.
    compiled = njit(error_model="numpy", **options)

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = enable_cache(compiled(function), function, cache)
        compile = dispatcher.compile
        entry = None if is_linked else function.__qualname__

        def compile_here(signature: Any) -> Any:
            if is_general:
                signature = tuple(map(_without_value, signature))
            with _compiling(entry, dispatcher.targetctx.codegen()):
                try:
                    return compile(signature)
                finally:
                    end_turn(dispatcher)

        dispatcher.compile = functools.partial(_unless_signalled, compile_here)
        return dispatcher

    return decorate


called_jit = _compiler(KernelCache, is_general=True)
# Without counting references to arrays: threads would wait for each other's atomic additions. Such
# kernels can make no arrays, nor assign one to a slice of another.
threaded_jit = _compiler(KernelCache, nogil=True, _nrt=False)
# Without the wrappers through which Python and C call it.
_compile_linked = functools.partial(
    _compiler, KernelCache, True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
jit = _compile_linked()
short_jit = _compile_linked(_nrt=False)
# Becomes part of its callers: constants among the arguments remove branches.
inline_jit = _compile_linked(is_general=True, forceinline=True)
_compile_parallel = _compiler(EntryPointCache, parallel=True)
_compile_serial = _compiler(EntryPointCache)


def parallel_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function whose prange loops run on all threads, as a decorator.

    Its last parameter may be `workers`: callers leave it out, and it gets the number of threads.
    """
    compiled = _compile_parallel(function)
    signature = inspect.signature(function)
    *others, last = signature.parameters.values()
    is_divided = last.name == "workers"

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        if is_divided:
            arguments = *arguments, threads()
        with PARALLEL.region:
            result = compiled(*arguments)
        if active.recording is not None:
            active.recording.add(compiled, arguments)
        return result

    if is_divided:
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return run


def serial_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that Python calls and that runs on the calling thread: a decorator."""
    compiled = _compile_serial(function)

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        result = compiled(*arguments)
        if active.recording is not None:
            active.recording.add(compiled, arguments)
        return result

    return run


class _Native(CFunc):
    """Unlike other kernels it sends no event when it is not in the cache."""

    def _compile_uncached(self) -> Any:
        activity.begin_compiling()
        try:
            return super()._compile_uncached()  # type: ignore[misc]
        finally:
            activity.end_compiling()


_natives: dict[str, CFunc] = {}  # by symbol


def native(symbol: str, signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function one that kernels call through a symbol: a decorator.

    Its machine code exists once instead of in every kernel that calls it, and only if one does. The
    decorated function can be called by kernels only, not from Python.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        callback = _Native(function, (signature.args, signature.return_type), {}, {})
        _natives[symbol] = enable_cache(callback, function, EntryPointCache)
        return _external(symbol, signature)

    return decorate


def _define(symbol: str) -> None:
    """Compiles or loads a `native` function, unless that has been done."""
    callback = _natives[symbol]
    if callback.address is not None:
        return

    def compile() -> None:
        with _compiling(callback.__qualname__, cpu_target.target_context.codegen()):
            try:
                callback.compile()
            finally:
                end_turn(callback)

    _unless_signalled(compile)
    llvm.add_symbol(symbol, callback.address)


def _external(symbol: str, signature: Any) -> Callable[..., Any]:
    """Returns the function by which kernels call a `native` one.

    Numba's ExternalFunction does the same, but takes neither arrays nor named tuples.
    """

    define = functools.partial(_define, symbol)

    def call(*arguments: Any) -> Any:
        raise TypeError(f"{symbol} can only be called by a kernel")

    class Template(ConcreteTemplate):
        cases: ClassVar = [signature]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result, *kinds = map(context.get_value_type, (sig.return_type, *sig.args))
        kind = ir.FunctionType(result, kinds)
        _define(symbol)
        context.active_code_library._reload_init.add(define)  # so that it is, at later starts
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), args)

    infer_global(call, typing_key=symbol)(Template)
    imputils.lower_builtin(symbol, *signature.args)(codegen)
    return call


class _Announcement(event.Listener):
    """Tells the activity hook of each kernel of ours that is not in the cache."""

    def on_start(self, event: event.Event) -> None:
        if self._is_ours(event):
            activity.begin_compiling()

    def on_end(self, event: event.Event) -> None:
        if self._is_ours(event):
            activity.end_compiling()

    def _is_ours(self, event: event.Event) -> bool:
        return str(event.data["dispatcher"].py_func.__module__).startswith("smallmind.")


event.register("numba:compile", _Announcement())

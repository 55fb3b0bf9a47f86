"""How kernels are compiled, cached on disk and spread over threads.

Kernels are decorated with `jit`, `parallel_jit` or `native` from here, never with Numba's own.
"""

import functools
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy
import psutil
from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import _nrt_python
from numba.core.sigutils import normalize_signature


def cache_directory() -> Path:
    """Where compiled kernels live: one directory for each state of the kernels' source.

    Numba notices an edit only in the file that holds the compiled function, not in the files whose
    functions it calls. So the directory's name is a digest of all kernel sources and of the
    versions that compile them: an edit or an upgrade starts a new directory, and stale code cannot
    be found.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    versions = (sys.version, numba.__version__, llvmlite.__version__, numpy.__version__)
    # Not the level of optimisation: it changes no result, and a cache for each would double the
    # wait of someone who uses both the command line and the library.
    config = numba.config
    target = (config.CPU_NAME, config.CPU_FEATURES, config.ENABLE_AVX, config.BOUNDSCHECK)
    digest.update(repr((*versions, *target)).encode())
    for root in _cache_roots():
        directory = root / "smallmind" / "kernels" / digest.hexdigest()[:16]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="smallmind-kernels-"))


def _cache_roots() -> list[Path]:
    """Places for a cache, the user's own choice first; the last is writable nearly everywhere."""
    roots = []
    for variable in ("SMALLMIND_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        path = Path(os.environ.get(variable, ""))
        if path.is_absolute():
            roots.append(path)
    home = Path(os.path.expanduser("~"))
    if home.is_absolute():
        roots.append(home / ("Library/Caches" if sys.platform == "darwin" else ".cache"))
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    roots.append(Path(tempfile.gettempdir()) / f"smallmind-{user}")
    return roots


# A thread that waits at the end of a parallel region spins, by GNU OpenMP's default for 4 ms. Where
# the system has put two threads on one core, each region then costs two time slices: a step of
# 14 ms takes 800. After 5000 rounds (65 us) it sleeps instead, and costs nothing when all is well.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

CACHE = cache_directory()


class _KernelCache(FunctionCache):
    """Numba's cache of a function, which loads no more than what it takes to run.

    Numba's own first makes ready for compiling, which takes 0.3 s and 30 MB; the compiler does so
    itself as soon as there is something to compile.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        _define_runtime()
        try:
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except Exception:  # what unpickling half a file raises depends on where it ends
            self.flush()  # compiles anew
            return None


class _NamesAndObjectCode(CompileResultCacheImpl):
    """What is on disk of a function that is built into no other: its code, and what that defines.

    Numba would add its LLVM module, for callers, and parse that at every start.
    """

    def reduce(self, cres: Any) -> Any:
        (library, kind, (object_code, _)), *rest = super().reduce(cres)
        names = [function.name for function in cres.library.get_defined_functions()]
        module = "\n".join(f'define void @"{name}"() {{ ret void }}' for name in names)
        return (library, kind, (object_code, llvm.parse_assembly(module).as_bitcode())), *rest


class _EntranceCache(_KernelCache):
    """The cache of a function that Python or a pointer calls, but no other kernel by its name."""

    _impl_class = _NamesAndObjectCode


@functools.cache
def _define_runtime() -> None:
    """Tells LLVM where Numba's runtime is, which compiled code calls."""
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _with_cache(compiled: Any, function: Callable[..., Any], kind: type[_KernelCache]) -> Any:
    """compiled, with its cache in CACHE; other functions keep their own place."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(CACHE)
    try:
        compiled._cache = kind(function)
    finally:
        numba.config.CACHE_DIR = before
    return compiled


def _quickly(dispatcher: Any) -> Any:
    """The dispatcher, compiled at LLVM's first level of optimisation.

    The kernels' vectors are written out: higher levels take a third longer and find nothing more.
    """
    compile = dispatcher.compile

    def compile_at_first_level(signature: Any) -> Any:
        before, numba.config.OPT = numba.config.OPT, type(numba.config.OPT)("1")
        try:
            return compile(signature)
        finally:
            numba.config.OPT = before

    dispatcher.compile = compile_at_first_level
    return dispatcher


def _compiler(
    cache: type[_KernelCache], **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    # Divisions follow IEEE 754 instead of raising, or each one carries a branch.
    compile = njit(error_model="numpy", **options)
    return lambda function: _quickly(_with_cache(compile(function), function, cache))


called_jit = _compiler(_KernelCache)
# What only kernels call needs no way in from Python: without one it compiles in less time.
jit = _compiler(_KernelCache, no_cpython_wrapper=True, no_cfunc_wrapper=True)
_compile_parallel = _compiler(_EntranceCache, parallel=True)
# One Python thread at a time: two would share the same cores, and on Numba's own threading layer
# the second ends the process.
_entrance = threading.Lock()


def parallel_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: compiles a function whose prange loops run on all threads."""
    compiled = _compile_parallel(function)

    @functools.wraps(function)
    def enter(*arguments: Any) -> Any:
        with _entrance:
            return compiled(*arguments)

    return enter


def native(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: compiles a function at once, with a C address (`.address`)."""

    def decorate(function: Callable[..., Any]) -> Any:
        callback = CFunc(function, normalize_signature(signature), locals={}, options={})
        _with_cache(callback, function, _EntranceCache).compile()
        return callback

    return decorate


@dataclass
class _Settings:
    threads: int


_settings = _Settings(numba.config.NUMBA_NUM_THREADS)  # to ask Numba takes a microsecond


def set_threads(count: int) -> None:
    """Run the kernels on `count` threads; results do not depend on it."""
    numba.set_num_threads(count)
    _settings.threads = count


def threads() -> int:
    """The number of threads that kernels run on."""
    return _settings.threads


def most_threads() -> int:
    """The number of threads that kernels can run on."""
    return int(numba.config.NUMBA_NUM_THREADS)


def cores() -> int:
    """The number of cores to use: two threads that share one core's multipliers gain nothing."""
    return min(most_threads(), psutil.cpu_count(logical=False) or most_threads())


def threading_layer() -> str:
    """The library that runs the threads: omp, tbb or workqueue."""
    set_threads(threads())  # starts the layer, which has no name before
    return str(numba.threading_layer())


class _FirstCompile(event.Listener):
    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def on_start(self, event: event.Event) -> None:
        action, self.action = self.action, None
        if action:
            action()

    def on_end(self, event: event.Event) -> None:
        pass


@contextmanager
def on_first_compile(action: Callable[[], None]) -> Iterator[None]:
    """Within the block, calls action once when a kernel is compiled that the cache did not hold."""
    with event.install_listener("numba:compile", _FirstCompile(action)):
        yield

"""Where compiled kernels are kept on disk, and how they are loaded again.

Any of this may fail without harm: what cannot be read is compiled again, and a directory that
cannot be written to is replaced by the next candidate.
"""

import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.runtime import _nrt_python

KERNELS = Path(__file__).parent.parent


@functools.cache
def cache_directory() -> Path:
    """The directory of compiled kernels: one for each state of the kernels' source.

    Numba notices an edit only in the file that holds the compiled function, not in the files whose
    functions it calls. So the directory's name is a digest of all kernel sources and of the
    versions that compile them: after an edit or an upgrade the directory is a different one, and
    stale code cannot be found.
    """
    for root in _cache_roots():
        directory = root / "smallmind" / "kernels" / _digest()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="smallmind-kernels-"))


def _digest() -> str:
    """A digest of everything that the machine code depends on.

    Not the optimisation level: it changes no result, and a cache for each level would double the
    wait of someone who uses both the command line and the library.
    """
    digest = hashlib.sha256()
    for source in sorted(KERNELS.rglob("*.py")):
        name = source.relative_to(KERNELS).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes())
    versions = (sys.version, numba.__version__, llvmlite.__version__, numpy.__version__)
    config = numba.config
    target = (config.CPU_NAME, config.CPU_FEATURES, config.ENABLE_AVX, config.BOUNDSCHECK)
    digest.update(repr((*versions, *target)).encode())
    return digest.hexdigest()[:16]


def _cache_roots() -> list[Path]:
    """Candidates, the user's own choice first; the last is writable almost everywhere."""
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


class KernelCache(FunctionCache):
    """Numba's cache of a function, without initialising the compiler.

    Numba's own initialises it before every load, which takes 0.3 s and 30 MB; the compiler does so
    itself as soon as there is something to compile.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        _define_runtime()
        try:
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except Exception:  # what unpickling half a file raises depends on where it ends
            self.flush()
            return None  # so it is compiled again


class _NamesAndObjectCode(CompileResultCacheImpl):
    """Saves a function that is never linked into another: object code and the names it defines.

    Numba would add the LLVM module, which callers need, and parse it at every start.
    """

    def reduce(self, cres: Any) -> Any:
        (library, kind, (object_code, _)), *rest = super().reduce(cres)
        names = [function.name for function in cres.library.get_defined_functions()]
        module = "\n".join(f'define void @"{name}"() {{ ret void }}' for name in names)
        return (library, kind, (object_code, llvm.parse_assembly(module).as_bitcode())), *rest


class EntryPointCache(KernelCache):
    """The cache of a function that is called from Python or by its address, not by kernels."""

    _impl_class = _NamesAndObjectCode


@functools.cache
def _define_runtime() -> None:
    """Makes the functions of Numba's runtime, which compiled code calls, known to LLVM."""
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def enable_cache(compiled: Any, function: Callable[..., Any], kind: type[KernelCache]) -> Any:
    """Gives compiled a cache in cache_directory(); other users of Numba keep their own."""
    previous, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(cache_directory())
    try:
        compiled._cache = kind(function)
    finally:
        numba.config.CACHE_DIR = previous
    return compiled

"""Compiled kernels on disk: loaded again if nothing has damaged them.

Any of this may fail without harm: what cannot be read is compiled again, and what cannot be
written costs a warning.
"""

import functools
import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps
from numba.core.types.containers import BaseTuple

from smallmind.console import activity
from smallmind.console.signals import is_any_deferred
from smallmind.files import durable
from smallmind.files.lock import lock_byte
from smallmind.kernels.codegen.cache_directory import SUFFIX, cache_directory, is_ours, warn
from smallmind.kernels.codegen.sources import PACKAGE, modules

# Seconds to wait for another process that compiles the same; it may be stopped.
MAX_WAIT_SECONDS = 60.0
DIGEST_BYTES = hashlib.sha256().digest_size  # bytes


class BusyError(Exception):
    """Another process compiles this function."""


class SignalledError(BaseException):
    """A signal came while this process waited for another that compiles the same.

    It is not an Exception: Numba would take one for an error in a kernel.
    """


class _Turns:
    """Lets one process at a time compile a function, all processes of one directory together.

    Each function has a byte of a file, past its end, which its process locks. The system unlocks
    those of a process that dies. Where the disk has no locks, all compile everything.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "turns"
        self._file: int | None = None

    def take(self, name: str) -> bool:
        """Takes the turn for a function -> False if another process has it."""
        try:
            if self._file is None:
                way = os.O_RDWR | os.O_CREAT | durable.flags("O_NOFOLLOW", "O_BINARY", "O_CLOEXEC")
                self._file = os.open(self._path, way, 0o600)
            return lock_byte(self._file, self._place(name))
        except OSError:
            return True

    def give(self, name: str) -> None:
        """Ends what `take` began."""
        if self._file is not None:
            with suppress(OSError):
                lock_byte(self._file, self._place(name), unlock=True)

    def _place(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") >> 2


class _Patience:
    """How this process waits for others: see `skip_what_others_compile`."""

    skips = False
    is_over = False  # it has been signalled: from now on it compiles what others do too
    taken = 0  # functions that it compiles, each within the one before


def skip_what_others_compile() -> None:
    """Makes a kernel that another process compiles raise BusyError from now on, without a wait."""
    _Patience.skips = True


class CheckedFiles:
    """The compiled versions of one function by key, each in a file of its own.

    A file begins with the SHA-256 of its key and of the rest, so that nothing that is damaged, or
    belongs to another key, is ever unpickled or executed.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self._name = directory, name

    def load(self, key: str) -> Any:
        """key -> what `save` was given; None if it is missing or damaged."""
        content = self._read(self._file(key))
        digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        return pickle.loads(data) if _digest(key, data) == digest else None

    def save(self, key: str, value: Any) -> None:
        """Adds a compiled version. OSError if the disk refuses it."""
        data = dumps(value)
        self._write(self._file(key), _digest(key, data) + data)

    def _file(self, key: str) -> str:
        return f"{self._name}.{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"

    def _read(self, name: str) -> bytes:
        """Returns the contents of a file; empty if it is missing or not ours."""
        try:
            with durable.open_regular(self.directory / name, follow=False) as file:
                return file.read() if is_ours(os.fstat(file.fileno())) else b""
        except (OSError, ValueError):
            return b""

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file that only this user can write to, whatever the umask."""
        descriptor, temporary = tempfile.mkstemp(dir=self.directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            durable.replace(temporary, self.directory / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


class KernelCache(FunctionCache):
    """Numba's cache of a function, in CheckedFiles and without initialising the compiler.

    Numba's own initialises it before every load, which takes 0.3 s and 30 MB; the compiler does so
    itself as soon as there is something to compile.
    """

    def __init__(self, function: Callable[..., Any], directory: Path) -> None:
        module = function.__module__.removeprefix(f"{PACKAGE}.")
        name = f"{module}.{function.__qualname__}".replace("<locals>.", "")
        line = function.__code__.co_firstlineno
        self._py_func = function  # of which the key takes a digest
        self._name = f"{name}-{line}"
        self._files = CheckedFiles(directory, self._name)
        self._turns = _turns(directory.parent)
        self._taken: list[str] = []

    @property
    def cache_path(self) -> str:
        return str(self._files.directory)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns what is kept for these types; None if it is compiled here, until `end_turn`."""
        _define_runtime()
        loaded = self._load(sig, target_context)
        turn = f"{self._files.directory.name}/{self._name}{sig}"
        if loaded is None and self._take_turn(turn):
            # Another process has compiled it since.
            loaded = self._load(sig, target_context)
        return loaded

    def _take_turn(self, name: str) -> bool:
        """Waits while another process compiles this -> True if one did.

        Not for ever: then both compile it. SignalledError if a signal waits to be handled, once.
        """
        waits = not self._turns.take(name)
        if waits and _Patience.skips and not _Patience.taken:
            raise BusyError
        if waits:
            activity.begin_compiling()
            try:
                end = time.monotonic() + MAX_WAIT_SECONDS
                while not (self._turns.take(name) or time.monotonic() > end or _Patience.is_over):
                    if is_any_deferred():
                        _Patience.is_over = True
                        raise SignalledError
                    time.sleep(0.01)
            finally:
                activity.end_compiling()
        self._taken.append(name)
        _Patience.taken += 1
        return waits

    def end_turn(self) -> None:
        """Ends the turns that `load_overload` took: this has been compiled, or has failed."""
        while self._taken:
            self._turns.give(self._taken.pop())
            _Patience.taken -= 1

    def _key(self, sig: Any, codegen: Any) -> str:
        # A module may not import the class of a named tuple that its functions are given.
        return repr((*self._index_key(sig, codegen), _fields(getattr(sig, "args", sig))))

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            saved = self._files.load(self._key(sig, target_context.codegen()))
            loaded = saved and CompileResult._rebuild(target_context, *saved)
            if loaded:  # what it needs, those need that it is linked into
                loaded.library._reload_init.update(loaded.reload_init)
            return loaded
        except Exception:  # sound, but this process cannot use it
            return None  # so it is compiled again

    def save_overload(self, sig: Any, compiled: Any) -> None:
        if compiled.library.has_dynamic_globals:  # addresses in this process
            return
        # Numba leaves out those of functions behind symbols, which it finishes later than others.
        compiled.reload_init[:] = compiled.library._reload_init
        try:
            self._files.save(self._key(sig, compiled.codegen), self.reduce(compiled))
        except OSError as error:
            place = self._files.directory.parent  # of all modules
            warn(
                f"cannot keep compiled kernels in {place}: {error.strerror}; every start "
                "compiles them again until SMALLMIND_CACHE_DIR names a directory with room"
            )

    def reduce(self, compiled: Any) -> Any:
        """Returns the compiled function in the form that is saved."""
        return compiled._reduce()

    def flush(self) -> None:
        pass


class EntryPointCache(KernelCache):
    """The cache of a function that is called from Python or by its address, not by kernels.

    It is never linked into another: object code and the names that it defines are enough. Numba
    would add the LLVM module, which callers need, and parse it at every start.
    """

    def reduce(self, compiled: Any) -> Any:
        (library, kind, (object_code, _)), *rest = compiled._reduce()
        names = [function.name for function in compiled.library.get_defined_functions()]
        module = "\n".join(f'define void @"{name}"() {{ ret void }}' for name in names)
        return (library, kind, (object_code, llvm.parse_assembly(module).as_bitcode())), *rest


def _digest(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()


def _fields(kinds: Any) -> list[Any]:
    """Returns the names of the fields of named tuples among these types, and within them."""
    tuples = (kind for kind in kinds if isinstance(kind, BaseTuple))
    return [(getattr(kind, "fields", ()), _fields(kind)) for kind in tuples]


@functools.cache
def _turns(directory: Path) -> _Turns:
    return _Turns(directory)


@functools.cache
def _define_runtime() -> None:
    """Makes the functions of Numba's runtime, which compiled code calls, known to LLVM."""
    for name, address in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def enable_cache(compiled: Any, function: Callable[..., Any], kind: type[KernelCache]) -> Any:
    """Gives compiled a cache in the directory of its module, if there is one.

    Not a function from elsewhere, of whose source the directory's name has no digest.
    """
    if function.__module__ in modules():
        directory = cache_directory(function.__module__)
        if directory is not None:
            compiled._cache = kind(function, directory)
    return compiled


def end_turn(compiled: Any) -> None:
    """Lets other processes compile a function that this one has compiled, or failed to."""
    if isinstance(compiled._cache, KernelCache):
        compiled._cache.end_turn()

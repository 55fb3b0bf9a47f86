"""What a program waits for, told through one hook; and a clock that does not count compiling.

Nothing below the command line prints except through this hook: `hook(phrase, usual)` is called with
what is being done now, and with None at its end. A usual part of a run, such as an evaluation, is
only for a line that is replaced. In scripts and notebooks the hook shows everything else on
standard error; `with showing_on(hook):` replaces it, as the command line does.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from smallmind.live_line import LiveLine

Hook = Callable[[str | None, bool], object]

QUIET = 3.0  # seconds between two lines in a file


class _StandardError:
    """The hook of scripts and notebooks."""

    def __init__(self) -> None:
        self._line: LiveLine | None = None
        self._shown = -QUIET

    def __call__(self, text: str | None, usual: bool) -> None:
        if usual:
            return
        if self._line is None or self._line.stream is not sys.stderr:
            self._line = LiveLine(sys.stderr)
        if self._line.is_live:
            self._line.show(f"{text} ...") if text else self._line.clear()
        elif text and time.monotonic() - self._shown >= QUIET:
            self._line.write(f"{text} ...\n")
            self._shown = time.monotonic()


class _State:
    hook: Hook = _StandardError()
    phrases: list[tuple[str, bool]]  # what is being done, the innermost last
    compiling: int = 0  # kernels, each within the one before
    compiled: int = 0
    compile_start: float = 0.0
    compile_seconds: float = 0.0

    def __init__(self) -> None:
        self.phrases = []


_state = _State()


@contextmanager
def showing_on(hook: Hook) -> Iterator[None]:
    """Within the block, what is being done goes to this hook."""
    previous, _state.hook = _state.hook, hook
    try:
        yield
    finally:
        _state.hook = previous


@contextmanager
def doing(phrase: str, usual: bool = False) -> Iterator[None]:
    """Within the block, the hook shows a phrase such as "Reading the text"."""
    _begin(phrase, usual)
    try:
        yield
    finally:
        _end()


def begin_compiling(kernel: str) -> None:
    """Says that a kernel is being compiled, perhaps within another one; the clock stands still."""
    if _state.compiling:
        _state.phrases.pop()
    else:
        _state.compile_start = time.perf_counter()
    _state.compiling += 1
    _state.compiled += 1
    _begin(f"Compiling kernels for this CPU, once: {_state.compiled}, {kernel}")


def end_compiling() -> None:
    """Ends what begin_compiling began."""
    _state.compiling -= 1
    if not _state.compiling:
        _state.compile_seconds += time.perf_counter() - _state.compile_start
        _end()


def compiled() -> tuple[int, float]:
    """How many kernels this process has compiled, and in how many seconds."""
    return _state.compiled, _state.compile_seconds


def clock() -> float:
    """Like time.perf_counter, in seconds, but it stands still while kernels compile."""
    now = _state.compile_start if _state.compiling else time.perf_counter()
    return now - _state.compile_seconds


def _begin(phrase: str, usual: bool = False) -> None:
    _state.phrases.append((phrase, usual))
    _state.hook(phrase, usual)


def _end() -> None:
    _, usual = _state.phrases.pop()
    _state.hook(*(_state.phrases[-1] if _state.phrases else (None, usual)))

"""Announces through one hook what a program waits for; and a clock that does not count compiling.

Nothing below the command line prints except through this hook: `hook(phrase, usual)` is called when
work begins, and with None at its end. A `usual` phrase is only for a line that is replaced: a part
of every run, once it has taken a second, or progress, as in "Evaluating after step 250: 17%, 0:12
left". In scripts and notebooks the hook shows all others on standard error; the command line
replaces it with `showing_on(hook)`.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from smallmind.console.live_line import LiveLine

Hook = Callable[[str | None, bool], object]
Item = TypeVar("Item")

QUIET_SECONDS = 3.0  # seconds between two lines in a file
COMPILING_SECONDS = 30.0  # between two about compiling
COMPILING = "Compiling kernels for this CPU, once"
REFRESH = 1.0  # seconds between two changes of a line that is replaced
LARGE = 10**8  # bytes that may take more than a second to read, encode or write


class Pause:
    """Keeps the lines in a file apart, those about compiling further than others."""

    def __init__(self) -> None:
        self._last, self._time = "", -QUIET_SECONDS

    def is_over(self, text: str) -> bool:
        """Returns True if this line may be written now; then the next pause begins."""
        is_same = text.startswith(COMPILING) and self._last.startswith(COMPILING)
        now = time.monotonic()
        if now - self._time < (COMPILING_SECONDS if is_same else QUIET_SECONDS):
            return False
        self._last, self._time = text, now
        return True


class _StandardError:
    """The hook of scripts and notebooks."""

    def __init__(self) -> None:
        self._line: LiveLine | None = None
        self._pause = Pause()

    def __call__(self, text: str | None, usual: bool) -> None:
        if self._line is None or self._line.stream is not sys.stderr:
            self._line = LiveLine(sys.stderr)
        if usual and not self._line.is_shown:
            return
        if self._line.is_live:
            self._line.show(f"{text} ...") if text else self._line.clear()
        elif text and self._pause.is_over(text):
            self._line.write(f"{text} ...\n")


class _Task:
    """Work under way: a phrase for the hook or, with `on_progress`, for a display of its caller's.

    A phrase is shown at once, or only once it has taken a second.
    """

    def __init__(
        self,
        phrase: str = "",
        at_once: bool = False,
        on_progress: Callable[[str], object] | None = None,
    ) -> None:
        self.start = time.monotonic()
        self.parts: list[list[int]] = []  # done and all, the inner ones within one of the outer
        # It may name a file, which may have any name.
        self.phrase = "".join(c if c.isprintable() else "\ufffd" for c in phrase)
        self.delay = 0.0 if on_progress else REFRESH  # seconds until it may be shown by `tick`
        self.on_progress = on_progress
        self.is_shown = at_once
        if at_once:
            _state.hook(self.phrase, False)

    def so_far(self) -> str:
        """-> "17%, 0:12 left", or without parts the time so far; nothing in the first second."""
        share, width = 0.0, 1.0
        for done, count in self.parts:
            width /= count
            share += width * done
        seconds = time.monotonic() - self.start
        if seconds < REFRESH:
            return ""
        if not share:
            return duration(seconds)
        return f"{share:.0%}, {duration(seconds * (1 - share) / share)} left"

    def show(self, so_far: str = "") -> None:
        """Shows the phrase, if there is one, and the progress."""
        if self.on_progress:
            self.on_progress(so_far)
        else:
            self.is_shown = True
            _state.hook(f"{self.phrase}: {so_far}" if so_far else self.phrase, True)


class _State:
    hook: Hook = _StandardError()
    tasks: list[_Task]  # what is being done, the innermost last
    refreshed: float = 0.0  # when `tick` last showed something
    compiling: int = 0  # kernels, each within the one before
    compiled: int = 0
    expected: int = 0  # about how many in all; 0: not known
    finished: Callable[[], int] | None = None  # kernels, by any process, where several compile
    compile_start: int = 0  # nanoseconds
    compile_time: int = 0  # nanoseconds

    def __init__(self) -> None:
        self.tasks = []


_state = _State()


@contextmanager
def showing_on(hook: Hook) -> Iterator[None]:
    """Shows what is being done within the block on this hook."""
    previous, _state.hook = _state.hook, hook
    try:
        yield
    finally:
        _state.hook = previous


@contextmanager
def doing(phrase: str, usual: bool = False) -> Iterator[None]:
    """Shows a phrase within the block; a usual one once it has taken a second, on a live line."""
    with _under_way(_Task(phrase, at_once=not usual)):
        yield


@contextmanager
def refreshing(show: Callable[[str], object]) -> Iterator[None]:
    """Calls `show` within the block about once a second with the progress: "17%, 0:12 left"."""
    with _under_way(_Task(on_progress=show)):
        yield


@contextmanager
def _under_way(task: _Task) -> Iterator[None]:
    depth = len(_state.tasks)
    _state.tasks.append(task)
    try:
        yield
    finally:
        _end(depth)


def tick() -> None:
    """Shows the progress if a second has passed since the last time; takes 0.1 microseconds if not.

    Whatever may take long calls it now and then.
    """
    if not _state.tasks or (now := time.monotonic()) - _state.refreshed < REFRESH:
        return
    for task in reversed(_state.tasks):
        if now - task.start >= task.delay:
            _state.refreshed = now
            task.show(task.so_far())
            return


def parts(items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items one by one, each of them an equal part of what is being done. Ticks."""
    if not _state.tasks:
        yield from items
        return
    counted = _state.tasks[-1].parts
    depth, part = len(counted), [0, len(items)]
    counted.append(part)
    try:
        for item in items:
            tick()
            yield item
            part[0] += 1
    finally:
        del counted[depth:]


@contextmanager
def expecting_kernels(count: int, finished: Callable[[], int] | None = None) -> Iterator[None]:
    """Announces compiling within the block as one of about `count` kernels; 0: not known.

    If several processes compile, `finished` returns how many of them are compiled.
    """
    _state.expected, _state.finished = count, finished
    try:
        yield
    finally:
        _state.expected, _state.finished = 0, None


def begin_compiling() -> None:
    """Announces a kernel, perhaps within another one. The clock stands still."""
    if _state.compiling:
        _state.tasks.pop()
    else:
        _state.compile_start = time.perf_counter_ns()
    _state.compiling += 1
    _state.compiled += 1
    number = max(_state.compiled, _state.finished() + 1 if _state.finished else 0)
    in_all = f" of about {max(_state.expected, number)}" if _state.expected else ""
    _state.tasks.append(_Task(f"{COMPILING}: {number}{in_all}", at_once=True))


def end_compiling() -> None:
    """Ends what begin_compiling began."""
    _state.compiling -= 1
    if not _state.compiling:
        _state.compile_time += time.perf_counter_ns() - _state.compile_start
        _end(len(_state.tasks) - 1)


def compiled() -> tuple[int, float]:
    """Returns the number of kernels that this process has compiled, and the seconds that took."""
    return _state.compiled, _state.compile_time / 1e9


def clock() -> float:
    """Returns seconds like time.perf_counter, but stands still while kernels compile."""
    return clock_ns() / 1e9


def clock_ns() -> int:
    """Returns the nanoseconds of `clock`."""
    now = _state.compile_start if _state.compiling else time.perf_counter_ns()
    return now - _state.compile_time


def duration(seconds: float) -> str:
    """Seconds -> 0:07, 12:34 or 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _end(depth: int) -> None:
    """Ends all but the outer `depth` tasks: several if an interrupt kept inner ones from ending."""
    ended = _state.tasks[depth:]
    del _state.tasks[depth:]
    if any(task.is_shown for task in ended):
        if _state.tasks and _state.tasks[-1].is_shown:
            _state.tasks[-1].show()
        else:
            _state.hook(None, False)

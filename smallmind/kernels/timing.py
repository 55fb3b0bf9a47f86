"""Times contestants in turn, so that other load on the machine affects all of them alike."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

TURN = 0.015  # seconds that a contestant runs without interruption
MAX_CALLS = 400  # per turn
PAUSE = 0.005
MAX_PAUSES = 100


@dataclass(frozen=True)
class Contestant:
    """`run` is timed; `prepare`, if there is one, runs before each call and is not timed.

    A turn runs inside `setting()`.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] | None = None
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Times:
    """Seconds per call."""

    median: float
    spread: float  # interquartile range over median
    minimum: float
    calls: int


def take_in_turn(contestants: dict[str, Contestant], rounds: int) -> dict[str, Times]:
    """-> every contestant has a turn in every round; the first call of a turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            with contestant.setting():
                seconds[name] += turn(contestant)
    return {name: _summary(values) for name, values in seconds.items()}


def wait_for_idle_threads() -> None:
    """Pauses until no thread of this process is busy.

    Threads of OpenBLAS and PyTorch spin for up to 100 ms after a call, which would slow down the
    next contestant.
    """
    for _ in range(MAX_PAUSES):
        before = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - before < PAUSE / 10:
            return


def turn(contestant: Contestant, length: float = TURN, least: int = 3) -> list[float]:
    """Calls it for some seconds, at least so often, and waits for its idle threads.

    Returns the seconds of each call but the first.
    """
    run, prepare, clock = contestant.run, contestant.prepare, time.perf_counter
    seconds: list[float] = []
    end = clock() + length
    while not seconds or (clock() < end and len(seconds) < MAX_CALLS) or len(seconds) < least:
        if prepare:
            prepare()
        start = clock()
        run()
        seconds.append(clock() - start)
    wait_for_idle_threads()
    return seconds[1:]


def _summary(seconds: list[float]) -> Times:
    first, median, third = statistics.quantiles(seconds, n=4)
    return Times(median, (third - first) / median, min(seconds), len(seconds))


def duration(seconds: float) -> str:
    """-> 12.3 us, 1.23 ms or 1.23 s."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def serve(**answers: Callable[[Any], Any]) -> None:
    """Answers each line of standard input, `{"name": argument}`, with answers[name](argument)."""
    for line in sys.stdin:
        ((name, argument),) = json.loads(line).items()
        sys.stdout.write(json.dumps(answers[name](argument)) + "\n")
        sys.stdout.flush()

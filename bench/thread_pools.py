"""Gives every contestant the same cores."""

import os

import psutil


class ThreadPools:
    """Knows the threads that each package has started, and binds them to CPUs.

    Systems that save power put two threads that sleep between calls on one core and leave the
    other idle: a contestant then runs at half its speed, or not, by chance. Bound, the n-th thread
    of every pool has the n-th CPU. Only Linux can bind; elsewhere nothing is done.
    """

    def __init__(self) -> None:
        self.pools: list[list[int]] = []
        self.known = self._threads()

    def note(self) -> None:
        """The threads that are new since the last call are one pool."""
        started = self._threads() - self.known
        self.pools.append(sorted(started))
        self.known |= started

    def bind(self) -> None:
        if not hasattr(os, "sched_setaffinity"):
            return
        cpus = sorted(os.sched_getaffinity(0))
        for pool in self.pools:
            for place, thread in enumerate(pool, 1):
                os.sched_setaffinity(thread, {cpus[place % len(cpus)]})
        os.sched_setaffinity(0, {cpus[0]})

    @staticmethod
    def _threads() -> set[int]:
        return {thread.id for thread in psutil.Process().threads()}

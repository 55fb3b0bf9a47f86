"""Ranks that are threads of this process: as many as a test likes, without MPI.

One thread runs at a time, until it waits for what others send. What is sent is copied at once.
"""

import json
import threading
from itertools import pairwise

import numpy as np
import pytest

from smallmind.cli import parallel as cli_parallel
from smallmind.parallel import launch
from smallmind.parallel.group import ENDED, Group
from smallmind.runs.parallel import follow
from tests.faults import runs


class _World:
    """The messages of the ranks: messages[i][rank] is its part of their i-th exchange."""

    def __init__(self):
        self.turn = threading.Condition()  # held by the thread that runs
        self.messages = []
        self.errors = []


class ThreadRanks(Group):
    """One of several ranks. They agree on the kind and the order of everything they exchange."""

    def __init__(self, rank, size, world):
        self.rank, self.size = rank, size
        self.names = [f"rank {i}" for i in range(size)]
        self.agreed = None
        self._world = world
        self._count = 0  # exchanges that this rank has taken part in

    def _post(self, kind, message, received):
        """Sends a message -> what waits for those of all, and returns received(messages)."""
        world = self._world
        if self._count == len(world.messages):
            world.messages.append({})
        posted = world.messages[self._count]
        self._count += 1
        assert {other for other, _ in posted.values()} <= {kind}
        posted[self.rank] = kind, message
        world.turn.notify_all()
        return _Pending(world, posted, self.size, received)

    def share(self, value):
        shared = self._post("share", json.dumps(value), lambda messages: messages).wait()
        values = [json.loads(shared[rank]) for rank in range(self.size)]
        if self.rank and isinstance(values[0], dict) and ENDED in values[0]:
            raise SystemExit(values[0][ENDED])
        return values

    def end(self, status):
        self.share({ENDED: status})
        return True

    def send(self, array):
        def received(messages):
            array[...] = messages[0]

        self._post("send", None if self.rank else array.copy(), received).wait()

    def spread(self, vector, ends, senders, buffer):
        assert senders[self.rank] == (vector is not None)
        parts = [None if vector is None else vector[a:b].copy() for a, b in pairwise(ends)]
        own = ends[self.rank + 1] - ends[self.rank]
        expected = [r for r in range(self.size) if senders[r] and r != self.rank]
        assert buffer.size == own * len(expected)

        def received(messages):
            pieces = [None] * self.size
            for i, rank in enumerate(expected):
                pieces[rank] = buffer[i * own : (i + 1) * own]
                pieces[rank][...] = messages[rank][self.rank]
            return pieces

        return self._post("spread", parts, received)

    def collect(self, vector, ends):
        def received(messages):
            for rank, (a, b) in enumerate(pairwise(ends)):
                vector[a:b] = messages[rank]

        own = vector[ends[self.rank] : ends[self.rank + 1]].copy()
        return self._post("collect", own, received)

    def gather(self, array, ends):
        assert array.size == ends[self.rank + 1] - ends[self.rank]
        parts = self._post("gather", array.copy(), lambda messages: messages).wait()
        return array if self.rank else np.concatenate([parts[rank] for rank in range(self.size)])


class _Pending:
    def __init__(self, world, posted, size, received):
        self._world, self._posted, self._size, self._received = world, posted, size, received

    def wait(self):
        while len(self._posted) < self._size:
            if self._world.errors:
                raise RuntimeError("another rank has failed")
            self._world.turn.wait(60)
        return self._received({rank: message for rank, (_, message) in self._posted.items()})


def status(size, *words):
    """The exit status of a command line on several ranks, the others of which follow it."""

    def lead(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "join", lambda *_: ranks)
            patch.setattr(cli_parallel, "_check_equal", lambda *_: None)
            return runs.status(*words)

    return on_ranks(size, lead)


def _follow(ranks):
    follow(ranks, 1, lambda _: None)


def on_ranks(size, lead, follow=_follow):
    """Calls lead(ranks) in this thread and follow(ranks) in one for each other rank -> its result.

    The first of their errors is raised here; SystemExit ends a rank that follows.
    """
    world = _World()

    def followed(rank):
        with world.turn:
            try:
                follow(ThreadRanks(rank, size, world))
            except SystemExit:
                pass
            except BaseException as error:
                world.errors.append(error)
                world.turn.notify_all()

    threads = [threading.Thread(target=followed, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    result = None
    try:
        with world.turn:
            result = lead(ThreadRanks(0, size, world))
    except BaseException as error:
        world.errors.append(error)
    finally:
        with world.turn:
            world.turn.notify_all()
        for thread in threads:
            thread.join()
    if world.errors:
        raise world.errors[0]
    return result

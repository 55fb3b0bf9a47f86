"""The thread that computes: texts of all requests share the steps of a model's decoder."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from smallmind.checks import InputError
from smallmind.decoder import Continuation, Decoder, Token

PART_OPERATIONS = 2e9  # of the part of a prompt that is read between two tokens of other texts
SHORTEST, LONGEST = 16, 512  # such parts, in tokens
# Seconds between two messages to clients. A screen shows no more of them, and each costs as much as
# a token of a small model: it takes the interpreter, and a core, from the thread that computes.
BETWEEN = 1 / 60


class Busy(InputError):
    """As many requests wait as may."""


def prompt_part(parameters: int) -> int:
    """The tokens of a prompt that a model of this size reads at a time: a power of two.

    It does not depend on what else is served, so that texts do not either.
    """
    tokens = int(PART_OPERATIONS / (2 * max(1, parameters)))
    return min(LONGEST, max(SHORTEST, 1 << max(0, tokens.bit_length() - 1)))


class Request:
    """Texts with one prompt that a client waits for.

    `error` says why texts have not ended by themselves; `has_expired` that the seconds are over.
    """

    def __init__(self, texts: Sequence[Continuation], seconds: float) -> None:
        self.texts = list(texts)
        self.error: Exception | None = None
        self.has_expired = False
        self.deadline = time.monotonic() + seconds
        self.is_cancelled = False
        self._tokens: deque[Token] = deque()
        self._ready = asyncio.Event()
        self._is_done = all(text.ended for text in texts)  # and all tokens are in the deque
        self._is_new = True  # its client has not been told of a token

    async def tokens(self) -> AsyncIterator[list[Token]]:
        """Yields the tokens that have been written since the last time, in order."""
        while True:
            is_done = self._is_done  # before what is taken: the thread adds tokens, then sets it
            taken = [self._tokens.popleft() for _ in range(len(self._tokens))]
            if taken:
                yield taken
            if is_done:
                return
            if not self._tokens:
                await self._ready.wait()
            self._ready.clear()

    @property
    def has_ended(self) -> bool:
        """True if no more tokens will come."""
        ended = all(text.ended for text in self.texts)
        return ended or self.has_expired or self.error is not None or self.is_cancelled


class Line:
    """The requests of one model: those that are served by its decoder, and those that wait."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.waiting: deque[Request] = deque()
        self.served: list[Request] = []

    @property
    def is_idle(self) -> bool:
        """True if nobody waits or is served."""
        return not self.waiting and not self.served


class Engine:
    """`with Engine(most_waiting) as engine`: steps the decoders of all lines in one thread.

    Requests are submitted by the event loop in which it was made.
    """

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self._loop = asyncio.get_running_loop()
        self._lines: list[Line] = []
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._stops = False
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)

    def __enter__(self) -> "Engine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join()

    def add(self, line: Line) -> None:
        """Serves the requests of one more model."""
        with self._changed:
            self._lines.append(line)

    def remove(self, line: Line) -> None:
        """Forgets a model that serves nobody."""
        with self._changed:
            self._lines.remove(line)

    def submit(self, line: Line, request: Request) -> None:
        """Queues a request. Busy if too many wait."""
        with self._changed:
            if len(line.waiting) >= self.most_waiting:
                raise Busy(f"{self.most_waiting} requests are waiting already; try again later")
            line.waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Frees the slots of a request before the next token."""
        request.is_cancelled = True

    async def run(self, job: Callable[[], Any]) -> Any:
        """Computes something else with a model, between two steps -> its result."""
        future: Future[Any] = Future()
        with self._changed:
            self._jobs.append((job, future))
            self._changed.notify()
        return await asyncio.wrap_future(future)

    async def run_beside(self, job: Callable[[], Any]) -> Any:
        """Computes something in a thread of its own, which ends -> its result.

        Every thread that has run a kernel has helpers, one for each other core. While a process has
        more threads of this kind than cores, GNU OpenMP lets all of them sleep as soon as they
        wait, and a token takes half as long again.
        """
        future: Future[Any] = Future()
        threading.Thread(target=_run_job, args=(job, future), name="loading", daemon=True).start()
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        news: dict[Request, None] = {}  # those with tokens that their clients do not know of
        told = 0.0
        while True:
            with self._changed:
                while not (self._stops or self._jobs or any(not x.is_idle for x in self._lines)):
                    self._changed.wait()
                if self._stops:
                    return
                lines = list(self._lines)
                job = self._jobs.popleft() if self._jobs else None
            if job:
                _run_job(*job)
            for line in lines:
                news |= dict.fromkeys(self._step(line))
            now = time.monotonic()
            if now - told >= BETWEEN or any(each._is_new or each._is_done for each in news):
                for request in news:
                    request._is_new = False
                with suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(_wake, list(news))
                news, told = {}, now

    def _step(self, line: Line) -> list[Request]:
        """One step of a decoder -> the requests that have something new."""
        news = self._drop(line)
        with self._changed:
            while line.waiting and line.decoder.free >= len(line.waiting[0].texts):
                request = line.waiting.popleft()
                line.served.append(request)
                line.decoder.add(*request.texts)
        of_text = {text: request for request in line.served for text in request.texts}
        try:
            for token in line.decoder.step() if len(line.decoder) else ():
                request = of_text[token.continuation]
                request._tokens.append(token)
                news.append(request)
        except Exception as error:  # of the model: every text is in the same step
            for request in line.served:
                request.error = error
            news += line.served
            self._drop(line)
        for request in news:
            request._is_done = request.has_ended
        # One that was cancelled meanwhile has slots: `_drop` frees them.
        line.served = [
            request for request in line.served if request.is_cancelled or not request.has_ended
        ]
        return news

    def _drop(self, line: Line) -> list[Request]:
        """Removes requests that are cancelled, expired or failed -> those that do not know yet."""
        now, news = time.monotonic(), []
        with self._changed:
            requests = [*line.served, *line.waiting]
            for request in requests:
                if now > request.deadline and not request.has_ended:
                    request.has_expired = True
                    news.append(request)
            for request in requests:
                if request.has_ended:
                    for text in request.texts:
                        line.decoder.remove(text)
            line.served = [request for request in line.served if not request.has_ended]
            line.waiting = deque(request for request in line.waiting if not request.has_ended)
        return news


def _wake(requests: list[Request]) -> None:
    for request in requests:
        request._ready.set()


def _run_job(job: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)

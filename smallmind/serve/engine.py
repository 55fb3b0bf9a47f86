"""The thread that computes: texts of all requests share the steps of a model's decoder."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from smallmind.checks import InputError
from smallmind.writing.decoder import Continuation, Decoder, Token

PART_OPERATIONS = 2e9  # of the part of a prompt that is read between two tokens of other texts
MIN_PART, MAX_PART = 16, 512  # tokens of such a part
# Seconds between two messages to clients. A screen shows no more of them, and each costs as much as
# a token of a small model: it takes the interpreter, and a core, from the thread that computes.
MESSAGE_SECONDS = 1 / 60
LAST_STEP_SECONDS = 5.0  # in which the thread ends its last step, or is left behind


class Busy(InputError):
    """As many requests wait as may."""


def prompt_part(parameters: int) -> int:
    """Returns the tokens of a prompt that a model of this size reads at a time: a power of two.

    It does not depend on what else is served, so that texts do not either.
    """
    tokens = int(PART_OPERATIONS / (2 * max(1, parameters)))
    return min(MAX_PART, max(MIN_PART, 1 << max(0, tokens.bit_length() - 1)))


class Request:
    """The texts that a client waits for: one or more for each of its prompts.

    `error` says why texts have not ended by themselves; `has_expired` that the seconds are over.
    The event loop sets `is_cancelled`, at any time, which frees its slots before the next token;
    all else is set by the thread that computes.
    """

    def __init__(self, prompts: Sequence[Sequence[Continuation]], seconds: float) -> None:
        self.texts = [text for texts in prompts for text in texts]
        self.error: Exception | None = None
        self.has_expired = False
        self.deadline = time.monotonic() + seconds
        self.is_cancelled = False
        self.has_begun = False  # one of its prompts is in the decoder, or has been
        self.waiting = deque(texts for texts in prompts if not all(text.ended for text in texts))
        self.unfinished = sum(map(len, self.waiting))  # texts that have not ended
        self.writing = 0  # texts in the decoder
        self._tokens: deque[Token] = deque()
        self._ready = asyncio.Event()
        self._is_done = not self.waiting  # and all tokens are in the deque
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


class ModelQueue:
    """The requests of one model: those that are served by its decoder, and those that wait."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.requests: list[Request] = []  # in the order in which they came
        self.texts: dict[Continuation, Request] = {}  # those in the decoder
        self._readers = 0

    @property
    def waiting(self) -> list[Request]:
        """The requests of which no text has begun."""
        return [request for request in self.requests if not request.has_begun]

    @property
    def is_idle(self) -> bool:
        """True if nobody waits or is served."""
        return not self.requests and not self._readers

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the model within the block: for a request that is not submitted yet."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1


class Engine:
    """`with Engine(most_waiting) as engine`: steps the decoders of all lines in one thread.

    Requests are submitted by the event loop in which it was made.
    """

    def __init__(self, most_waiting: int) -> None:
        self.most_waiting = most_waiting
        self._loop = asyncio.get_running_loop()
        self._lines: list[ModelQueue] = []
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
        self._thread.join(LAST_STEP_SECONDS)

    def add(self, line: ModelQueue) -> None:
        """Serves the requests of one more model."""
        with self._changed:
            self._lines.append(line)

    def remove(self, line: ModelQueue) -> None:
        """Forgets a model that serves nobody."""
        with self._changed:
            self._lines.remove(line)

    def submit(self, line: ModelQueue, request: Request) -> None:
        """Queues a request. Busy if too many wait."""
        if request._is_done:
            return
        with self._changed:
            if len(line.waiting) >= self.most_waiting:
                raise Busy(f"{self.most_waiting} requests are waiting already; try again later")
            line.requests.append(request)
            self._changed.notify()

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
        wait, and a token takes half as long again. The end of the program waits for no such thread.
        """
        future: Future[Any] = Future()
        threading.Thread(target=_run_job, args=(job, future), name="beside", daemon=True).start()
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        news: dict[Request, None] = {}  # those with tokens that their clients do not know of
        told = 0.0
        while True:
            with self._changed:
                while not (self._stops or self._jobs or any(x.requests for x in self._lines)):
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
            if now - told >= MESSAGE_SECONDS or any(each._is_new or each._is_done for each in news):
                for request in news:
                    request._is_new = False
                with suppress(RuntimeError):  # the loop has been closed
                    self._loop.call_soon_threadsafe(_wake, list(news))
                news, told = {}, now

    def _step(self, line: ModelQueue) -> list[Request]:
        """Runs one step of a decoder -> the requests that have something new."""
        news: list[Request] = []
        try:
            news += self._let_go(line)
            self._admit(line)
            for token in line.decoder.step() if len(line.decoder) else ():
                request = line.texts[token.continuation]
                request._tokens.append(token)
                if token.is_last:
                    del line.texts[token.continuation]
                    request.writing -= 1
                    request.unfinished -= 1
                news.append(request)
            for request in dict.fromkeys(news):
                if not request.unfinished:
                    self._end(line, request)
        except Exception as error:  # of the model: every text is in the same step
            line.decoder.clear()
            line.texts.clear()
            for request in [request for request in line.requests if request.has_begun]:
                request.error = error
                self._end(line, request)
                news.append(request)
        return news

    def _let_go(self, line: ModelQueue) -> list[Request]:
        """Ends the requests that are cancelled or expired -> those."""
        now = time.monotonic()
        with self._changed:
            # Decided here, and nowhere else: a client may leave between any two looks.
            leaving = [x for x in line.requests if x.is_cancelled or now > x.deadline]
        for request in leaving:
            request.has_expired = now > request.deadline
            self._end(line, request)
        return leaving

    def _admit(self, line: ModelQueue) -> None:
        """Adds texts to the decoder while it has free slots."""
        with self._changed:
            while line.decoder.free:
                waiting = [request for request in line.requests if request.waiting]
                # Whoever has the fewest texts in the decoder comes next: a request of many prompts
                # lets others in between them.
                request = min(waiting, key=lambda request: request.writing, default=None)
                if request is None or len(request.waiting[0]) > line.decoder.free:
                    return
                request.has_begun = True
                texts = [text for text in request.waiting.popleft() if not text.ended]
                line.texts.update(dict.fromkeys(texts, request))
                request.writing += len(texts)
                line.decoder.add(*texts)

    def _end(self, line: ModelQueue, request: Request) -> None:
        """Removes a request, with all of its texts; its client is told of no more tokens."""
        for text in request.texts:
            if line.texts.pop(text, None):
                line.decoder.remove(text)
        with self._changed:
            if request in line.requests:
                line.requests.remove(request)
        request._is_done = True


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

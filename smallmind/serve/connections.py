"""Connections to clients: how long each may take, and how many there may be."""

import asyncio
import json
import logging
import sys
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from smallmind.serve.errors import APIError

HEADERS_SECONDS = 10.0  # seconds in which a client has to send the first lines of a request
BODY_SECONDS = 30.0  # and all that follows
STALLED_SECONDS = 30.0  # seconds in which it has to take what it is sent
MAX_CONNECTIONS = 512  # each takes a file descriptor
BACKLOG = 32  # connections at once, before the oldest are closed
MAX_QUEUED = 1024  # connections that the system holds until they are accepted
SHUTDOWN_SECONDS = 5  # for answers that are being written when the server is stopped


def server_of(app: ASGIApp, **settings: Any) -> uvicorn.Server:
    """Returns a server for the application; settings are more of uvicorn's."""
    settings.setdefault("timeout_graceful_shutdown", SHUTDOWN_SECONDS)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        **settings,
    )
    logging.getLogger("uvicorn.error").addFilter(_is_bug)
    return uvicorn.Server(config)


class Connection(H11Protocol):
    """HTTP for one client, which is not waited for without an end.

    While its request is not complete, a connection is closed after some seconds, or when too many
    others come.
    """

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _since = 0.0  # when the client began to be waited for

    @property
    def is_waiting(self) -> bool:
        """True while the client has to send something before it gets an answer."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEADERS_SECONDS)
        if len(self.connections) > _most_connections():
            self._close_longest_waiting()

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if not self.is_waiting:
            self._stop_waiting()
        elif self.cycle is not cycle and not self.cycle.response_complete:
            self._wait(BODY_SECONDS)
        elif self._timer is None:
            self._wait(HEADERS_SECONDS)

    def on_response_complete(self) -> None:
        self._stop_waiting()  # until the next request begins, uvicorn waits for some seconds
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stalling()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalling()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._since = self.loop.time()
        message = f"the request was not complete after {seconds:g} seconds"
        self._timer = self.loop.call_later(seconds, self._refuse, 408, message)

    def _stop_waiting(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _stop_stalling(self) -> None:
        if self._stalled:
            self._stalled.cancel()

    def _close_longest_waiting(self) -> None:
        """Closes the connection that has been waited for longest; this one, if there is none."""
        waiting = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self and other.is_waiting
        ]

        def order(other: Connection) -> tuple[bool, float]:
            """Sorts by how long they wait; last come clients that were answered and may go on."""
            was_answered = other.cycle is not None and bool(other.cycle.response_complete)
            return was_answered, other._since

        oldest = min(waiting, key=order, default=self)
        oldest._refuse(503, "too many connections; try again later")

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an answer if none has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started:
            body = json.dumps(APIError(message, status=status).content()).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        self.connections.discard(self)


def _most_connections() -> int:
    """-> the most connections that this process may have, with descriptors left for other files."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _is_bug(record: logging.LogRecord) -> bool:
    """-> False for what uvicorn reports of answers that end with the server or with their
    client.
    """
    if record.exc_info:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    message = str(record.msg).strip()  # starlette puts the traceback of its lifespan into it
    begins = message.startswith(("Cancel ", "ASGI callable returned without"))
    return not (begins or message.endswith("CancelledError"))

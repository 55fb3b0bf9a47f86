"""Which requests are answered at all: those of the page itself and of programs on this machine.

A page elsewhere can make a browser send requests to this machine, also by a name of its own that
leads here (DNS rebinding): so the names in Host and Origin are checked. Programs send no Origin.
"""

import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smallmind.serve.errors import APIError

LOCAL = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")
# Names by which programs in containers and virtual machines call the machine that they run on. A
# page cannot have them: .internal is reserved for private networks.
OUTSIDE = tuple(
    f"{name}.internal"
    for name in (
        *("host.docker", "gateway.docker", "host.containers", "host.orb", "host.lima"),
        *("host.minikube", "host.rancher-desktop", "docker.for.mac.host", "host.k3d"),
    )
)
COOKIE = "smallmind_token"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
POLICY = "Content-Security-Policy"
# Frames in which the page may be shown: of this server, and of notebooks on this machine.
OUR_FRAMES = "frame-ancestors 'self'"
LOCAL_FRAMES = f"{OUR_FRAMES} http://localhost:* http://127.0.0.1:*"
NOTHING = "default-src 'none'; frame-ancestors 'none'"  # the policy of what is not a page


class Guard:
    """Wraps an application: checks Host, Origin and token, and adds the headers of all answers.

    With `in_frames`, the document at / may be loaded from another site, into a frame; its policy
    says of which.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], token: str | None, in_frames: bool = False
    ) -> None:
        self.app, self.hosts, self.token = app, {*LOCAL, *OUTSIDE, *hosts}, token
        self.in_frames = in_frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSocket is served
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = Headers(raw=message["headers"])
                more = {**HEADERS, POLICY: NOTHING}
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items() if k not in headers),
                ]
            await send(message)

        answer = self._refusal(scope) or self.app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns the answer to a request that is not let in; None for the others."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_known(hosts[0]):
            return _forbidden("the request is for another host", "host")
        origins = headers.getlist("origin")
        if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return _forbidden("pages of other sites may not use this server", "origin")
        is_document = scope["method"] in ("GET", "HEAD") and scope["path"] == "/"
        framed = is_document and self.in_frames and headers.get("sec-fetch-dest") == "iframe"
        # Browsers say so of requests that carry no Origin too.
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and not framed:
            return _forbidden("pages of other sites may not use this server", "origin")
        if self.token is None or is_document:
            return None
        if not self._has_token(headers):
            message = "give the token of the server, as Authorization: Bearer TOKEN"
            error = APIError(message, code="invalid_api_key", status=401)
            return error.response({"WWW-Authenticate": "Bearer"})
        return None

    def _is_known(self, host: str) -> bool:
        """Returns True for the name of this server, with any port."""
        name, separator, port = host.lower().rpartition(":")
        if not separator or not port.isdecimal():
            name = host.lower()
        return name in self.hosts

    def _has_token(self, headers: Headers) -> bool:
        assert self.token is not None
        kind, _, token = headers.get("authorization", "").partition(" ")
        candidates = [token.strip()] if kind.lower() == "bearer" else []
        cookies: Any = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            cookies = {}
        if COOKIE in cookies:
            candidates.append(cookies[COOKIE].value)
        known = self.token.encode()
        return any(hmac.compare_digest(each.encode(), known) for each in candidates)


def _forbidden(message: str, code: str) -> Response:
    return APIError(message, code=code, status=403).response()

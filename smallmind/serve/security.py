"""Which requests are answered at all: those of the page itself and of programs on this machine.

A page elsewhere can make a browser send requests to this machine, also by a name of its own that
leads here (DNS rebinding): so the names in Host and Origin are checked. Programs send no Origin.
"""

import hmac
import re
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smallmind.serve.errors import APIError

# Names below localhost lead to this machine alone (RFC 6761, section 6.3).
LOCAL = ("localhost", "*.localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]")
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
PERMISSION = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Private-Network": "true",
    "Access-Control-Max-Age": "600",
}
POLICY = "Content-Security-Policy"
OPEN = "/", "/health"  # addresses that need no token
# Frames in which the page may be shown: of this server, and of notebooks on this machine.
OUR_FRAMES = "frame-ancestors 'self'"
LOCAL_FRAMES = f"{OUR_FRAMES} http://localhost:* http://127.0.0.1:*"
NOTHING = "default-src 'none'; frame-ancestors 'none'"  # the policy of what is not a page


class Guard:
    """Wraps an application: checks Host, Origin and token, and adds the headers of all answers.

    In hosts and origins, * stands for any part of a name; a host without a port has any. With
    `in_frames`, the document at / may be loaded from another site, into a frame; its policy says of
    which.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        token: str | None,
        in_frames: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        self.app, self.token, self.in_frames = app, token, in_frames
        self._is_host = _matcher({*LOCAL, *OUTSIDE, *hosts})
        self._is_origin = _matcher(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no WebSocket is served
            await send({"type": "websocket.close", "code": 1008})
            return

        # Clients join addresses of which one ends with a slash and the other begins with one.
        scope = {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}
        asked = HTTPConnection(scope)
        origin, more = asked.headers.get("origin", ""), {**HEADERS, POLICY: NOTHING}
        if self._is_origin(origin.lower()):
            more |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "*"}

        has_all = False  # of the body

        async def receive_counted() -> Message:
            nonlocal has_all
            message = await receive()
            has_all = not message.get("more_body", False)
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                # A connection that is closed before all was read is reset, and a refusal lost. Who
                # expects to be asked for the body has not sent it.
                while message["status"] >= 400 and not has_all and "expect" not in asked.headers:
                    await receive_counted()
                headers = Headers(raw=message["headers"])
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in more.items() if k not in headers),
                ]
            await send(message)

        answer = self._refusal(scope["method"], asked) or self.app
        await answer(scope, receive_counted, send_guarded)

    def _refusal(self, method: str, asked: HTTPConnection) -> Response | None:
        """Returns the answer to a request that does not reach the application; else None."""
        headers, path, reads = asked.headers, asked.scope["path"], method in ("GET", "HEAD")
        hosts = headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        name = re.sub(r":\d*$", "", host)
        if not (self._is_host(host) or self._is_host(name.removesuffix("."))):
            message = f"the request names the host {name[:100]!r}, which is not allowed"
            return _forbidden(message, "host", name, "if this server has that name")
        own = f"http://{host}", f"https://{host}"
        others = [each.lower() for each in headers.getlist("origin") if each.lower() not in own]
        if not all(map(self._is_origin, others)):
            message = f"pages of {others[0][:100]!r} may not use this server"
            return _forbidden(message, "origin", others[0], "to allow it")
        if others and method == "OPTIONS":  # a browser asks before it sends the request
            asked_for = headers.get("access-control-request-headers", "*")
            return Response(None, 204, {**PERMISSION, "Access-Control-Allow-Headers": asked_for})
        # Browsers say from where a request is also if it carries no Origin. A link may lead to the
        # page, and a notebook show it.
        site, kind = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-dest")
        is_shown = reads and path == "/" and kind in ("document", self.in_frames and "iframe")
        if site not in ("none", "same-origin") and not (is_shown or others):
            return _forbidden("pages of other sites may not load this address", "origin")
        if self.token is None or (reads and path in OPEN):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        tokens = [token.strip()] if scheme.lower() == "bearer" else []
        if not others:  # the cookie is the page's own
            tokens.append(asked.cookies.get(COOKIE, ""))
        if any(hmac.compare_digest(each.encode(), self.token.encode()) for each in tokens):
            return None
        message = "send the server's token, as Authorization: Bearer TOKEN"
        error = APIError(message, code="invalid_api_key", status=401)
        return error.response({"WWW-Authenticate": "Bearer"})


def _forbidden(message: str, code: str, name: str = "", purpose: str = "") -> Response:
    if re.fullmatch(r"[\w.:/\[\]+-]{1,253}", name, re.ASCII):
        more = " --token-file FILE" if name == "null" else "f"  # any site can have such a page
        message += f"; {purpose}, start the server with --allow-{code} {name.strip('[]')}{more}"
    return APIError(message, code=code, status=403).response()


def _matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    """Returns a function that is True for names like one of the patterns."""
    each = (re.escape(pattern).replace(r"\*", "[^@]*") for pattern in patterns)
    expression = re.compile("|".join(each))
    return lambda name: bool(name) and expression.fullmatch(name) is not None

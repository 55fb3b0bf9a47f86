"""The application: the page, OpenAI's API and the page's own endpoints, behind one guard."""

import difflib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from smallmind import page
from smallmind.serve.api import API, RequestLimits
from smallmind.serve.engine import Engine
from smallmind.serve.errors import APIError
from smallmind.serve.models import Models
from smallmind.serve.page_api import PageAPI
from smallmind.serve.security import COOKIE, LOCAL_FRAMES, OUR_FRAMES, POLICY, Guard

# Addresses of other servers -> what there is here instead.
ELSEWHERE = {
    **dict.fromkeys(("/v1/responses", "/v1/messages", "/api/chat"), "/v1/chat/completions"),
    **{"/api/generate": "/v1/completions", "/api/tags": "/v1/models", "/v1": "/v1/models"},
}
CONNECTIONS = "connect-src 'self'", "frame-src 'self'"  # that the page may do


def application(
    paths: Sequence[Path],
    folder: Path | None = None,
    *,
    precision: str | None = None,
    slots: int = 8,
    waiting: int = 32,
    context: int | None = None,
    limits: RequestLimits | None = None,
    hosts: Collection[str] = (),
    token: str | None = None,
    in_frames: bool = False,
    template_args: Mapping[str, Any] = MappingProxyType({}),
    origins: Collection[str] = (),
    ignores_tools: bool = False,
) -> Guard:
    """Models on disk -> the application that serves them, for any ASGI server.

    paths are runs, model files or models of other programs; the runs of `folder` are served too,
    also those that begin later. `slots` texts of a model are written at a time, and `waiting`
    requests may wait for them. Requests have to be for one of `hosts` or this machine, from a
    program, the page or one of `origins`, and to have the token, if there is one. Chat templates
    get `template_args`; tools that they do not know are refused, or with `ignores_tools` left out.
    With `in_frames` notebooks on this machine may show the page.
    """
    html = page.document()
    policy = page.policy(html, *CONNECTIONS, LOCAL_FRAMES if in_frames else OUR_FRAMES)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with Engine(waiting) as engine:
            models = Models(engine, paths, folder, precision, slots, context, template_args)
            api = API(engine, models, limits or RequestLimits(), ignores_tools)
            app.state.api = api
            app.router.routes.extend(_routes(api, PageAPI(api)))
            yield
            api.is_stopping = True

    async def show_page(_request: HTTPRequest) -> Response:
        return HTMLResponse(html, headers={POLICY: policy})

    async def begin_session(_request: HTTPRequest) -> Response:
        """Returns a cookie with the token, for what a page loads without headers of its own."""
        response = Response(status_code=204)
        if token:
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response

    async def show_health(_request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/health", show_health),
            Route("/api/session", begin_session, methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(
            (APIError, HTTPException, ClientDisconnect, Exception), _show_error
        ),
    )
    return Guard(app, hosts, token, in_frames, origins)


def _routes(api: API, page_api: PageAPI) -> list[Route]:
    return [
        Route("/v1/models", api.list_models),
        Route("/v1/models/{id:path}", api.show_model),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/api/state", page_api.state),
        Route("/api/inspect", page_api.inspect, methods=["POST"]),
        Route("/api/attention", page_api.attention, methods=["POST"]),
        Route("/api/runs", page_api.runs),
        Route("/api/runs/{name}", page_api.run),
        Route("/api/runs/{name}/report", page_api.report),
    ]


async def _show_error(request: HTTPRequest, error: Exception) -> Response:
    if isinstance(error, APIError):
        return error.response()
    if isinstance(error, HTTPException):
        method, path = request.method, request.url.path[:100]
        methods = (error.headers or {}).get("Allow", "")
        texts = {
            404: f"there is nothing at {path}; the nearest address is {_nearest(request)}",
            405: f"{path} takes {methods.replace('HEAD, ', '')}, not {method}",
        }
        text = texts.get(error.status_code, str(error.detail))
        return APIError(text, status=error.status_code).response(error.headers)
    if isinstance(error, ClientDisconnect):
        return APIError("the request ended in the middle").response()  # its client has left
    return APIError(f"the server failed: {type(error).__name__}", status=500).response()


def _nearest(request: HTTPRequest) -> str:
    """Returns the address for programs that is most like the one which was asked for."""
    paths = [route.path for route in request.app.routes]
    known = {path: path for path in paths if "/api" not in path and "{" not in path} | ELSEWHERE
    return known[difflib.get_close_matches(request.url.path.lower(), known, 1, 0)[0]]

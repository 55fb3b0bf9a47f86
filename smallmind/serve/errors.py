"""Errors in the form of OpenAI's API."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer other than 200: its status, a line that says what to do, the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def content(self) -> dict[str, object]:
        """Returns the error as JSON."""
        return content_of(self.status, str(self), self.code, self.param)

    def response(self) -> JSONResponse:
        """Returns the error as an answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.content(), self.status, headers)


def content_of(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, object]:
    """Returns an error as clients read it."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Returns an error as an answer."""
    return JSONResponse(content_of(status, message, code), status, headers)

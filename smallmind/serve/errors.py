"""Errors in the form of OpenAI's API."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(Exception):
    """An answer other than 200: a line that says what to do, the field at fault, a status."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(_encodable(message))
        self.status, self.param, self.code = status, param and _encodable(param), code

    def content(self) -> dict[str, object]:
        """Returns the error as JSON."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = KINDS.get(self.status, other)
        described = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": described}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Returns the error as an answer."""
        if self.status in (429, 503):
            headers = {"Retry-After": "1"}
        return JSONResponse(self.content(), self.status, headers)


def _encodable(text: str) -> str:
    """Returns a text without halves of characters, which JSON can have and UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()

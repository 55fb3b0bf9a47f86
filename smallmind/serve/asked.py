"""The fields of requests, checked one by one."""

import json
import math
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from smallmind.checks import InputError
from smallmind.serve.errors import APIError
from smallmind.settings.config import GenerationConfig
from smallmind.text.chat import ASSISTANT, ROLES, SYSTEM, Turn

MAX_BODY = 4 * 2**20  # bytes
MOST_STOPS, MOST_TOP = 16, 20
TYPES: dict[type, str] = {
    **{str: "a string", bool: "true or false", int: "a whole number", float: "a number"},
    **{list: "a list", dict: "an object"},
}
Value = TypeVar("Value")


class Fields:
    """The fields of a JSON object that a client has sent. APIError 400 for a wrong one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """A field of this type; None if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise APIError(400, f"{name} must be {TYPES[kind]}", name)
        return value

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number from low to high."""
        value = self.get(name, int)
        value = default if value is None else value
        if not low <= value <= high:
            raise APIError(400, f"{name}={value} must be from {low} to {high}", name)
        return value

    def required(self, name: str, kind: type[Value]) -> Value:
        """A field that must be there."""
        value = self.get(name, kind)
        if value is None:
            raise APIError(400, f"{name} is missing; it must be {TYPES[kind]}", name)
        return value

    def ids(self, name: str, vocab_size: int) -> list[int]:
        """A list of tokens, by default an empty one."""
        found = self.get(name, list) or []
        if not all(type(i) is int and 0 <= i < vocab_size for i in found):
            raise APIError(400, f"{name} must be tokens from 0 to {vocab_size - 1}", name)
        return found

    def refuse(self, names: Mapping[str, Any]) -> None:
        """Refuses fields that would change the result and are not implemented, by their neutral."""
        for name, neutral in names.items():
            if self.values.get(name) not in (None, neutral):
                raise APIError(400, f"{name} is not supported by this server; leave it out", name)


async def fields_of(request: Request) -> Fields:
    """The body of a request. APIError if it is too large, or not a JSON object."""
    body = b""
    if (length := request.headers.get("content-length", "0")).isdecimal():
        _check_size(int(length))
    async for part in request.stream():
        body += part
        _check_size(len(body))
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise APIError(400, "the body must be a JSON object")
    return Fields(values)


def _check_size(size: int) -> None:
    if size > MAX_BODY:
        raise APIError(413, f"the body has more than {MAX_BODY // 2**20} MiB")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def generation_of(fields: Fields, most: int, default: int) -> GenerationConfig:
    """The settings of a request, of at most `most` tokens. Without a seed, a random one."""
    given: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        given[name] = fields.get(name, float)
    given["repetition_penalty"] = fields.get("repetition_penalty", float)
    given["top_k"] = fields.get("top_k", int)
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise APIError(400, f"{name} must be a finite number", name)
    seed = fields.get("seed", int)
    given["seed"] = secrets.randbits(62) if seed is None else seed % 2**63
    name = "max_completion_tokens" if "max_completion_tokens" in fields.values else "max_tokens"
    given["max_tokens"] = fields.whole(name, min(default, most), 0, most)
    given["stop"] = _stops(fields)
    try:
        return GenerationConfig(**{k: v for k, v in given.items() if v is not None})
    except InputError as error:
        raise APIError(400, str(error), _named(str(error), given)) from None


def _stops(fields: Fields) -> tuple[str, ...] | None:
    stop = fields.values.get("stop")
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise APIError(400, f"stop must be a string, or a list of at most {MOST_STOPS}", "stop")
    if not all(isinstance(each, str) and each for each in stops):
        raise APIError(400, "stop must be strings of one character or more", "stop")
    return tuple(stops) or None


def _named(message: str, given: Mapping[str, Any]) -> str | None:
    """The field that a message is about."""
    return next((name for name in given if message.startswith(name)), None)


def top_of(fields: Fields, chat: bool) -> int | None:
    """How many alternatives to each token a client asks for; None: no probabilities at all."""
    if not chat:
        return None if fields.get("logprobs", int) is None else fields.whole("logprobs", 0, 0, 20)
    if not fields.get("logprobs", bool):
        if fields.get("top_logprobs", int):
            raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return fields.whole("top_logprobs", 0, 0, MOST_TOP)


def turns_of(fields: Fields) -> tuple[str, list[Turn]]:
    """The messages of a conversation -> the system's text, and all other turns."""
    messages = fields.required("messages", list)
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    system = []
    while turns and turns[0].role == SYSTEM:
        system.append(turns.pop(0).text)
    if not turns:
        raise APIError(400, "messages must have a turn of the user", "messages")
    return "\n".join(system), turns


def _turn(message: Any, place: str) -> Turn:
    if not isinstance(message, dict):
        raise APIError(400, f"{place} must be an object with role and content", "messages")
    role, content = message.get("role"), message.get("content")
    role = SYSTEM if role == "developer" else role
    if role not in ROLES:
        raise APIError(400, f"{place}.role must be one of {', '.join(ROLES)}", "messages")
    if isinstance(content, list):
        found = [part.get("text") if isinstance(part, dict) else None for part in content]
        parts = [part for part in found if isinstance(part, str)]
        if len(parts) < len(found):
            raise APIError(400, f"{place}.content may have parts of text only", "messages")
        content = "".join(parts)
    if content is None and role == ASSISTANT:
        content = ""
    if not isinstance(content, str):
        raise APIError(400, f"{place}.content must be a string", "messages")
    return Turn(role, content)

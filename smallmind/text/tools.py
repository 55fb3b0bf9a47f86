"""Calls of tools: as messages have them, and as models write them.

In a message a call has the form of OpenAI's API. Models of Qwen, Hermes and SmolLM write
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also with a list of calls inside; those
of Llama write the object alone, with `parameters`, perhaps after `<|python_tag|>`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from smallmind.checks import InputError
from smallmind.text.tokenizer import special_names

ARGUMENTS = "arguments", "parameters"
# Spaces in calls are where templates write them, in the words of llguidance.
AS_WRITTEN = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Call(NamedTuple):
    """A call of a tool; arguments are an object, or the text that should be one."""

    name: str
    arguments: Any

    def as_message(self, id: str, is_text: bool) -> dict[str, Any]:
        """Returns the call as a message has it; templates take arguments that are not text."""
        arguments = self.arguments
        if is_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}


def messages_calls(value: Any) -> list[dict[str, Any]]:
    """Returns the `tool_calls` of a message as templates take them. InputError for other things."""
    value = _opened(value)
    if not isinstance(value, list):
        raise InputError("is not a list of calls")
    calls = []
    for number, one in enumerate(value, 1):
        one = _opened(one)
        said = one.get("function", one) if isinstance(one, dict) else None
        if (call := _call(said)) is None:
            raise InputError(f"has no name of a function and arguments in call {number:,}")
        id = one.get("id")
        calls.append(call.as_message(id if isinstance(id, str) else f"call{number:05}", False))
    return calls


def described_tools(value: Any) -> list[dict[str, Any]]:
    """Returns the `tools` of a conversation as templates take them. InputError for other things."""
    value = _opened(value)
    if not isinstance(value, list):
        raise InputError("is not a list of tools")
    tools = []
    for number, one in enumerate(value, 1):
        one = _opened(one)
        said = one.get("function", one) if isinstance(one, dict) else {}
        if not (isinstance(said, dict) and isinstance(said.get("name"), str) and said["name"]):
            raise InputError(f"has no name of a function in tool {number:,}")
        tools.append({"type": "function", "function": said})
    return tools


def calls_in(text: str) -> Iterator[Call]:
    """Yields the calls that a text consists of; none if it is anything else."""
    decoder, found, rest = json.JSONDecoder(strict=False), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return
        found += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip("; \n\t,")
    calls = [_call(one) for one in found]
    if all(calls):
        yield from filter(None, calls)


def calling_in(text: str) -> tuple[str, str, str] | None:
    """Returns what a call has before and after its object, and the object's name for arguments.

    None for a call that is anything else.
    """
    before, _, rest = text.partition("{")
    inner, _, after = rest.rpartition("}")
    try:
        said = json.loads(f"{{{inner}}}")
    except ValueError:
        return None
    name = next((key for key in ARGUMENTS if key in said), None)
    return (before, after, name) if name and _call(said) else None


def call_grammar(
    tools: Sequence[Mapping[str, Any]], calling: tuple[str, str, str], special: Mapping[str, int]
) -> str:
    """Returns the grammar of a call of one of the tools, in the notation of Lark.

    Names of `special` tokens around it are these tokens, as a template writes them.
    """
    before, after, arguments = calling
    calls = []
    for tool in tools:
        function = tool["function"]
        inner = function.get("parameters") or {"type": "object"}
        kinds = {"name": {"const": function["name"]}, arguments: inner}
        closed = {"required": [*kinds], "additionalProperties": False}
        calls.append({"type": "object", "properties": kinds, **closed})
    schema = json.dumps({"x-guidance": AS_WRITTEN, "anyOf": calls})
    pieces = [special_names(tuple(special)).split(x) if special else [x] for x in (before, after)]
    written = (
        " ".join(
            f"<[{special[x]}]>" if x in special else json.dumps(x, ensure_ascii=False)
            for x in filter(None, each)
        )
        for each in pieces
    )
    return "start: {} call {}\ncall: %json {}".format(*written, schema)


def _call(said: Any) -> Call | None:
    """Returns the call that an object describes; None if it describes none."""
    if not isinstance(said, dict) or not isinstance(name := said.get("name"), str) or not name:
        return None
    arguments = next((said[key] for key in ARGUMENTS if key in said), None)
    arguments = {} if arguments is None else _opened(arguments)
    return Call(name, arguments) if isinstance(arguments, dict | str) else None


def _opened(value: Any) -> Any:
    """Returns the object or list that JSON in a text holds; else the value."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value

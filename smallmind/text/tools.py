"""Calls of tools: as messages have them, and as models write them.

In a message a call has the form of OpenAI's API. Models of Qwen, Hermes and SmolLM write
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also with a list of calls inside; those
of Llama write the object alone, with `parameters`, perhaps after `<|python_tag|>`; FORMS has the
others. Which one a model writes is found by its template.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from smallmind.checks import InputError
from smallmind.text.tokenizer import special_names

NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")
CONSTANTS = {"true": True, "false": False, "null": None}  # of JSON, in calls as Python has them
DEEPSEEK = str.maketrans("| ", "\uff5c\u2581")  # of its special tokens
# Spaces in calls are where templates write them, in the words of llguidance.
AS_WRITTEN = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


Tools = Mapping[str, Any]  # those that there are: name -> the schema of its arguments


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


def calls_in(text: str, tools: Tools = MappingProxyType({})) -> list[Call]:
    """Returns the calls that a text consists of; none if it is anything else."""
    del tools
    decoder, found, rest = json.JSONDecoder(strict=False), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        found += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip("; \n\t,")
    calls = [_call(one) for one in found]
    return [call for call in calls if call] if all(calls) else []


def _python_calls(text: str, tools: Tools) -> list[Call]:
    """-> the calls in a list or lines of Python, such as `[f(x=1)]`; as `calls_in`."""
    del tools
    text = text.strip().removeprefix("```python").removesuffix("```").strip()
    calls: list[Call] = []
    try:
        with warnings.catch_warnings(action="ignore"):
            body = _Constants().visit(ast.parse(text)).body
        for line in body:
            several: list[Any] = (
                line.value.elts if isinstance(line.value, ast.List) else [line.value]
            )
            for call in several:
                if call.args:
                    return []
                said = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
                calls.append(Call(ast.unparse(call.func), json.loads(json.dumps(said))))
    except (AttributeError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []
    return calls


class _Constants(ast.NodeTransformer):
    """Replaces the constants of JSON by those of Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node


def _calls_as(
    call: str, arguments: Callable[[str, Mapping[str, Any]], Any] = lambda text, _: _opened(text)
) -> "Reader":
    """Returns what reads calls by an expression with their `name` and their arguments, `inner`.

    arguments gets the latter, and the schema of the tool.
    """
    pattern = re.compile(rf"\s*{call}\s*", re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call]:
        calls, position = [], 0
        while position < len(text):
            found = pattern.match(text, position)
            said = found and arguments(found["inner"], tools.get(found["name"]) or {})
            if not found or not isinstance(said, dict):
                return []
            calls.append(Call(found["name"], said))
            position = found.end()
        return calls

    return read


def _elements(argument: str) -> Callable[[str, Mapping[str, Any]], Any]:
    """Returns what reads arguments by an expression with the name of one and its value, a text.

    Its type is that of the schema; without one, a text that is JSON counts as that.
    """
    pattern = re.compile(rf"\s*{argument}\s*", re.DOTALL)

    def read(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        if pattern.sub("", text).strip():
            return None
        kinds = schema.get("properties")
        kinds = kinds if isinstance(kinds, Mapping) else {}
        return {name: _value(said, kinds.get(name)) for name, said in pattern.findall(text)}

    return read


def _value(text: str, schema: Any) -> Any:
    """Returns an argument that is written as a text; templates write some as Python does."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind and text != "null"):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(text)
            json.dumps(value)
            return value
    return text


def _quoted(text: str, schema: Mapping[str, Any]) -> Any:
    """-> arguments in the notation of Gemma: JSON with bare names, and quotes of their own."""
    del schema
    plain = text.split('<|"|>')
    plain[::2] = [re.sub(r"([{,]\s*)([^\s{}\[\]:,]+):", r'\1"\2":', part) for part in plain[::2]]
    plain[::2] = [re.sub(r"\bNone\b", "null", part) for part in plain[::2]]
    plain[1::2] = map(json.dumps, plain[1::2])
    return _opened("".join(plain))


Reader = Callable[[str, Tools], list[Call]]


class CallForm(NamedTuple):
    """How models write calls: what is before and after them, and what reads those in between."""

    begin: str
    end: str  # "": the end of the answer
    read: Reader = calls_in


FORMS = (
    CallForm("<tool_call>", "</tool_call>"),  # of Hermes, Qwen and SmolLM
    CallForm(  # of Qwen3-Coder, Qwen3.5 and Nemotron 3
        "<tool_call>",
        "</tool_call>",
        _calls_as(
            r"<function=(?P<name>[^>\n]+)>(?P<inner>.*?)</function>",
            _elements(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
        ),
    ),
    CallForm(  # of GLM
        "<tool_call>",
        "</tool_call>",
        _calls_as(
            r"(?P<name>[^<>\s{]+)\s*(?P<inner>(<arg_key>.*)?)",
            _elements(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        ),
    ),
    CallForm("<tool_calls>", "</tool_calls>"),  # of Jamba
    CallForm("<|tool_call|>", "<|/tool_call|>"),  # of Phi-4 and Granite
    CallForm("<|START_ACTION|>", "<|END_ACTION|>"),  # of Command
    CallForm("[TOOL_CALLS]", ""),  # of Mistral
    CallForm(  # of later ones of Mistral
        "[TOOL_CALLS]",
        "",
        _calls_as(r"(\[TOOL_CALLS\])?(?P<name>[^\[{]+)\[ARGS\](?P<inner>.*?(?=\[TOOL_CALLS\]|$))"),
    ),
    CallForm("<|tool_call_start|>", "<|tool_call_end|>", _python_calls),  # of LFM2 and MiniCPM3
    CallForm(  # of Gemma 4
        "<|tool_call>", "<tool_call|>", _calls_as(r"call:(?P<name>[^{\s]+)(?P<inner>.*)", _quoted)
    ),
    CallForm(
        "<|tool calls begin|>".translate(DEEPSEEK),
        "<|tool calls end|>".translate(DEEPSEEK),
        _calls_as(
            "<|tool call begin|>(function<|tool sep|>)?(?P<name>[^\n<]+?)(\n```json\n)?"
            "(<|tool sep|>)?(?P<inner>{.*?)(\n```)?<|tool call end|>".translate(DEEPSEEK)
        ),
    ),
    CallForm("<function=", "</function>", _calls_as("(?P<name>[^>\n]+)>(?P<inner>.*)")),  # of Llama
)


def form_in(text: str, call: Call) -> CallForm | None:
    """Returns the form in which a text has a call and nothing after it; None if it is unknown."""
    for form in FORMS:
        _, mark, rest = text.partition(form.begin)
        inner, end, rest = rest.partition(form.end) if form.end else (rest, "", "")
        if mark and end == form.end and not rest.strip() and form.read(inner, {}) == [call]:
            return form
    return None


def spelled(call: Mapping[str, Any]) -> str:
    """Returns a call of a message in the first of the forms."""
    said = {name: call["function"][name] for name in ("name", "arguments")}
    return f"{FORMS[0].begin}\n{json.dumps(said, ensure_ascii=False)}\n{FORMS[0].end}"


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
    is_known = name and NAMES[0] in said and _call(said)
    return (before, after, name) if name and is_known else None


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
    name = next((said[x] for x in NAMES if x in said), "") if isinstance(said, dict) else ""
    if not isinstance(name, str) or not name:
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

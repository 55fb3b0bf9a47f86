"""The fields of requests, checked one by one."""

import itertools
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.requests import Request

from smallmind.checks import InputError
from smallmind.serve.errors import APIError
from smallmind.settings.config import GenerationConfig
from smallmind.text.chat import (
    ASSISTANT,
    ROLE_NAMES,
    ROLES,
    SYSTEM,
    TOOL,
    ChatFormat,
    Turn,
    said_in,
)
from smallmind.text.templates import RESERVED_ARGS
from smallmind.text.tokenizer import Tokenizer
from smallmind.text.tools import call_grammar, described_tools, messages_calls
from smallmind.writing.form import Form

MAX_BODY = 4 * 2**20  # bytes
# Commas in a body, and brackets, which cost more: Python reads JSON at once, and more would hold up
# all others.
MAX_VALUES, BRACKET_VALUES = 2**20, 8
MAX_STOPS, MAX_TOP = 16, 20
MAX_TEXTS = 2**16  # of a request; each takes memory while it waits
MAX_CHARACTERS = 32  # of the prompts of a request, for each token that may be read
MAX_NUMBER = 2**31  # what is larger counts as that
TYPES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
BOOLS = {"true": True, "1": True, "false": False, "0": False}  # as some clients write them
Value = TypeVar("Value")


class Field(NamedTuple):
    """A field of requests that has an effect: what it takes, and under which names.

    What is out of its range counts as the nearest value, as in llama.cpp's server (vLLM and OpenAI
    refuse it), unless it says how many things an answer has.
    """

    name: str
    kind: type  # object: more than one, see where it is read
    default: Any = None
    low: float = -math.inf
    high: float = MAX_NUMBER  # the server may have a lower one
    off: tuple[Any, ...] = ()  # besides null, and with all below the range: without a limit
    names: tuple[str, ...] = ()  # that others have for it
    strict: bool = False  # what is out of its range is refused
    chat: bool | None = None  # True: only in chats; False: only in completions

    @property
    def range(self) -> str:
        """The values that it takes, in words; "" if it takes any."""
        if self.low == -math.inf:
            return ""
        is_open = self.high == MAX_NUMBER
        return f"at least {self.low:g}" if is_open else f"from {self.low:g} to {self.high:g}"


# Names of one thing: of OpenAI, Hugging Face's transformers, llama.cpp, Ollama, text-generation-
# webui, KoboldCpp, Anthropic and Mistral.
COUNTS = "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict"
MAX_TOKENS = Field("max_tokens", int, 16, 0, off=(-1, -2), names=COUNTS, chat=False)
TABLE = (
    Field("model", str),
    Field("messages", list, chat=True),
    Field("prompt", object, chat=False),
    MAX_TOKENS,
    MAX_TOKENS._replace(default=500, chat=True),
    Field("temperature", float, 0.8, 0),
    Field("top_k", int, None, 1, off=(0, -1)),
    Field("top_p", float, None, 0, 1, off=(0,)),
    Field("min_p", float, None, 0, 1),
    Field("repetition_penalty", float, 1, 0.01, 100, names=("repeat_penalty", "rep_pen")),
    Field("presence_penalty", float, 0, -100, 100),
    Field("frequency_penalty", float, 0, -100, 100),
    Field("stop", object, names=("stop_sequences", "stop_sequence", "stopping_strings")),
    Field("seed", int, off=(-1,), names=("random_seed", "sampler_seed")),
    Field("n", int, 1, 1, strict=True),
    Field("stream", bool, False),
    Field("stream_options", dict),
    Field("logprobs", int, None, 0, MAX_TOP, off=(False,), strict=True, chat=False),
    Field("logprobs", bool, False, chat=True),
    Field("top_logprobs", int, 0, 0, MAX_TOP, strict=True, chat=True),
    Field("echo", bool, False, chat=False),
    Field("prefix_tokens", list),
    Field("response_format", dict),
    Field("json_schema", object, names=("guided_json",)),
    Field("regex", str, names=("guided_regex",)),
    Field("grammar", str, names=("guided_grammar",)),
    Field("tools", list, chat=True),
    Field("tool_choice", object, chat=True),
    Field("chat_template_kwargs", dict, chat=True),
    Field("enable_thinking", bool, names=("think",), chat=True),
)
GENERATION = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
FIELDS = {
    chat: {field.name: field for field in TABLE if field.chat in (None, chat)}
    for chat in (False, True)
}
# Any other field is refused, as it may change what is written, unless its value is among those that
# change nothing: NOTHING, or what NEUTRAL has for it.
# Whatever their value: of OpenAI, vLLM, llama.cpp, Ollama, LM Studio, OpenRouter and SillyTavern
# (public/scripts/textgen-settings.js, openai.js). The order of samplers is always the same here,
# and a model has the context that it has.
HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls"),
    *("priority", "request_id", "cache_salt", "guided_decoding_backend"),
    *("guided_whitespace_pattern", "spaces_between_special_tokens", "cache_prompt", "id_slot"),
    "slot_id",
    *("timings_per_token", "return_progress", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau"),
    *("mirostat_eta", "repeat_last_n", "keep_alive", "ttl", "draft_model", "usage", "session_id"),
    *("chat_id", "conversation_id", "num_thread", "num_gpu", "use_mmap", "debug", "id"),
    *("num_ctx", "ctx_len", "truncation_length", "num_batch", "num_keep", "use_mlock"),
    *("sampler_priority", "sampler_order", "temperature_last", "smoothing_curve"),
    *("rep_pen_range", "rep_pen_slope", "repetition_penalty_range", "adaptive_decay"),
    *("api_type", "api_server", "type", "chat_completion_source", "user_name", "char_name"),
    *("group_names", "custom_prompt_post_processing", "use_sysprompt"),
}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("best_of", "typical_p", "length_penalty", "guidance_scale", "tfs_z"), (None, 1)
    ),
    **dict.fromkeys(("dynatemp_exponent", "tfs", "encoder_repetition_penalty"), (None, 1)),
    **dict.fromkeys(("do_sample", "add_generation_prompt", "skip_special_tokens"), (None, True)),
    **dict.fromkeys(("detokenize", "include_reasoning", "separate_reasoning"), (None, True)),
    **dict.fromkeys(("thinking", "reasoning"), (None,)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "modalities": (None, [], ["text"]),
    "reasoning_format": (None, "none", "auto"),
    "reasoning_effort": (None, "none", "auto"),
    "adaptive_target": (None, -1, -0.01),  # below zero it is off
    "add_bos_token": (None, True),  # a text begins as its tokenizer says
    "num_beams": (None, 0, 1),
    "verbosity": (None, "medium"),
    "top_n_sigma": (None, 0, -1),
    "truncation": (None, "disabled"),
    "typical": (None, 0, 1),
}
SAMPLERS = "temperature", "top_k", "top_p", "min_p"  # a list without one of them turns it off
TOOLS = {"tools": "tool_choice", "functions": "function_call"}  # and what may turn them off
NO_TOOLS = (
    "the model's chat template does not support tools: leave them out, or let the server ignore "
    "them with serve --ignore-tools"
)
UNREAD_CALLS = (
    "the model's chat template writes calls in a format of its own, which the server cannot read: "
    "leave the tools out, or let the server ignore them with serve --ignore-tools"
)
NOT_IN_MESSAGES = ("prefix", "partial", "images", "audio")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Fields:
    """The fields of a JSON object that a client has sent. APIError 400 for a wrong one."""

    def __init__(self, values: Mapping[str, Any], chat: bool = False) -> None:
        self.values, self.chat = values, chat

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Returns a field of this type; None if it is missing or null."""
        value: Any = self.values.get(name)
        if kind is bool and (isinstance(value, str) or value in (0, 1)):
            value = BOOLS.get(str(value).lower(), value)
        elif kind in (int, float) and isinstance(value, str):
            value = _number(value)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**1000:
            value = float(value)
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if kind is not object and type(value) is not kind:
            raise APIError(f"{name} must be {TYPES[kind]}", name)
        if isinstance(value, float) and not math.isfinite(value):
            raise APIError(f"{name} must be a finite number", name)
        return value

    def setting(self, name: str, most: float = MAX_NUMBER) -> Any:
        """Returns the value of a field of the table, at most `most`, under any of its names.

        Of several counts the smallest one counts; other fields may not contradict each other.
        """
        field = FIELDS[self.chat][name]
        field = field._replace(high=min(field.high, most))
        found: dict[str, Any] = {}
        for each in (name, *field.names):
            if self.values.get(each) is False and False in field.off:
                continue
            if (value := self.get(each, field.kind)) is None:
                continue
            if field.strict and not field.low <= value <= field.high:
                raise APIError(f"{each}={value} must be {field.range}", each)
            if not field.strict and field.off and (value in field.off or value < field.low):
                value = None if field.default is None else field.high
            elif field.range:
                value = min(max(value, field.low), field.high)
            if value is not None:
                found[each] = value
        if field.names is COUNTS:
            return min(found.values(), default=min(field.default, field.high))
        for each, value in found.items():
            if value != next(iter(found.values())):
                raise APIError(f"{each} contradicts {next(iter(found))}; send one of them", each)
        return next(iter(found.values()), field.default)

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """Returns a whole number from low to high."""
        value = self.get(name, int)
        value = default if value is None else value
        if not low <= value <= high:
            raise APIError(f"{name}={value} must be from {low} to {high}", name)
        return value

    def required(self, name: str, kind: type[Value]) -> Value:
        """Returns a field that must be there."""
        value = self.get(name, kind)
        if value is None:
            raise APIError(f"{name} is missing; it must be {TYPES[kind]}", name)
        return value

    def ids(self, name: str, vocab_size: int) -> list[int]:
        """Returns a list of tokens, by default an empty one."""
        found = self.get(name, list) or []
        if not all(type(i) is int and 0 <= i < vocab_size for i in found):
            raise APIError(f"{name} must be tokens from 0 to {vocab_size - 1}", name)
        return found

    def refuse_unknown(self) -> None:
        """Refuses what is not built, unless it has a value that changes nothing."""
        built = {
            name for field in FIELDS[self.chat].values() for name in (field.name, *field.names)
        }
        for name, value in self.values.items():
            if name in built or name in HARMLESS or name.startswith("speculative."):
                continue
            if name in TOOLS and self.values.get(TOOLS[name]) == "none":
                continue
            if name == "samplers" and isinstance(value, list) and all(x in value for x in SAMPLERS):
                continue
            if name == "logit_bias" and isinstance(value, dict) and not any(value.values()):
                continue
            default = (None, not self.chat) if name == "add_special_tokens" else NOTHING
            if value not in NEUTRAL.get(name, default):
                raise APIError(
                    f"{name[:100]} is not supported by this server; leave it out", name[:100]
                )


def _number(text: str) -> Any:
    """Returns the number that a text is, None if it is blank, or else the text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text if text.strip() else None


async def body_of(request: Request) -> bytes:
    """Returns the body of a request. APIError 413 if it is too large, 415 if it is compressed."""
    body = bytearray()
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise APIError(f"the body is encoded as {encoding[:100]!r}; send it plain", status=415)
    if (length := request.headers.get("content-length", "0")).isdecimal():
        _check_size(int(length[:20]))
    async for part in request.stream():
        body += part
        _check_size(len(body))
    return bytes(body)


def fields_in(body: bytes, chat: bool) -> Fields:
    """Returns the fields of a body. APIError unless it is a JSON object, of not too many values."""
    values = body.count(b",") + BRACKET_VALUES * (body.count(b"[") + body.count(b"{"))
    if values > MAX_VALUES:
        raise APIError(f"the body has more than {MAX_VALUES:,} values", status=413)
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise APIError("the body must be a JSON object")
    return Fields(found, chat)


def _check_size(size: int) -> None:
    if size > MAX_BODY:
        raise APIError(f"the body has more than {MAX_BODY // 2**20} MiB", status=413)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def generation_of(fields: Fields, most: int) -> GenerationConfig:
    """Returns the settings of a request, of at most `most` tokens. Without a seed, a random one."""
    settings = {name: fields.setting(name) for name in GENERATION}
    seed = fields.setting("seed")
    seed = secrets.randbits(62) if seed is None else seed % 2**63
    settings |= {"max_tokens": fields.setting("max_tokens", most), "stop": _stops(fields)}
    try:
        return GenerationConfig(**settings, seed=seed)
    except InputError as error:
        raise APIError(str(error), "stop") from None  # too long


def _stops(fields: Fields) -> tuple[str, ...] | None:
    stop = fields.setting("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise APIError(f"stop must be a string, or a list of at most {MAX_STOPS}", "stop")
    if not all(each is None or isinstance(each, str) for each in stops):
        raise APIError("stop must be a string, or a list of strings", "stop")
    return tuple(filter(None, stops)) or None


def top_of(fields: Fields) -> int | None:
    """-> how many alternatives to each token a client asks for; None: no probabilities at all."""
    if not fields.chat:
        return fields.setting("logprobs")
    top = fields.setting("top_logprobs")
    if top and not fields.setting("logprobs"):
        raise APIError("top_logprobs needs logprobs: true", "top_logprobs")
    return top if fields.setting("logprobs") else None


def form_of(fields: Fields, tokenizer: Tokenizer) -> Form | None:
    """Returns the form that a client asks for in one of several ways; None for any text."""
    asks = {name: fields.setting(name) for name in ("json_schema", "regex", "grammar")}
    asks = {name: value for name, value in asks.items() if value not in (None, "")}
    said = Fields(fields.setting("response_format") or {"type": "text"})
    name = "response_format"
    kind = said.get("type", str)
    if kind == "json_object":
        asks[name] = said.get("schema", dict)  # as llama.cpp has it; None: any object
    elif kind == "json_schema":
        described = said.get("json_schema", dict) or said.values
        if "schema" not in described:
            raise APIError(f"{name}.json_schema.schema is missing; it must be an object", name)
        asks[name] = described["schema"]
    elif kind != "text":
        raise APIError(f"{name}.type must be text, json_object or json_schema", name)
    if len(asks) > 1:
        message = f"{' and '.join(asks)} ask for two formats; send one of them"
        raise APIError(message, next(iter(asks)))
    for name, value in asks.items():
        try:
            kind = name if name in ("regex", "grammar") else "json" if value is None else "schema"
            return Form(tokenizer, kind, value)
        except InputError as error:
            raise APIError(f"{name}: {error}", name) from None
    return None


def prompts_of(fields: Fields, tokenizer: Tokenizer, most: int) -> list[np.ndarray]:
    """Returns the prompts of a completion: a text, several, tokens, or several lists of tokens.

    APIError if they have more than `most` tokens each; InputError for unknown characters.
    """
    prompt = fields.values.get("prompt")
    prompt = tokenizer.opening if prompt is None or prompt == "" else prompt
    several: list[Any] = prompt if isinstance(prompt, list) and prompt else [prompt]
    if all(type(one) is int for one in several):
        several = [several]
    if len(several) * fields.setting("n") > MAX_TEXTS:
        message = f"{len(several):,} prompts are too many for one request; send several requests"
        raise APIError(message, "prompt")
    if all(isinstance(one, str) and one for one in several):
        check_length(several, most, "prompt")
        found = [tokenizer.prompt(one) for one in several]
    elif all(isinstance(one, list) and one for one in several):
        lists = [Fields({"prompt": one}).ids("prompt", tokenizer.vocab_size) for one in several]
        found = [np.array(ids, np.int32) for ids in lists]
    else:
        raise APIError("prompt must be a text, texts, or tokens, none of them empty", "prompt")
    for ids in found:
        check_count(len(ids), most, "prompt")
    return found


def check_length(texts: Iterable[str], most: int, name: str) -> None:
    """Raises APIError for texts, together, that are too long even to be encoded."""
    length, most = sum(map(len, texts)), MAX_CHARACTERS * most
    if length > most:
        raise APIError(
            f"{name} has {length:,} characters; the limit is {most:,}",
            name,
            "context_length_exceeded",
        )


def check_count(count: int, most: int, name: str) -> None:
    """Raises APIError for a prompt of more than `most` tokens."""
    if count > most:
        raise APIError(
            f"the prompt has {count:,} tokens; the limit is {most:,}",
            name,
            "context_length_exceeded",
        )


def variables_of(fields: Fields) -> dict[str, Any]:
    """Returns the variables that a client gives to the chat template, besides the messages."""
    variables = fields.setting("chat_template_kwargs") or {}
    for name in (RESERVED_ARGS | {"tools"}) & variables.keys():
        field = f"chat_template_kwargs.{name}"
        raise APIError(f"{field} is not supported by this server; leave it out", field)
    thinks = fields.setting("enable_thinking")
    return variables if thinks is None else {"enable_thinking": thinks, **variables}


def tools_of(fields: Fields, template: ChatFormat | None, ignores: bool) -> list[dict[str, Any]]:
    """Returns the tools that a model may call. APIError if its template does not know any.

    Also if nothing reads the calls that it writes. Unless the server `ignores` them.
    """
    knows_tools = bool(template and template.tools)
    reads_calls = bool(template and (template.calls or template.calling))
    choice = fields.setting("tool_choice")
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = named.get("name") if isinstance(named, dict) else None
    if choice not in (None, "auto", "none", "required") and not isinstance(name, str):
        raise APIError(
            "tool_choice must be auto, none, required, or name a function", "tool_choice"
        )
    said = fields.setting("tools") or []
    if not said and choice not in (None, "auto", "none"):
        raise APIError("tool_choice asks for a call, and there are no tools", "tool_choice")
    if not said or choice == "none" or (ignores and not (knows_tools and reads_calls)):
        return []
    if not (knows_tools and reads_calls):
        problem = UNREAD_CALLS if knows_tools else NO_TOOLS
        raise APIError(problem, "tools", "tools_not_supported")
    try:
        tools = described_tools(said)
    except InputError as error:
        raise APIError(f"tools {error}", "tools") from None
    chosen = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise APIError(
            f"tool_choice names {name!r:.80}, which is not among the tools", "tool_choice"
        )
    return chosen


def call_form(
    fields: Fields, tools: Sequence[dict[str, Any]], template: ChatFormat, tokenizer: Tokenizer
) -> Form | None:
    """Returns the form of a call of one of the tools, if a client asks for one; else None."""
    if not tools or fields.setting("tool_choice") in (None, "auto"):
        return None
    if template.calling is None:
        message = "the model's chat template writes calls in a format of its own, which cannot be"
        raise APIError(f"{message} required: tool_choice must be auto or none", "tool_choice")
    try:
        grammar = call_grammar(tools, template.calling, tokenizer.special)
        return Form(tokenizer, "grammar", grammar)
    except InputError as error:
        for tool in tools:  # to name the keyword at fault
            function = tool["function"]
            try:
                Form(tokenizer, "schema", function.get("parameters") or True)
            except InputError as inner:
                raise APIError(f"tools: {function['name']}: {inner}", "tools") from None
        raise APIError(f"tool_choice: {error}", "tool_choice") from None


def turns_of(
    fields: Fields, knows_tools: bool = True, ignores_tools: bool = False
) -> tuple[str, list[Turn]]:
    """The messages of a conversation -> the system's text, and all other turns.

    APIError for calls and results of tools if the template does not know them, unless the server
    ignores these turns.
    """
    messages = fields.required("messages", list)
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not knows_tools and any(turn.more or turn.role == TOOL for turn in turns):
        if not ignores_tools:
            raise APIError(NO_TOOLS, "messages", "tools_not_supported")
        turns = [turn._replace(more="") for turn in turns if turn.role != TOOL]
        turns = [turn for turn in turns if turn.says or turn.role != ASSISTANT]
    rest = list(itertools.dropwhile(lambda turn: turn.role == SYSTEM, turns))
    if not rest:
        raise APIError("messages must contain a user turn", "messages")
    return "\n".join(turn.text for turn in turns[: len(turns) - len(rest)]), rest


def _turn(message: Any, name: str) -> Turn:
    if not isinstance(message, dict):
        raise APIError(f"{name} must be an object with role and content", "messages")
    role, content, thinks = message.get("role"), message.get("content"), ""
    role = ROLE_NAMES.get(role.strip().casefold()) if isinstance(role, str) else None
    if role is None:
        raise APIError(f"{name}.role must be one of {', '.join((*ROLES, TOOL))}", "messages")
    for other in NOT_IN_MESSAGES:
        if message.get(other):
            raise APIError(
                f"{name}.{other} is not supported by this server; leave it out", "messages"
            )
    if isinstance(content, list):
        content, thinks, wrong = said_in(content)
        if wrong:
            raise APIError(f"{name}.content may have parts of text only", "messages")
    if content is None and role in (ASSISTANT, TOOL):
        content = ""
    if not isinstance(content, str):
        raise APIError(f"{name}.content must be a string", "messages")
    thought = next(filter(None, map(message.get, THOUGHTS)), thinks)
    if not isinstance(thought, str):
        raise APIError(f"{name}.reasoning_content must be a string", "messages")
    more: dict[str, Any] = {}
    if calls := message.get("tool_calls") or list(filter(None, [message.get("function_call")])):
        if role != ASSISTANT:
            raise APIError(f"{name}.tool_calls belong in an assistant turn", "messages")
        try:
            more["tool_calls"] = messages_calls(calls)
        except InputError as error:
            raise APIError(f"{name}.tool_calls {error}", "messages") from None
    if role == TOOL:
        known = ((field, message.get(field)) for field in ("name", "tool_call_id"))
        more |= {field: value for field, value in known if isinstance(value, str)}
    return Turn(role, content, thought=thought, more=json.dumps(more) if more else "")

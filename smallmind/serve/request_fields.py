"""The fields of requests, checked one by one."""

import itertools
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request

from smallmind.checks import InputError
from smallmind.serve.errors import APIError
from smallmind.settings.config import GenerationConfig
from smallmind.text.chat import ASSISTANT, ROLES, SYSTEM, Turn
from smallmind.text.tokenizer import Tokenizer

MAX_BODY = 4 * 2**20  # bytes
# Commas and brackets in a body: Python reads JSON at once, and more would hold up all others.
MAX_VALUES = 2**17
MAX_STOPS, MAX_TOP, MAX_PROMPTS = 16, 20, 256
MAX_CHARACTERS = 32  # of the prompts of a request, for each token that may be read
MAX_PENALTY = 100.0
TYPES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
Value = TypeVar("Value")
PENALTIES = {
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (1 / MAX_PENALTY, MAX_PENALTY),
}

# The fields of requests. Any other one is refused, as it may change what is written, unless its
# value is among those that change nothing: NOTHING, or what NEUTRAL has for it.
BUILT = {
    *("model", "n", "stream", "stream_options", "logprobs", "seed", "stop", "prefix_tokens"),
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", *PENALTIES),
}
CHAT_ONLY = {"messages", "top_logprobs", "chat_template_kwargs"}
COMPLETION_ONLY = {"prompt"}
HARMLESS = {  # whatever their value: of OpenAI, vLLM, llama.cpp, Ollama, LM Studio and OpenRouter
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls"),
    *("priority", "request_id", "cache_salt", "guided_decoding_backend"),
    *("guided_whitespace_pattern", "spaces_between_special_tokens", "cache_prompt", "id_slot"),
    *("timings_per_token", "return_progress", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "mirostat_tau"),
    *("mirostat_eta", "repeat_last_n", "keep_alive", "ttl", "draft_model", "usage", "session_id"),
    *("chat_id", "conversation_id", "num_thread", "num_gpu", "use_mmap", "debug"),
}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("best_of", "typical_p", "repeat_penalty", "length_penalty", "guidance_scale", "tfs_z"),
        (None, 1),
    ),
    **dict.fromkeys(("dynatemp_exponent", "tfs", "encoder_repetition_penalty"), (None, 1)),
    **dict.fromkeys(("do_sample", "add_generation_prompt", "skip_special_tokens"), (None, True)),
    **dict.fromkeys(("detokenize", "include_reasoning", "separate_reasoning"), (None, True)),
    # Other names of counts and of the seed, which say something with any value.
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "random_seed"), (None,)),
    **dict.fromkeys(("think", "thinking", "enable_thinking", "reasoning"), (None,)),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, [], ["text"]),
    "reasoning_format": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "top_n_sigma": (None, 0, -1),
    "truncation": (None, "disabled"),
    "typical": (None, 0, 1),
}
RESERVED = {"messages", "add_generation_prompt", "continue_final_message"}  # to the template
NOT_IN_MESSAGES = ("tool_calls", "function_call", "prefix", "partial", "images", "audio")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class Fields:
    """The fields of a JSON object that a client has sent. APIError 400 for a wrong one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Returns a field of this type; None if it is missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise APIError(f"{name} must be {TYPES[kind]}", name)
        return value

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

    def refuse_unknown(self, chat: bool) -> None:
        """Refuses what is not built, unless it has a value that changes nothing."""
        built = BUILT | (CHAT_ONLY if chat else COMPLETION_ONLY)
        for name, value in self.values.items():
            if name in built or name in HARMLESS or name.startswith("speculative."):
                continue
            default = (None, not chat) if name == "add_special_tokens" else NOTHING
            if value not in NEUTRAL.get(name, default):
                raise APIError(
                    f"{name[:100]} is not supported by this server; leave it out", name[:100]
                )


async def body_of(request: Request) -> bytes:
    """Returns the body of a request. APIError 413 if it is too large."""
    body = bytearray()
    if (length := request.headers.get("content-length", "0")).isdecimal():
        _check_size(int(length[:20]))
    async for part in request.stream():
        body += part
        _check_size(len(body))
    return bytes(body)


def fields_in(body: bytes) -> Fields:
    """Returns the fields of a body. APIError unless it is a JSON object, of not too many values."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise APIError(f"the body has more than {MAX_VALUES:,} values", status=413)
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise APIError("the body must be a JSON object")
    return Fields(values)


def _check_size(size: int) -> None:
    if size > MAX_BODY:
        raise APIError(f"the body has more than {MAX_BODY // 2**20} MiB", status=413)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def generation_of(fields: Fields, most: int, default: int) -> GenerationConfig:
    """Returns the settings of a request, of at most `most` tokens. Without a seed, a random one."""
    settings: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", *PENALTIES):
        settings[name] = value = fields.get(name, float)
        if value is not None and not math.isfinite(value):
            raise APIError(f"{name} must be a finite number", name)
    for name, (low, high) in PENALTIES.items():
        if settings[name] is not None and not low <= settings[name] <= high:
            raise APIError(f"{name}={settings[name]:g} must be from {low:g} to {high:g}", name)
    settings["top_k"] = fields.get("top_k", int)
    # The values by which clients turn them off.
    settings["top_k"] = None if settings["top_k"] in (0, -1) else settings["top_k"]
    settings["top_p"] = settings["top_p"] or None
    seed = fields.get("seed", int)
    settings["seed"] = secrets.randbits(62) if seed in (None, -1) else seed % 2**63
    settings["max_tokens"] = _max_tokens(fields, most, default)
    settings["stop"] = _stops(fields)
    try:
        return GenerationConfig(**{k: v for k, v in settings.items() if v is not None})
    except InputError as error:
        field = next((field for field in settings if str(error).startswith(field)), None)
        raise APIError(str(error), field) from None


def _max_tokens(fields: Fields, most: int, default: int) -> int:
    """Returns the smaller of two fields for one thing; -1 is as many as there may be."""
    counts = []
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name, int)
        if value is not None and value < -1:
            raise APIError(f"{name}={value} must be at least 0, or -1: as many as fit", name)
        if value is not None:
            counts.append(most if value == -1 else value)
    return min(*counts, most) if counts else min(default, most)


def _stops(fields: Fields) -> tuple[str, ...] | None:
    stop = fields.values.get("stop")
    if stop is None or stop == "":
        return None
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise APIError(f"stop must be a string, or a list of at most {MAX_STOPS}", "stop")
    if not all(isinstance(each, str) and each for each in stops):
        raise APIError("stop must be strings of one character or more", "stop")
    return tuple(stops) or None


def top_of(fields: Fields, chat: bool) -> int | None:
    """-> how many alternatives to each token a client asks for; None: no probabilities at all."""
    if fields.values.get("logprobs") is False:
        fields = Fields({**fields.values, "logprobs": None})
    if not chat:
        return None if fields.get("logprobs", int) is None else fields.whole("logprobs", 0, 0, 20)
    if not fields.get("logprobs", bool):
        if fields.get("top_logprobs", int):
            raise APIError("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return fields.whole("top_logprobs", 0, 0, MAX_TOP)


def prompts_of(fields: Fields, tokenizer: Tokenizer, most: int) -> list[np.ndarray]:
    """Returns the prompts of a completion: a text, several, tokens, or several lists of tokens.

    APIError if they have more than `most` tokens each; InputError for unknown characters.
    """
    prompt = fields.values.get("prompt")
    prompt = tokenizer.opening if prompt is None or prompt == "" else prompt
    several: list[Any] = prompt if isinstance(prompt, list) and prompt else [prompt]
    if all(type(one) is int for one in several):
        several = [several]
    if len(several) > MAX_PROMPTS:
        raise APIError(
            f"prompt has {len(several):,} prompts, of which at most {MAX_PROMPTS} may come in one "
            "request; send several requests",
            "prompt",
        )
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
            f"{name} has {length:,} characters, of which at most {most:,} are read",
            name,
            "context_length_exceeded",
        )


def check_count(count: int, most: int, name: str) -> None:
    """Raises APIError for a prompt of more than `most` tokens."""
    if count > most:
        raise APIError(
            f"the prompt has {count:,} tokens, of which at most {most:,} are read",
            name,
            "context_length_exceeded",
        )


def variables_of(fields: Fields) -> dict[str, Any]:
    """Returns the variables that a client gives to the chat template, besides the messages."""
    variables = fields.get("chat_template_kwargs", dict) or {}
    for name in RESERVED & variables.keys():
        field = f"chat_template_kwargs.{name}"
        raise APIError(f"{field} is not supported by this server; leave it out", field)
    return variables


def turns_of(fields: Fields) -> tuple[str, list[Turn]]:
    """The messages of a conversation -> the system's text, and all other turns."""
    messages = fields.required("messages", list)
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    rest = list(itertools.dropwhile(lambda turn: turn.role == SYSTEM, turns))
    if not rest:
        raise APIError("messages must have a turn of the user", "messages")
    return "\n".join(turn.text for turn in turns[: len(turns) - len(rest)]), rest


def _turn(message: Any, name: str) -> Turn:
    if not isinstance(message, dict):
        raise APIError(f"{name} must be an object with role and content", "messages")
    role, content = message.get("role"), message.get("content")
    role = SYSTEM if role == "developer" else role
    if role not in ROLES:
        raise APIError(f"{name}.role must be one of {', '.join(ROLES)}", "messages")
    for other in NOT_IN_MESSAGES:
        if message.get(other):
            raise APIError(
                f"{name}.{other} is not supported by this server; leave it out", "messages"
            )
    if isinstance(content, list):
        found = [_text_in(part) for part in content]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            raise APIError(f"{name}.content may have parts of text only", "messages")
        content = "".join(parts)
    if content is None and role == ASSISTANT:
        content = ""
    if not isinstance(content, str):
        raise APIError(f"{name}.content must be a string", "messages")
    thought = next(filter(None, map(message.get, THOUGHTS)), "")
    if not isinstance(thought, str):
        raise APIError(f"{name}.reasoning_content must be a string", "messages")
    return Turn(role, content, thought=thought)


def _text_in(part: Any) -> str | None:
    """Returns the text of a part of a message; None if it is something else."""
    if not isinstance(part, dict) or part.get("type", "text") not in ("text", "input_text"):
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None

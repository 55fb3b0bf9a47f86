"""OpenAI's API: models, completions and chat completions, whole or in events.

https://platform.openai.com/docs/api-reference. Besides, requests may have top_k, min_p and
repetition_penalty, and prefix_tokens, with which the answer has begun already; probabilities have
the numbers of tokens and the entropy of each choice.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from smallmind.chat import prompt_of
from smallmind.checks import InputError
from smallmind.decoder import Continuation, Token
from smallmind.serve.asked import Fields, fields_of, generation_of, top_of, turns_of
from smallmind.serve.engine import Busy, Engine, Request
from smallmind.serve.errors import APIError
from smallmind.serve.models import Entry, Loaded, Models
from smallmind.settings.config import GenerationConfig
from smallmind.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # OpenAI's default
CHAT_TOKENS = 500
STALLED = 30.0  # seconds in which a client has to take what it is sent
REASONS = {"end": "stop", "stop": "stop", "length": "length"}
NOT_SUPPORTED = {
    **{"tools": [], "tool_choice": "none", "functions": [], "logit_bias": {}, "suffix": ""},
    **{"echo": False, "best_of": 1, "response_format": {"type": "text"}, "audio": {}},
}


class Limits(NamedTuple):
    """The most that a request may ask for."""

    max_tokens: int = 4096
    prompt_tokens: int = 32768
    seconds: float = 600.0


class Asked(NamedTuple):
    """A request that has been understood: prompts, and the texts that continue each."""

    entry: Entry
    loaded: Loaded
    requests: list[Request]  # one per prompt
    chat: bool
    prompt_tokens: int
    lead: str  # begins the text of an answer, and is not shown
    top: int | None


class API:
    """The endpoints under /v1."""

    def __init__(self, engine: Engine, models: Models, limits: Limits) -> None:
        self.engine, self.models, self.limits = engine, models, limits
        self.is_stopping = False

    async def list_models(self, _request: HTTPRequest) -> Response:
        """GET /v1/models."""
        entries = self.models.entries()
        return JSONResponse({"object": "list", "data": [_described(entry) for entry in entries]})

    async def show_model(self, request: HTTPRequest) -> Response:
        """GET /v1/models/NAME."""
        return JSONResponse(_described(self.entry(request.path_params["id"])))

    async def complete(self, request: HTTPRequest) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: HTTPRequest) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    def entry(self, name: Any) -> Entry:
        """The model of this name. APIError 404 if there is none."""
        try:
            return self.models.entry(str(name))
        except KeyError:
            known = ", ".join(entry.id for entry in self.models.entries()) or "none yet"
            message = f"the model {str(name)[:100]!r} does not exist; there are: {known}"
            raise APIError(404, message, "model", "model_not_found") from None

    async def loaded(self, entry: Entry) -> Loaded:
        """The model in memory. APIError 500 if it cannot be loaded."""
        try:
            return await self.models.loaded(entry)
        except InputError as error:
            raise APIError(500, f"the model cannot be loaded: {error}", "model") from None

    async def _answer(self, request: HTTPRequest, chat: bool) -> Response:
        if self.is_stopping:
            raise APIError(503, "the server is stopping")
        fields = await fields_of(request)
        asked = await self._understood(fields, chat)
        streams = fields.get("stream", bool) or False
        options = Fields(fields.get("stream_options", dict) or {})
        with_usage = options.get("include_usage", bool) or False
        try:
            for each in asked.requests:
                self.engine.submit(asked.loaded.line, each)
        except Busy as error:
            for each in asked.requests:
                self.engine.cancel(each)
            raise APIError(429, str(error), code="rate_limit_exceeded") from None
        return Answer(self.engine, asked, streams, with_usage)

    async def _understood(self, fields: Fields, chat: bool) -> Asked:
        fields.refuse(NOT_SUPPORTED)
        entry = self.entry(fields.required("model", str))
        loaded = await self.loaded(entry)
        tokenizer, slots = loaded.tokenizer, self.models.slots
        config = generation_of(
            fields, self.limits.max_tokens, CHAT_TOKENS if chat else COMPLETION_TOKENS
        )
        n, top = fields.whole("n", 1, 1, slots), top_of(fields, chat)
        begun = fields.ids("prefix_tokens", tokenizer.vocab_size)
        lead = ""
        try:
            if chat:
                prompts, config, lead = self._conversation(fields, loaded, config)
            else:
                prompts = _prompts(fields, tokenizer)
            for ids in prompts:
                if len(ids) > self.limits.prompt_tokens:
                    raise APIError(
                        400,
                        f"the prompt has {len(ids):,} tokens, of which at most "
                        f"{self.limits.prompt_tokens:,} are read",
                        "messages" if chat else "prompt",
                        "context_length_exceeded",
                    )
            requests = [
                Request(
                    [
                        Continuation(tokenizer, ids, _with_seed(config, i), top, begun)
                        for i in range(n)
                    ],
                    self.limits.seconds,
                )
                for ids in prompts
            ]
        except InputError as error:
            raise APIError(400, str(error), "messages" if chat else "prompt") from None
        count = sum(map(len, prompts))
        return Asked(entry, loaded, requests, chat, count, "" if begun else lead, top)

    def _conversation(
        self, fields: Fields, loaded: Loaded, config: GenerationConfig
    ) -> tuple[list[np.ndarray], GenerationConfig, str]:
        """Messages -> the prompt, the settings, and how an answer begins."""
        if loaded.template is None:
            raise APIError(
                400,
                "the model was not trained on conversations and has no chat template; send a "
                "prompt to /v1/completions",
                "messages",
            )
        system, turns = turns_of(fields)
        context = loaded.line.decoder.cache.length
        given = loaded.tokenizer, loaded.template, system, turns, context
        asked = prompt_of(*given, config.max_tokens)
        return [asked.ids], replace(config, max_tokens=asked.most), loaded.template.lead


def _described(entry: Entry) -> dict[str, Any]:
    created = int(entry.path.stat().st_mtime) if entry.path.exists() else 0
    return {"id": entry.id, "object": "model", "created": created, "owned_by": "smallmind"}


def _with_seed(config: GenerationConfig, number: int) -> GenerationConfig:
    return replace(config, seed=(config.seed + number) % 2**63)


def _prompts(fields: Fields, tokenizer: Tokenizer) -> list[np.ndarray]:
    """The prompts of a completion: a text, several, tokens, or several lists of tokens."""
    given = fields.values.get("prompt")
    given = tokenizer.opening if given is None or given == "" else given
    if isinstance(given, str):
        return [tokenizer.prompt(given)]
    if isinstance(given, list) and given:
        if all(isinstance(one, str) and one for one in given):
            return [tokenizer.prompt(one) for one in given]
        lists = given if all(isinstance(one, list) and one for one in given) else [given]
        found = [Fields({"prompt": one}).ids("prompt", tokenizer.vocab_size) for one in lists]
        return [np.array(ids, np.int32) for ids in found]
    raise APIError(400, "prompt must be a text, texts, or tokens, none of them empty", "prompt")


class Answer(Response):
    """Sends what the texts of a request become, whole or in events; stops if the client leaves."""

    def __init__(self, engine: Engine, asked: Asked, streams: bool, with_usage: bool) -> None:
        self.engine, self.asked = engine, asked
        self.streams, self.with_usage = streams, with_usage
        kind = "chatcmpl" if asked.chat else "cmpl"
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self.n = len(asked.requests[0].texts)
        texts = [text for request in asked.requests for text in request.texts]
        self.index = {text: i for i, text in enumerate(texts)}
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def leaving() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = self._stream if self.streams else self._whole
        tasks = [
            asyncio.create_task(answer(scope, receive, send)),
            asyncio.create_task(leaving()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()
        finally:
            for request in self.asked.requests:
                self.engine.cancel(request)
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _news(self) -> AsyncIterator[list[Token]]:
        """The tokens of all requests as they come."""
        if len(self.asked.requests) == 1:
            async for tokens in self.asked.requests[0].tokens():
                yield tokens
            return
        queue: asyncio.Queue[list[Token] | None] = asyncio.Queue()

        async def move(request: Request) -> None:
            async for tokens in request.tokens():
                queue.put_nowait(tokens)
            queue.put_nowait(None)

        moving = [asyncio.create_task(move(request)) for request in self.asked.requests]
        try:
            left = len(moving)
            while left:
                news = await queue.get()
                if news is None:
                    left -= 1
                else:
                    yield news
        finally:
            for task in moving:
                task.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends one JSON object at the end."""
        parts = [_Part(self.asked) for _ in self.index]
        async for tokens in self._news():
            for token in tokens:
                parts[self.index[token.continuation]].add(token)
        error = self._error()
        if error:
            await error.response()(scope, receive, send)
            return
        kind = "chat.completion" if self.asked.chat else "text_completion"
        choices = [
            self._choice(i, part, text, "message")
            for (text, i), part in zip(self.index.items(), parts, strict=True)
        ]
        content = {**self._head(kind), "choices": choices, "usage": self._usage()}
        await JSONResponse(content)(scope, receive, send)

    async def _stream(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Sends server-sent events, each with all that has been written since the last one."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(*events: Any) -> None:
            data = "".join(f"data: {_json(event)}\n\n" for event in events)
            body = {"type": "http.response.body", "body": data.encode(), "more_body": True}
            # A client that does not read is let go. Python 3.11's wait_for may lose a cancellation.
            async with asyncio.timeout(STALLED):
                await send(body)

        chat = self.asked.chat
        head = self._head("chat.completion.chunk" if chat else "text_completion")
        if self.with_usage:
            head["usage"] = None
        if chat:
            roles = [
                {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                | {"finish_reason": None}
                for i in self.index.values()
            ]
            await write(*({**head, "choices": [role]} for role in roles))
        shown = [_Shown(self.asked.lead) for _ in self.index]
        async for tokens in self._news():
            parts: dict[Continuation, _Part] = {}
            for token in tokens:
                text = token.continuation
                parts.setdefault(text, _Part(self.asked, shown[self.index[text]])).add(token)
            choices = [
                self._choice(self.index[text], part, text, "delta") for text, part in parts.items()
            ]
            await write(*({**head, "choices": [choice]} for choice in choices))
        ends: list[Any] = []
        if error := self._error():
            ends.append(error.content())
        elif self.with_usage:
            ends.append({**head, "choices": [], "usage": self._usage()})
        await write(*ends, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self, kind: str) -> dict[str, Any]:
        own = {"id": self.id, "object": kind, "created": self.created}
        return {**own, "model": self.asked.entry.id, "system_fingerprint": self.asked.loaded.name}

    def _choice(self, index: int, part: "_Part", text: Continuation, name: str) -> dict[str, Any]:
        """One text, or what is new of it."""
        reason = REASONS[text.ended] if part.has_last and text.ended else None
        content: dict[str, Any] = {"text": part.text}
        if self.asked.chat:
            content = {name: {"content": part.text}}
            if name == "message":
                content[name]["role"] = "assistant"
        return {"index": index, **content, "logprobs": part.logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        written = sum(text.count for text in self.index)
        counts = self.asked.prompt_tokens, written
        names = "prompt_tokens", "completion_tokens"
        return {**dict(zip(names, counts, strict=True)), "total_tokens": sum(counts)}

    def _error(self) -> APIError | None:
        """The reason why the texts have not ended; None if they have."""
        for request in self.asked.requests:
            if request.error:
                return APIError(500, f"the model failed: {request.error}")
            if request.has_expired:
                return APIError(408, "the answer took longer than this server allows")
        return None


class _Shown:
    """The beginning of an answer, which the template has and a reader does not see."""

    def __init__(self, lead: str) -> None:
        self.lead = lead

    def without_lead(self, piece: str) -> str:
        if piece and self.lead:
            piece, self.lead = piece.removeprefix(self.lead), ""
        return piece


class _Part:
    """Some tokens of a text, as a client gets them."""

    def __init__(self, asked: Asked, shown: _Shown | None = None) -> None:
        self._asked, self._shown = asked, shown or _Shown(asked.lead)
        self._pieces: list[str] = []
        self._tokens: list[Token] = []
        self.has_last = False

    def add(self, token: Token) -> None:
        self._pieces.append(self._shown.without_lead(token.piece))
        self.has_last = token.is_last
        if token.alternatives and not (token.is_last and token.continuation.ended == "end"):
            self._tokens.append(token)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def logprobs(self) -> dict[str, Any] | None:
        if self._asked.top is None:
            return None
        tokenizer = self._asked.loaded.tokenizer
        return (_chat_logprobs if self._asked.chat else _logprobs)(tokenizer, self._tokens)


@lru_cache(maxsize=1 << 16)
def _text_of(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token])


def _chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = _text_of(tokenizer, id)
        own = {"token": text, "logprob": round(float(logprob), 6)}
        return {**own, "bytes": list(text.encode()), "id": int(id)}

    content = []
    for token in tokens:
        found = token.alternatives
        assert found
        pairs = zip(found.tokens, found.logprobs, strict=True)
        top = [entry(int(id), logprob) for id, logprob in pairs]
        more = {"top_logprobs": top, "entropy": round(found.entropy, 6)}
        content.append({**entry(token.id, found.logprob), **more})
    return {"content": content, "refusal": None}


def _logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    found = [token.alternatives for token in tokens if token.alternatives]
    texts = [_text_of(tokenizer, token.id) for token in tokens]
    offsets = np.cumsum([0, *map(len, texts)])[:-1].tolist()
    return {
        "tokens": texts,
        "token_logprobs": [round(each.logprob, 6) for each in found],
        "top_logprobs": [
            {
                _text_of(tokenizer, int(id)): round(float(logprob), 6)
                for id, logprob in zip(each.tokens, each.logprobs, strict=True)
            }
            for each in found
        ],
        "text_offset": offsets,
        "ids": [token.id for token in tokens],
        "entropies": [round(each.entropy, 6) for each in found],
        # Different tokens may have the same text, of which the objects above keep one.
        "top_ids": [each.tokens.tolist() for each in found],
        "top_texts": [[_text_of(tokenizer, int(id)) for id in each.tokens] for each in found],
        "top_values": [[round(float(x), 6) for x in each.logprobs] for each in found],
    }


def _json(event: Any) -> str:
    return (
        event if event == "[DONE]" else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    )

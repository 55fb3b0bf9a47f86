"""OpenAI's API: models, completions and chat completions, whole or in events.

https://platform.openai.com/docs/api-reference. Besides, requests may have top_k, min_p and
repetition_penalty, prefix_tokens, with which the answer has begun already, and json_schema, regex
or grammar for its form; probabilities have the numbers of tokens and the entropy of each choice.
"""

import asyncio
import codecs
import json
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from smallmind.checks import InputError
from smallmind.serve.engine import Busy, Engine, Request
from smallmind.serve.errors import APIError
from smallmind.serve.models import Loaded, Models, ServedModel
from smallmind.serve.request_fields import (
    Fields,
    body_of,
    call_form,
    check_count,
    check_length,
    fields_in,
    form_of,
    generation_of,
    prompts_of,
    tools_of,
    top_of,
    turns_of,
    variables_of,
)
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.calls import CallDivider
from smallmind.writing.chat import Prompt, Thinking, prompt_of
from smallmind.writing.decoder import Continuation, Token, choices_in
from smallmind.writing.sampling import Alternatives

TEXTS_AT_ONCE = 64  # texts that are prepared before others are served
REASONS = {"end": "stop", "stop": "stop", "form": "stop", "length": "length"}


class RequestLimits(NamedTuple):
    """The most that a request may ask for."""

    max_tokens: int = 4096
    prompt_tokens: int = 32768
    seconds: float = 600.0


class ParsedRequest(NamedTuple):
    """A request that has been understood: prompts, and the texts that continue each."""

    entry: ServedModel
    loaded: Loaded
    request: Request
    chat: bool
    prompt_tokens: int
    begun: list[int]  # tokens with which the answers have begun already
    lead: str  # begins the text of an answer, and is not shown
    top: int | None
    thinking: Thinking  # as an answer begins; a copy divides it
    echo: list[np.ndarray]  # the prompt of each text, which is shown before it; else empty
    tools: Mapping[str, Any] = MappingProxyType({})  # that an answer may call, and their arguments


class API:
    """The endpoints under /v1."""

    def __init__(
        self, engine: Engine, models: Models, limits: RequestLimits, ignores_tools: bool = False
    ) -> None:
        self.engine, self.models, self.limits = engine, models, limits
        self.ignores_tools = ignores_tools
        self.is_stopping = False

    async def list_models(self, _request: HTTPRequest) -> Response:
        """Lists the models: GET /v1/models."""
        entries = self.models.entries()
        return JSONResponse({"object": "list", "data": [_described(entry) for entry in entries]})

    async def show_model(self, request: HTTPRequest) -> Response:
        """Describes a model: GET /v1/models/NAME."""
        return JSONResponse(_described(self.entry(request.path_params["id"])))

    async def complete(self, request: HTTPRequest) -> Response:
        """Continues prompts: POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: HTTPRequest) -> Response:
        """Answers messages: POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    def entry(self, name: Any) -> ServedModel:
        """Returns the model of this name, or of one that means it. APIError 404 without one.

        The only one needs no name.
        """
        entries = self.models.entries()
        known = ", ".join(entry.id for entry in entries) or "none yet"
        if name is None and len(entries) == 1:
            return entries[0]
        if name is None:
            raise APIError(f"model is missing; there are: {known}", "model")
        for plain in (str, str.lower, _bare):
            found = [entry for entry in entries if plain(entry.id) == plain(str(name))]
            if len(found) == 1:
                return found[0]
        message = f"the model {str(name)[:100]!r} does not exist; there are: {known}"
        raise APIError(message, "model", "model_not_found", status=404)

    async def loaded(self, entry: ServedModel) -> Loaded:
        """Returns the model in memory. APIError 500 if it cannot be loaded."""
        try:
            return await self.models.loaded(entry)
        except InputError as error:
            raise APIError(f"the model cannot be loaded: {error}", "model", status=500) from None

    async def fields(self, request: HTTPRequest, chat: bool | None = None) -> Fields:
        """Returns the fields of a request. With `chat`, APIError 400 for one that is not built."""
        body = await body_of(request)

        def read() -> Fields:
            fields = fields_in(body, bool(chat))
            if chat is not None:
                fields.refuse_unknown()
            return fields

        return await self.engine.run_beside(read)

    async def _answer(self, request: HTTPRequest, chat: bool) -> Response:
        if self.is_stopping:
            raise APIError("the server is stopping", status=503)
        fields = await self.fields(request, chat)
        entry = self.entry(fields.get("model", str))
        loaded = await self.loaded(entry)
        with loaded.line.in_use():
            parsed = await self.engine.run_beside(lambda: self._parsed(fields, entry, loaded, chat))
            streams = fields.setting("stream")
            options = Fields(fields.setting("stream_options") or {})
            with_usage = options.get("include_usage", bool) or False
            try:
                self.engine.submit(loaded.line, parsed.request)
            except Busy as error:
                raise APIError(str(error), code="rate_limit_exceeded", status=429) from None
        return Answer(self.engine, parsed, streams, with_usage)

    def _parsed(
        self, fields: Fields, entry: ServedModel, loaded: Loaded, chat: bool
    ) -> ParsedRequest:
        """Reads a request, on any thread."""
        tokenizer, limits = loaded.tokenizer, self.limits
        name = "messages" if chat else "prompt"
        config, top = generation_of(fields, limits.max_tokens), top_of(fields)
        n = fields.setting("n", self.models.slots)
        begun = fields.ids("prefix_tokens", tokenizer.vocab_size)
        lead, thinking, form = "", Thinking(None), form_of(fields, tokenizer)
        tools: list[dict[str, Any]] = []
        try:
            if chat:
                tools = tools_of(fields, loaded.template, self.ignores_tools)
                prompt = self._conversation(fields, loaded, config.max_tokens, tools)
                prompts, config = [prompt.ids], replace(config, max_tokens=prompt.most)
                template = loaded.template
                assert template  # see `_conversation`
                if called := call_form(fields, tools, template, tokenizer):
                    if form:
                        message = "tool_choice asks for a call, and another field for a format"
                        raise APIError(f"{message}; send one of them", "tool_choice")
                    form = called
                lead = "" if begun else template.lead
                asked = b"".join(map(tokenizer.token_bytes, prompt.ids[-8:].tolist()))
                # In a form there is no place for a thought, even if the prompt has opened one.
                thinking = Thinking(
                    None if form else template.marks, asked.decode("utf-8", "replace")
                )
                thinking.add(b"".join(map(tokenizer.token_bytes, begun)).decode("utf-8", "replace"))
                if thinking.is_open:  # the lead ends the thought
                    lead = ""
            else:
                prompts = prompts_of(fields, tokenizer, limits.prompt_tokens)
            if begun and len(prompts) > 1:
                raise APIError("prefix_tokens needs a single prompt", "prefix_tokens")
            for ids in prompts:
                check_count(len(ids) + len(begun), limits.prompt_tokens, name)
            echo = (
                [] if chat or not fields.setting("echo") else [x for x in prompts for _ in range(n)]
            )
            seen = loaded.model.config.block_size
            if top is not None and (longest := max(map(len, echo), default=0)) > seen + 1:
                message = f"the context is {seen:,} tokens, and a prompt to echo has {longest:,}"
                raise APIError(f"{message}; leave out logprobs, or make it shorter", "echo")
            seeds = [(config.seed + i) % 2**63 for i in range(n)]
            configs = [replace(config, seed=seed) for seed in seeds]
            texts = [
                [Continuation(tokenizer, ids, seeded, top, begun, form) for seeded in configs]
                for ids in prompts
            ]
        except InputError as error:
            raise APIError(str(error), name) from None
        count = sum(map(len, prompts))
        rounds = -(-len(prompts) * n // self.models.slots)  # of answers, which wait for each other
        request = Request(texts, limits.seconds * rounds)
        functions = [tool["function"] for tool in tools]
        known = {one["name"]: one.get("parameters") for one in functions}
        return ParsedRequest(
            entry, loaded, request, chat, count, begun, lead, top, thinking, echo, known
        )

    def _conversation(
        self, fields: Fields, loaded: Loaded, most: int, tools: Sequence[dict[str, Any]]
    ) -> Prompt:
        """Messages -> the prompt, and how many tokens the answer may have."""
        if loaded.template is None:
            raise APIError(
                "the model was not trained on conversations and has no chat template; send a "
                "prompt to /v1/completions",
                "messages",
            )
        system, turns = turns_of(fields, loaded.template.tools, self.ignores_tools)
        texts = (text for turn in turns for text in (turn.text, turn.thought, turn.more))
        described = [json.dumps(tools)] if tools else []
        check_length([system, *texts, *described], self.limits.prompt_tokens, "messages")
        context, variables = loaded.line.decoder.cache.length, variables_of(fields)
        tokenizer, template = loaded.tokenizer, loaded.template
        return prompt_of(tokenizer, template, system, turns, context, most, variables, tools)


def _bare(name: str) -> str:
    """Returns the name of a model without what clients put around it, as in openai/NAME:latest."""
    name = name.lower().rpartition("/")[2].removesuffix(":latest")
    return name.removesuffix(".gguf").removesuffix(".safetensors")


def _described(entry: ServedModel) -> dict[str, Any]:
    created = int(entry.path.stat().st_mtime) if entry.path.exists() else 0
    return {"id": entry.id, "object": "model", "created": created, "owned_by": "smallmind"}


class Answer(Response):
    """Sends what the texts of a request become, whole or in events; stops if the client leaves."""

    def __init__(
        self, engine: Engine, parsed: ParsedRequest, streams: bool, with_usage: bool
    ) -> None:
        self.engine, self.parsed = engine, parsed
        self.streams, self.with_usage = streams, with_usage
        kind = "chatcmpl" if parsed.chat else "cmpl"
        self.id, self.created = f"{kind}-{uuid.uuid4().hex}", int(time.time())
        self.index = {text: i for i, text in enumerate(parsed.request.texts)}
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
            self.parsed.request.is_cancelled = True  # before its next token
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _shown(self) -> dict[Continuation, "_Shown"]:
        """Begins what is shown of each text, with its prompt if a client wants that too."""
        shown, before = {}, None
        for text, i in self.index.items():
            if i % TEXTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            shown[text] = _Shown(self.parsed)
            if self.parsed.echo:
                ids, top = self.parsed.echo[i], self.parsed.top
                if top is not None and ids is not before:
                    read = partial(self._choices_in, ids, top)
                    choices, before = await self.engine.run(read), ids
                shown[text].echo(text, ids, choices if top is not None else [])
        return shown

    def _choices_in(self, ids: np.ndarray, top: int) -> list[Alternatives]:
        loaded = self.parsed.loaded
        return choices_in(loaded.model, ids, loaded.tokenizer.vocab_size, top)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends one JSON object at the end."""
        shown = await self._shown()
        async for tokens in self.parsed.request.tokens():
            for token in tokens:
                shown[token.continuation].add(token)
        error = self._error()
        if error:
            await error.response()(scope, receive, send)
            return

        def content() -> bytes:
            kind = "chat.completion" if self.parsed.chat else "text_completion"
            head = _json({**self._head(kind), "usage": self._usage()})
            # One by one: other threads wait while Python writes JSON.
            choices = [_json(self._choice(one, text, "message")) for text, one in shown.items()]
            return f'{head[:-1]},"choices":[{",".join(choices)}]}}'.encode()

        body = await self.engine.run_beside(content)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Sends server-sent events, each with all that has been written since the last one."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write(*events: Any, end: str = "") -> None:
            data = "".join(f"data: {_json(event)}\n\n" for event in events) + end
            await send({"type": "http.response.body", "body": data.encode(), "more_body": True})

        chat = self.parsed.chat
        head = self._head("chat.completion.chunk" if chat else "text_completion")
        if self.with_usage:
            head["usage"] = None
        if chat:
            role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
            roles = [{"index": i, **role, "finish_reason": None} for i in self.index.values()]
            await write(*({**head, "choices": [role]} for role in roles))
        shown = await self._shown()
        if self.parsed.echo:
            choices = [self._choice(one, text, "delta") for text, one in shown.items()]
            await write(*({**head, "choices": [choice]} for choice in choices))
        async for tokens in self.parsed.request.tokens():
            for token in tokens:
                shown[token.continuation].add(token)
            texts = dict.fromkeys(token.continuation for token in tokens)
            choices = [self._choice(shown[text], text, "delta") for text in texts]
            await write(*({**head, "choices": [choice]} for choice in choices))
        if error := self._error():
            await write(error.content())
        elif self.with_usage:
            await write({**head, "choices": [], "usage": self._usage()})
        await write(end="data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.parsed.entry.id,
            "system_fingerprint": self.parsed.loaded.name,
        }

    def _choice(self, shown: "_Shown", text: Continuation, name: str) -> dict[str, Any]:
        """Describes the new part of one text."""
        piece, tokens, is_last = shown.taken()
        content: dict[str, Any] = {"text": piece}
        if self.parsed.chat:
            ends = is_last or not self.streams
            thought, said = shown.thinking.add(piece, ends)
            content = {name: {"content": said}}
            if shown.calls:
                content = {name: shown.called(said, ends)}
            if thought:
                content[name]["reasoning_content"] = thought
            if name == "message":
                content[name]["role"] = "assistant"
        logprobs = None
        if self.parsed.top is not None:
            describe = _chat_logprobs if self.parsed.chat else _logprobs
            logprobs = describe(self.parsed.loaded.tokenizer, tokens)
        # Without a token, nothing has said so.
        has_ended = is_last or not self.streams or not text.config.max_tokens
        reason = REASONS[text.ended] if text.ended and has_ended else None
        if reason == "stop" and shown.calls and shown.calls.count:
            reason = "tool_calls"
        return {"index": self.index[text], **content, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        prompt, written = self.parsed.prompt_tokens, sum(text.count for text in self.index)
        total = prompt + written
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": total}

    def _error(self) -> APIError | None:
        """Returns the reason why the texts have not ended; None if they have."""
        request = self.parsed.request
        if request.error:
            return APIError(f"the model failed: {request.error}", status=500)
        if request.has_expired:
            return APIError("the answer took longer than this server allows", status=408)
        return None


class _Spelled(NamedTuple):
    """A token of which all that belongs to the text has been shown."""

    token: Token
    bytes: bytes  # in the text: fewer than its own where a stop string or a lead cuts it
    offset: int  # characters of the text before it


class _Shown:
    """A text as its client gets it: without the template's lead, each token with its own bytes.

    A token waits until the text has the last of its bytes, as a stop string may cut it off. Of a
    character that the last token leaves unfinished nothing is shown.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self._lead, self._token_bytes = parsed.lead, parsed.loaded.tokenizer.token_bytes
        self._with_tokens = parsed.top is not None
        self._pieces: list[str] = []  # not taken yet, as all of the next two
        self._tokens: list[_Spelled] = []
        self._is_last = False
        self._waiting: deque[Token] = deque()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters of the text so far, with the lead
        self._spelled = 0  # those that tokens in `_tokens`, and those taken, spell
        self.thinking = copy(parsed.thinking)
        self.calls = None
        if parsed.tools:
            assert parsed.loaded.template
            self.calls = CallDivider(parsed.tools, parsed.loaded.template.calls)
        self._begun = ""  # the beginning of the text, while it may be that of the lead
        self._without = ""  # the lead, where the text begins with it
        self._utf8.decode(b"".join(map(self._token_bytes, parsed.begun)))
        self._decode = parsed.loaded.tokenizer.decode
        self._echoed: int | None = None  # characters of the prompt, if it is shown

    def echo(self, text: Continuation, ids: np.ndarray, choices: Sequence[Alternatives]) -> None:
        """Shows the prompt of a text first; choices are those of all its tokens but the first."""
        spelled, prompt = [*map(self._token_bytes, ids.tolist())], self._decode(ids)
        # Some tokenizers begin a text with a token or a space that does not belong to it.
        whole, said = b"".join(spelled), prompt.encode()
        hidden = len(whole) - len(said) if said and whole.endswith(said) else 0
        utf8, length = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for id, own, found in zip(ids.tolist(), spelled, [None, *choices], strict=False):
            shown, hidden = own[hidden:], max(0, hidden - len(own))
            if self._with_tokens:
                self._tokens.append(_Spelled(Token(text, id, "", found), shown, length))
            length += len(utf8.decode(shown))
        self._pieces.append(prompt)
        self._echoed = len(prompt)

    def add(self, token: Token) -> None:
        """Takes the next token of the text."""
        piece = token.piece
        if token.is_last and token.continuation.ended == "length" and self._is_in_character(token):
            piece = piece[:-1]  # the sign in its place
        self._length += len(piece)
        if self._lead:
            self._begun, piece = self._begun + piece, ""
            is_short = len(self._begun) < len(self._lead) and not token.is_last
            if not (is_short and self._lead.startswith(self._begun)):
                if self._begun.startswith(self._lead):
                    self._without = self._lead
                piece, self._lead = self._begun.removeprefix(self._lead), ""
        self._pieces.append(piece)
        self._is_last = token.is_last
        if self._with_tokens:
            if not (token.is_last and token.continuation.ended == "end"):
                self._waiting.append(token)
            if not self._lead:
                self._spell()
            if token.is_last and token.continuation.ended == "end" and self._echoed is not None:
                # Clients that read the prompt's probabilities count on a token after it.
                self._tokens.append(_Spelled(token, b"", self._echoed + self._length))

    def called(self, said: str, is_last: bool) -> dict[str, Any]:
        """Divides what is said -> the content and the calls of a message, or of a part of one."""
        assert self.calls
        number = self.calls.count
        said, calls = self.calls.add(said, is_last)
        found: dict[str, Any] = {"content": said if said or not calls else None}
        if calls:
            ids = (f"call_{uuid.uuid4().hex[:24]}" for _ in calls)
            found["tool_calls"] = [
                {"index": i, **call.as_message(id, True)}
                for i, (call, id) in enumerate(zip(calls, ids, strict=True), number)
            ]
        return found

    def taken(self) -> tuple[str, list[_Spelled], bool]:
        """Returns the new part of the text, its tokens, and True if the text has ended."""
        found = "".join(self._pieces), self._tokens, self._is_last
        self._pieces, self._tokens = [], []
        return found

    def _is_in_character(self, token: Token) -> bool:
        """Returns True if a text ends in the middle of a character, of at most four bytes."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        utf8.decode(b"".join(map(self._token_bytes, token.continuation.tokens[-4:])))
        return bool(utf8.getstate()[0])

    def _spell(self) -> None:
        while self._waiting:
            spelled = self._token_bytes(self._waiting[0].id)
            before, count, state = self._spelled, 0, self._utf8.getstate()
            for byte in spelled:
                if self._spelled >= self._length:
                    break
                self._spelled += len(self._utf8.decode(bytes([byte])))
                count += 1
            is_cut = count < len(spelled)
            if is_cut and not self._is_last:
                self._spelled = before
                self._utf8.setstate(state)
                return
            token = self._waiting.popleft()
            if is_cut:
                self._waiting.clear()
            if count or not spelled:
                lead = len(self._without)
                hidden = self._without[before:].encode() if before < lead else b""
                shown = spelled[len(hidden) : count]
                offset = max(0, before - lead) + (self._echoed or 0)
                self._tokens.append(_Spelled(token, shown, offset))


def _text_of(spelled: bytes) -> str:
    return spelled.decode("utf-8", "replace")


def _chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[_Spelled]) -> dict[str, Any]:
    def entry(id: int, logprob: float, spelled: bytes) -> dict[str, Any]:
        text, logprob = _text_of(spelled), round(float(logprob), 6)
        return {"token": text, "logprob": logprob, "bytes": list(spelled), "id": int(id)}

    content = []
    for token, spelled, _ in tokens:
        found = token.alternatives
        assert found
        top = [
            entry(id, logprob, tokenizer.token_bytes(id))
            for id, logprob in zip(found.tokens.tolist(), found.logprobs, strict=True)
        ]
        more = {"top_logprobs": top, "entropy": round(found.entropy, 6)}
        content.append({**entry(token.id, found.logprob, spelled), **more})
    return {"content": content, "refusal": None}


def _logprobs(tokenizer: Tokenizer, tokens: Sequence[_Spelled]) -> dict[str, Any]:
    found = [token.alternatives for token, _, _ in tokens]  # None: of a first token
    top_ids = [each.tokens.tolist() if each else [] for each in found]
    top_texts = [[_text_of(tokenizer.token_bytes(id)) for id in ids] for ids in top_ids]
    top_values = [[round(float(x), 6) for x in each.logprobs] if each else [] for each in found]
    return {
        "tokens": [_text_of(spelled) for _, spelled, _ in tokens],
        "token_logprobs": [each and round(each.logprob, 6) for each in found],
        # Different tokens may have the same text, of which an object keeps the likeliest.
        "top_logprobs": [
            dict(zip(texts[::-1], values[::-1], strict=True)) if each else None
            for each, texts, values in zip(found, top_texts, top_values, strict=True)
        ],
        "text_offset": [offset for _, _, offset in tokens],
        "bytes": [list(spelled) for _, spelled, _ in tokens],
        "ids": [token.id for token, _, _ in tokens],
        "entropies": [each and round(each.entropy, 6) for each in found],
        "top_ids": top_ids,
        "top_texts": top_texts,
        "top_values": top_values,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

"""OpenAI's API, over HTTP: the same texts as without a server, whole or in events."""

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

import smallmind
from smallmind import Tokenizer
from smallmind.serve.api import Answer, RequestLimits
from smallmind.serve.engine import prompt_part
from smallmind.writing.chat import Chat
from smallmind.writing.generation import generate, generate_samples
from tests.programs import PATIENCE
from tests.serve.conftest import (
    TEXT,
    httpx,
    line_of,
    new_client,
    refused,
    saved_model,
    slow_down,
    talking,
    wait_for,
)

PROMPT = "The quick "


def completed(client, **fields):
    answer = client.post("/v1/completions", json={"model": "text", "prompt": PROMPT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client, path, **fields):
    """The events of a stream, after a check of their form."""
    with client.stream("POST", path, json={**fields, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_models_are_listed_and_described(client):
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["text", "chat"]
    assert client.get("/v1/models/chat").json()["object"] == "model"
    state = client.get("/api/state").json()
    assert [model["kind"] for model in state["models"]] == ["completion", "chat"]
    assert state["models"][0]["block_size"] == 64


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "top_k": 5}])
def test_a_completion_is_what_generate_writes(client, models, settings):
    found = completed(client, max_tokens=90, **settings)  # past the context
    expected = generate(*smallmind.load(models[0]), PROMPT, max_tokens=90, **settings)
    assert PROMPT + found["choices"][0]["text"] == expected
    assert found["usage"] == {"prompt_tokens": 10, "completion_tokens": 90, "total_tokens": 100}
    assert found["choices"][0]["finish_reason"] == "length"


def test_events_are_pieces_of_the_same_texts(client):
    fields = {"model": "text", "prompt": PROMPT, "max_tokens": 40, "seed": 7, "n": 3}
    whole = client.post("/v1/completions", json={**fields, "logprobs": 2}).json()
    options = {"include_usage": True}
    events = events_of(client, "/v1/completions", **fields, logprobs=2, stream_options=options)
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        ids = [token for each in own for token in each["logprobs"]["ids"]]
        assert ids == choice["logprobs"]["ids"] and len(ids) == 40
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["length"]


PLACE = {"enum": ["The fox", "the dog", "Be"]}
SCHEMA = {"type": "array", "items": PLACE, "minItems": 2, "maxItems": 2}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FORMS = {
    "schema": (
        {"response_format": AS_SCHEMA},
        lambda text: all(one in PLACE["enum"] for one in json.loads(text)),
    ),
    "regex": ({"guided_regex": "(fox|dog)+"}, re.compile("(fox|dog)+").fullmatch),
    "grammar": ({"grammar": 'root ::= "fox" | "dog"'}, re.compile("fox|dog").fullmatch),
}


@pytest.mark.parametrize("kind", FORMS)
def test_answers_have_the_form_that_is_asked_for(tmp_path, kind):
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(TEXT + 'systemuserassistant{}[]",:')
    path = saved_model(tmp_path / "m.safetensors", chat=True, tokenizer=tokenizer)
    asked, matches = FORMS[kind]
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}], **asked}
    fields |= {"max_tokens": 30, "n": 4, "seed": 5, "temperature": 2}
    with talking([path]) as (client, _):
        answers = client.post("/v1/chat/completions", json={**fields, "logprobs": True}).json()
        events = events_of(client, "/v1/chat/completions", **fields)
    for i, choice in enumerate(answers["choices"]):
        text = choice["message"]["content"]
        assert matches(text) and choice["finish_reason"] in ("stop", "length")
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == text
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == i]
        assert "".join(one["delta"]["content"] for one in own) == text


TOOLS = [{"type": "function", "function": {"name": "fox", "parameters": {"type": "object"}}}]
CALL = {"name": "fox", "arguments": {"The": "dog"}}
CALLED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A client of a server of a model whose template knows tools."""
    pytest.importorskip("jinja2")
    pytest.importorskip("llguidance")
    path = tmp_path_factory.mktemp("tools") / "m.safetensors"
    tokenizer = Tokenizer(kind="byte")
    with talking([saved_model(path, True, 1024, tokenizer, "hermes")]) as (client, _):
        yield client


def test_calls_are_divided_from_an_answer(caller):
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "tools": TOOLS}
    # Whatever the model has learned, this is what it writes.
    fields |= {"regex": re.escape(f"Be.\n{CALLED}\n{CALLED}"), "max_tokens": 200}
    (choice,) = caller.post("/v1/chat/completions", json=fields).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Be.")
    calls = choice["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [CALL["arguments"]] * 2
    assert len({call["id"] for call in calls}) == 2
    deltas = [e["choices"][0] for e in events_of(caller, "/v1/chat/completions", **fields)]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert "".join(one["delta"]["content"] or "" for one in deltas) == "Be."
    streamed = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]) for call in streamed] == [
        (i, call["function"]) for i, call in enumerate(calls)
    ]
    answered = [{"role": "assistant", "tool_calls": calls}]
    answered += [{"role": "tool", "content": "4", "tool_call_id": call["id"]} for call in calls]
    fields |= {"messages": [*fields["messages"], *answered], "regex": "So[.]"}
    (choice,) = caller.post("/v1/chat/completions", json=fields).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "So.")


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TWO = [*TOOLS, {"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ("fox", "weather")),
        ({"type": "function", "function": {"name": "weather"}}, ("weather",)),
    ],
    ids=str,
)
def test_a_call_can_be_required(caller, choice, names):
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "tools": TWO}
    fields |= {"tool_choice": choice, "max_tokens": 150, "n": 4, "temperature": 2, "seed": 1}
    for answer in caller.post("/v1/chat/completions", json=fields).json()["choices"]:
        (call,) = answer["message"]["tool_calls"]
        assert answer["message"]["content"] is None and call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        city = call["function"]["name"] == "weather"
        assert (
            arguments in ({"city": "Rome"}, {"city": "Oslo"}) if city else type(arguments) is dict
        )


PYTHON_TAG = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<|python_tag|>{{ '{\"name\": ' }}"
    '{{ call.function.name | tojson }}, "parameters": {{ call.function.arguments | tojson }}'
    "{{ '}' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AROUND = {"hermes": ["<tool_call>", "</tool_call>"], "llama": ["<|python_tag|>"], "plain": []}


@pytest.mark.parametrize("smallest", [0, 1024])
@pytest.mark.parametrize("kind", AROUND)
def test_a_required_call_has_the_special_tokens_of_its_template(
    tmp_path, monkeypatch, kind, smallest
):
    pytest.importorskip("jinja2")
    pytest.importorskip("llguidance")
    monkeypatch.setattr("smallmind.writing.form.MAX_SMALL", smallest)
    marks = AROUND[kind]
    tokenizer = Tokenizer(kind="byte").with_special([*marks, "<|im_start|>", "<|im_end|>"])
    if kind == "llama":
        tokenizer = tokenizer.with_published(
            {"tokenizer_config.json": {"chat_template": PYTHON_TAG}}
        )
    path = saved_model(tmp_path / "m.safetensors", kind != "llama", 1024, tokenizer, "hermes")
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "tools": TWO}
    fields |= {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    fields |= {"max_tokens": 150, "temperature": 2, "seed": 1, "logprobs": True}
    with talking([path]) as (client, _):
        (choice,) = client.post("/v1/chat/completions", json=fields).json()["choices"]
        events = events_of(client, "/v1/chat/completions", **fields)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) in ({"city": "Rome"}, {"city": "Oslo"})
    ids = [one["id"] for one in choice["logprobs"]["content"]]
    special = [token for token in ids if token not in range(256)]
    assert special == [tokenizer.special[name] for name in marks]
    deltas = [event["choices"][0] for event in events]
    streamed = [call for one in deltas for call in one["delta"].get("tool_calls", ())]
    assert [each["function"] for each in streamed] == [call["function"]]
    assert not any(one["delta"]["content"] for one in deltas)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "any"}, "tool_choice must be auto, none, required, or name a function"),
        ({"tool_choice": {"name": "dog"}}, "tool_choice names 'dog', which is not among the tools"),
        (
            {"regex": "a", "tool_choice": "required"},
            "asks for a call, and another field for a format",
        ),
        ({"tools": [], "tool_choice": "required"}, "asks for a call, and there are no tools"),
        (
            {
                "tools": [{"name": "f", "parameters": {"type": "object", "not": {}}}],
                "tool_choice": "required",
            },
            "tools: f: the schema cannot be compiled: the keyword 'not' is not supported",
        ),
    ],
    ids=str,
)
def test_a_call_that_cannot_be_required_is_refused(caller, fields, words):
    asked = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "tools": TOOLS}
    answer = caller.post("/v1/chat/completions", json=asked | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


OWN_CALLS = PYTHON_TAG.replace("<|python_tag|>{{ '{\"name\": ' }}", "to ").replace("{{ '}' }}", "")


def test_tools_are_refused_if_nothing_reads_the_calls(tmp_path):
    """The template writes `to "fox", "parameters": {...}`."""
    pytest.importorskip("jinja2")
    tokenizer = Tokenizer(kind="byte").with_special(["<|im_start|>", "<|im_end|>"])
    tokenizer = tokenizer.with_published({"tokenizer_config.json": {"chat_template": OWN_CALLS}})
    path = saved_model(tmp_path / "m.safetensors", False, 1024, tokenizer)
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 1}
    with talking([path]) as (client, _):
        answer = client.post("/v1/chat/completions", json={**fields, "tools": TOOLS})
        plain = client.post("/v1/chat/completions", json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "tools_not_supported")
    assert "writes calls in a format of its own" in error["message"]
    assert plain.status_code == 200


def test_without_tools_nothing_is_called(caller):
    fields = {"model": "m", "messages": [{"role": "user", "content": "fox"}]}
    fields |= {"regex": re.escape(CALLED), "max_tokens": 100}
    found = [
        caller.post("/v1/chat/completions", json={**fields, **more}).json()
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
    ]
    plain, none, with_tools = (one["choices"][0] for one in found)
    assert plain["message"] == none["message"] and plain["message"]["content"] == CALLED
    assert "tool_calls" not in plain["message"] and with_tools["message"]["content"] is None
    counts = [one["usage"]["prompt_tokens"] for one in found]
    assert counts[0] == counts[1] < counts[2]


def test_tools_that_the_template_does_not_know_are_refused_or_ignored(models):
    asked = [{"role": "user", "content": "fox"}]
    calls = [{"id": "a", "type": "function", "function": {"name": "fox", "arguments": "{}"}}]
    answered = [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "a"},
    ]
    fields = {"model": "chat", "messages": asked, "max_tokens": 5, "temperature": 0}
    with talking(models, ignores_tools=True) as (client, _):
        answers = [
            client.post("/v1/chat/completions", json={**fields, **more}).json()["choices"]
            for more in ({}, {"tools": TOOLS}, {"messages": answered, "tools": TOOLS})
        ]
    assert answers[0] == answers[1] == answers[2]
    with talking(models) as (client, _):
        for more in ({"tools": TOOLS}, {"messages": answered}):
            answer = client.post("/v1/chat/completions", json={**fields, **more})
            assert answer.status_code == 400 and "--ignore-tools" in answer.text
            assert answer.json()["error"]["code"] == "tools_not_supported"


class Endless:
    """A request without a text, which gives no tokens until it is cancelled."""

    texts, error, has_expired, is_cancelled = (), None, False, False

    async def tokens(self):
        while not self.is_cancelled:
            yield []
            await asyncio.sleep(0)


def test_an_answer_that_is_cancelled_as_it_sends_does_not_seem_complete():
    async def answer():
        request, sent, sending = Endless(), [], asyncio.Queue()
        names = SimpleNamespace(id="m", name="m")
        asked = SimpleNamespace(
            request=request,
            chat=None,
            entry=names,
            loaded=names,
            lead="",
            begun=[],
            top=None,
            echo=[],
        )

        async def send(message):
            sent.append(message.get("body", b""))
            if len(sent) == 3:
                sending.put_nowait(ended := asyncio.get_running_loop().create_future())
                await ended

        task = asyncio.create_task(Answer(request, asked, True, False)({}, asyncio.Future, send))
        (await sending.get()).set_result(None)  # it has been sent, and at once
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return sent

    assert b"[DONE]" not in b"".join(asyncio.run(answer()))


def test_several_answers_have_seeds_one_after_another(client, models):
    found = completed(client, max_tokens=20, seed=11, n=3)
    expected = generate_samples(*smallmind.load(models[0]), PROMPT, 3, max_tokens=20, seed=11)
    assert [each["text"] for each in found["choices"]] == [each.text for each in expected]


def test_the_same_seed_gives_the_same_text_whoever_else_is_served(address):
    alone = {}

    def ask(seed, kept):
        with new_client(address) as client:
            time.sleep(0.01 * (seed % 5))
            prompt = PROMPT * (1 + seed % 4)
            kept[seed] = completed(client, prompt=prompt, seed=seed, max_tokens=30 + seed)

    for seed in range(9):
        ask(seed, alone)
    together = {}
    threads = [threading.Thread(target=ask, args=(seed, together)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(9):
        assert together[seed]["choices"] == alone[seed]["choices"]


def test_a_chat_answers_as_chat_does(client, models):
    settings = {"seed": 5, "max_tokens": 30, "temperature": 0.7}
    chat = Chat(*smallmind.load(models[1]), system="Be quick.", **settings)
    messages = [{"role": "system", "content": "Be quick."}]
    for question in ("The fox?", "The dog?"):
        messages.append({"role": "user", "content": question})
        fields = {"model": "chat", "messages": messages, **settings}
        answer = client.post("/v1/chat/completions", json=fields)
        assert answer.status_code == 200, answer.text
        answer = answer.json()["choices"][0]["message"]
        assert answer["role"] == "assistant" and answer["content"] == chat.say(question)
        messages.append(answer)


def test_probabilities_come_with_tokens_numbers_and_entropy(client):
    fields = {"model": "chat", "messages": [{"role": "user", "content": "fox"}]}
    more = {"logprobs": True, "top_logprobs": 3, "max_tokens": 6, "temperature": 0}
    found = client.post("/v1/chat/completions", json=fields | more).json()["choices"][0]
    content = found["logprobs"]["content"]
    for token in content:
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0 <= token["entropy"]
        assert token["id"] == token["top_logprobs"][0]["id"] and len(token["top_logprobs"]) == 3
    assert "".join(token["token"] for token in content).startswith(found["message"]["content"])


def test_an_answer_can_be_continued_from_any_token(client):
    whole = completed(client, max_tokens=20, seed=9, logprobs=0)["choices"][0]
    begun, rest = whole["logprobs"]["ids"][:8], whole["logprobs"]["tokens"][8:]
    again = completed(client, max_tokens=12, seed=9, prefix_tokens=begun)["choices"][0]
    assert again["text"] == "".join(rest)


def test_a_text_ends_before_a_stop_string(client):
    text = completed(client, max_tokens=40, seed=2)["choices"][0]["text"]
    stop = text[10:12]
    found = completed(client, max_tokens=40, seed=2, stop=["zzzz", stop])["choices"][0]
    assert found["text"] == text[: text.index(stop)] and found["finish_reason"] == "stop"


def test_prompts_may_be_texts_or_tokens(client, models):
    tokenizer = smallmind.load(models[0])[1]
    texts = ["The fox", "A dog", "QA"]
    ids = [tokenizer.encode(text).tolist() for text in texts]
    expected = [completed(client, prompt=text, temperature=0)["choices"][0] for text in texts]
    for prompt in (texts, ids):
        found = completed(client, prompt=prompt, temperature=0)["choices"]
        assert [each["text"] for each in found] == [each["text"] for each in expected]
        assert [each["index"] for each in found] == [0, 1, 2]
    one = completed(client, prompt=ids[0], temperature=0)["choices"]
    assert one[0]["text"] == expected[0]["text"]


WRONG = [
    ({"model": "none"}, 404, "model", "does not exist"),
    ({"model": None}, 400, "model", "missing"),
    ({"temperature": "hot"}, 400, "temperature", "must be a number"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "a whole number"),
    ({"n": 5}, 400, "n", "from 1 to 4"),
    ({"n": True}, 400, "n", "a whole number"),
    ({"stop": [1]}, 400, "stop", "a list of strings"),
    ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    ({"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    ({"prompt": "☃"}, 400, "prompt", "☃"),
    ({"prompt": [1, 10**6]}, 400, "prompt", "tokens from 0"),
    ({"prompt": {"a": 1}}, 400, "prompt", "must be a text"),
    ({"prefix_tokens": [-1]}, 400, "prefix_tokens", "tokens from 0"),
    ({"stream": "yes"}, 400, "stream", "true or false"),
    ({"suffix": "x"}, 400, "suffix", "not supported"),
    ({"seed": "a"}, 400, "seed", "a whole number"),
]


@pytest.mark.parametrize(("fields", "status", "param", "message"), WRONG)
def test_a_wrong_field_is_refused_in_the_form_of_the_api(client, fields, status, param, message):
    answer = client.post("/v1/completions", json={"model": "text", "prompt": "fox", **fields})
    error = refused(answer, message, param, status)
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


MESSAGES = [
    ([], "a user turn"),
    ("hello", "must be a list"),
    ([{"role": "wizard", "content": "x"}], "must be one of"),
    ([{"role": "user"}], "must be a string"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of text only"),
    (["x"], "must be an object"),
    ([{"role": "user", "content": "fox " * 100}], "shorten it"),
]


@pytest.mark.parametrize(("messages", "message"), MESSAGES)
def test_wrong_messages_are_refused(client, messages, message):
    fields = {"model": "chat", "messages": messages}
    refused(client.post("/v1/chat/completions", json=fields), message)


def test_a_model_without_a_template_says_what_to_use_instead(client):
    fields = {"model": "text", "messages": [{"role": "user", "content": "fox"}]}
    refused(client.post("/v1/chat/completions", json=fields), "/v1/completions")


BODIES = [b"", b"{", b"[1]", b'{"a": NaN}', b"[" * 100_000, b"\xff\xfe", b'{"model": "text"']


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_what_is_not_a_json_object_is_refused(client, body):
    error = refused(client.post("/v1/completions", content=body))
    assert error["message"].startswith("the body")


def test_a_body_that_is_too_large_is_refused(client):
    refused(client.post("/v1/completions", content=b" " * (5 * 2**20)), status=413)


def endless(client):
    """A stream that takes long."""
    body = {"model": "text", "prompt": "fox", "max_tokens": 4096, "stream": True}
    return httpx.stream("POST", f"{client.base_url}/v1/completions", json=body, timeout=PATIENCE)


def test_a_client_that_leaves_frees_its_slot(models):
    with talking(models[:1], slots=1) as (client, app):
        slow_down(client, app)
        with endless(client) as answer:
            lines = answer.iter_lines()  # kept: httpx closes a stream that is dropped
            next(lines)
            assert len(line_of(app).requests) == 1
        wait_for(lambda: line_of(app).is_idle and line_of(app).decoder.free == 1)


def test_requests_wait_for_a_slot_and_only_so_many(models):
    with talking(models[:1], slots=1, waiting=1) as (client, app):
        slow_down(client, app)
        with endless(client) as answer:
            lines = answer.iter_lines()  # kept: httpx closes a stream that is dropped
            next(lines)
            found = {}

            def ask():
                found.update(completed(client, max_tokens=3, seed=1))

            waiting = threading.Thread(target=ask)
            waiting.start()
            wait_for(lambda: len(line_of(app).waiting) == 1)
            refusal = client.post("/v1/completions", json={"model": "text"})
            assert refused(refusal, status=429)["type"] == "rate_limit_error"
            assert refusal.headers["retry-after"] == "1"
            answer.close()
            waiting.join(30)
            assert found["usage"]["completion_tokens"] == 3


def test_an_answer_that_takes_too_long_ends(models):
    with talking(models[:1], limits=RequestLimits(seconds=0.3)) as (client, app):
        slow_down(client, app)
        answer = client.post("/v1/completions", json={"model": "text", "max_tokens": 4096})
        refused(answer, status=408)
        events = events_of(client, "/v1/completions", model="text", max_tokens=4096)
        assert "longer" in events[-1]["error"]["message"]
        wait_for(lambda: line_of(app).is_idle)


def test_a_failure_of_the_model_ends_its_answers_and_not_the_server(models):
    with talking(models[:1]) as (client, app):
        completed(client, max_tokens=1)
        decoder = line_of(app).decoder
        step, decoder.step = decoder.step, lambda: 1 / 0
        answer = client.post("/v1/completions", json={"model": "text", "max_tokens": 5})
        refused(answer, "division", status=500)
        decoder.step = step
        assert completed(client, max_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_text_is_inspected_token_by_token(client, models):
    model, tokenizer = smallmind.load(models[0])
    found = client.post("/api/inspect", json={"model": "text", "text": PROMPT, "top": 4}).json()
    ids = tokenizer.encode(PROMPT)
    losses = model.losses(ids[None, :-1], ids[None, 1:])[0]
    assert [token["id"] for token in found["tokens"]] == ids.tolist()
    assert found["tokens"][0]["logprob"] is None
    for token, loss in zip(found["tokens"][1:], losses, strict=True):
        assert token["logprob"] == pytest.approx(-loss, abs=1e-4) and len(token["top"]) == 4
    assert found["loss"] == pytest.approx(losses.mean(), abs=1e-4)
    fields = {"model": "text", "ids": ids.tolist(), "layer": 1, "head": 2}
    weights = client.post("/api/attention", json=fields).json()["weights"]
    assert [len(row) for row in weights] == list(range(1, len(ids) + 1))
    assert all(sum(row) == pytest.approx(1, abs=0.01) for row in weights)


def test_a_text_longer_than_the_context_is_not_inspected(client):
    answer = client.post("/api/inspect", json={"model": "text", "text": PROMPT * 10})
    refused(answer, "64")


def test_parts_of_prompts_depend_on_the_model_alone():
    assert [prompt_part(n) for n in (1000, 10**7, 6 * 10**8)] == [512, 64, 16]


def test_the_openai_package_works_unchanged(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["text", "chat"]
        completion = client.completions.create(
            model="text", prompt=PROMPT, max_tokens=9, seed=1, logprobs=2
        )
        assert completion.usage.completion_tokens == 9
        assert len(completion.choices[0].logprobs.tokens) == 9
        messages = [{"role": "user", "content": "The fox?"}]
        fields = {"model": "chat", "messages": messages, "max_tokens": 9, "seed": 1}
        chat = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
        assert chat.choices[0].logprobs.content[0].top_logprobs
        pieces = [
            part.choices[0].delta.content or ""
            for part in client.chat.completions.create(**fields, stream=True)
        ]
        assert "".join(pieces) == chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-4", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="text", prompt="fox", temperature="hot")

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            return await asyncio.gather(
                *(client.chat.completions.create(**fields) for _ in range(6))
            )

    for found in asyncio.run(together()):
        assert found.choices[0].message.content == chat.choices[0].message.content

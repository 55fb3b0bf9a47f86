"""The fields of requests: those that count, change nothing, or are refused."""

import itertools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import smallmind
from smallmind import Tokenizer
from smallmind.guide import text_of
from smallmind.serve import request_fields
from smallmind.serve.api import RequestLimits, _Shown
from smallmind.text.chat import Turn
from smallmind.writing.decoder import Token
from tests.serve.conftest import new_client, refused, saved_model, talking

PROMPT = {"model": "text", "prompt": "fox", "temperature": 0}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "fox"}], "temperature": 0}
PATHS = {"text": "/v1/completions", "chat": "/v1/chat/completions"}


def asking(client, body, **fields):
    return client.post(PATHS[body["model"]], json={**body, **fields})


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_completion_tokens": None, "max_tokens": 3}, 3),
        ({"max_completion_tokens": 3, "max_tokens": None}, 3),
        ({"max_completion_tokens": 5, "max_tokens": 2}, 2),
        ({"max_completion_tokens": 2, "max_tokens": 5}, 2),
        ({"max_completion_tokens": -1, "max_tokens": 2}, 2),
        ({"max_completion_tokens": 10**30, "max_tokens": 2}, 2),
        ({"max_completion_tokens": -2, "max_tokens": 2.0}, 2),
        ({"max_completion_tokens": -(10**30), "max_tokens": 2}, 2),
        ({"n_predict": 3}, 3),
        ({"max_new_tokens": 3, "num_predict": -1}, 3),
        ({"max_output_tokens": 3, "max_tokens": None}, 3),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": "3"}, 3),
        ({"max_tokens": "4.0", "n_predict": "", "max_new_tokens": "-1"}, 4),
    ],
)
def test_the_smaller_of_both_counts_of_tokens_counts(client, body, fields, count):
    found = asking(client, body, **fields).json()
    assert found["usage"]["completion_tokens"] == count
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("count", [8192, -1, 10**9])
def test_more_tokens_than_there_may_be_are_as_many_as_fit(models, count):
    with talking(models, limits=RequestLimits(max_tokens=110)) as (client, _):
        found = asking(client, PROMPT, max_tokens=count).json()
        assert found["usage"]["completion_tokens"] == 110  # the limit of the server
        found = asking(client, CHAT, max_tokens=count, seed=1, temperature=1).json()
        has_ended = found["choices"][0]["finish_reason"] == "stop"
        assert has_ended or found["usage"]["total_tokens"] == 128  # the context


OFF = [
    {"top_k": 0},
    {"top_k": -1},
    {"top_k": -5},
    {"top_p": 0},
    {"top_p": 1},
    {"top_p": 1.5},
    {"top_p": -1},
    {"min_p": 0},
    {"min_p": -0.5},
    {"temperature": -1},
    {"stop": ""},
    {"stop": []},
    {"stop": None},
    {"stop": ["", None]},
    {"stop_sequences": []},
    {"min_p": None, "top_k": None, "top_p": None, "n": None, "temperature": 0.0},
    {"repeat_penalty": 1.0, "rep_pen": 1, "repeat_last_n": 64},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"seed": None},
    {"tools": []},
    {"tools": None, "tool_choice": "none"},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"functions": [], "function_call": "none"},
    {"logit_bias": {}},
    {"logit_bias": None},
    {"logit_bias": {"5": 0, "7": 0.0}},
    {"temperature": "0", "top_k": "", "presence_penalty": " 0.0 "},
    {"stream": "false"},
    {"stream": 0},
    {"slot_id": -1},
    {"response_format": {"type": "text"}},
    {"logprobs": False},
    {"logprobs": None, "top_logprobs": 0},
    {"best_of": 1},
    {"echo": False, "suffix": ""},
    {"grammar": "", "guided_json": None, "stop_token_ids": []},
    {"ignore_eos": False, "min_tokens": 0, "bad_words": []},
    {"repetition_penalty": 1, "repeat_penalty": 1.0, "typical_p": 1},
    {"skip_special_tokens": True, "add_generation_prompt": True},
    {"mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0.0, "xtc_probability": 0},
    {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"safety_identifier": "x", "prompt_cache_key": "y", "prediction": {"type": "content"}},
    {"cache_prompt": True, "id_slot": 3, "keep_alive": "5m", "ttl": 60, "speculative.n_max": 4},
    {"modalities": ["text"], "audio": None, "verbosity": "medium", "web_search_options": None},
    {"chat_template_kwargs": {}, "documents": []},
    {"stream_options": None, "stream": False},
    {"something_new": None},
]


@pytest.fixture(scope="module")
def plain(address):
    """The answers to requests without more fields, by the name of the model."""
    with new_client(address) as client:
        answers = [asking(client, body, max_tokens=5).json() for body in (PROMPT, CHAT)]
    return {answer["model"]: answer["choices"] for answer in answers}


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("fields", OFF, ids=lambda fields: next(iter(fields)))
def test_what_changes_nothing_is_taken(client, plain, body, fields):
    answer = asking(client, body, max_tokens=5, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain[body["model"]]


REFUSED = {
    "guided_choice": ["a", "b"],
    "structured_outputs": {"choice": ["a"]},
    "format": "json",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 5,
    "bad_words": ["x"],
    "allowed_token_ids": [1],
    "logit_bias": {"5": -100},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "web_search_options": {"search_context_size": "low"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "suffix": "x",
    "best_of": 3,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "typical_p": 0.5,
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.5,
    "top_n_sigma": 1.0,
    "samplers": ["top_k"],
    "do_sample": False,
    "skip_special_tokens": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "{{ messages }}",
    "options": {"num_ctx": 4096},
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 10,
    "lora": [{"id": 0, "scale": 0.5}],
    "no_repeat_ngram_size": 3,
    "something_new": 1,
}


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_and_is_not_built_is_named(client, body, name):
    error = refused(asking(client, body, **{name: REFUSED[name]}), param=name)
    assert error["message"] == f"{name} is not supported by this server; leave it out"


@pytest.mark.parametrize(
    ("body", "fields", "name"),
    [
        (PROMPT, {"add_special_tokens": False}, "add_special_tokens"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
        (PROMPT, {"messages": CHAT["messages"]}, "messages"),
        (CHAT, {"prompt": "fox"}, "prompt"),
        (CHAT, {"echo": True}, "echo"),
        (PROMPT, {"enable_thinking": True}, "enable_thinking"),
        (CHAT, {"enable_thinking": "yes"}, "enable_thinking"),
        (PROMPT, {"prompt": "fox " * 20, "echo": True, "logprobs": 1}, "echo"),
        (PROMPT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (CHAT, {"chat_template_kwargs": 1}, "chat_template_kwargs"),
        (PROMPT, {"prompt": ["a", "b"], "prefix_tokens": [1]}, "prefix_tokens"),
        (PROMPT, {"stop": ["a" * 5000]}, "stop"),
        (CHAT, {"stop": "a" * 5000}, "stop"),
        (PROMPT, {"prefix_tokens": [1] * 40000}, "prompt"),
        (PROMPT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (PROMPT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        (CHAT, {"messages": [*CHAT["messages"], {"role": "tool", "content": "4"}]}, "messages"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"max_tokens": "many"}, "max_tokens"),
        (CHAT, {"temperature": "nan"}, "temperature"),
        (CHAT, {"stream": "maybe"}, "stream"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (PROMPT, {"json_schema": {"not": {}}}, "json_schema"),
        (PROMPT, {"regex": "(a"}, "regex"),
        (PROMPT, {"grammar": "x"}, "grammar"),
        (PROMPT, {"regex": "a", "guided_regex": "b"}, "guided_regex"),
        (PROMPT, {"regex": "a", "json_schema": {}}, "json_schema"),
    ],
)
def test_a_field_is_refused_where_it_says_something(client, body, fields, name):
    refused(asking(client, body, **fields), param=name)


HALF = [
    *({"model": "\ud800"}, {"prompt": "\ud800"}, {"stop": "\ud800"}, {"\ud800": 1}),
    *(
        {"messages": [{"role": "\ud800", "content": "fox"}]},
        {"chat_template_kwargs": {"\ud800": 1}},
    ),
]


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize("fields", HALF, ids=range(len(HALF)))
def test_half_a_character_is_no_fault_of_the_server(client, body, fields):
    answer = client.post(
        PATHS[body["model"]], content=json.dumps({**body, "max_tokens": 1, **fields})
    )
    assert answer.status_code in (200, 400, 404) and answer.json()


@pytest.mark.parametrize("name", ["tool_calls", "prefix", "images"])
def test_what_a_message_has_besides_its_text_is_refused(client, name):
    messages = [*CHAT["messages"], {"role": "assistant", "content": "A", name: [{"a": 1}]}]
    refused(asking(client, CHAT, messages=messages), f"messages[1].{name}")


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "text": "x"}, {"type": "text", "text": 5}, "x"]
)
def test_parts_of_a_message_that_are_no_text_are_refused(client, part):
    messages = [{"role": "user", "content": [part]}]
    refused(asking(client, CHAT, messages=messages), "parts of text only")


def test_a_thought_before_an_answer_is_not_a_part_of_it():
    messages = [
        {"role": "user", "content": "3*4?"},
        {"role": "assistant", "reasoning_content": "three fours", "content": "12"},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    _, turns = request_fields.turns_of(request_fields.Fields({"messages": messages}))
    assert turns[1] == Turn("assistant", "12", thought="three fours")
    assert turns[2] == Turn("user", "Sure?")
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": "12"}]
    messages[1:] = [{"role": "AI", "content": parts}, {"role": "human", "content": "Sure?"}]
    _, turns = request_fields.turns_of(request_fields.Fields({"messages": messages}))
    assert turns[1:] == [Turn("assistant", "12", thought="hm"), Turn("user", "Sure?")]


def test_earlier_calls_of_functions_are_those_of_tools():
    call = {"name": "w", "arguments": '{"x": 1}'}
    found = []
    for fields, role in (({"function_call": call}, "function"), ({"tool_calls": [call]}, "tool")):
        messages = [
            {"role": "user", "content": "fox"},
            {"role": "assistant", "content": None, **fields},
            {"role": role, "name": "w", "content": None},
        ]
        found.append(request_fields.turns_of(request_fields.Fields({"messages": messages})))
    assert found[0] == found[1] and found[0][1][2].role == "tool"
    assert json.loads(found[0][1][1].more)["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_the_only_model_needs_no_name(client, models):
    for body in ({"prompt": "fox", "max_tokens": 1}, {"model": None, "prompt": "fox"}):
        refused(client.post(PATHS["text"], json=body), "model is missing; there are: text", "model")
        with talking(models[:1]) as (alone, _):
            assert alone.post(PATHS["text"], json=body).json()["model"] == "text"


def written(value):
    """A default or a value that switches a field off, as the guide has it."""
    return json.dumps(value).replace("null", "")


def rows():
    """The table of fields in Markdown."""
    yield "| field | value | default | off | other names | out of range |"
    yield "|---|---|---|---|---|---|"
    for field in request_fields.TABLE:
        only = {None: "", True: " (chat)", False: " (completion)"}[field.chat]
        kind = "text or a list" if field.kind is object else request_fields.TYPES[field.kind]
        value = f"{kind} {field.range.partition(',')[0]}".strip()
        off = ", ".join(map(written, field.off))
        names = ", ".join(f"`{name}`" for name in field.names)
        outside = "refused" if field.strict else "the nearest" if field.range else ""
        if field.range and field.off and not field.strict:
            outside = "as many as fit" if field.default else "off"
        default = written(field.default)
        yield f"| `{field.name}`{only} | {value} | {default} | {off} | {names} | {outside} |"


def test_the_guide_has_the_table_of_fields():
    assert "\n".join(rows()) + "\n" in text_of("serving")


# --- prompts ---


@pytest.mark.parametrize("count", [33, 300])
def test_many_prompts_at_an_idle_server_are_answered(client, count):
    client.timeout = 600  # on a busy machine
    found = asking(client, PROMPT, prompt=["fox"] * count, max_tokens=2).json()
    assert [choice["index"] for choice in found["choices"]] == list(range(count))
    assert found["usage"] == {
        "prompt_tokens": 3 * count,
        "completion_tokens": 2 * count,
        "total_tokens": 5 * count,
    }


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5}),
        ({"repetition_penalty": 1.5}, {"rep_pen": 1.5, "repetition_penalty": 1.5}),
        ({"stop": ["o"]}, {"stop_sequences": "o"}),
        ({"stop": ["o"]}, {"stopping_strings": ["o", ""]}),
        ({"seed": 7, "temperature": 1}, {"random_seed": 7, "temperature": 1.0}),
        ({"top_k": 10**9, "temperature": 1, "seed": 1}, {"temperature": 1, "seed": 1}),
        ({"top_k": 0, "temperature": 1, "seed": 1}, {"temperature": 1, "seed": 1}),
        ({"top_p": 0, "temperature": 1, "seed": 1}, {"top_p": 1, "temperature": 1, "seed": 1}),
        ({"min_p": 7, "temperature": 1, "seed": 1}, {"min_p": 1, "temperature": 1, "seed": 1}),
        ({"presence_penalty": 1e308}, {"presence_penalty": 100}),
        ({"frequency_penalty": -1000}, {"frequency_penalty": -100}),
        ({"repetition_penalty": 1e-300}, {"rep_pen": 0}),
    ],
)
def test_other_names_and_values_that_mean_the_same_give_the_same(client, body, one, other):
    found = [asking(client, body, max_tokens=8, **fields) for fields in (one, other)]
    assert [answer.status_code for answer in found] == [200, 200], found[1].text
    assert found[0].json()["choices"] == found[1].json()["choices"]


STRANGE = [None, 0, -1, 10**400, -(10**30), 1e308, "", "NaN", [], {}, True, [None], [[[]]], 0.5]


@pytest.mark.parametrize("body", [PROMPT, CHAT], ids=["completion", "chat"])
def test_no_value_of_a_field_is_a_fault_of_the_server(client, body):
    for field in request_fields.FIELDS[body is CHAT].values():
        for name, value in itertools.product((field.name, *field.names), STRANGE):
            asked = {**body, "max_tokens": 1, "n_predict": 1, name: value}
            answer = client.post(PATHS[body["model"]], json=asked)
            if answer.status_code != 200:
                is_unknown = name == "model" and isinstance(value, str)
                error = refused(answer, status=404 if is_unknown else 400)
                assert error["param"] in (name, field.name), (asked, error)


def test_other_names_have_an_effect(client):
    plain = asking(client, PROMPT, max_tokens=8).json()["choices"][0]["text"]
    assert (
        asking(client, PROMPT, max_tokens=8, repeat_penalty=50).json()["choices"][0]["text"]
        != plain
    )
    ended = asking(client, PROMPT, max_tokens=8, stop_sequences=[plain[3]]).json()["choices"][0]
    assert ended["text"] == plain[: plain.index(plain[3])]


def test_names_of_one_thing_may_not_contradict_each_other(client):
    answer = asking(client, PROMPT, repetition_penalty=1.1, repeat_penalty=1.2)
    refused(answer, "contradicts repetition_penalty; send one of them", "repeat_penalty")


def test_too_many_prompts_are_counted_before_they_are_encoded(client, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("a prompt was encoded"))
    for prompt, n in ((["fox"] * 100_000, 1), ([[1]] * 40_000, 2)):
        words = f"{len(prompt):,} prompts are too many for one request"
        refused(asking(client, PROMPT, prompt=prompt, n=n), words, "prompt")


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(client, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("a prompt was encoded"))
    text = "a" * (request_fields.MAX_CHARACTERS * 32768 + 1)
    messages = [{"role": role, "content": text[:600_000]} for role in ("user", "assistant")]
    answers = [
        asking(client, PROMPT, prompt=text),
        asking(client, PROMPT, prompt=[text[:600_000]] * 2),
        asking(client, CHAT, messages=messages),
        client.post("/api/inspect", json={"model": "text", "text": text}),
    ]
    for answer in answers:
        refused(answer, " characters; the limit is 1,048,576")


def test_a_body_of_too_many_values_is_refused_before_it_is_read(client, monkeypatch):
    fail = pytest.fail
    monkeypatch.setattr(request_fields.json, "loads", lambda *_, **__: fail("the body was read"))
    body = b'{"model":"text","prompt":[' + b"[]," * 1_000_000 + b"[]]}"
    answer = client.post("/v1/completions", content=body)
    assert answer.status_code == 413 and "1,048,576 values" in answer.text


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_while_a_request_is_read_others_are_answered(client, monkeypatch, name):
    """The request is not read to its end before others have been answered."""
    answered = threading.Event()
    is_chat = name == "messages"
    body, other, reader = (CHAT, PROMPT, "turns_of") if is_chat else (PROMPT, CHAT, "prompts_of")
    read = getattr(request_fields, reader)

    def slowly(*arguments):
        assert answered.wait(60)
        return read(*arguments)

    found = []
    asking(client, CHAT, max_tokens=1)  # both models are loaded
    asking(client, PROMPT, max_tokens=1)
    monkeypatch.setattr(f"smallmind.serve.api.{reader}", slowly)
    thread = threading.Thread(target=lambda: found.append(asking(client, body, max_tokens=1)))
    thread.start()
    for _ in range(3):
        assert client.get("/v1/models").status_code == 200
        assert asking(client, other, max_tokens=2).status_code == 200
    assert not found
    answered.set()
    thread.join(60)
    assert found[0].status_code == 200


# --- probabilities ---

ANSWERS = [
    ("I \U0001f49a it \U0001f44d\U0001f3fd!", None, "I \U0001f49a it \U0001f44d\U0001f3fd!"),
    ("I \U0001f49a it \U0001f44d\U0001f3fd!", " it", "I \U0001f49a"),
    ("I \U0001f49a it \U0001f44d\U0001f3fd!", "\U0001f44d", "I \U0001f49a it "),
    ("I \U0001f49a it \U0001f44d\U0001f3fd!", "\U0001f3fd!", "I \U0001f49a it \U0001f44d"),
    ("caf\xe9 stopping there", "ping", "caf\xe9 stop"),
    ("caf\xe9 stopping there", "stoppard", "caf\xe9 stopping there"),
    ("caf\xe9 stopping there", "c", ""),
    ("caf\xe9", "e", "caf\xe9"),
]


@pytest.fixture(scope="module", params=["byte", "bpe", "char"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def spoken(kind, tmp_path_factory):
    """A server whose models write what a test says, and their tokenizer."""
    folder = tmp_path_factory.mktemp("spoken")
    text = "".join(answer for answer, _, _ in ANSWERS) + "stopping there caf\xe9 " * 30
    tokenizer = Tokenizer(text + "\nsystemuserassistantQ:A", kind=kind)
    paths = [
        saved_model(folder / "text.safetensors", tokenizer=tokenizer),
        saved_model(folder / "chat.safetensors", True, 128, tokenizer),
        saved_model(folder / "qa.safetensors", True, 128, tokenizer, "qa"),
    ]
    with talking(paths) as (client, _):
        yield client, {path.stem: smallmind.load(path)[1] for path in paths}


def say(monkeypatch, ids):
    """Makes a model write these tokens."""
    writing = iter(ids)
    monkeypatch.setattr("smallmind.writing.decoder.choose_each", lambda *_: [next(writing)])


def all_choices(text, streams):
    """The choices of an answer, or of all its events."""
    lines = [line[6:] for line in text.split("\n\n")[:-2]] if streams else [text]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def choices_in(text, streams):
    """The first choice of an answer, or of each of its events."""
    return [choice for choice in all_choices(text, streams) if choice["index"] == 0]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("model", ["text", "chat", "qa"])
@pytest.mark.parametrize(("answer", "stop", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_the_bytes_of_tokens_are_those_of_the_text(
    spoken, monkeypatch, kind, model, streams, answer, stop, expected
):
    client, tokenizers = spoken
    lead = " " if model == "qa" else ""
    ids = tokenizers[model].encode(lead + answer).tolist()
    say(monkeypatch, ids)
    body = {"model": model, "stop": stop, "max_tokens": len(ids), "stream": streams}
    if model == "text":
        path, body = "/v1/completions", {**body, "prompt": "it", "logprobs": 3}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "it"}], "logprobs": True}
        body["top_logprobs"] = 5
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    choices = choices_in(found.text, streams)
    assert choices[-1]["finish_reason"] == ("length" if expected == answer else "stop")
    spelled, written, count = b"", "", 0
    for choice in choices:
        message = choice.get("delta", choice.get("message", choice))
        written += message.get("content", message.get("text", ""))
        logprobs = choice["logprobs"] or {"content": []}
        if model == "text":
            spelled += b"".join(map(bytes, logprobs["bytes"]))
            found_ids = logprobs["ids"]
        else:
            spelled += b"".join(bytes(token["bytes"]) for token in logprobs["content"])
            found_ids = [token["id"] for token in logprobs["content"]]
            for token in logprobs["content"]:
                for other in token["top_logprobs"]:
                    assert bytes(other["bytes"]) == tokenizers[model].token_bytes(other["id"])
        assert found_ids == ids[count : count + len(found_ids)]
        count += len(found_ids)
        # A token is not shown before its characters are.
        assert written.encode().startswith(spelled[: len(written.encode())])
        assert len(spelled) <= len(written.encode())
    assert written == expected and spelled == expected.encode()
    if expected == answer:
        assert count == len(ids)


@pytest.mark.parametrize("kind", ["byte", "bpe"], indirect=True)
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_shown_of_a_character_that_the_last_token_leaves_unfinished(
    spoken, monkeypatch, count, logprobs
):
    client, tokenizers = spoken
    ids = [tokenizers["text"].encode(part).tolist() for part in ("it ", "\U0001f916")]
    assert len(ids[1]) > count
    written = ids[0] + ids[1][:count]
    say(monkeypatch, written)
    body = {"model": "text", "prompt": "it", "logprobs": logprobs, "max_tokens": len(written)}
    found = client.post("/v1/completions", json=body).json()
    choice = found["choices"][0]
    assert choice["text"] == "it " and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == len(written)
    if logprobs is not None:
        assert b"".join(map(bytes, choice["logprobs"]["bytes"])) == b"it "


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>\nHi", "Hi"),
        ("<think>\n", ""),
        ("<thin ice", "<thin ice"),
        ("<thi", "<thi"),
        ("Hi <think>\n", "Hi <think>\n"),
    ],
)
def test_a_lead_of_several_tokens_is_not_shown(answer, expected):
    tokenizer = Tokenizer(kind="byte")
    loaded = SimpleNamespace(tokenizer=tokenizer)
    fields = {"top": 0, "begun": [], "echo": [], "thinking": None, "tools": ()}
    shown = _Shown(SimpleNamespace(lead="<think>\n", loaded=loaded, **fields))
    text = SimpleNamespace(ended="length", tokens=[])
    found, spelled = "", b""
    for i, token in enumerate(tokenizer.encode(answer).tolist()):
        text.tokens.append(token)
        shown.add(Token(text, token, chr(token), None, i == len(answer) - 1))
        piece, tokens, _ = shown.taken()
        found, spelled = found + piece, spelled + b"".join(one.bytes for one in tokens)
        assert found.encode().startswith(spelled)
    assert found == expected and spelled == expected.encode()


def test_offsets_are_those_of_the_text_also_in_a_stream(spoken, monkeypatch):
    client, tokenizers = spoken
    answer = ANSWERS[0][0]
    ids = tokenizers["text"].encode(answer).tolist()
    body = {"model": "text", "prompt": "it", "logprobs": 0, "max_tokens": len(ids)}
    found = []
    for streams in (False, True):
        say(monkeypatch, ids)
        text = client.post("/v1/completions", json={**body, "stream": streams}).text
        each = [choice["logprobs"] for choice in choices_in(text, streams)]
        found.append([offset for one in each for offset in one["text_offset"]])
    assert found[0] == found[1]
    bytes_before = np.cumsum([0, *(len(tokenizers["text"].token_bytes(i)) for i in ids)])[:-1]
    whole = answer.encode()
    expected = [len(whole[:n].decode("utf-8", "ignore")) for n in bytes_before]
    assert found[0] == expected


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_has_the_likelihoods_of_the_prompt(client, models, count, streams):
    model, tokenizer = smallmind.load(models[0])
    prompts = [tokenizer.encode(text).tolist() for text in ("The quick fox", "A dog", "Q")]
    body = {"max_tokens": count, "logprobs": 2, "echo": True, "prompt": prompts, "n": 2}
    answer = asking(client, PROMPT, **body, stream=streams)
    assert answer.status_code == 200, answer.text
    plain = asking(client, PROMPT, **{**body, "echo": False}).json()["choices"]
    for i in range(6):
        own = [each for each in all_choices(answer.text, streams) if each["index"] == i]
        ids, text = prompts[i // 2], "".join(each["text"] for each in own)
        assert text == tokenizer.decode(ids) + plain[i]["text"]
        assert own[-1]["finish_reason"] == "length"
        found = {
            name: [x for each in own for x in each["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "ids")
        }
        assert found["ids"] == ids + plain[i]["logprobs"]["ids"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        array = np.array([ids], np.int32)
        losses = model.losses(array[:, :-1], array[:, 1:])[0] if len(ids) > 1 else []
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(-np.array(losses), abs=1e-5)
        assert found["token_logprobs"][len(ids) :] == plain[i]["logprobs"]["token_logprobs"]
        for top in found["top_logprobs"][1:]:
            assert len(top) == 2
        places = zip(found["tokens"], found["text_offset"], strict=True)
        assert all(text[offset:].startswith(token) for token, offset in places)


def test_an_echo_without_probabilities_is_the_text(client):
    plain = asking(client, PROMPT, max_tokens=4).json()["choices"][0]["text"]
    choice = asking(client, PROMPT, max_tokens=4, echo=True).json()["choices"][0]
    assert choice["text"] == "fox" + plain and choice["logprobs"] is None


def test_the_token_that_ends_an_echo_is_counted(spoken, monkeypatch):
    """Clients take the last token for the one that was written, and leave it out."""
    client, tokenizers = spoken
    tokenizer = tokenizers["chat"]
    say(monkeypatch, tokenizer.ends)
    body = {"model": "chat", "prompt": "it", "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "it" and choice["finish_reason"] == "stop"
    count = len(tokenizer.prompt("it"))
    assert len(choice["logprobs"]["token_logprobs"]) == count + 1
    assert choice["logprobs"]["text_offset"][-1] == 2


# --- variables of the template ---

JINJA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{% endif %}"
)


def test_variables_of_a_client_and_of_the_server_reach_the_template(tmp_path):
    pytest.importorskip("jinja2")
    tokenizer = Tokenizer(kind="byte").with_special(["<|im_start|>", "<|im_end|>"])
    published = {"tokenizer_config.json": {"chat_template": JINJA}}
    path = saved_model(tmp_path / "chat.safetensors", tokenizer=tokenizer.with_published(published))
    thinks, does_not = {"enable_thinking": True}, {"enable_thinking": False}
    cases = [
        ({}, 0),
        ({"chat_template_kwargs": None}, 0),
        ({"chat_template_kwargs": {}, "enable_thinking": None}, 0),
        ({"chat_template_kwargs": thinks}, 0),
        ({"chat_template_kwargs": does_not}, 2),
        (thinks, 0),
        (does_not, 2),
        ({"think": False}, 2),
        # Names that functions on the way to the template have too.
        ({"chat_template_kwargs": dict.fromkeys(("tokenizer", "answers", "a b", "range"), 1)}, 0),
    ]
    for served in ({}, thinks, does_not):
        with talking([path], template_args=served) as (client, _):
            counts = []
            for fields, _ in cases:
                answer = asking(client, CHAT, **fields, max_tokens=1)
                assert answer.status_code == 200, answer.text
                counts.append(answer.json()["usage"]["prompt_tokens"])
        least = min(counts)
        usual = 2 if served == does_not else 0
        expected = [more if 2 < i < 8 else usual for i, (_, more) in enumerate(cases)]
        assert [count - least for count in counts] == expected


# As Qwen3's: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/tokenizer_config.json
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
OPENS = THINKS.replace("\n\n</think>\n\n{% endif %}", "\n{% endif %}")  # within a thought
# Also where nothing is thought.
ALWAYS = OPENS.replace("{% if m.r", "{% if m.role == 'assistant' or m.r")
ALWAYS = ALWAYS.replace("enable_thinking is defined and not enable_thinking", "true")
ANSWERED = [
    ("<think>\nthree fours\n</think>\n\n12", {}, "three fours", "12"),
    ("\n<think>a <b</think>12 </think>", {}, "a <b", "12 </think>"),
    ("<think>\n\n</think>\n\n12\n", {}, None, "12\n"),
    ("<think>\nnot yet", {}, "not yet", ""),
    ("<thin ice", {}, None, "<thin ice"),
    ("12 <think>no</think>", {}, None, "12 <think>no</think>"),
    ("12", {"enable_thinking": False}, None, "12"),
    ("so\n</think>\n12", {"enable_thinking": False, "model": "opens"}, "so", "12"),
    ("\n</think>\n\n12", {"model": "always"}, None, "12"),
    ("so\n</think>\n\n12", {"model": "always"}, "so", "12"),
]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A server with models whose templates have marks for thoughts."""
    pytest.importorskip("jinja2")
    folder, paths = tmp_path_factory.mktemp("thinking"), []
    templates = {"thinks": THINKS, "opens": OPENS, "always": ALWAYS}
    for name, template in templates.items():
        tokenizer = Tokenizer(kind="byte").with_special(["<|im_start|>", "<|im_end|>"])
        published = {"tokenizer_config.json": {"chat_template": template}}
        tokenizer = tokenizer.with_published(published)
        paths.append(saved_model(folder / f"{name}.safetensors", False, 256, tokenizer))
    with talking(paths) as (client, _):
        yield client, tokenizer


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("answer", "fields", "thought", "said"), ANSWERED)
def test_what_a_model_thinks_is_not_in_what_it_says(
    thinking, monkeypatch, streams, answer, fields, thought, said
):
    client, tokenizer = thinking
    ids = tokenizer.encode(answer).tolist()
    say(monkeypatch, ids)
    body = {"model": "thinks", "messages": CHAT["messages"], "max_tokens": len(ids), **fields}
    found = client.post("/v1/chat/completions", json={**body, "stream": streams})
    assert found.status_code == 200, found.text
    messages = [one.get("delta") or one.get("message") for one in choices_in(found.text, streams)]
    messages = [message for message in messages if message]
    assert "".join(message.get("content") for message in messages) == said
    thoughts = [message.get("reasoning_content") for message in messages]
    assert "".join(filter(None, thoughts)) == (thought or "")
    assert thought or thoughts == [None] * len(thoughts)


def test_an_answer_that_is_continued_within_its_thought_goes_on_thinking(thinking, monkeypatch):
    client, tokenizer = thinking
    begun, rest = (tokenizer.encode(text).tolist() for text in ("<think>\nwell", " yes</think>No"))
    say(monkeypatch, rest)
    body = {"model": "thinks", "messages": CHAT["messages"], "max_tokens": len(rest)}
    found = client.post("/v1/chat/completions", json={**body, "prefix_tokens": begun}).json()
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" yes", "No")

"""Clients of others, unchanged: their packages, and the bodies that their programs send."""

import importlib
import json
import os
import random
import subprocess
import sys

import httpx
import pytest

from smallmind import Run
from tests.exchange.weights import SMOLLM2, real
from tests.programs import PATIENCE
from tests.serve.conftest import serving

MESSAGES = [{"role": "user", "content": "The fox?"}]
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "typical_p", "xtc"]
SAMPLERS += ["top_p", "min_p", "adaptive_p", "temperature"]
# https://github.com/SillyTavern/SillyTavern: public/scripts/textgen-settings.js, with samplers off
# but for temperature and a penalty; its server adds no field (src/endpoints/backends).
SILLYTAVERN = {
    **{"prompt": "The fox", "max_new_tokens": 5, "max_tokens": 5, "temperature": 0.7, "top_p": 1},
    **{"typical_p": 1, "typical": 1, "sampler_seed": -1, "min_p": 0, "repetition_penalty": 1.1},
    **{"frequency_penalty": 0, "presence_penalty": 0, "top_k": 0, "skew": 0, "min_length": 0},
    **{"min_tokens": 0, "num_beams": 1, "length_penalty": 1, "early_stopping": False},
    **{"add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1, "dry_multiplier": 0},
    **{"dry_allowed_length": 2, "dry_base": 1.75, "dry_sequence_breakers": '["\\n", ":"]'},
    **{"dry_penalty_last_n": 0, "max_tokens_second": 0, "sampler_priority": SAMPLERS},
    **{"samplers": SAMPLERS, "stopping_strings": ["\nYou:"], "stop": ["\nYou:"]},
    **{"truncation_length": 2048, "ban_eos_token": False, "skip_special_tokens": True},
    **{"include_reasoning": True, "top_a": 0, "tfs": 1, "epsilon_cutoff": 0, "eta_cutoff": 0},
    **{"mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": ""},
    **{"banned_strings": [], "api_type": "ooba", "api_server": "http://127.0.0.1:8000/"},
    **{"xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0, "min_keep": 0},
    **{"encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0, "seed": -1},
    **{"do_sample": True, "guidance_scale": 1, "negative_prompt": "", "grammar_string": ""},
    **{"repetition_penalty_range": 0, "temperature_last": True, "logit_bias": [], "n": 1},
}
BODIES = {
    "SillyTavern": SILLYTAVERN,
    "SillyTavern, streamed": {**SILLYTAVERN, "stream": True},
    # Its chats: openai.js and src/endpoints/backends/chat-completions.js.
    "SillyTavern's chat": {
        **{"messages": MESSAGES, "temperature": 1, "max_tokens": 5, "stream": True, "top_p": 1},
        **{"presence_penalty": 0, "frequency_penalty": 0, "top_k": 0, "stop": [], "logit_bias": {}},
        **{"seed": -1, "n": None, "reasoning_effort": "auto", "user_name": "You", "type": "normal"},
        **{"char_name": "Fox", "group_names": [], "include_reasoning": True, "tools": []},
        **{"enable_web_search": False, "request_images": False, "use_sysprompt": False},
        **{"chat_completion_source": "custom", "custom_prompt_post_processing": ""},
    },
    # https://github.com/open-webui/open-webui: backend/open_webui/utils/payload.py
    "open-webui": {
        **{"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
        **{"temperature": 0.8, "top_p": 0.9, "max_tokens": 5, "frequency_penalty": 0.0, "seed": 1},
        **{
            "presence_penalty": 0.0,
            "min_p": 0.0,
            "top_k": 40,
            "repeat_penalty": 1.1,
            "mirostat": 0,
        },
        **{"stop": ["x"], "tfs_z": 1, "repeat_last_n": 64, "num_ctx": 2048, "num_batch": 512},
        **{"num_keep": 0, "use_mmap": True, "use_mlock": True, "num_thread": 2, "num_gpu": 0},
        **{"think": None, "keep_alive": "5m", "chat_id": "a", "session_id": "b", "id": "c"},
        **{"features": {}, "metadata": {}, "tool_ids": [], "files": [], "background_tasks": {}},
    },
    "open-webui's titles": {
        **{"messages": MESSAGES, "stream": False, "max_completion_tokens": 1000},
        **{"metadata": {"task": "title_generation"}, "seed": 1},
    },
    # https://github.com/continuedev/continue: core/llm/llms/OpenAI.ts
    "Continue": {
        **{"messages": MESSAGES, "max_tokens": 2048, "temperature": 0.5, "stream": True},
        **{"stop": ["<|im_end|>"], "parallel_tool_calls": False},
    },
    "Continue's completions": {
        **{"prompt": "def f", "max_tokens": 5, "temperature": 0.01, "stream": True},
        **{"stop": ["\n\n"], "top_p": None, "suffix": "", "frequency_penalty": None},
    },
    # https://lmstudio.ai/docs/developer/openai-compat
    "LM Studio": {
        **{"messages": MESSAGES, "temperature": 0.7, "max_tokens": -1, "stream": True, "ttl": 300},
        **{"top_k": 40, "repeat_penalty": 1.1, "min_p": 0.05, "tools": [], "draft_model": "x"},
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_clients_are_answered(address, name):
    body = BODIES[name]
    path = "chat/completions" if "messages" in body else "completions"
    model = "chat" if "messages" in body else "text"
    asked = {"model": model, **body}
    answer = httpx.post(f"{address}/v1/{path}", json=asked, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        *parts, end = [x.removeprefix("data: ") for x in answer.text.split("\n\n") if x]
        assert end == "[DONE]" and any(json.loads(part)["choices"] for part in parts)
    else:
        assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    "changed",
    [{"num_beams": 4}, {"top_a": 0.2}, {"mirostat_mode": 2}, {"samplers": ["temperature"]}],
)
def test_what_would_change_the_answer_is_refused_by_name(address, changed):
    (name,) = changed
    body = {"model": "text", **SILLYTAVERN, **changed}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.interop
def test_openai_gives_up_in_time_and_tries_again(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        asked = {"model": "chat", "messages": MESSAGES, "max_tokens": 60}
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1e-4, max_retries=1).chat.completions.create(**asked)
        assert client.chat.completions.create(**asked).usage.completion_tokens > 0


@pytest.mark.interop
def test_openais_loop_of_tools_runs_with_a_model_that_has_learned_one(tmp_path):
    openai = pytest.importorskip("openai")
    pytest.importorskip("jinja2")
    random.seed(1)
    names = [
        "Rome",
        "Paris",
        "Oslo",
        "Lima",
        "Cairo",
        "Berlin",
        "Tokyo",
        "Madrid",
        "Vienna",
        "Quito",
        "Delhi",
        "Dublin",
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    lines = []
    for number in range(300):
        city, degrees, id = random.choice(names), random.randint(1, 39), f"call_{number}"
        call = {"name": "weather", "arguments": json.dumps({"city": city})}
        messages = [
            {"role": "user", "content": f"How warm is it in {city}?"},
            {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": id, "content": f"{degrees}"},
            {"role": "assistant", "content": f"It is {degrees} degrees in {city}."},
        ]
        lines.append(json.dumps({"messages": messages, "tools": tools}) + "\n")
    (tmp_path / "weather.jsonl").write_text("".join(lines))
    shape = {"n_layer": 2, "n_embd": 96, "n_head": 4, "block_size": 320, "batch_size": 8}
    path = tmp_path / "weather"
    run = Run.create(
        text=tmp_path / "weather.jsonl",
        out=path,
        chat_template="hermes",
        tokenizer="bpe",
        steps=400,
        **shape,
    )
    run.train(progress=False)
    asked = {"model": "weather", "tools": tools, "temperature": 0}
    with (
        serving([path]) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        for city in names[:6]:
            messages = [{"role": "user", "content": f"How warm is it in {city}?"}]
            answer = client.chat.completions.create(messages=messages, **asked).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            assert call.function.name == "weather"
            assert json.loads(call.function.arguments) == {"city": city}
            result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
            messages += [answer.message, result]
            answer = client.chat.completions.create(messages=messages, **asked).choices[0]
            assert answer.message.content == f"It is 21 degrees in {city}."


# Its own code warns, and so does that of llm.
WARNS = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@WARNS
@pytest.mark.interop
def test_litellm_works_unchanged(address, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it asks a server
    litellm = pytest.importorskip("litellm")
    fields = {"api_base": f"{address}/v1", "api_key": "none", "max_tokens": 9, "seed": 1}
    asked = {"model": "openai/chat", "messages": MESSAGES, **fields}
    whole = litellm.completion(**asked).choices[0].message.content
    parts = [part.choices[0].delta.content for part in litellm.completion(**asked, stream=True)]
    assert whole == "".join(filter(None, parts))
    model = "text-completion-openai/text"
    found = litellm.text_completion(model=model, prompt="The fox", **fields)
    assert found.choices[0].text


@pytest.mark.interop
def test_langchain_works_unchanged(address):
    langchain = pytest.importorskip("langchain_openai")
    fields = {"base_url": f"{address}/v1", "api_key": "none", "max_tokens": 9, "seed": 1}
    chat = langchain.ChatOpenAI(model="chat", **fields)
    whole = chat.invoke("The fox?").content
    assert "".join(part.content for part in chat.stream("The fox?")) == whole
    assert [answer.content for answer in chat.batch(["The fox?"] * 3)] == 3 * [whole]
    assert langchain.OpenAI(model="text", **fields).invoke("The fox")


@pytest.mark.interop
def test_instructor_works_in_its_plain_mode():
    """With a model that has all characters of its prompt."""
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    legs = importlib.import_module("pydantic").create_model("Legs", cat=int, dog=int)
    with (
        serving([real(SMOLLM2)]) as (address, _),
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        plain = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
        question = {"role": "user", "content": "How many legs have a cat and a dog?"}
        asked = {"messages": [question], "max_retries": 1, "max_tokens": 99, "temperature": 0}
        model = client.models.list().data[0].id
        with pytest.raises(Exception, match="max_tokens length limit"):  # it answers, at length
            plain.chat.completions.create(model=model, response_model=legs, **asked)
        pytest.importorskip("llguidance")
        formed = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        found = formed.chat.completions.create(model=model, response_model=legs, **asked)
        assert isinstance(found.cat, int) and isinstance(found.dog, int)


@pytest.mark.interop
def test_the_program_llm_works_unchanged(address, tmp_path):
    pytest.importorskip("llm")
    said = f'- model_id: mine\n  model_name: chat\n  api_base: "{address}/v1"\n'
    (tmp_path / "extra-openai-models.yaml").write_text(said, encoding="utf-8")
    words = [sys.executable, "-m", "llm", "-m", "mine", "-o", "seed", "1", "-o", "max_tokens", "9"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    found = [
        subprocess.run(
            [*words, *more, "--key", "none", "The fox?"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for more in ([], ["--no-stream"])
    ]
    assert found[0] == found[1] and found[0].strip()

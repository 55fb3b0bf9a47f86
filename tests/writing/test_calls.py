"""Calls of tools in what a model writes, however it comes in pieces."""

import json

import pytest

from smallmind.text.tools import Call
from smallmind.writing.calls import CallDivider

ROME = {"name": "weather", "arguments": {"city": "Rome"}}
OSLO = {"name": "weather", "parameters": {"city": "Oslo"}}
CALLS = {"Rome": Call("weather", {"city": "Rome"}), "Oslo": Call("weather", {"city": "Oslo"})}
ANSWERS = {
    "Qwen": (f"<tool_call>\n{json.dumps(ROME)}\n</tool_call>", "", ["Rome"]),
    "Qwen, two after a text": (
        f"I look. \n<tool_call>{json.dumps(ROME)}</tool_call>\n<tool_call>{json.dumps(OSLO)}"
        "</tool_call>",
        "I look.",
        ["Rome", "Oslo"],
    ),
    "SmolLM": (f"<tool_call>[{json.dumps(ROME)}, {json.dumps(OSLO)}]</tool_call>", "", [*CALLS]),
    "Llama": (f"{json.dumps(OSLO)}", "", ["Oslo"]),
    "Llama, marked": (f"<|python_tag|>{json.dumps(OSLO)}; {json.dumps(ROME)}", "", [*CALLS][::-1]),
    "arguments as text": (
        f"<tool_call>{json.dumps(ROME | {'arguments': json.dumps(ROME['arguments'])})}</tool_call>",
        "",
        ["Rome"],
    ),
    "cut before its mark": (f"<tool_call>{json.dumps(ROME)}", "", ["Rome"]),
    "cut in the middle": ('<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    "not JSON": ("<tool_call>weather</tool_call> x", "<tool_call>weather</tool_call> x", []),
    "JSON that is no call": ('{"city": "Rome"}', '{"city": "Rome"}', []),
    "an object of another name": ('{"name": "Ann"}', '{"name": "Ann"}', []),
    "a text": ("It is 3 < 4 \n <tool> {}", "It is 3 < 4 \n <tool> {}", []),
    "nothing": ("", "", []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_divided_from_what_is_said(name, size):
    answer, said, called = ANSWERS[name]
    divider, texts, calls = CallDivider({"weather"}), [], []
    for start in [*range(0, len(answer), size), len(answer)]:
        text, found = divider.add(answer[start : start + size], start == len(answer))
        texts.append(text)
        calls += found
    assert "".join(texts) == said and calls == [CALLS[one] for one in called]
    assert divider.count == len(called)


def test_a_text_is_handed_out_as_it_comes():
    divider = CallDivider({"weather"})
    pieces = [divider.add(piece)[0] for piece in ("It ", "is <to", "ol> so")]
    assert pieces == ["It", " is", " <tool> so"]

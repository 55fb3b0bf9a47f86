"""Calls of tools in what a model writes, however it comes in pieces."""

import json

import pytest

from smallmind.text.tools import FORMS, Call
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
    divider, texts, calls = CallDivider({"weather": None}), [], []
    for start in [*range(0, len(answer), size), len(answer)]:
        text, found = divider.add(answer[start : start + size], start == len(answer))
        texts.append(text)
        calls += found
    assert "".join(texts) == said and calls == [CALLS[one] for one in called]
    assert divider.count == len(called)


def test_a_text_is_handed_out_as_it_comes():
    divider = CallDivider({"weather": None})
    pieces = [divider.add(piece)[0] for piece in ("It ", "is <to", "ol> so")]
    assert pieces == ["It", " is", " <tool> so"]


# How models write a call of w with n=3 and city="7\n", and then one of v without arguments.
WRITTEN = {
    "elements": (
        "<tool_call>\n<function=w>\n<parameter=n>\n3\n</parameter>\n<parameter=city>\n7\n\n</parameter>"
        "\n</function>\n</tool_call>\n<tool_call>\n<function=v>\n</function>\n</tool_call>"
    ),
    "pairs": (
        "<tool_call>w\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>city</arg_key>"
        "<arg_value>7\n</arg_value>\n</tool_call><tool_call>v</tool_call>"
    ),
    "a list between marks": (
        '<tool_calls>[{"name": "w", "arguments": {"n": 3, "city": "7\\n"}}, '
        '{"name": "v", "arguments": {}}]</tool_calls>'
    ),
    "other names in objects": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "w", "parameters": {"n": 3, "city": '
        '"7\\n"}}, {"tool_call_id": "1", "tool_name": "v", "parameters": {}}]<|END_ACTION|>'
    ),
    "a list to the end": (
        '[TOOL_CALLS] [{"name": "w", "arguments": {"n": 3, "city": "7\\n"}, "id": "a"}, '
        '{"name": "v", "arguments": {}, "id": "b"}]'
    ),
    "a name before each": ('[TOOL_CALLS]w[ARGS]{"n": 3, "city": "7\\n"}[TOOL_CALLS]v[ARGS]{}'),
    "Python": "<|tool_call_start|>[w(n=3, city='7\\n'), v()]<|tool_call_end|>",
    "lines of Python": (
        '<|tool_call_start|>\n```python\nw(n=3,city="7\\n")\nv()\n```\n<|tool_call_end|>\n'
    ),
    "bare names": (
        '<|tool_call>call:w{n:3,city:<|"|>7\n<|"|>}<tool_call|><|tool_call>call:v{}<tool_call|>'
    ),
    "fenced objects": (
        "<|tool calls begin|><|tool call begin|>function<|tool sep|>w\n```json\n"
        '{"n":_3,"city":_"7\\n"}\n```<|tool call end|>\n<|tool call begin|>function<|tool sep|>v\n'
        "```json\n{}\n```<|tool call end|><|tool calls end|>"
    )
    .translate({ord("|"): 0xFF5C, ord(" "): 0x2581})
    .replace("_", " "),
    "an object in an element": (
        '<function=w>{"n": 3, "city": "7\\n"}</function><function=v>{}</function>'
    ),
}
SCHEMAS = {
    "w": {"properties": {"n": {"type": "integer"}, "city": {"type": "string"}}, "type": "object"},
    "v": None,
}


def divided(answer, size, form, tools):
    divider, texts, calls = CallDivider(tools, form), [], []
    for start in [*range(0, len(answer), size), len(answer)]:
        text, found = divider.add(answer[start : start + size], start == len(answer))
        texts.append(text)
        calls += found
    return "".join(texts), calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_the_forms_of_other_models(name, size):
    answer = WRITTEN[name]
    # In the marks of a form an object without them is known too.
    known = [form for form in FORMS if divided(answer, 1000, form, SCHEMAS)[1]]
    for form in known:
        calls = [Call("w", {"n": 3, "city": "7\n"}), Call("v", {})]
        assert divided(answer, size, form, SCHEMAS) == ("", calls)
        assert divided(f"I look.\n{answer}", size, form, SCHEMAS) == ("I look.", calls)
        # Half a call, or one that is damaged, is text.
        half = answer[: answer.index("7")]
        assert divided(half, size, form, SCHEMAS) == (half, [])
    assert known


def test_arguments_have_the_types_of_their_schema():
    text = "<function=f>" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>"
        for name, value in {"a": "3", "b": "True", "c": '["x", null]', "d": "x y", "e": "3"}.items()
    )
    schema = {"properties": {"a": {"type": "string"}, "e": {"type": ["string", "null"]}}}
    (call,) = FORMS[1].read(f"{text}</function>", {"f": schema})
    assert call == Call("f", {"a": "3", "b": True, "c": ["x", None], "d": "x y", "e": "3"})

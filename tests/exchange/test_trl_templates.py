"""Published templates, as TRL ships them: the same texts as transformers, and the same is learned.

Those for training mark what the assistant writes: TRL's mask is compared, but for three things that
are on purpose. Ours begins where a prompt ends; it ends with the token at which the model stops,
and leaves out a line break after that.
"""

import json
import re
from pathlib import Path

import pytest

from smallmind.checks import InputError
from smallmind.text.chat import Turn, with_tools
from smallmind.text.jinja_template import JinjaTemplate
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.calls import CallDivider

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]
FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(
    r"<\|[^|<>\s{}'\"+]+\|>|<\|\w+>|<\w+\|>|<\uff5c[^\uff5c<>\s{}]+\uff5c>|</?s>|<\|\"\|>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance)>|</?(?:think|tool_call|arg_key|arg_value)>"
)
ENDS = {
    *("<turn|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eot|>", "<|end|>", "</s>"),
    *("<|END_OF_TURN_TOKEN|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"),
}
# The files of these models name other tokens.
OTHER_ENDS = {
    "gptoss": {"<|return|>", "<|call|>"},
    "glm": {"<|user|>", "<|observation|>"},
    "gemma4": {"<turn|>", "<|tool_response>"},
    "diffusion": {"<turn|>", "<|tool_response>"},
}


def tool(name, **kinds):
    properties = {key: {"type": kind, "description": f"A {key}."} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": name, "description": f"Says the {name}.", "parameters": schema}
    return {"type": "function", "function": function}


def call(number, name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def calls(*several, text="", thought=""):
    more = json.dumps({"tool_calls": several})
    return Turn("assistant", text, thought=thought, more=more)


def result(called, text):
    about = {"name": called["function"]["name"], "tool_call_id": called["id"]}
    return Turn("tool", text, more=json.dumps(about))


TOOLS = [tool("weather", city="string", days="integer"), tool("clock", zone="string")]
ROME, ZONE = call(1, "weather", city="Rome", days=3), call(2, "clock", zone='a, "b"')
ASK, SAY = Turn("user", "Ask one?"), Turn("assistant", "Said one.")
AGAIN, MORE = Turn("user", "Ask two?"), Turn("assistant", "Said two.")
PLAIN = {
    "one": [ASK, SAY],
    "several": [ASK, SAY, AGAIN, MORE],
    "a thought": [ASK, SAY._replace(thought="Hm."), AGAIN, MORE._replace(thought="Hm hm.")],
    "a system": [Turn("system", "Be brief."), ASK, SAY, AGAIN, MORE],
}
CALLING = {
    "no call": [ASK, SAY],
    "one result": [ASK, calls(ROME), result(ROME, "21"), SAY],
    "two results": [ASK, calls(ROME, ZONE), result(ROME, "21"), result(ZONE, "12:30"), SAY],
    "two steps": [ASK, calls(ROME), result(ROME, "21"), calls(ZONE), result(ZONE, "9"), SAY, AGAIN],
    "a thought": [ASK, calls(ROME, thought="Hm."), result(ROME, "21"), SAY],
}


def message(turn):
    found = {"role": turn.role, "content": turn.text, **json.loads(turn.more or "{}")}
    return {**found, "reasoning_content": turn.thought} if turn.thought else found


def studied(name):
    """-> the template, and the variables for its special tokens."""
    text = (FOLDER / f"{name}.jinja").read_text()
    names = dict.fromkeys([*SPECIAL.findall(text), "<s>", "</s>"])
    ends = next((more for part, more in OTHER_ENDS.items() if part in name), ENDS & {*names})
    names |= dict.fromkeys(sorted(ends))
    last = min(ends - {"</s>"} or ends)
    tokenizer = Tokenizer(kind="byte").with_special([*names])
    roles = {"bos_token": "<s>", "eos_token": last}
    numbers = [tokenizer.special[end] for end in ends]
    settings = {"tokenizer_config.json": {"chat_template": text, **roles}}
    settings["generation_config.json"] = {"eos_token_id": numbers}
    return JinjaTemplate.of(text, tokenizer.with_published(settings)), roles


def conversations(template):
    yield from ((turns, None) for turns in PLAIN.values())
    yield from ((turns, TOOLS) for turns in CALLING.values() if template.tools)


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_what_is_learned_are_those_of_trl(name):
    template, roles = studied(name)
    marked = "generation" in template.text and "_training" in name
    for turns, tools in conversations(template):
        messages = [message(turn) for turn in turns]
        if template.parts:
            for one in messages:
                one["content"] = [{"type": "text", "text": one["content"]}]
        settings = {"chat_template": template.text, "return_assistant_tokens_mask": marked, **roles}
        try:
            (text,), places = render_jinja_template([messages], tools, **settings)
        except Exception:  # a template refuses by raising anything
            with pytest.raises(InputError):
                template.render(with_tools(turns, tools or []))
            continue
        found = template.render(with_tools(turns, tools or []))
        assert found.text == text or found.text.startswith(text)  # with an end that it leaves out
        count = turns.index(ASK) + 1
        asked = template.render(with_tools(turns[:count], tools or []), answers=True).text
        (prompt,), _ = render_jinja_template(
            [messages[:count]], tools, **settings, add_generation_prompt=True
        )
        assert asked == prompt
        learned = "".join(found.text[begin:end] for begin, end in found.learned)
        for turn in turns:
            if turn.role == "assistant" and not turn.more:
                assert turn.text in learned
            for one in json.loads(turn.more or "{}").get("tool_calls", []):
                assert one["function"]["name"] in learned or "gptoss" in name
        assert not any(turn.text in learned for turn in turns if turn.role in ("user", "system"))
        if marked:
            theirs = {i for begin, end in places[0] for i in range(begin, end)}
            ours = {i for begin, end in found.learned for i in range(begin, end)}
            more = runs(text, theirs - ours)
            # The end of a prompt, and ends at which the model does not stop.
            others = (roles["eos_token"], "<|end|>")
            assert all(x.strip() in template.prompting or x.strip() in others for x in more), more
            fewer = runs(found.text, ours - theirs)
            assert all(not x.strip() or x in (template.end, template.call_end) for x in fewer), (
                fewer
            )


def runs(text, places):
    found = []
    for i in sorted(places):
        if found and found[-1][1] == i:
            found[-1][1] = i + 1
        else:
            found.append([i, i + 1])
    return [text[begin:end] for begin, end in found]


@pytest.mark.parametrize("name", [name for name in NAMES if "_training" not in name])
def test_calls_that_a_template_writes_are_read(name):
    template, _ = studied(name)
    if not (template.calls or template.calling):
        pytest.skip("it writes no calls, or in a form that is not read")
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}
    for several in ([ROME], [ROME, ZONE]):
        try:
            found = template.render(with_tools([ASK, calls(*several)], TOOLS))
        except InputError as error:  # some write one call at most
            assert len(several) > 1 and "single" in str(error)
            continue
        ((begin, end),) = found.learned
        text = found.text[begin:end].removeprefix(template.lead).removesuffix(template.call_end)
        for size in (1, 3, len(text)):
            divider, said, read = CallDivider(schemas, template.calls), "", []
            for start in [*range(0, len(text), size), len(text)]:
                piece, more = divider.add(text[start : start + size], start == len(text))
                said, read = said + piece, read + more
            wanted = [(one["function"]["name"], one["function"]["arguments"]) for one in several]
            assert (said.strip(), [tuple(one) for one in read]) == ("", wanted)

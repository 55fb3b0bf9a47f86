"""Chat templates of other programs, in the language of Jinja.

A template is a program of a stranger, so it is rendered by jinja2's sandbox, with the environment
of transformers. The sandbox keeps it away from files and from Python's internals, but it stops
neither endless loops nor endless texts, and nothing can stop a loop in a thread of this process. So
templates run in another process, which limits its memory and its computing time for each
conversation. All templates of this process share that one; it ends with the last of them, and with
this process, even if this one is killed.

A conversation is rendered once, as it is. Where each turn is in the rendering says what is an
answer, and which names of special tokens are only text that somebody wrote; see
`jinja_process.Traced`.
"""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from difflib import SequenceMatcher
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from smallmind.checks import InputError
from smallmind.text import jinja_process
from smallmind.text.chat import (
    ASSISTANT,
    TEMPLATE_ARGS,
    TOKENIZER_CONFIG,
    TOOL,
    USER,
    ChatFormat,
    Conversation,
    Rendered,
    Turn,
    is_learned,
    with_tools,
)
from smallmind.text.jinja_process import MAX_CHARACTERS, MAX_MEMORY
from smallmind.text.tokenizer import Tokenizer, special_names
from smallmind.text.tools import FORMS, Call, CallForm, calling_in, form_in, spelled

MAX_SECONDS = 5.0  # of computing for one conversation
MAX_START_SECONDS = 30.0  # for the start of the process
MAX_LINE_CHARACTERS = 8 * MAX_CHARACTERS
PARTS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\d+|\D")
TOO_MUCH = "it takes more than"
# Around thoughts, of Qwen3, SmolLM3, DeepSeek-R1 and others; of Gemma 4.
THINK = (("<think>", "</think>"), ("<|channel>thought", "<channel|>"))
TRIED: dict[str, Any] = {  # a tool
    "name": "weather",
    "description": "Says how it is.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TRIED_ARGUMENTS = {"city": "Rome"}
THOUGHTS = "reasoning_content", "thinking"  # the fields of messages that transformers fills


class WrittenText(NamedTuple):
    """The text that a template has written, and where turns say something in it."""

    text: str
    said: tuple[tuple[int, int, int], ...] = ()  # the turn or -1, where it begins and ends
    error: str = ""  # why the template has written nothing

    def turns(self) -> dict[int, tuple[str, int, int, str]]:
        """turn -> the template's text before it, where it begins and ends, the text after it.

        The last place counts if a turn is written more than once.
        """
        found = {}
        bounds = [(-2, 0, 0), *self.said, (-2, len(self.text), len(self.text))]
        first = 1
        for i in range(1, len(bounds) - 1):
            turn, _, end = bounds[i]
            first = first if bounds[i - 1][0] == turn else i
            before, begin = bounds[first - 1][2], bounds[first][1]
            if bounds[i + 1][0] != turn:
                after = self.text[end : bounds[i + 1][1]]
                found[turn] = (self.text[before:begin], begin, end, after)
        return found


@dataclass(frozen=True, eq=False)
class JinjaTemplate(ChatFormat):
    """A template as its text, and what is known of it from how it writes short conversations."""

    text: str
    special: tuple[str, ...]
    roles: Mapping[str, str]  # what the template calls tokens by: bos_token ...
    ends: tuple[str, ...]  # at which the model stops, besides `end`
    process: "_Process" = field(repr=False)
    variables: Mapping[str, Any] = field(default_factory=dict)  # that are given besides turns
    now: datetime | None = None  # the time for templates that write it; None: the current one
    parts: bool = False  # it takes a text as a list of parts
    spells: bool = False  # it takes the arguments of a call as JSON
    null: bool = False  # it takes a turn of calls alone without a text
    writes: bool = True  # it writes calls; else they are in the text of their turns
    prompting: str = ""  # what a prompt has between the question and the answer
    following: str = ""  # what is written after every answer
    end: str = ""
    lead: str = ""
    thinks: bool = False
    thinking: tuple[str, str] | None = None  # what the model writes before and after a thought
    tools: bool = False
    calling: tuple[str, str, str] | None = None
    calls: CallForm | None = None
    call_end: str = ""  # that of a turn of calls
    name = "of the model"

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Self:
        """Studies the template of a tokenizer. InputError if it does not show where answers end."""
        if importlib.util.find_spec("jinja2") is None:
            raise InputError('the chat template needs jinja2: pip install "smallmind[chat]"')
        said = tokenizer.published.get(TOKENIZER_CONFIG, {})
        roles = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = said.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                roles[name] = content
        ends = tuple(name for name, i in tokenizer.special.items() if i in tokenizer.ends)
        made = cls(text, tuple(tokenizer.special), roles, ends, _shared_process())
        return replace(made, variables=dict(said.get(TEMPLATE_ARGS) or {}))._studied()

    @property
    def jinja(self) -> str:
        return self.text

    @property
    def marks(self) -> tuple[str, str] | None:  # type: ignore[override]
        before, after = map(str.strip, self.thinking or ("", ""))
        if before and after:
            return before, after
        known = (pair for pair in THINK if all(mark in self.text for mark in pair))
        return next(known, None)

    def at(self, now: datetime | None) -> Self:
        return replace(self, now=now)

    def render(
        self,
        conversation: Conversation,
        answers: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        (written,) = self._write([conversation], answers, variables)
        return self._rendered(conversation, written, answers)

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        written = self._write(conversations, False, {})
        return list(map(self._rendered, conversations, written))

    def _rendered(
        self, conversation: Conversation, written: WrittenText, answers: bool = False
    ) -> Rendered:
        if written.error:
            problem = f"the chat template refuses the conversation: {written.error}"
            if where := getattr(conversation, "where", ""):
                problem = f"{where}: {problem}; correct or remove it"
            raise InputError(problem)
        text, learned, cuts, places = written.text, [], [], written.turns()
        for number, turn in enumerate(conversation):
            if turn.role != ASSISTANT or number not in places:
                continue
            before, begin, end, after = places[number]
            begin -= len(before) - _prompt_in(before, self.prompting)
            is_last = number + 1 == len(conversation)
            if is_last and is_learned(turn) and not answers and not self._stops(after, turn):
                # In some templates an answer ends with the token that begins the next turn.
                end_of_turn = self.call_end if turn.more else self.end
                text, after = text + end_of_turn, after + end_of_turn
            ended, cut = self._ends(after, turn)
            if is_learned(turn):
                # Some templates end an earlier answer with a token at which a model does not stop.
                stops = is_last or after[:ended].endswith((self.end, *self.ends))
                learned.append((begin, end + ended if stops else end))
            follows = conversation[number + 1].role if not is_last else ASSISTANT
            if cut is not None and follows not in (ASSISTANT, TOOL):  # a result is of its call
                cuts.append(end + cut)
        said = tuple((begin, end) for _, begin, end in written.said)
        return Rendered(text, tuple(learned), tuple(cuts), said)

    def _ends(self, after: str, turn: Turn) -> tuple[int, int | None]:
        """The text after an answer -> where the answer's last token ends and the next turn begins.

        The second is None if the token that ends an answer is one of the next turn.
        """
        tokens = self._stops(after, turn)
        if is_usual := bool(self.following) and after.startswith(self.following):
            ended = self._tokens(self.following)[-1].end()
        elif turn.more and self.calls and not tokens and self.calls.end in after:
            ended = after.index(self.calls.end) + len(self.calls.end)
        else:
            ended = min((found.end() for found in tokens), default=0)
        begins = {found.start() for found in tokens}
        places = [len(self.following)] * is_usual + [ended]
        return ended, next((p for p in places if p in begins), ended if is_usual else None)

    def _stops(self, after: str, turn: Turn) -> list["re.Match[str]"]:
        """Returns the special tokens after an answer, from the one on that ends it.

        Calls may have tokens of their own around them.
        """
        tokens = self._tokens(after)
        if turn.more:
            ends = (
                i for i, x in enumerate(tokens) if x[0] in (self.end, self.call_end, *self.ends)
            )
            return tokens[next(ends, len(tokens)) :]
        return tokens

    def _tokens(self, text: str) -> list["re.Match[str]"]:
        """Returns the special tokens in what the template has written."""
        return list(special_names(self.special).finditer(text)) if self.special else []

    def _write(
        self, conversations: Sequence[Conversation], answers: bool, variables: Mapping[str, Any]
    ) -> list[WrittenText]:
        """Renders conversations, once more with thoughts divided from texts if one is refused."""
        request = {
            "template": self.text,
            "thoughts": [name for name in THOUGHTS if re.search(rf"\b{name}\b", self.text)],
            "parts": self.parts,
            "spells": self.spells,
            "null": self.null,
            "now": self.now.isoformat() if self.now else None,
            "variables": {
                **self.roles,
                "add_generation_prompt": answers,
                **self.variables,
                **variables,
            },
        }
        if not self.writes:
            conversations = [[*map(with_calls, turns)] for turns in conversations]
        written = self.process.render(request, conversations)
        for i, turns in enumerate(conversations):
            if written[i].error and (divided := [*map(self._divided, turns)]) != [*turns]:
                (again,) = self.process.render(request, [divided])
                written[i] = written[i] if again.error else again
        return written

    def _divided(self, turn: Turn) -> Turn:
        """A turn as the model wrote it -> its text and its thought, without what is around them."""
        if turn.role != ASSISTANT or turn.thought:
            return turn
        if self.thinking and turn.text.startswith(self.thinking[0]):
            begun = turn.text.removeprefix(self.thinking[0])
            thought, mark, text = begun.partition(self.thinking[1])
            if mark:
                return turn._replace(text=text, thought=thought)
        return turn._replace(text=turn.text.removeprefix(self.lead))

    def _studied(self) -> Self:
        """Renders short conversations to see how the template writes answers. Errors as `of`."""
        asked, answer = Turn(USER, "a"), Turn(ASSISTANT, "b")
        turns = [asked, answer, asked, answer]
        problems = []
        for parts in (False, True):
            form = replace(self, parts=parts)
            (prompt,) = form._write([[asked]], True, {})
            if prompt.error.startswith(TOO_MUCH):
                raise InputError(f"the chat template cannot be rendered: {prompt.error}")
            single, several = form._write([turns[:2], turns], False, {})
            written = prompt, single, several
            shown = [{turn for turn, *_ in one.said} for one in written]
            if shown == [{0}, {0, 1}, {0, 1, 2, 3}]:
                return form._knowing(prompt, single, several)
            errors = [f"cannot be rendered: {one.error}" for one in written if one.error]
            problems += errors[:1] or ["does not write what is said"]
        raise InputError(f"the chat template {problems[0]}")

    def _knowing(self, prompt: WrittenText, single: WrittenText, several: WrittenText) -> Self:
        """Returns the template with what these tell about it: two conversations, one longer."""
        middle, last = (several.turns()[turn][-1] for turn in (1, 3))
        following = self._common(middle, last)
        tokens = self._tokens(following) or self._tokens(last or middle)[:1]
        if not tokens:
            raise InputError(
                "the chat template has no special token at the end of an answer, so nothing says "
                "where one ends"
            )
        end = next((found for found in tokens if found[0] in self.ends), tokens[-1])
        # Some templates begin the next turn, whatever it is.
        following = following[: next((x.start() for x in tokens if x.start() >= end.end()), None)]
        prompting = prompt.turns()[0][-1]
        before = single.turns()[1][0]
        lead = before[_prompt_in(before, prompting) :]
        known = replace(self, prompting=prompting, following=following, end=end[0], lead=lead)
        known = replace(known, call_end=end[0])
        turns = Turn(USER, "a"), Turn(ASSISTANT, "b", thought="c")
        (written,) = self._write([turns], False, {})
        said = {written.text[begin:end]: (begin, end) for turn, begin, end in written.said if turn}
        if list(said) != ["c", "b"]:
            return replace(known, thinks="c" in "".join(said))._knowing_tools()
        before = written.turns()[1][0]
        marks = before[_prompt_in(before, prompting) :], written.text[said["c"][1] : said["b"][0]]
        return replace(known, thinks=True, thinking=marks)._knowing_tools()

    def _knowing_tools(self) -> Self:
        """Returns the template with whether it writes tools, calls and what they return."""
        if "tool" not in self.text:
            return self
        call = Call(TRIED["name"], TRIED_ARGUMENTS).as_message("call00001", False)
        calls = json.dumps({"tool_calls": [call]})
        about = json.dumps({"name": TRIED["name"], "tool_call_id": "call00001"})
        turns = Turn(USER, "a"), Turn(ASSISTANT, "", more=calls), Turn(TOOL, "c", more=about)
        asked = with_tools(
            [*turns, Turn(ASSISTANT, "d")], [{"type": "function", "function": TRIED}]
        )
        wanted = [(-1, TRIED["description"]), (1, TRIED["name"]), (1, "Rome"), (2, "c"), (3, "d")]
        takes: list[dict[str, Any]]
        takes = [{"spells": x, "null": y} for y in (False, True) for x in (False, True)]
        takes += [{"writes": False}] * (FORMS[0].begin in self.text)
        for each in takes:
            form = replace(self, **each)
            (written,) = form._write([asked], False, {})
            said = dict.fromkeys(range(-1, 4), "")
            for turn, begin, end in written.said:
                said[turn] += written.text[begin:end]
            if all(word in said[turn] for turn, word in wanted):
                before, begin, end, after = written.turns()[1]
                called = before[_prompt_in(before, self.prompting) :] + written.text[begin:end]
                stops = form._stops(after, asked[1])
                called += after[: stops[0].start()] if stops else after
                known = replace(form, tools=True, calling=calling_in(called))
                known = replace(known, call_end=stops[0][0] if stops else self.end)
                return replace(known, calls=form_in(called, Call(TRIED["name"], TRIED_ARGUMENTS)))
        return self

    def _common(self, first: str, second: str) -> str:
        """Returns the common beginning of two texts; "" if there is no special token in it."""
        if not self.special:
            return ""
        names, common = special_names(self.special), ""
        for one, other in zip(names.split(first), names.split(second), strict=False):
            if one != other and not {one, other} & {*self.special}:
                shorter, longer = sorted((one, other), key=len)
                common += shorter if longer.startswith(shorter) else ""
            if one != other:
                break
            common += one
        return common if self._tokens(common) else ""


def with_calls(turn: Turn) -> Turn:
    """Returns a turn with its calls in its text."""
    fields = json.loads(turn.more or "{}")
    if not (calls := fields.pop("tool_calls", [])):
        return turn
    text = "\n".join([*filter(None, [turn.text]), *map(spelled, calls)])
    return turn._replace(text=text, more=json.dumps(fields, ensure_ascii=False) if fields else "")


@lru_cache
def _prompt_in(before: str, prompting: str) -> int:
    """The text before an answer -> where that part of it ends which a prompt has too.

    Numbers may differ, as some templates count turns. If less than a third of the prompt is there,
    the answer begins with its own text.
    """
    # Tags are not divided: a thought may begin as a call does.
    one, other = (PARTS.findall(text) for text in (prompting, before))
    alike = [["0" if part.isdigit() else part for part in parts] for parts in (one, other)]
    match = SequenceMatcher(None, alike[0], alike[1], autojunk=False).find_longest_match()
    enough = 3 * match.size >= len(one)
    return sum(map(len, other[: match.b + match.size])) if enough else len(before)


class _Process:
    """A process that renders templates. It starts when it is needed, and again if one killed it."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._end = lambda: None
        self._lock = threading.Lock()
        self._owner = 0  # the process that started it: a fork of that one has its pipes too

    def render(
        self, request: Mapping[str, Any], conversations: Sequence[Conversation]
    ) -> list[WrittenText]:
        """Renders conversations; `request` has the other arguments of `jinja_process.rendered`."""
        turns = [[(t.role, t.text, t.thought, t.more) for t in turns] for turns in conversations]
        whole = {**request, "seconds": MAX_SECONDS, "conversations": turns}
        with self._lock:
            return self._answers(json.dumps(whole).encode() + b"\n", len(turns))

    def _answers(self, request: bytes, count: int) -> list[WrittenText]:
        process = self._started()
        assert process.stdin and process.stdout
        # On Windows it does not limit itself.
        timer = threading.Timer(MAX_START_SECONDS + MAX_SECONDS * count, process.kill)
        timer.start()
        answers: list[WrittenText] = []
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(request)
                process.stdin.flush()
                while len(answers) < count:
                    line = process.stdout.readline(MAX_LINE_CHARACTERS)
                    if not line.endswith(b"\n"):
                        break
                    answers.append(_written(json.loads(line)))
        finally:
            timer.cancel()
            if len(answers) < count:  # else the next request would read the rest
                self._end()
        if len(answers) < count:
            most = f"{MAX_SECONDS:g} seconds of computing or {MAX_MEMORY >> 30} GB"
            answers.append(WrittenText("", error=f"{TOO_MUCH} {most} for one conversation"))
            answers += [WrittenText("", error="another one was too much")] * (count - len(answers))
        return answers

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._running and self._owner == os.getpid() and self._running.poll() is None:
            return self._running
        self._end()
        # With -P it does not import modules from the working directory or from that of the file.
        self._running = subprocess.Popen(
            [sys.executable, "-P", jinja_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._running, self._owner)
        return self._running


def _written(answer: Mapping[str, Any]) -> WrittenText:
    said = iter(answer.get("said", ()))
    places = tuple(zip(said, said, said, strict=True))
    return WrittenText(answer.get("text", ""), places, answer.get("error", ""))


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if stream:
                stream.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


_SHARED: "weakref.WeakValueDictionary[str, _Process]" = weakref.WeakValueDictionary()


def _shared_process() -> _Process:
    """Returns the process that all templates share; it ends with the last of them."""
    return _SHARED.setdefault("", _Process())

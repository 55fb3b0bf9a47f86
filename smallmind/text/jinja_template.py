"""Chat templates of other programs, in the language of Jinja.

A template is a program of a stranger, so it is rendered by jinja2's sandbox, with the environment
of transformers. The sandbox keeps it from files and from Python's own objects, but neither from
loops without an end nor from texts without a size, and nothing can stop such a loop in a thread of
this process. So templates run in a process of their own, with a limit on memory and one on the
computing time of each conversation: one for all templates of this process, that ends with the last
of them and with this process, also if it is killed.

A conversation is rendered once, as it is. What is an answer, and what is text that somebody wrote
and no special token, follows from where each turn is in the rendering; see `jinja_process.Traced`.
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
from typing import Any, NamedTuple, Self

from smallmind.checks import InputError
from smallmind.text import jinja_process
from smallmind.text.chat import (
    ASSISTANT,
    TOKENIZER_CONFIG,
    USER,
    Conversation,
    Format,
    Rendered,
    Turn,
    is_learned,
)
from smallmind.text.jinja_process import LONGEST, MEMORY
from smallmind.text.tokenizer import Tokenizer, special_names

SECONDS = 5.0  # of computing for one conversation
STARTING = 30.0  # for the start of the process
LONGEST_LINE = 8 * LONGEST
THOUGHTS = "reasoning_content", "thinking"  # the fields of messages that transformers fills


class Written(NamedTuple):
    """What a template has written, and which parts of it a turn says."""

    text: str
    said: tuple[tuple[int, int, int], ...] = ()  # the turn, -1: an unknown one, its begin and end
    error: str = ""  # why it has written nothing

    def around(self, turn: int) -> tuple[str, int, int, str] | None:
        """-> the template's text before a turn, where it begins and ends, and the text after it.

        None if the template does not write the turn. It may write it more than once: the last time.
        """
        places = [i for i, (one, *_) in enumerate(self.said) if one == turn]
        if not places:
            return None
        first = last = places[-1]
        while first and self.said[first - 1][0] == turn:
            first -= 1
        begin, end = self.said[first][1], self.said[last][2]
        before = self.said[first - 1][2] if first else 0
        after = self.said[last + 1][1] if last + 1 < len(self.said) else len(self.text)
        return self.text[before:begin], begin, end, self.text[end:after]


@dataclass(frozen=True, eq=False)
class JinjaTemplate(Format):
    """A template as its text. InputError if it cannot be rendered, or says no end of a turn."""

    text: str
    special: tuple[str, ...]
    roles: Mapping[str, str]  # what the template calls tokens by: bos_token ...
    process: "_Process" = field(repr=False)
    now: datetime | None = None  # the time for templates that write it; None: the current one
    parts: bool = False  # it takes a text as a list of parts
    prompting: str = ""  # between a question and the answer that the model begins
    following: str = ""  # after an answer, whatever is next
    end: str = ""
    lead: str = ""
    thinking: tuple[str, str] | None = None  # what the model writes before and after a thought
    name = "of the model"

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Self:
        """The template of a tokenizer, rendered to see how it writes answers."""
        if importlib.util.find_spec("jinja2") is None:
            raise InputError('the chat template needs jinja2: pip install "smallmind[chat]"')
        said = tokenizer.published.get(TOKENIZER_CONFIG, {})
        roles = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = said.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                roles[name] = content
        return cls(text, tuple(tokenizer.special), roles, _shared_process())._studied()

    @property
    def jinja(self) -> str:
        return self.text

    @property
    def thinks(self) -> bool:  # type: ignore[override]
        return any(name in self.text for name in THOUGHTS)

    def at(self, now: datetime | None) -> Self:
        return replace(self, now=now)

    def render(
        self, conversation: Conversation, answers: bool = False, **variables: Any
    ) -> Rendered:
        (written,) = self._write([conversation], answers, variables)
        return self._rendered(conversation, written)

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        written = self._write(conversations, False, {})
        return list(map(self._rendered, conversations, written))

    def _rendered(self, conversation: Conversation, written: Written) -> Rendered:
        if written.error:
            problem = f"the chat template refuses the conversation: {written.error}"
            if where := getattr(conversation, "where", ""):
                problem = f"{where}: {problem}; correct or remove it"
            raise InputError(problem)
        learned, cuts = [], []
        for number, turn in enumerate(conversation):
            found = written.around(number) if turn.role == ASSISTANT else None
            if not found:
                continue
            before, begin, end, after = found
            begin -= len(before) - _prompt_in(before, self.prompting)
            ended, cut = self._ends(after)
            if is_learned(turn):
                learned.append((begin, end + ended))
            is_last = number + 1 == len(conversation)
            if cut is not None and not is_last and conversation[number + 1].role != ASSISTANT:
                cuts.append(end + cut)
        said = tuple((begin, end) for _, begin, end in written.said)
        return Rendered(written.text, tuple(learned), tuple(cuts), said)

    def _ends(self, after: str) -> tuple[int, int | None]:
        """What follows an answer -> where its last token ends, and where the next turn begins.

        None if it is not known where, as the token that ends an answer is one of the next turn.
        """
        tokens = self._tokens(after)
        if is_usual := bool(self.following) and after.startswith(self.following):
            ended = self._tokens(self.following)[-1].end()
        else:
            ended = min((found.end() for found in tokens), default=0)
        begins = {found.start() for found in tokens}
        places = [len(self.following)] * is_usual + [ended]
        return ended, next((p for p in places if p in begins), ended if is_usual else None)

    def _tokens(self, text: str) -> list["re.Match[str]"]:
        """The special tokens in what the template has written."""
        return list(special_names(self.special).finditer(text)) if self.special else []

    def _write(
        self, conversations: Sequence[Conversation], answers: bool, variables: Mapping[str, Any]
    ) -> list[Written]:
        """What the template writes of each conversation.

        Some refuse an answer as their model has written it, with its thought: they get it divided.
        """
        given = {**self.roles, "add_generation_prompt": answers, **variables}
        request = {
            "template": self.text,
            "thoughts": [name for name in THOUGHTS if name in self.text],
            "parts": self.parts,
            "now": self.now.isoformat() if self.now else None,
            "variables": given,
        }
        written = self.process.render(request, conversations)
        for i, turns in enumerate(conversations):
            if written[i].error and (divided := [*map(self._divided, turns)]) != [*turns]:
                (again,) = self.process.render(request, [divided])
                written[i] = written[i] if again.error else again
        return written

    def _divided(self, turn: Turn) -> Turn:
        """A turn that the model has written -> its text without the lead, and its thought."""
        if turn.role != ASSISTANT or turn.thought:
            return turn
        if self.thinking and turn.text.startswith(self.thinking[0]):
            begun = turn.text.removeprefix(self.thinking[0])
            thought, mark, text = begun.partition(self.thinking[1])
            if mark:
                return turn._replace(text=text, thought=thought)
        return turn._replace(text=turn.text.removeprefix(self.lead))

    def _studied(self) -> Self:
        """The template, with what is to be known of it from how it writes short conversations."""
        asked, answer = Turn(USER, "a"), Turn(ASSISTANT, "b")
        turns = [asked, answer, asked, answer]
        problems = []
        for parts in (False, True):
            form = replace(self, parts=parts)
            (prompt,) = form._write([[asked]], True, {})
            single, several = form._write([turns[:2], turns], False, {})
            written = prompt, single, several
            shown = [{turn for turn, *_ in one.said} for one in written]
            if shown == [{0}, {0, 1}, {0, 1, 2, 3}]:
                return form._knowing(prompt, single, several)
            errors = [f"cannot be rendered: {one.error}" for one in written if one.error]
            problems += errors[:1] or ["does not write what is said"]
        raise InputError(f"the chat template {problems[0]}")

    def _knowing(self, prompt: Written, single: Written, several: Written) -> Self:
        """The template, with what follows from a prompt, a conversation, and a longer one."""
        asked, answered, middle, last = (
            written.around(turn)
            for written, turn in ((prompt, 0), (single, 1), (several, 1), (several, 3))
        )
        assert asked and answered and middle and last
        following = self._common(middle[-1], last[-1])
        ends = self._tokens(following) or self._tokens(last[-1] or middle[-1])[:1]
        if not ends:
            raise InputError(
                "the chat template has no special token at the end of an answer, so nothing says "
                "where one ends"
            )
        prompting = asked[-1]
        lead = answered[0][_prompt_in(answered[0], prompting) :]
        known = replace(self, prompting=prompting, following=following, end=ends[-1][0], lead=lead)
        return replace(known, thinking=known._thinking()) if self.thinks else known

    def _thinking(self) -> tuple[str, str] | None:
        """What the model writes before and after a thought; None if the template writes none."""
        turns = Turn(USER, "a"), Turn(ASSISTANT, "b", thought="c")
        (written,) = self._write([turns], False, {})
        found = written.around(1)
        said = [place for place in written.said if place[0] == 1]
        if not found or len(said) != 2 or written.text[slice(*said[0][1:])] != "c":
            return None
        before = found[0][_prompt_in(found[0], self.prompting) :]
        return before, written.text[said[0][2] : said[1][1]]

    def _common(self, first: str, second: str) -> str:
        """What two texts begin with, if there is a special token in it; no part of such a token."""
        if not self.special:
            return ""
        names, common = special_names(self.special), ""
        for one, other in zip(names.split(first), names.split(second), strict=False):
            if one != other:
                if not {one, other} & {*self.special}:
                    common += (
                        min(one, other, key=len)
                        if one.startswith(other) or other.startswith(one)
                        else ""
                    )
                break
            common += one
        return common if self._tokens(common) else ""


@lru_cache
def _prompt_in(before: str, prompting: str) -> int:
    """Where the part of a prompt ends that precedes an answer: at least a third of it.

    Numbers may differ, as some templates count. Without one the answer begins with its own text.
    """
    one, other = (re.findall(r"\d+|\D", text) for text in (prompting, before))
    alike = [["0" if part.isdigit() else part for part in parts] for parts in (one, other)]
    match = SequenceMatcher(None, alike[0], alike[1], autojunk=False).find_longest_match()
    enough = 3 * match.size >= len(one)
    return sum(map(len, other[: match.b + match.size])) if enough else len(before)


class _Process:
    """The process that renders; it starts when it is needed, and again after a template's fault."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._end = lambda: None
        self._lock = threading.Lock()
        self._owner = 0  # the process that has started it: a fork has pipes to it too

    def render(
        self, request: Mapping[str, Any], conversations: Sequence[Conversation]
    ) -> list[Written]:
        """What a template writes of each conversation."""
        turns = [[(t.role, t.text, t.thought) for t in turns] for turns in conversations]
        whole = {**request, "seconds": SECONDS, "conversations": turns}
        with self._lock:
            return self._answers(json.dumps(whole).encode() + b"\n", len(turns))

    def _answers(self, request: bytes, count: int) -> list[Written]:
        process = self._started()
        assert process.stdin and process.stdout
        # The process limits itself, but not on Windows.
        timer = threading.Timer(STARTING + SECONDS * count, process.kill)
        timer.start()
        answers: list[Written] = []
        with contextlib.suppress(OSError):
            process.stdin.write(request)
            process.stdin.flush()
            while len(answers) < count:
                line = process.stdout.readline(LONGEST_LINE)
                if not line.endswith(b"\n"):
                    break
                answers.append(_written(json.loads(line)))
        timer.cancel()
        if len(answers) < count:
            self._end()
            most = f"{SECONDS:g} seconds of computing or {MEMORY >> 30} GB"
            answers.append(Written("", error=f"it takes more than {most} for one conversation"))
            answers += [Written("", error="another one was too much")] * (count - len(answers))
        return answers

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._running and self._owner == os.getpid() and self._running.poll() is None:
            return self._running
        self._end()
        # Neither the directory of a person nor that of the file is looked into for modules.
        self._running = subprocess.Popen(
            [sys.executable, "-P", jinja_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._running, self._owner)
        return self._running


def _written(answer: Mapping[str, Any]) -> Written:
    said = iter(answer.get("said", ()))
    places = tuple(zip(said, said, said, strict=True))
    return Written(answer.get("text", ""), places, answer.get("error", ""))


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
    """The one that all templates of this process share; it ends with the last of them."""
    return _SHARED.setdefault("", _Process())

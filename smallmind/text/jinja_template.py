"""Chat templates of other programs, in the language of Jinja.

A template is a program of a stranger. It is rendered by jinja2's sandbox, as transformers does, in
a process of its own that has a second and a gigabyte: loops without an end and texts without a size
end there. Its environment is that of transformers: `trim_blocks` and `lstrip_blocks`.
"""

import atexit
import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from smallmind.checks import InputError
from smallmind.text.chat import (
    ASSISTANT,
    Conversation,
    Format,
    Rendered,
    free_character,
    guarded,
    tokens_in,
)
from smallmind.text.tokenizer import Tokenizer

SECONDS = 5.0  # for one conversation
STARTING = 30.0  # for the first one, as the process starts
MEMORY = 2**30  # bytes
LONGEST = 2**26  # characters of a conversation as it is rendered
TOKENIZER_CONFIG = "tokenizer_config.json"


class JinjaTemplate(Format):
    """A template as its text. InputError if it cannot be rendered, or says no end of a turn."""

    name = "of the model"

    def __init__(self, text: str, special: Sequence[str], end: str, names: dict[str, str]) -> None:
        self._text, self.special, self.end = text, tuple(special), end
        self._names = names  # what the template calls tokens by: bos_token ...
        self._process = _Process()

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> "JinjaTemplate":
        """The template of a tokenizer, rendered once to see that it can be."""
        if importlib.util.find_spec("jinja2") is None:
            raise InputError(
                'the chat template needs jinja2: pip install "smallmind[chat]"; or give one by '
                "name with --chat-template"
            )
        said = tokenizer.published.get(TOKENIZER_CONFIG, {})
        names = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = said.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                names[name] = content
        made = cls(text, tuple(tokenizer.special), "", names)
        made.end = made._find_end(tokenizer)
        return made

    @property
    def jinja(self) -> str:
        return self._text

    def render(
        self, conversation: Conversation, answers: bool = False, **variables: Any
    ) -> Rendered:
        messages = [{"role": turn.role, "content": turn.text} for turn in conversation]
        guard = free_character(conversation)
        for message in messages:
            message["content"] = guarded(message["content"], self.special, guard)
        whole = self._rendered(messages, answers, **variables)
        if answers:  # nothing is learned from a prompt
            return Rendered(whole, (), (), guard)
        learned, cuts = [], []
        for i, turn in enumerate(conversation):
            if turn.role == ASSISTANT:
                before = len(self._beginning(whole, messages[:i], True))
                after = whole.find(self.end, before + len(messages[i]["content"].strip()))
                if after < 0:
                    raise InputError(f"the chat template ends an answer without {self.end!a}")
                learned.append((before, after + len(self.end)))
                if i + 1 < len(messages) and conversation[i + 1].role != ASSISTANT:
                    cuts.append(len(self._beginning(whole, messages[: i + 1], False)))
        return Rendered(whole, tuple(learned), tuple(cuts), guard)

    def _beginning(self, whole: str, messages: list[dict[str, str]], answers: bool) -> str:
        """The rendering of the first messages. InputError unless that of all begins with it."""
        first = self._rendered(messages, answers)
        if not whole.startswith(first):
            raise InputError(
                "the chat template writes the beginning of a conversation in another way once it "
                "goes on: what is an answer cannot be told; give --chat-template chatml"
            )
        return first

    def _rendered(self, messages: list[dict[str, str]], answers: bool, **variables: Any) -> str:
        own = {"messages": messages, "add_generation_prompt": answers}
        return self._process.render(self._text, {**self._names, **variables, **own})

    def _find_end(self, tokenizer: Tokenizer) -> str:
        """The special token after an answer. InputError if there is none."""
        question = {"role": "user", "content": "a"}
        prompt = self._rendered([question], True)
        whole = self._rendered([question, {"role": ASSISTANT, "content": "b"}], False)
        _, _, after = whole[len(prompt) :].partition("b")
        found = tokens_in(after, tuple(tokenizer.special))
        if not whole.startswith(prompt) or not found:
            raise InputError(
                "the chat template has no special token at the end of an answer, so nothing says "
                "where one ends; give --chat-template chatml"
            )
        return found[0]


class _Process:
    """The process that renders; it starts when it is needed, and again after a template's fault."""

    def __init__(self) -> None:
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # a server renders on several threads

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """InputError if the template is wrong, or takes too long or too much memory."""
        with self._lock:
            return self._render(template, variables)

    def _render(self, template: str, variables: dict[str, Any]) -> str:
        seconds = SECONDS
        if self._running is None or self._running.poll() is not None:
            command = [sys.executable, "-P", "-m", "smallmind.text.jinja_process"]
            self._running = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            atexit.register(self._end)
            seconds = STARTING
        process = self._running
        assert process.stdin and process.stdout
        request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        answer = b""
        with contextlib.suppress(OSError):
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline(8 * LONGEST)
        timer.cancel()
        if not answer.endswith(b"\n"):
            self._end()
            raise InputError(
                f"the chat template takes more than {seconds:g} seconds or {MEMORY >> 30} GB for "
                "one conversation; give --chat-template chatml"
            )
        result = json.loads(answer)
        if "error" in result:
            raise InputError(f"the chat template cannot be rendered: {result['error']}")
        return str(result["text"])

    def _end(self) -> None:
        if self._running:
            self._running.kill()
            self._running.wait()
            for stream in (self._running.stdin, self._running.stdout):
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()
            self._running = None
        atexit.unregister(self._end)

    def __del__(self) -> None:
        self._end()

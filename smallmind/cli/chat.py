"""Talk to a model that was trained on conversations."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console, typed_lines
from smallmind.cli.flags import (
    MODEL_OR_RUN,
    add_checkpoint,
    add_config_flags,
    add_form,
    add_precision,
    add_run,
    add_template_args,
    form_of,
    generation_of,
    run_of,
)
from smallmind.console import activity
from smallmind.settings.config import GenerationConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.writing.chat import Chat

HELP = """\
/system TEXT       set the system prompt and start a new conversation
/reset             start a new conversation
/undo              remove your last question and its answer
/save FILE         save the conversation as JSON, which `smallmind train` reads
/temperature X     0: always the likeliest answer; higher: more varied
/help              show this list
Ctrl-C stops an answer, Ctrl-D quits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind chat`."""
    parser.epilog = (
        "Each line that you type or pipe in is a question. Lines that start with / are commands; "
        "/help lists them."
    )
    add_run(parser, MODEL_OR_RUN)
    add_checkpoint(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON per answer, with its exact characters",
    )
    add_template_args(parser)
    add_precision(parser)
    add_form(parser)
    add_config_flags(parser, GenerationConfig)


def run(options: argparse.Namespace) -> int:
    """Answers each question until there are no more."""
    config = generation_of(options)
    from smallmind.exchange.stored import find
    from smallmind.text.templates import template_args, with_template_args
    from smallmind.writing.chat import Chat

    notes, path = Console(sys.stderr), run_of(options)
    with activity.showing_on(notes.activity):
        found = find(path, options.checkpoint, options.adapter)
        model, tokenizer = found.load(precision=options.precision)
        tokenizer = with_template_args(tokenizer, template_args(options.template_args))
        chat = Chat(model, tokenizer, options.system, form_of(options, tokenizer), **vars(config))
        hint = " (/help lists commands, Ctrl-D quits)" if sys.stdin and sys.stdin.isatty() else ""
        notes.line(f"Talking to {found.found_at(path)}{hint}")
        _talk(chat, notes, options.json)
    return 0


def _talk(chat: "Chat", notes: Console, as_json: bool) -> None:
    console, commands = Console(), Commands(chat)
    dropped = 0
    for line in typed_lines(notes):
        try:
            if line.startswith("/"):
                notes.line(commands.obey(line))
                continue
            _answer(chat, line, console, as_json)
        except InputError as error:  # a character that the model does not know, an unknown command
            notes.line(f"smallmind: {error}")
        except KeyboardInterrupt:
            console.piece("\n")
        if chat.dropped > dropped:
            notes.line(
                f"(the conversation exceeds the context of {chat.model.config.block_size:,} "
                f"tokens: the model no longer sees the first {count_of(chat.dropped, 'turn')})"
            )
        dropped = chat.dropped
        if not console.has_reader:
            return


def _answer(chat: "Chat", question: str, console: Console, as_json: bool) -> None:
    """Prints the answer as it is written, or all of it as a line of JSON."""
    begun = time.monotonic()
    if as_json:
        answer = chat.say(question)
        seconds = round(time.monotonic() - begun, 4)
        line = {"role": "assistant", "content": answer, "ended": chat.ended, "seconds": seconds}
        console.piece(json.dumps(line) + "\n")
        return
    for piece in chat.stream(question):
        console.piece(piece)
    console.piece("\n" if chat.ended != "length" else " ...\n")


class Commands:
    """The lines that begin with a slash. Each returns what to say about it."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat
        self._all: dict[str, Callable[[str], str]] = {
            "system": self._system,
            "reset": self._reset,
            "undo": self._undo,
            "save": self._save,
            "temperature": self._temperature,
            "help": lambda _: HELP,
        }

    def obey(self, line: str) -> str:
        """A line such as "/save chat.json" -> what was done. InputError if it cannot be."""
        name, _, rest = line[1:].partition(" ")
        if name not in self._all:
            known = ", ".join(f"/{name}" for name in self._all)
            raise InputError(f"unknown command /{name}. Commands: {known}")
        return self._all[name](rest.strip())

    def _system(self, text: str) -> str:
        self._chat.reset()
        self._chat.system = text
        return "New conversation" + (f", system prompt: {text}" if text else "")

    def _reset(self, _: str) -> str:
        self._chat.reset()
        return "New conversation"

    def _undo(self, _: str) -> str:
        if self._chat.undo():
            return "Removed your last question and its answer"
        return "Nothing to undo"

    def _save(self, name: str) -> str:
        if not name:
            raise InputError("/save needs a file name, as in /save chat.json")
        content: dict[str, Any] = {"messages": self._chat.messages}
        text = json.dumps(content, ensure_ascii=False) + "\n"
        try:
            # One line, which is JSON and a line of JSONL alike.
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {name}: {error.strerror}") from None
        return f"Wrote {count_of(len(self._chat.turns), 'turn')} to {name}"

    def _temperature(self, value: str) -> str:
        chat = self._chat
        with suppress(ValueError):
            chat.config = dataclasses.replace(chat.config, temperature=float(value))
            return f"Temperature: {chat.config.temperature:g}"
        raise InputError("/temperature needs a number of at least 0, as in /temperature 0.7")

"""Talking with a model: its answers, turn by turn."""

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.text.chat import ASSISTANT, SYSTEM, USER, ChatFormat, Turn, with_tools
from smallmind.text.templates import format_of, stopping
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.decoder import overlap
from smallmind.writing.form import Form
from smallmind.writing.generation import Writer

MIN_SHARE = 4  # an answer has a fourth of the context at least


class Prompt(NamedTuple):
    """The tokens that ask for an answer."""

    ids: np.ndarray
    dropped: int  # of the oldest turns, which did not fit
    most: int  # tokens that the answer may have


def prompt_of(
    tokenizer: Tokenizer,
    template: ChatFormat,
    system: str,
    turns: Sequence[Turn],
    context: int,
    max_tokens: int,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompt:
    """Turns -> what the model is asked, with as many of the latest as `context` tokens hold.

    variables are those that a template may read besides the turns, tools those that the assistant
    may call. InputError if the last question alone is too long.
    """
    least = min(max(1, context // MIN_SHARE), max_tokens or 1)

    def ids_from(first: int) -> np.ndarray:
        asked = with_tools(_with_system(system, turns[first:]), tools)
        return template.prompt(tokenizer, asked, variables)

    first, ids = 0, ids_from(0)
    if len(ids) + least > context:
        # A look renders all turns from one on. Halving needs few, each at half the rest or so.
        beginnings = [0, *[i for i, turn in enumerate(turns) if turn.role == USER][1:]]
        found = bisect_left(beginnings, True, 1, key=lambda i: len(ids_from(i)) + least <= context)
        first = beginnings[min(found, len(beginnings) - 1)]
        ids = ids_from(first)
    if len(ids) + least <= context:
        return Prompt(ids, first, min(max_tokens, context - len(ids)))
    raise InputError(
        f"the question has {len(ids):,} tokens and the context is {context:,}, of which "
        f"{least:,} are reserved for the answer: shorten it"
    )


def _with_system(system: str, turns: Sequence[Turn]) -> list[Turn]:
    return [*([Turn(SYSTEM, system)] if system else []), *turns]


def _without(lead: str, pieces: Iterable[str]) -> Iterator[str]:
    """Pieces of an answer -> the same text in pieces, without the lead that it may begin with."""
    begun, is_begun = "", False
    for piece in pieces:
        if not is_begun:
            begun += piece
            if len(begun) < len(lead) and lead.startswith(begun):
                continue
            piece, is_begun = begun.removeprefix(lead), True
        if piece:
            yield piece
    if not is_begun and begun:
        yield begun


class Thinking:
    """Divides an answer, piece by piece, into what the model thinks and what it says.

    `marks` are around a thought, which only begins an answer; `prompt` may end with the first one.
    """

    def __init__(self, marks: tuple[str, str] | None, prompt: str = "") -> None:
        self._first, self._last = marks or ("", "")
        self.is_open = bool(marks) and prompt.rstrip().endswith(self._first)  # within a thought
        self._is_begun = self.is_open or not marks  # a thought, or what is said
        self._strips = self.is_open  # white space around a thought belongs to the marks
        self._held = ""

    def add(self, piece: str, is_last: bool = False) -> tuple[str, str]:
        """The next piece -> what is thought and what is said in it, as far as that is certain."""
        self._held += piece
        thought = ""
        if not self._is_begun:
            begun = self._held.lstrip()
            if len(begun) < len(self._first) and self._first.startswith(begun) and not is_last:
                return "", ""
            self._is_begun = True
            if begun.startswith(self._first):
                self.is_open = self._strips = True
                self._held = begun.removeprefix(self._first)
        if self.is_open:
            self._strip()
            thought, mark, rest = self._held.partition(self._last)
            if mark:
                self.is_open, self._strips, self._held = False, True, rest
                thought = thought.rstrip()
            elif is_last:
                self._held = ""
            else:
                certain = thought[: len(thought) - overlap(thought, self._last)].rstrip()
                thought, self._held = certain, thought[len(certain) :]
        if self.is_open:
            return thought, ""
        self._strip()
        said, self._held = self._held, ""
        return thought, said

    def _strip(self) -> None:
        if self._strips:
            self._held = self._held.lstrip()
            self._strips = not self._held


class Chat:
    """`Chat(model, tokenizer).say("Hello")` -> the model's answer.

    The conversation so far is in `turns`; the model sees as many of the latest as its context
    holds, always with the system turn. `system` is that turn, `form` that of every answer. settings
    are the fields of GenerationConfig, as in `generate`; an answer ends at the end of its turn, or
    after max_tokens.
    InputError if the tokenizer has no chat template: the model was not trained on conversations.
    """

    @suggesting(GenerationConfig)
    def __init__(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        system: str = "",
        form: Form | None = None,
        **settings: Any,
    ) -> None:
        check_type("model", model, TransformerModel)
        check_type("tokenizer", tokenizer, Tokenizer)
        template = format_of(tokenizer)
        if template is None:
            raise InputError(
                "the model has no chat template, as it was not trained on conversations: train "
                "it on some with --init-from, or use generate to continue texts"
            )
        self.model, self.tokenizer = model, stopping(tokenizer)
        self.template, self.form = template, form
        self.config = GenerationConfig(**settings)
        self.system = check_type("system", system, str)
        self.turns: list[Turn] = []
        self.dropped = 0  # of the oldest turns, that the last answer did not see
        self.ended = ""  # why the last answer did: "end", "stop", "form" or "length"

    def __repr__(self) -> str:
        return f"<Chat: {len(self.turns)} turns with {self.model!r}>"

    def say(self, text: str) -> str:
        """text -> the answer. Both become turns."""
        return "".join(self.stream(text))

    def stream(self, text: str) -> Iterator[str]:
        """Answers like `say`, and yields the answer piece by piece.

        An answer that is not read to its end becomes a turn as far as it came.
        """
        turn = Turn(USER, check_type("text", text, str))
        context, most = self.model.config.block_size, self.config.max_tokens
        turns = [*self.turns, turn]
        prompt = prompt_of(self.tokenizer, self.template, self.system, turns, context, most)
        config = dataclasses.replace(self.config, max_tokens=prompt.most)
        writer = Writer(self.model, self.tokenizer, prompt.ids, config, form=self.form)
        self.turns.append(turn)
        return self._answer(writer, prompt.dropped)

    def undo(self) -> bool:
        """Takes back the last question and its answer -> False if there is none."""
        questions = [i for i, turn in enumerate(self.turns) if turn.role == USER]
        del self.turns[questions[-1] if questions else len(self.turns) :]
        return bool(questions)

    def reset(self) -> None:
        """Forgets all turns but the system's."""
        self.turns.clear()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation in the form that other programs exchange."""
        return [
            {"role": turn.role, "content": turn.text}
            for turn in _with_system(self.system, self.turns)
        ]

    def _answer(self, writer: Writer, dropped: int) -> Iterator[str]:
        self.dropped, self.ended = dropped, ""
        answer: list[str] = []
        try:
            for piece in _without(self.template.lead, (piece for (piece,) in writer.pieces())):
                answer.append(piece)
                yield piece
            self.ended = writer.ended[0]
        finally:
            self.turns.append(Turn(ASSISTANT, "".join(answer)))

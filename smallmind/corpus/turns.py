"""Conversations in records: lists of messages, or fields with a question and its answer."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.reading import shown
from smallmind.text.chat import ASSISTANT, SYSTEM, USER, Turn

LISTS = ("messages", "conversations", "conversation")  # fields that hold all turns
ANSWERS = ("output", "response", "answer", "completion")
# A field with a question -> those that may hold its answer, the likeliest first.
QUESTIONS = {
    "instruction": ANSWERS,
    "prompt": ("completion", "response", "answer", "output"),
    "question": ("answer", "response", "output", "completion"),
    "query": ("answer", "response", "output", "completion"),
}
INPUTS = ("input", "context")  # of an instruction: what it is about
SYSTEMS = ("system", "system_prompt")
TELLING = {*LISTS, *QUESTIONS, *ANSWERS}  # fields by which conversations are recognised
ROLE_FIELDS, TEXT_FIELDS = ("role", "from"), ("content", "value", "text")
ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "human": USER,
    "prompter": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "chatbot": ASSISTANT,
}
NEEDED = (
    "messages (a list of objects with role and content), or prompt or question or instruction with "
    "completion, response, answer or output"
)


class Shape(NamedTuple):
    """The fields of a record that hold its conversation; an empty one where there is none."""

    messages: str = ""
    question: str = ""
    more: str = ""  # what the question is about
    answer: str = ""
    system: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, self))

    def __str__(self) -> str:
        *others, last = (repr(shown(name, 60)) for name in self.names)
        return f"{', '.join(others)} and {last}" if others else last

    def fits(self, record: Mapping[Any, Any]) -> bool:
        """True if the fields of a record hold what they are called."""
        if self.messages:
            return _is_messages(record.get(self.messages))
        return all(_may_be_said(record.get(name)) for name in (self.question, self.answer))


def find_shape(
    names: Collection[object],
    record: Mapping[Any, Any] | None = None,
    texts: Collection[str] = (),
) -> Shape | None:
    """The names of a record's fields -> those of its conversation; None if it has none.

    Without a record, as for the columns of a table, no field is a list. A record that has one of
    `texts` too must have a conversation beyond doubt; any other that looks like one is taken for
    it, and what is wrong in it is found when it is read.
    """
    by_key = {name.casefold(): name for name in reversed([n for n in names if isinstance(n, str)])}

    def first(wanted: Collection[str]) -> str:
        return next((by_key[name] for name in wanted if name in by_key), "")

    shapes = []
    for name in LISTS if record else ():
        if record and name in by_key and isinstance(record[by_key[name]], list | None):
            shapes.append(Shape(by_key[name], system=first(SYSTEMS)))
    for name, answers in QUESTIONS.items():
        if name in by_key and (answer := first(answers)):
            more = first(INPUTS) if name == "instruction" else ""
            shapes.append(Shape("", by_key[name], more, answer, first(SYSTEMS)))
    certain = [shape for shape in shapes if record is None or shape.fits(record)]
    return next(iter(certain if first(texts) else certain or shapes), None)


def _is_messages(value: object) -> bool:
    """True for a list of turns, in which not all need be right."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and not turn.keys().isdisjoint(ROLE_FIELDS) for turn in value
    )


def _may_be_said(value: object) -> bool:
    return value is None or isinstance(value, str | list)


class Turns:
    """The conversations of one file of records, all of one shape."""

    def __init__(self, entry: Entry, shape: Shape, has_text: bool = False) -> None:
        self._entry, self._shape = entry, shape
        # There is something else to read in it.
        self._otherwise = ", or give --no-chat to read the texts" if has_text else ""

    def pieces(self, record: object, where: str) -> Iterator[Piece]:
        """A record -> a piece for each turn of its conversation; `where` says which record it is.

        One without an answer is counted, not read. InputError for anything else.
        """
        turns = self._turns(record, where)
        if not any(turn.role == ASSISTANT and turn.text.strip() for turn in turns):
            self._entry.reading.unanswered += 1
            return
        self._entry.reading.conversations += 1
        self._entry.reading.turns += len(turns)
        for number, turn in enumerate(turns, 1):
            place = f"{self._entry.name}: {where}"
            yield Piece(turn.text, number == len(turns), turn.role, place)

    def _turns(self, record: object, where: str) -> list[Turn]:
        shape = self._shape
        if not isinstance(record, dict):
            raise self._wrong(f"{where} is not an object with a conversation")
        if shape.messages:
            turns = self._messages(self._field(record, shape.messages, where), where)
        else:
            question = self._field(record, shape.question, where)
            answer = record.get(shape.answer)
            turns = self._said(USER, question, shape.question, where)
            if shape.more and turns and turns[-1].role == USER:
                about = self._text(record.get(shape.more), shape.more, where)
                if about.strip():
                    turns[-1] = Turn(USER, f"{turns[-1].text}\n\n{about}")
            turns += self._said(ASSISTANT, answer, shape.answer, where)
        first = self._text(record.get(shape.system) if shape.system else None, shape.system, where)
        if first and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, first))
        return turns

    def _said(self, role: str, value: object, name: str, where: str) -> list[Turn]:
        """A field -> its turn; some name the fields of single turns, and have messages in them."""
        if _is_messages(value):
            return self._messages(value, where)
        return [Turn(role, self._text(value, name, where))]

    def _messages(self, messages: object, where: str) -> list[Turn]:
        if messages is None:
            return []
        if not isinstance(messages, list):
            raise self._wrong(f"the messages of {where} are not a list")
        return [self._turn(turn, f"turn {i:,} of {where}") for i, turn in enumerate(messages, 1)]

    def _turn(self, turn: object, where: str) -> Turn:
        if not isinstance(turn, dict):
            raise self._wrong(f"{where} is not an object with role and content")
        said = next((turn[name] for name in ROLE_FIELDS if name in turn), None)
        role = ROLES.get(said.casefold()) if isinstance(said, str) else None
        if role is None:
            kind = f"the role {shown(said, 60)!r}" if isinstance(said, str) else "no role"
            raise self._wrong(
                f"{where} has {kind}; known are {', '.join(ROLES)}", "remove such turns"
            )
        name = next((name for name in TEXT_FIELDS if name in turn), None)
        if name is None:
            raise self._wrong(f"{where} has no {TEXT_FIELDS[0]}")
        return Turn(role, self._text(turn[name], name, where))

    def _text(self, value: object, name: str, where: str) -> str:
        """A text, a number, or the parts of a text; null is an empty one."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)  # as the file has it
        if isinstance(value, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
        ):
            return "".join(part["text"] for part in value)
        raise self._wrong(f"the field {shown(name, 60)!r} of {where} is not text")

    def _field(self, record: dict[Any, Any], name: str, where: str) -> object:
        if name not in record:
            raise self._wrong(f"{where} has no field {shown(name, 60)!r}, unlike those before it")
        return record[name]

    def _wrong(self, problem: str, advice: str = "correct or remove it") -> InputError:
        return InputError(f"{self._entry.name}: {problem}; {advice}{self._otherwise}")

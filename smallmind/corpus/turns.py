"""Conversations in records: lists of messages, or fields with a question and its answer."""

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
INPUT = "input"  # of an instruction: what it is about
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
    """The fields of a record that hold its conversation."""

    messages: str | None = None
    question: str = ""
    answer: str = ""
    more: str | None = None  # what the question is about
    system: str | None = None

    def __str__(self) -> str:
        names = [name for name in self if name]
        return (
            ", ".join(repr(shown(name, 60)) for name in names[:-1])
            + (" and " if names[1:] else "")
            + repr(shown(names[-1], 60))
        )


def find_shape(names: Collection[object], record: Mapping[Any, Any] | None = None) -> Shape | None:
    """The names of a record's fields -> those of its conversation; None if it has none.

    Without a record, as for the columns of a table, no field is a list.
    """
    by_key = {name.casefold(): name for name in reversed([n for n in names if isinstance(n, str)])}
    for name in LISTS if record else ():
        found = by_key.get(name)
        turns = record[found] if record and found else None
        if found and isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            return Shape(messages=found)
    for name, answers in QUESTIONS.items():
        answer = next((by_key[other] for other in answers if other in by_key), None)
        if name in by_key and answer:
            more = by_key.get(INPUT) if name == "instruction" else None
            return Shape(None, by_key[name], answer, more, by_key.get("system"))
    return None


class Turns:
    """The conversations of one file of records, all of one shape."""

    def __init__(self, entry: Entry, shape: Shape) -> None:
        self._entry, self._shape = entry, shape

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
        for number, (role, text) in enumerate(turns, 1):
            yield Piece(text, number == len(turns), role)

    def _turns(self, record: object, where: str) -> list[Turn]:
        shape = self._shape
        if not isinstance(record, dict):
            raise self._wrong(f"{where} is not an object with a conversation")
        if shape.messages is not None:
            return self._messages(self._field(record, shape.messages, where), where)
        asked, answer = (self._field(record, name, where) for name in shape[1:3])
        # Some name the fields of single turns, and have lists of messages in them.
        if isinstance(asked, list) and isinstance(answer, list):
            return self._messages([*asked, *answer], where)
        question = self._text(asked, shape.question, where)
        if shape.more and (more := self._text(record.get(shape.more), shape.more, where)).strip():
            question += f"\n\n{more}"
        turns = [Turn(USER, question), Turn(ASSISTANT, self._text(answer, shape.answer, where))]
        system = record.get(shape.system) if shape.system else None
        if system:
            turns.insert(0, Turn(SYSTEM, self._text(system, shape.system or "", where)))
        return turns

    def _messages(self, messages: object, where: str) -> list[Turn]:
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
                f"{where} has {kind}; known are {', '.join(ROLES)}: remove such turns, or give "
                "--no-chat to read the file as text",
                advice="",
            )
        name = next((name for name in TEXT_FIELDS if name in turn), None)
        if name is None:
            raise self._wrong(f"{where} has no {TEXT_FIELDS[0]}")
        return Turn(role, self._text(turn[name], name, where))

    def _text(self, value: object, name: str, where: str) -> str:
        """A text, or the parts of one; null is an empty one."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if isinstance(value, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
        ):
            return "".join(part["text"] for part in value)
        raise self._wrong(f"the field {shown(name, 60)!r} of {where} is not text")

    def _field(self, record: dict[Any, Any], name: str, where: str) -> object:
        if name not in record:
            raise self._wrong(f"{where} has no field {shown(name, 60)!r}, unlike those before it")
        return record[name]

    def _wrong(
        self, problem: str, advice: str = "; correct or remove it, or give --no-chat"
    ) -> InputError:
        return InputError(f"{self._entry.name}: {problem}{advice}")

"""Conversations in records: lists of messages, or fields with a question and its answer."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from smallmind.checks import InputError
from smallmind.corpus.entry import Entry, Piece
from smallmind.corpus.json_values import has_text, opened, parsed
from smallmind.corpus.reading import LABELS, PAIRS, QUESTIONS, shown
from smallmind.text.chat import (
    ANSWERS,
    ASSISTANT,
    REJECTED,
    ROLE_NAMES,
    SYSTEM,
    TEXT_PARTS,
    THOUGHT_PARTS,
    TOOL,
    USER,
    Turn,
    said_in,
    with_tools,
)
from smallmind.text.tools import described_tools, messages_calls

LIST_FIELDS = ("messages", "conversations", "conversation")  # fields that hold all turns
ANSWER_FIELDS = ("output", "response", "answer", "completion", "answerkey")
# A field with a question -> those that may hold its answer, the likeliest first.
QUESTION_FIELDS = {
    "instruction": ANSWER_FIELDS,
    "prompt": ("completion", "response", "answer", "output"),
    "question": ("answer", "response", "output", "completion"),
    "query": ("answer", "response", "output", "completion"),
}
# Also a question and its answer, in records without a text: others only mention a user.
WEAKER_FIELDS = {
    "problem": ("solution", *ANSWER_FIELDS),
    "input": ANSWER_FIELDS,
    "inputs_pretokenized": ("targets_pretokenized",),
    "inputs": ("targets", "outputs"),
    "input_text": ("output_text",),
    "message_1": ("message_2",),
    "human": ("assistant", "bot", "gpt", "ai"),
    "user": ("assistant", "bot", "model"),
    "article": ("summary", "highlights"),
    "document": ("summary",),
}
INPUT_FIELDS = ("input", "context")  # that a question is about
CHOICE_FIELDS = ("choices", "options")  # among which its answer is
HISTORY_FIELDS = ("history",)  # the questions and answers before it
SYSTEM_FIELDS = ("system", "system_prompt")
TOOL_FIELDS = ("tools", "functions")  # that the assistant may call
CALL_FIELDS = ("tool_calls", "function_call")  # of a turn of the assistant
RESULT_FIELDS = ("name", "tool_call_id")  # of a turn of a tool
THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")  # before an answer
# By these conversations are recognised.
PAIR_FIELDS = {**QUESTION_FIELDS, **WEAKER_FIELDS}
TELLING_FIELDS = {*LIST_FIELDS, *PAIR_FIELDS, *itertools.chain(*PAIR_FIELDS.values())}
ROLE_FIELDS, TEXT_FIELDS = ("role", "from", "author"), ("content", "value", "text")
# Fields of a turn or a record that say whether it is learned; `masked` says the opposite. KTO's
# `label` is false beside an answer to avoid.
MARKS = ("weight", "train", "training", "trainable", "learn", "loss", "masked", "train_detail")
LABEL = "label"
RECORD_MARKS = ("weight", "train", "trainable", LABEL)
SAID_FALSE, SAID_TRUE = ("false", "no"), ("true", "yes")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_SHAPES = 256  # that are remembered of one file
MADE: Callable[[tuple[str, str, bool, str, str]], Turn] = partial(
    tuple.__new__, Turn
)  # in half the time
CALL_ROLES = ("function_call", "tool_call")  # of turns whose text is a call, or a list of calls
NEEDED = (
    "messages (a list of objects with role and content), or prompt or question or instruction with "
    "completion, response, answer or output"
)


class TurnFields(NamedTuple):
    """The fields of a record that hold its conversation; none where there is none of a kind."""

    messages: str = ""
    question: str = ""
    more: tuple[str, ...] = ()  # what the question is about, and what may be chosen
    answer: str = ""
    system: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    thought: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All of the fields."""
        texts = self.messages, self.question, *self.more, self.answer, *self.system
        return tuple(filter(None, (*texts, *self.history, *self.thought, *self.marks, *self.tools)))

    def __str__(self) -> str:
        *others, last = (
            repr(shown(name, 60)) for name in self.names if name not in (*self.marks, *self.tools)
        )
        return f"{', '.join(others)} and {last}" if others else last

    def fits(self, record: Mapping[Any, Any]) -> bool:
        """Returns True if the fields of a record hold what they are called."""
        if self.messages:
            return is_messages(opened(record.get(self.messages)))
        said = record.get(self.question), record.get(self.answer)
        return all(value is None or isinstance(value, str | list) for value in said)

    def completed(self, names: Collection[object]) -> "TurnFields":
        """-> the shape with the fields among `names` that a conversation may have or not."""
        by_key = _by_key(names)

        def each(wanted: Collection[str]) -> tuple[str, ...]:
            return tuple(by_key[name] for name in wanted if name in by_key)

        shape = self._replace(system=each(SYSTEM_FIELDS), marks=each(RECORD_MARKS))
        shape = shape._replace(tools=each(TOOL_FIELDS))
        if self.messages:
            return shape
        more = tuple(x for x in each((*INPUT_FIELDS, *CHOICE_FIELDS)) if x != self.question)
        thought = each(THOUGHT_FIELDS)
        return shape._replace(more=more, history=each(HISTORY_FIELDS), thought=thought)


def find_shape(
    names: Collection[object],
    record: Mapping[Any, Any] | None = None,
    texts: Collection[str] = (),
    needs_answer: bool = True,
) -> TurnFields | None:
    """The names of a record's fields -> those of its conversation; None if it has none.

    Without a record, as for the columns of a table without rows, no field is a list. A record that
    has one of `texts` too must have a conversation beyond doubt; any other that looks like one is
    taken for it, and what is wrong in it is found when it is read. Unless it `needs_answer`, a
    question is one too.
    """
    by_key = _by_key(names)
    shapes = []
    for name in LIST_FIELDS if record else ():
        if record and name in by_key and _may_be_list(record[by_key[name]]):
            shapes.append(TurnFields(by_key[name]))
    has_other = any(
        name in by_key and not are_turns((record or {}).get(by_key[name])) for name in texts
    )
    for name, answers in (QUESTION_FIELDS if has_other else PAIR_FIELDS).items():
        answer = next((by_key[word] for word in answers if word in by_key), "")
        if name in by_key and (answer or not (needs_answer or name in WEAKER_FIELDS)):
            shapes.append(TurnFields("", by_key[name], (), answer))
    if not (shapes or has_other):  # messages may have any other name, if nothing else has some
        lists = [name for name, value in (record or {}).items() if are_turns(value)]
        shapes = [TurnFields(name) for name in lists if len(lists) == 1]
    certain = [shape for shape in shapes if record is None or shape.fits(record)]
    found = next(iter(certain if has_other else certain or shapes), None)
    return found and found.completed(names)


def _by_key(names: Collection[object]) -> dict[str, str]:
    """Returns names by what they are in small letters; the first of several."""
    return {name.casefold(): name for name in reversed([n for n in names if isinstance(n, str)])}


def _may_be_list(value: object) -> bool:
    """Returns True for a list, nothing, or a text that looks like a list of objects."""
    if isinstance(value, str):
        words = value.lstrip()
        return not words or (words[0] == "[" and words[1:].lstrip().startswith(("{", "]")))
    return value is None or isinstance(value, list)


def role_of(turn: Any) -> str:
    """Returns the role that a turn names, in small letters; "" if it names none."""
    found = (turn.get(x) for x in ROLE_FIELDS) if isinstance(turn, dict) else ()
    said = next(filter(None, found), None)
    return said.strip().casefold() if isinstance(said, str) else ""


def are_turns(values: Any) -> TypeGuard[list[Any]]:
    """Returns True for a list that begins with a message."""
    return isinstance(values, list) and bool(values) and role_of(values[0]) in ROLE_NAMES


def is_messages(value: object) -> bool:
    """Returns True for a list of turns, in which not all need be right."""
    return isinstance(value, list) and any(
        isinstance(turn, dict) and not turn.keys().isdisjoint(ROLE_FIELDS) for turn in value
    )


class Turns:
    """The conversations of one file of records, all of one shape."""

    def __init__(
        self, entry: Entry, shape: TurnFields, has_text: bool = False, source: str = ""
    ) -> None:
        self._entry, self._reading, self._shape = entry, entry.reading, shape
        self._source = source  # in words; empty: the fields
        worse = {REJECTED: REJECTED} if entry.reading.preferences in (PAIRS, LABELS) else {}
        self._roles: Mapping[str, str] = {**ROLE_NAMES, **worse}
        # By the names of a record's fields.
        self._shapes: dict[tuple[object, ...], tuple[TurnFields, tuple[str, ...], bool]] = {}
        # There is something else to read in it.
        self._otherwise = ", or give --no-chat to read the texts" if has_text else ""

    def read(self, record: object, where: str) -> Piece | None:
        """A record -> its conversation; `where` says which record it is.

        One without an answer to learn is counted, and None. InputError for anything else.
        """
        if not isinstance(record, dict):
            raise self._wrong(f"{where} is not an object with a conversation")
        shape, names, is_plain = self._shape_of(record)
        plain = _plain(record, shape, self._roles) if is_plain else None
        turns = plain or self._turns(record, shape, where)
        if len(record) > len(names) or not plain:
            self._reading.note_unread(record, names, turns)
        if not plain:
            turns = self._learned(turns)
        if turns and self._reading.preferences == LABELS and turns[-1].role != REJECTED:
            turns = self._labelled(turns, record, shape)
        if not turns:
            return None
        self._reading.conversations += 1
        self._reading.turns += len(turns)
        return Piece("", True, turns, f"{self._entry.name}: {where}")

    def _learned(self, turns: list[Turn]) -> list[Turn]:
        """Marks what cannot be learned -> the turns; none if nothing is left, which is counted."""
        reading = self._reading
        if reading.preferences == QUESTIONS and (ending := _ending_with_question(turns)):
            return ending
        if not any(turn.role in ANSWERS and turn.says for turn in turns):
            reading.unanswered += 1
            return []
        if not any(turn.role in ANSWERS and turn.learned for turn in turns):
            reading.count("Left out", "conversation", "marked not to be learned")
            return []
        asked = [_is_asked(turns[:i]) for i in range(len(turns))]
        learned = [
            turn._replace(learned=turn.learned and is_asked and turn.says)
            if turn.role in ANSWERS
            else turn
            for turn, is_asked in zip(turns, asked, strict=True)
        ]
        if not any(turn.role in ANSWERS and turn.learned for turn in learned):
            reading.count("Left out", "conversation", "with a blank question")
            return []
        self._count(turns, asked)
        return learned

    def _labelled(
        self, turns: list[Turn], record: Mapping[Any, Any], shape: TurnFields
    ) -> list[Turn]:
        """Makes the last answer one to avoid if the label is false; none without a label."""
        name = next((name for name in shape.marks if name.casefold() == LABEL), None)
        value = record.get(name)
        word = value.strip().casefold() if isinstance(value, str) else value
        if word in (*SAID_TRUE, True):
            return turns
        if word not in (*SAID_FALSE, False):
            self._reading.count("Left out", "answer", "whose label is not true or false")
            return []
        last = max(i for i, turn in enumerate(turns) if turn.role == ASSISTANT)
        return [x._replace(role=REJECTED) if i == last else x for i, x in enumerate(turns)]

    def _count(self, turns: Sequence[Turn], asked: Sequence[bool]) -> None:
        """Counts what is not learned, and what is thought."""
        for turn, is_asked in zip(turns, asked, strict=True):
            if turn.role != ASSISTANT:
                continue
            if not turn.says:
                self._reading.count("Not learned", "turn", "of the assistant without text")
            elif not turn.learned:
                self._reading.count("Not learned", "answer", "marked so in the file")
            elif not is_asked:
                self._reading.count("Not learned", "answer", "to a blank question")
            if turn.thought:
                self._reading.count("Read", "thought", "before an answer")

    def _shape_of(self, record: dict[Any, Any]) -> tuple[TurnFields, tuple[str, ...], bool]:
        """Returns the shape with the optional fields of this record, and the names of its fields.

        Others may have had fewer. True if its turns may be plain.
        """
        key = tuple(record)
        found = self._shapes.get(key)
        if found is None:
            shape = self._shape.completed(record)
            others = shape.system, shape.history, shape.thought, shape.marks, shape.tools
            is_plain = not any(others) and all(
                name.casefold() not in CHOICE_FIELDS for name in shape.more
            )
            found = shape, shape.names, is_plain
            if len(self._shapes) < MAX_SHAPES:
                self._shapes[key] = found
                self._reading.note(f"read conversations from {self._source or shape}")
        return found

    def _turns(self, record: dict[Any, Any], shape: TurnFields, where: str) -> list[Turn]:
        if shape.messages:
            value = self._field(record, shape.messages, where)
            turns = self._messages(value, where)
        else:
            turns = self._history(record, shape, where) + self._asked(record, shape, where)
        label = LABEL if self._reading.preferences == LABELS else ""  # which `_labelled` reads
        marks = [name for name in shape.marks if name.casefold() != label]
        marks = [name for name in marks if not self._says_learned(record, name, where, False)]
        if marks:
            turns = [turn._replace(learned=turn.role != ASSISTANT) for turn in turns]
        if LABEL in map(str.casefold, marks):
            self._reading.note("left out what --loss kto would learn as answers to avoid")
        texts = [self._text(record.get(name), name, where) for name in shape.system]
        first = "\n\n".join(text for text in dict.fromkeys(texts) if text.strip())
        if first and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, first))
        elif first and turns[0].text.strip() != first.strip():
            self._reading.leave_unread(shape.system[0])
        for name in shape.tools:
            tools = opened(record.get(name))
            if isinstance(tools, list) and any(isinstance(opened(tool), dict) for tool in tools):
                turns = with_tools(turns, self._checked(described_tools, tools, name, where))
            elif has_text(tools):
                self._reading.leave_unread(name)
        return turns

    def _asked(self, record: dict[Any, Any], shape: TurnFields, where: str) -> list[Turn]:
        """Returns the question of a record and its answer."""
        value, answer = self._field(record, shape.question, where), record.get(shape.answer)
        asked = self._said(USER, value, shape.question, where)
        if asked and asked[-1].role == USER:
            texts = [asked[-1].text]
            for name in shape.more:
                value = record.get(name)
                if name.casefold() in CHOICE_FIELDS:
                    text, answer = self._choices(opened(value), answer, name, where)
                elif isinstance(value, list) and all(isinstance(text, str) for text in value):
                    text = "\n\n".join(value)
                else:
                    text = self._text(value, name, where)
                texts.append(text)
            if any(text.strip() for text in texts[1:]):
                text = "\n\n".join(text for text in texts if text.strip())
                asked[-1] = asked[-1]._replace(text=text)
        said = self._said(ASSISTANT, answer, shape.answer, where)
        for name in shape.thought:
            thought = self._text(record.get(name), name, where)
            if said and thought.strip() and not said[-1].thought:
                said[-1] = said[-1]._replace(thought=thought)
        return asked + said

    def _history(self, record: dict[Any, Any], shape: TurnFields, where: str) -> list[Turn]:
        """Returns the turns before a question: pairs of texts, or messages."""
        turns: list[Turn] = []
        for name in shape.history:
            value = opened(record.get(name))
            if value is None or value == "":
                continue
            if is_messages(value):
                turns += self._messages(value, where)
                continue
            if not isinstance(value, list):
                raise self._wrong(f"the field {shown(name, 60)!r} of {where} is not a list")
            for number, pair in enumerate(value, 1):
                of_pair = f"part {number:,} of {shown(name, 60)!r} of {where}"
                if not isinstance(pair, list) or len(pair) != 2:
                    raise self._wrong(f"{of_pair} is not a question with its answer")
                said = zip((USER, ASSISTANT), pair, strict=True)
                turns += [Turn(role, self._text(text, name, of_pair)) for role, text in said]
        return turns

    def _choices(self, value: object, answer: object, name: str, where: str) -> tuple[str, object]:
        """-> the choices of a question as lines, and the answer, which may be the number of one.

        They have letters where the answer is one, and the labels that the file gives them.
        """
        labels: list[str] = []
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            labels = [self._text(x, name, where) for x in value.get("label") or ()]
            value = value["text"]
        elif isinstance(value, dict):
            value = {label: text for label, text in value.items() if text is not None}
            labels, value = list(map(str, value)), list(value.values())
        if not isinstance(value, list):
            return self._text(value, name, where), answer
        texts = [self._text(text, name, where) for text in value]
        said = str(answer).strip() if isinstance(answer, str | int | float) else ""
        known = {text.strip() for text in texts}
        if not labels and said in list(LETTERS[: len(texts)]) and said not in known:
            labels = list(LETTERS[: len(texts)])
        elif not labels and texts and said.isdecimal() and said not in known:
            if int(said) >= len(texts):
                raise self._wrong(f"the answer of {where}, {said}, is not one of its choices")
            answer = texts[int(said)]
            self._reading.count("Read", "answer", "as the number of a choice, counting from 0")
        if len(labels) == len(texts):
            texts = [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)]
        return "\n".join(texts), answer

    def _said(self, role: str, value: object, name: str, where: str) -> list[Turn]:
        """A field -> its turn; some name the fields of single turns, and have messages in them."""
        value = [value] if is_messages([value]) else value
        if is_messages(value):
            return self._messages(value, where)
        text, thought = self._content(value, name, where)
        return [Turn(role, text, thought=thought)]

    def _messages(self, messages: object, where: str) -> list[Turn]:
        messages = opened(messages)
        if isinstance(messages, str) and _may_be_list(messages):
            try:
                messages = parsed(messages)
            except ValueError as error:
                raise self._wrong(
                    f"the messages of {where} are not JSON: {shown(error, 100)}",
                    "write them as JSON, with double quotes",
                ) from None
        if messages is None or messages == "":
            return []
        if not isinstance(messages, list):
            raise self._wrong(f"the messages of {where} are not a list")
        return [self._turn(turn, f"turn {i:,} of {where}") for i, turn in enumerate(messages, 1)]

    def _turn(self, turn: object, where: str) -> Turn:
        if not isinstance(turn, dict):
            raise self._wrong(f"{where} is not an object with role and content")
        role_field = _first(ROLE_FIELDS, turn)
        said = turn.get(role_field)
        if said in CALL_ROLES:
            calls = opened(turn.get(_first(TEXT_FIELDS, turn)))
            turn = {role_field: ASSISTANT, CALL_FIELDS[isinstance(calls, dict)]: calls}
            said = ASSISTANT
        role = self._roles.get(said.strip().casefold()) if isinstance(said, str) else None
        if role is None:
            kind = f"the role {shown(said, 60)!r}" if isinstance(said, str) else "no role"
            raise self._wrong(
                f"{where} has {kind}; known roles are {', '.join(ROLE_NAMES)}", "remove such turns"
            )
        name = _first(TEXT_FIELDS, turn)
        rest = [x for x in turn if x not in (role_field, name, *MARKS)]
        # Calls, refusals and thoughts may come without any text.
        if name not in turn and not (role in ANSWERS and any(has_text(turn[x]) for x in rest)):
            raise self._wrong(f"{where} has no {TEXT_FIELDS[0]}")
        text, thought = self._content(turn.get(name), name, where)
        more: dict[str, Any] = {}
        for other in rest:
            if role in ANSWERS and other in CALL_FIELDS:
                if (value := turn[other]) not in (None, "", [], {}, "[]"):
                    value = value if other == CALL_FIELDS[0] else [value]
                    calls = self._checked(messages_calls, value, other, where)
                    more |= {CALL_FIELDS[0]: calls} if calls else {}
            elif role == TOOL and other in RESULT_FIELDS:
                more |= {other: turn[other]} if isinstance(turn[other], str) else {}
            elif role in ANSWERS and other in THOUGHT_FIELDS:
                words = self._text(turn[other], other, where)
                if words.strip() and not thought.strip():
                    thought = words
                elif words.strip() != thought.strip():
                    self._reading.leave_unread(other, in_turns=True)
            elif (other, True) not in self._reading.unread and has_text(turn[other]):
                self._reading.leave_unread(other, in_turns=True)
        marks = [self._says_learned(turn, mark, where, True) for mark in MARKS if mark in turn]
        said = json.dumps(more, ensure_ascii=False) if more else ""
        if role not in ANSWERS:
            return Turn(role, text, more=said)
        return Turn(role, text, all(marks), thought, said)

    def _checked(
        self, check: Callable[[Any], list[Any]], value: Any, name: str, where: str
    ) -> list[Any]:
        """Returns what is checked of a field. InputError that says where it is wrong."""
        try:
            return check(value)
        except InputError as error:
            raise self._wrong(f"the field {shown(name, 60)!r} of {where} {error}") from None

    def _says_learned(self, fields: dict[Any, Any], name: str, where: str, in_turn: bool) -> bool:
        """Returns False if a field says that its turn, or its record, is not to be learned."""
        value, mark = fields.get(name), name.casefold()
        if value is None or value == "" or (mark == LABEL and value is not False):
            return True
        word = value.strip().casefold() if isinstance(value, str) else value
        if word in SAID_FALSE or word in SAID_TRUE:
            word = word in SAID_TRUE
        try:
            weight = float(word)
        except (TypeError, ValueError, OverflowError):
            weight = math.nan
        if math.isnan(weight):
            if in_turn:
                raise self._wrong(f"the field {name!r} of {where} is not a number, true or false")
            self._reading.leave_unread(name)
            return True
        if weight not in (0, 1):
            self._reading.count("Read", "weight", "other than 0 and 1, as 1")
        return (weight > 0) != (mark == "masked")

    def _text(self, value: object, name: str, where: str) -> str:
        return self._content(value, name, where)[0]

    def _content(self, value: object, name: str, where: str) -> tuple[str, str]:
        """A text, a number, null or parts -> the text, and what is thought in its parts."""
        if value is None:
            return "", ""
        if isinstance(value, str):
            return value, ""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value), ""
        if not isinstance(value, list) or (value and not any(isinstance(x, dict) for x in value)):
            raise self._wrong(f"the field {shown(name, 60)!r} of {where} is not text")
        text, thought, wrong = said_in(value)
        if wrong:
            part = value[wrong - 1]
            kind = part.get("type") if isinstance(part, dict) else None
            is_known = kind in (*TEXT_PARTS, *THOUGHT_PARTS)
            words = "" if is_known else f", but of type {shown(kind, 60)!r}"
            raise self._wrong(
                f"part {wrong:,} of the field {shown(name, 60)!r} of {where} is not text{words}",
                "remove such parts",
            )
        return text, thought

    def _field(self, record: dict[Any, Any], name: str, where: str) -> object:
        if name not in record:
            if self._reading.is_unfolded:
                raise self._wrong(f"{where} has other fields than the records before it")
            raise self._wrong(f"{where} has no field {shown(name, 60)!r}, unlike those before it")
        return record[name]

    def _wrong(self, problem: str, advice: str = "correct or remove it") -> InputError:
        return InputError(f"{self._entry.name}: {problem}; {advice}{self._otherwise}")


def _plain(
    record: dict[Any, Any], shape: TurnFields, roles: Mapping[str, str]
) -> list[Turn] | None:
    """-> the turns of a record with texts alone, none of them blank, as most are; else None.

    They are those of `Turns`, in a tenth of the time.
    """
    if not shape.messages:
        asked: list[Any] = [record.get(shape.question)]
        asked += [text for name in shape.more if (text := record.get(name)) not in (None, "")]
        answer: Any = record.get(shape.answer)
        for text in (answer, *asked):
            if type(text) is not str or not text or text.isspace():
                return None
        question = "\n\n".join(asked)
        return [MADE((USER, question, True, "", "")), MADE((ASSISTANT, answer, True, "", ""))]
    messages: Any = record.get(shape.messages)
    try:
        role, text = ("from", "value") if "from" in messages[0] else ("role", "content")
        turns = [
            MADE((roles[turn[role]], said, True, "", ""))
            for turn in messages
            if len(turn) == 2 and (said := turn[text]) and not said.isspace()
        ]
    except (AttributeError, LookupError, TypeError):  # this is not plain
        return None
    is_answered = turns and (turns[-1].role == ASSISTANT or any(x.role == ASSISTANT for x in turns))
    return turns if is_answered and len(turns) == len(messages) else None


def _ending_with_question(turns: list[Turn]) -> list[Turn]:
    """Returns turns that end with what the user says, without a blank answer; else none."""
    last = len(turns)
    while last and turns[last - 1].role == ASSISTANT and not turns[last - 1].text.strip():
        last -= 1
    is_question = last and turns[last - 1].role == USER and turns[last - 1].text.strip()
    return turns[:last] if is_question else []


def _first(names: Sequence[str], fields: Mapping[Any, Any]) -> str:
    """Returns the first of the names whose field has a value, or is there, or else the first."""
    present = [name for name in names if name in fields]
    return next((x for x in present if fields[x] is not None), (present or names)[0])


def _is_asked(turns: Sequence[Turn]) -> bool:
    """-> False if what the user says right before an answer is blank; True if nobody has asked."""
    asked = None
    for turn in reversed(turns):
        if turn.role != USER:
            break
        asked = bool(asked or turn.text.strip())
    return asked is not False

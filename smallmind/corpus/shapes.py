"""The shapes of records in published files, and how each becomes records of a plain form.

A record has a plain form if its fields hold messages, a question and its answer, or a text. All
other shapes are in one table, `SHAPES`: a new shape is a line of it, perhaps with a function.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from smallmind.corpus.json_values import OPENING, opened
from smallmind.corpus.reading import LABELS, PAIRS, Reading
from smallmind.corpus.turns import (
    CALL_FIELDS,
    LIST_FIELDS,
    MAX_SHAPES,
    PAIR_FIELDS,
    QUESTION_FIELDS,
    TEXT_FIELDS,
    are_turns,
    find_shape,
    role_of,
)
from smallmind.text.chat import ASSISTANT, REJECTED, ROLE_NAMES, SYSTEM, USER

TEXT_NAMES = ("text", "content", "story")  # fields that hold the text, the most likely first
KNOWN_FIELDS = {*TEXT_NAMES, *PAIR_FIELDS, *LIST_FIELDS}
ONLY_VALUE = "its only value"  # the place of a record that is a whole file
LIST, OBJECT = "[]", "{}"  # stand for the names of a list, and of an object with any names
CONTAINERS = "train|data|rows|records|examples|instances|items|conversations|dialogues"
# Fields that hold lists or objects: where they are texts, these say what they hold.
OF_LISTS = {*LIST_FIELDS, "data", "dialog", "dialogue", "utterances", "contents", "completions"}
OF_LISTS |= {"answers", "items", "turns", "instances", "body"}
BEGINNINGS = frozenset("[{a \n\t")  # of such texts
# A record with one of these is no list of others, whatever else it has.
PLAIN = " ".join(f"!{name}" for name in (*TEXT_NAMES, *QUESTION_FIELDS, "messages"))
TURNS = "messages|conversations|conversation"
CHOSEN = "chosen|chosen_response|preferred_output"
REJECTED_NAMES = "rejected|rejected_response|non_preferred_output"
RATED = "instruction|prompt|question completions|answers"
OF_TWO = "the better and the worse of two answers"
OF_PAIRS = f"prompt|question|instruction|query|input? input|context? history? {TURNS}?"
TRANSCRIPT = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):")

Row = tuple[object, str]  # a record, and where it is in its file


class Shape(NamedTuple):
    """A shape of records: the names of its fields, and the function that reads what they hold.

    A name is "a", "a|b" (either), "a?" (perhaps) or "!a" (absent). The function is given the values
    by the first of their names, and returns records of a plainer shape; None if this is none. A
    string says why a record that has this shape is left out.
    """

    words: str  # for the line that says what was read
    names: str
    read: Callable[[Any], Sequence[Any] | str | None]
    is_chat: bool = True  # False: it holds records of any kind
    joins: str | None = None  # neighbours with the same value in this field are read as a list
    preferences: bool | None = None  # read only where worse answers are, or only where not

    def match(self, names: Iterable[object]) -> dict[str, str] | None:
        """The names of a record's fields -> those of this shape, each by its first name."""
        known = {name.casefold(): name for name in names if isinstance(name, str)}
        found = {}
        for word in self.names.split():
            alternatives = word.strip("!?").split("|")
            name = next((known[each] for each in alternatives if each in known), None)
            if (name is None) == word.startswith("!"):
                found.update({} if name is None else {alternatives[0]: name})
            elif not word.endswith("?"):
                return None
        return found


Matches = list[tuple[Shape, dict[str, str]]]  # shapes that a record may have, and their fields


class Unfolded:
    """The records of one file, unfolded: each is of a plain form, or of an unknown one."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        is_text = reading.chat is False or bool(reading.field)
        kinds = None, reading.preferences in (PAIRS, LABELS)
        shapes = [] if reading.is_earlier else [x for x in SHAPES if x.preferences in kinds]
        self._shapes = [shape for shape in shapes if not (is_text and shape.is_chat)]
        self._is_plain = is_text or reading.is_earlier
        # The shapes that records with the same names may have, and the field of turns in which
        # all of them look for something else.
        self._known: dict[tuple[object, ...], tuple[Matches, str]] = {}

    def opened(self, record: Any) -> Any:
        """Opens texts that hold lists or objects, in fields that are for these, or messages."""
        if self._is_plain or not isinstance(record, dict):
            return record
        if BEGINNINGS.isdisjoint([x[:1] for x in record.values() if isinstance(x, str)]):
            return record  # as most are
        found = {}
        for name, value in record.items():
            if isinstance(value, str) and OPENING.match(value):
                is_list = isinstance(name, str) and name.casefold() in OF_LISTS
                inner = opened(value) if is_list or "role" in value or "from" in value else value
                if inner is not value and (is_list or are_turns(inner) or are_turns([inner])):
                    found[name] = inner
        return {**record, **found} if found else record

    def has(self, record: object) -> bool:
        """Returns True if a record of a table has one of the shapes."""
        matches = ((x, _fields(record, names)) for x, names in self._matches(record, ""))
        return any(x.read(found if x.joins is None else [found]) for x, found in matches)

    def rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields the records that rows hold."""
        common, together = None, list[Row]()  # neighbours that are read as a list
        for row in rows:
            if (record := self.opened(row[0])) is not row[0]:
                row = record, row[1]
            matches = self._matches(*row)
            if not (matches or common):
                yield row
                continue
            joined = self._joined(row, matches)
            if common and joined != common:
                yield from self._together(*common, together)
                together = []
            common = joined
            if joined:
                together.append(row)
            else:
                yield from self._unfold(*row, matches)
            del row, record  # which may be large, while the next one is read
        if common:
            yield from self._together(*common, together)

    def _together(
        self, shape: Shape, names: dict[str, str], _: object, rows: list[Row]
    ) -> Iterator[Row]:
        """Yields the records that neighbours hold together, or each by itself."""
        found = shape.read([_renamed(record, names) for record, _ in rows])
        if found is not None:
            self._reading.note(f"read {shape.words}")
            rows = [(record, rows[0][1]) for record in found]
        for record, where in rows:
            yield from self._unfold(record, where, self._matches(record, where))

    @staticmethod
    def _joined(row: Row, matches: Matches) -> tuple[Shape, dict[str, str], object] | None:
        """Returns what a row has in common with its neighbours, if they are read together."""
        for shape, names in matches:
            if shape.joins is not None:
                fields = _renamed(row[0], names)
                if shape.read([fields]) is not None:
                    return shape, names, fields.get(shape.joins)
        return None

    def _matches(self, record: object, where: str) -> Matches:
        """Returns the shapes whose names a record has."""
        if not isinstance(record, dict):
            if not isinstance(record, list):
                return []
            key: tuple[object, ...] = (LIST,)
        else:
            key = (*record, OBJECT) if where == ONLY_VALUE else tuple(record)
        found = self._known.get(key)
        if found is None:
            is_plain = isinstance(record, dict) and any(
                name in record for name in (self._reading.field, LIST, OBJECT)
            )
            shapes = () if is_plain else self._shapes
            matches = [(x, names) for x in shapes if (names := x.match(key)) is not None]
            fields = {name for _, names in matches for name in names.values()}
            field = fields.pop() if len(fields) == 1 else ""
            found = matches, field if field.casefold() in LIST_FIELDS else ""
            if len(self._known) < MAX_SHAPES:
                self._known[key] = found
        matches, field = found
        return [] if field and isinstance(record, dict) and are_turns(record[field]) else matches

    def _unfold(self, record: Any, where: str, matches: Matches) -> Iterator[Row]:
        """Yields the records that one holds: itself if it has none of the shapes."""
        for shape, names in matches:
            if shape.joins is not None or (found := shape.read(_fields(record, names))) is None:
                continue
            if isinstance(found, str):
                self._reading.count("Left out", "pair", found)
                return
            self._reading.note(f"read {shape.words}")
            self._reading.is_unfolded |= shape.is_chat
            rest = {} if OBJECT in names or LIST in names else _rest(record, names)
            if not shape.is_chat:
                self._reading.note_unread(rest, ())
            for number, each in enumerate(found, 1):
                place = where if shape.is_chat else f"record {number:,} of {where}"
                each = {**rest, **each} if shape.is_chat else each
                yield from self._unfold(each, place, self._matches(each, place))
            return
        yield record, where


def _fields(record: Any, names: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of a record by the names of its shape."""
    if isinstance(record, dict) and OBJECT not in names:
        return {name: record[actual] for name, actual in names.items()}
    return {OBJECT: record, LIST: record}


def _rest(record: dict[Any, Any], names: dict[str, str]) -> dict[Any, Any]:
    """Returns the fields of a record that its shape does not have."""
    read = set(names.values())
    return {name: value for name, value in record.items() if name not in read}


def _renamed(record: Any, names: dict[str, str]) -> dict[Any, Any]:
    return {**_rest(record, names), **_fields(record, names)}


def _records(fields: dict[str, Any]) -> list[Any] | None:
    """Returns the records in a list of them, unless they are the turns of one conversation."""
    values = next(iter(fields.values()))
    first = values[0] if isinstance(values, list) and values else None
    return values if isinstance(first, list | str) or is_record(first) else None


def is_record(value: object) -> bool:
    """Returns True for an object that is not a turn of a conversation."""
    if not isinstance(value, dict):
        return False
    return "role" not in value and not value.keys() >= {"from", "value"}


def _frame(fields: dict[str, Any]) -> list[Any] | None:
    """{"a": {"0": 1, "1": 2}}, {"a": [1, 2]} or {"0": {"a": 1}, "1": {"a": 2}} -> its rows."""
    frame = fields[OBJECT]
    parts = list(frame.values())
    first = parts[0] if parts else None
    has_names = any(name.casefold() in KNOWN_FIELDS for name in frame)
    if isinstance(first, list) and first and isinstance(first[0], str | int | float):
        is_even = all(isinstance(part, list) and len(part) == len(first) for part in parts)
        rows = zip(*parts, strict=True) if has_names and is_even else ()
        return [dict(zip(frame, row, strict=True)) for row in rows] or None
    if not isinstance(first, dict) or not first:
        return None
    if not all(isinstance(part, dict) and part.keys() == first.keys() for part in parts):
        return None
    if has_names or all(name.lstrip("-").isdecimal() for name in first):
        return [{name: frame[name][row] for name in frame} for row in first]
    return parts


def _split_frame(fields: dict[str, Any]) -> list[Any] | None:
    names, rows = fields["columns"], fields["data"]
    if not isinstance(names, list) or not isinstance(rows, list):
        return None
    is_frame = all(isinstance(row, list) and len(row) == len(names) for row in rows)
    return [dict(zip(names, row, strict=True)) for row in rows] if is_frame else None


def _values(fields: dict[str, Any]) -> list[Any] | None:
    """[1, "text"] -> its text; ["question", "answer"] -> both."""
    texts = [value for value in fields[LIST] if isinstance(value, str)]
    if any(isinstance(value, dict | list) for value in fields[LIST]):
        return None
    if len(texts) == len(fields[LIST]) == 2:
        return [{"question": texts[0], "answer": texts[1]}]
    return [{"text": texts[0]}] if len(texts) == 1 else None


def _articles(fields: dict[str, Any]) -> list[Any] | None:
    """Paragraphs with a context, and questions about it -> a record for each question."""
    paragraphs, found = fields["paragraphs"], []
    for paragraph in paragraphs if isinstance(paragraphs, list) else [{}]:
        asked = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(asked, list) or not all(isinstance(each, dict) for each in asked):
            return None
        found += [{"context": paragraph.get("context"), **each} for each in asked]
    return found


def _first_answer(fields: dict[str, Any]) -> list[Any] | None:
    """A question with several answers -> with the first; "" if it has none."""
    answers = fields["answers"]
    answers = answers.get("text") if isinstance(answers, dict) else answers
    if not isinstance(answers, list):
        return None
    answer = _first(answers) or ""
    answer = answer.get("text") if isinstance(answer, dict) else answer
    asked = {"question": fields["question"], "context": fields.get("context")}
    return [{**asked, "answer": answer}] if isinstance(answer, str) else None


def _conversation(messages: Iterable[Any]) -> list[Any]:
    return [{"messages": list(messages)}]


def _alternating(said: Any) -> list[Any] | None:
    """["question", "answer", "question", "answer"] -> messages."""
    if not (isinstance(said, list) and len(said) > 1 and all(isinstance(x, str) for x in said)):
        return None
    roles = (USER, ASSISTANT)
    return _conversation({"role": roles[i % 2], "content": text} for i, text in enumerate(said))


def _paired(pairs: Any) -> list[Any] | None:
    """[{"input": "question", "output": "answer"}] -> messages."""
    first = pairs[0] if isinstance(pairs, list) and pairs else None
    shape = find_shape(first) if isinstance(first, dict) and not role_of(first) else None
    names = [shape.question, shape.answer] if shape else []
    if not names or not all(isinstance(x, dict) and x.keys() >= set(names) for x in pairs):
        return None
    return _alternating([pair[name] for pair in pairs for name in names])


def _best_path(root: Any, replies: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    """Yields the messages from the root of a tree, each time by the reply of the best rank."""
    while isinstance(root, dict):
        yield {"role": root.get("role"), "content": root.get("text")}
        found = [x for x in replies(root) or () if isinstance(x, dict)]
        kept = [x for x in found if str(x.get("deleted")).casefold() != "true"]  # as tables have it
        root = min(kept, key=_order, default=None)


def _order(message: dict[str, Any]) -> float:
    """Returns the rank of a reply, of which 0 is the best, or more than any for one without."""
    try:
        return float(message["rank"])
    except (KeyError, TypeError, ValueError):
        return math.inf


def _tree(fields: dict[str, Any]) -> list[Any] | None:
    path = _best_path(fields["prompt"], lambda node: node.get("replies"))
    return _conversation(path) if isinstance(fields["prompt"], dict) else None


def _tree_rows(rows: list[dict[str, Any]]) -> list[Any] | None:
    """The messages of a tree -> its best path; nothing without its root."""
    replies: dict[object, list[Any]] = {}
    for row in rows:
        if not all(isinstance(row.get(k), str | None) for k in ("message_id", "parent_id", "text")):
            return None
        replies.setdefault(row["parent_id"] or None, []).append(row)
    roots = replies.get(None, [])
    path = [_best_path(root, lambda node: replies.pop(node["message_id"], ())) for root in roots]
    return [each for turns in path for each in _conversation(turns)]


def _message_rows(rows: list[dict[str, Any]]) -> list[Any] | None:
    """The messages of one conversation, each in a row -> the conversation."""
    if not all(role_of(row) in ROLE_NAMES for row in rows):
        return None
    is_one = len(rows) == 1 or any(ROLE_NAMES[role_of(row)] == ASSISTANT for row in rows)
    return _conversation(rows) if is_one else None


def _transcript(text: str) -> list[Any] | None:
    """Human: question, Assistant: answer, each after a blank line -> messages."""
    before, *parts = TRANSCRIPT.split(text)
    if before.strip() or len(parts) < 4:
        return None
    said = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": role.casefold(), "content": text.strip()} for role, text in said]


def _chosen(fields: dict[str, Any]) -> list[Any] | None:
    """Returns the better one of two answers after its prompt: texts, messages or transcripts."""
    chosen, asked = map(_as_text, (fields["chosen"], fields.get("prompt", fields.get("messages"))))
    if isinstance(asked, dict) and are_turns(asked.get("messages")):
        asked = asked["messages"]
    more = fields.get("input")
    if isinstance(asked, str) and isinstance(more, str) and more.strip() and more is not asked:
        asked = f"{asked}\n\n{more}"
    pairs = fields.get("history")
    if isinstance(asked, str) and isinstance(pairs, list):
        before = [text for pair in pairs for text in (pair if isinstance(pair, list) else ())]
        for record in _alternating(before) or ():
            asked = [*record["messages"], {"role": USER, "content": asked}]
    if isinstance(chosen, str):
        beginning = asked if isinstance(asked, str) else ""
        if said := _transcript(beginning + chosen) or _transcript(chosen):
            return _conversation(said)
        if isinstance(asked, str):
            return [{"prompt": asked, "completion": chosen}]
        chosen = {"role": ASSISTANT, "content": chosen}
    turns: Any = [chosen] if isinstance(chosen, dict) else chosen
    if not are_turns(turns):
        return None
    if ROLE_NAMES[role_of(turns[0])] != ASSISTANT:
        return _conversation(turns)
    if isinstance(asked, str):
        asked = [{"role": USER, "content": asked}]
    return _conversation([*asked, *turns]) if are_turns(asked) else None


def _pair(fields: dict[str, Any]) -> list[Any] | str | None:
    """A better and a worse answer -> their prompt, the one, and the other as REJECTED."""
    sides = []
    for side, words in (("chosen", "better"), ("rejected", "worse")):
        if _is_blank(fields.get(side)):
            return f"without a {words} answer"
        if (found := _chosen({**fields, "chosen": fields[side]})) is None:
            return _fault(fields) if "rejected" in fields else None
        (record,) = found
        asked = {"role": USER, "content": record.get("prompt")}
        answer = {"role": ASSISTANT, "content": record.get("completion")}
        sides.append(record.get("messages") or [asked, answer])
    equal = (one == other for one, other in zip(*sides, strict=False))
    same = next((i for i, is_equal in enumerate(equal) if not is_equal), min(map(len, sides)))
    if same == len(sides[0]) == len(sides[1]):
        return "with the same answer twice"
    chosen, rejected = (turns[same:] for turns in sides)
    if not (len(chosen) == len(rejected) == 1 and are_turns(chosen) and are_turns(rejected)):
        return "whose answers follow different prompts"
    if not ROLE_NAMES[role_of(chosen[0])] == ROLE_NAMES[role_of(rejected[0])] == ASSISTANT:
        return "whose answers follow different prompts"
    if not all(map(_says, (*chosen, *rejected))):
        return "with a blank answer"
    if ROLE_NAMES.get(role_of(sides[0][same - 1])) == USER and not _says(sides[0][same - 1]):
        return "with a blank prompt"
    return _conversation([*sides[0][:same], *chosen, {**rejected[0], "role": REJECTED}])


def _fault(pair: dict[str, Any]) -> str:
    """Returns why an answer of a pair cannot be read after its prompt."""
    for answer in map(_as_text, (pair["chosen"], pair["rejected"])):
        if not (isinstance(answer, str) or are_turns([answer]) or are_turns(answer)):
            return "whose answers are not texts or messages"
    return "without a prompt"


def _as_text(value: Any) -> Any:
    """Returns a number as a text, and anything else as it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _says(turn: dict[str, Any]) -> bool:
    """Returns True for a message with a text or with calls."""
    return not all(_is_blank(turn.get(name)) for name in (*TEXT_FIELDS, *CALL_FIELDS))


def _is_blank(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _rated(fields: dict[str, Any]) -> list[Any] | None:
    """Rated answers -> the best one and the worst, if they are not equally good."""
    answers = fields["completions"]
    if not isinstance(answers, list) or not all(isinstance(each, dict) for each in answers):
        return None
    for name in ("overall_score", "fine-grained_score", "score", "rating", "rank"):
        if answers and all(isinstance(each.get(name), int | float) for each in answers):
            answers = sorted(answers, key=lambda each: each[name], reverse=name != "rank")
            said = [x.get("response", x.get("answer")) for x in (answers[0], answers[-1])]
            is_equal = answers[0][name] == answers[-1][name]
            worse = None if is_equal else said[1]
            return [{"prompt": fields["instruction"], "chosen": said[0], "rejected": worse}]
    return None


def _of_two(one: str, other: str, fields: dict[str, Any]) -> list[Any]:
    """Two answers and a choice, among the values that mean `one` or the `other` -> the better."""
    *_, first, second, choice = fields.values()
    choice = str(choice).removesuffix(".0")
    better, worse = (second, first) if choice in other.split() else (first, second)
    worse = worse if choice in f"{one} {other}".split() else None
    return [{"prompt": fields.get("prompt"), "chosen": better, "rejected": worse}]


def _contents(fields: dict[str, Any]) -> list[Any] | None:
    """Contents of the API of Gemini -> messages."""
    turns = fields["contents"]
    if isinstance(fields.get("systeminstruction"), dict) and isinstance(turns, list):
        turns = [{**fields["systeminstruction"], "role": SYSTEM}, *turns]
    if not turns or not isinstance(turns, list):
        return None
    if not all(isinstance(x, dict) and isinstance(x.get("parts"), list) for x in turns):
        return None
    return _conversation(
        {"role": turn.get("role", USER), "content": [_part(part) for part in turn["parts"]]}
        for turn in turns
    )


def _part(part: Any) -> Any:
    part = part if isinstance(part, dict) and part else {"?": None}
    kind = "thinking" if part.get("thought") else "text"
    return {"type": kind, kind: part["text"]} if "text" in part else {"type": next(iter(part))}


def _langchain(messages: Any) -> list[Any] | None:
    """Messages that LangChain has written, as fields or in `data` or `kwargs` -> with roles."""
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(first, dict) or "type" not in first or role_of(first):
        return None
    if not all(isinstance(message, dict) for message in messages):
        return None
    found = []
    for message in messages:
        inner = message.get("data", message.get("kwargs"))
        inner = dict(inner) if isinstance(inner, dict) else dict(message)
        kind, path = inner.pop("type", None), message.get("id")
        if kind is None and isinstance(path, list):  # the name of its class
            kind = path[-1] if path else None
        role = re.sub("Message(Chunk)?$", "", str(kind)).casefold()
        found.append({"role": role, **inner})
    return _conversation(found) if are_turns(found) else None


def _task(fields: dict[str, Any]) -> list[Any] | None:
    """A task of Natural Instructions -> its instances, with the first of their answers."""
    said, found = _first(fields["definition"]), _records({"": fields["instances"]}) or [None]
    if not all(map(is_record, found)):
        return None
    return [{"instruction": said, **each, "output": _first(each.get("output"))} for each in found]


def _first(value: Any) -> Any:
    """Returns the first part of a list, or anything else as it is."""
    return value[0] if isinstance(value, list) and value else value


CONTAINER = Shape("the records in a list", f"{CONTAINERS} {PLAIN}", _records, is_chat=False)
SHAPES = (
    # Objects and lists that hold records. The first four are written by `DataFrame.to_json`.
    Shape("the rows of a table", "columns index? data", _split_frame, is_chat=False),
    Shape("the rows of a table", "data schema", _records, is_chat=False),
    Shape("the rows of a table", OBJECT, _frame, is_chat=False),
    Shape("rows without names", LIST, _values, is_chat=False),
    Shape("the questions about paragraphs", "paragraphs", _articles, is_chat=False),
    Shape("the records in 'row'", "row row_idx", lambda x: [x["row"]], is_chat=False),
    Shape("the first answer to each question", "question context? answers !answer", _first_answer),
    # https://github.com/allenai/natural-instructions
    Shape("the instances of a task", "definition instances", _task, is_chat=False),
    Shape(
        "the bodies of requests",
        "body custom_id|url",
        lambda x: [x["body"]] if isinstance(x["body"], dict) else None,
    ),
    # Conversations.
    Shape(
        "lists of texts as questions and answers",
        f"data|dialog|dialogue|utterances|conversation|conversations {PLAIN}",
        lambda x: _alternating(x["data"]),
    ),
    Shape("pairs as conversations", f"{TURNS}|dialog|dialogue", lambda x: _paired(x["messages"])),
    # https://github.com/LAION-AI/Open-Assistant/tree/main/oasst-data
    Shape("the replies of the best rank", "prompt message_tree_id", _tree),
    Shape(
        "the replies of the best rank",
        "message_tree_id message_id parent_id text role",
        _tree_rows,
        joins="message_tree_id",
    ),
    Shape(
        "pairs of a better and a worse answer",
        f"{CHOSEN} {REJECTED_NAMES}? {OF_PAIRS}",
        _pair,
        preferences=True,
    ),
    Shape(
        "pairs of a better and a worse answer",
        f"!chosen {REJECTED_NAMES} {OF_PAIRS}",
        lambda _: "without a better answer",
        preferences=True,
    ),
    # https://huggingface.co/datasets/openbmb/UltraFeedback
    Shape("the best and the worst of rated answers", RATED, _rated),
    # PKU-SafeRLHF, HelpSteer3, those of Chatbot Arena, SHP
    Shape(OF_TWO, "prompt response_0 response_1 better_response_id", partial(_of_two, "0", "1")),
    Shape(
        OF_TWO,
        "prompt|context response1 response2 overall_preference",
        partial(_of_two, "-3 -2 -1", "1 2 3"),
    ),
    Shape(OF_TWO, "conversation_a conversation_b winner", partial(_of_two, "model_a", "model_b")),
    Shape(OF_TWO, "prompt|history human_ref_a human_ref_b labels", partial(_of_two, "1", "0")),
    Shape(
        "the chosen answers of preferences, not the rejected ones (--init-from learns from both),",
        f"{CHOSEN} {REJECTED_NAMES} {OF_PAIRS}",
        _chosen,
        preferences=False,
    ),
    # https://ai.google.dev/api/caching#Content
    Shape("the contents of Gemini", "contents systeminstruction|system_instruction?", _contents),
    Shape("the messages of LangChain", TURNS, lambda x: _langchain(x["messages"])),
    Shape("the messages of LangChain", LIST, lambda x: _langchain(x[LIST])),
    Shape("the messages of LangChain", "type data|kwargs|content", _langchain, joins=""),
    Shape(
        "a list of messages as a conversation",
        LIST,
        lambda x: _conversation(x[LIST]) if are_turns(x[LIST]) else None,
    ),
    Shape(
        "a message per row",
        "conversation_id|dialogue_id|session_id|thread_id role|from content|value|text",
        _message_rows,
        joins="conversation_id",
    ),
    Shape("a message per row", "role|from content|value !text", _message_rows, joins=""),
    Shape("the records in a list", LIST, lambda x: _records({"": x[LIST]}), is_chat=False),
    CONTAINER,
)
# All names of fields in the table, of which a record may need none but one.
SHAPE_FIELDS = {
    name for shape in SHAPES for name in re.split(r"[ |?]+", shape.names) if name[:1] != "!"
}

"""A task: items in a file, of one kind, and the verdicts of a model on them."""

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, check_type, count_of, shown_value
from smallmind.console import activity
from smallmind.corpus.fields import read_fields
from smallmind.corpus.reading import shown
from smallmind.corpus.records import named
from smallmind.nn.transformer import TransformerModel
from smallmind.tasks.results import ItemGroup, TaskResult
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.form import Form

GROUPS = ("group", "paradigm", "UID", "task", "subset", "category", "subject", "type")
MAX_ITEMS = 2_000_000
QUICK_ITEMS = 1000  # which take no time
MAX_NAMES = 12  # of fields in a message


class ItemRecord:
    """A record of a file of items, whose fields are asked for by any of several names."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self._fields, self.source = fields, source  # "pairs.jsonl: line 7"

    def value(self, names: Sequence[str]) -> Any:
        """-> the first of these fields, if need be in other letter case. InputError without any."""
        if (name := named(self._fields, names)) is None:
            known = ", ".join(shown(name, 40) for name in list(self._fields)[:MAX_NAMES])
            raise self.wrong(f"has no field {names[0]!r}", f"it has {known or 'none'}")
        return self._fields[name]

    def text(self, names: Sequence[str]) -> str:
        """Returns a field that is a text or a number, as text. InputError for anything else."""
        if (found := as_text(self.value(names))) is None:
            raise self.wrong(f"has a field {named(self._fields, names)!r} that is not text")
        return found

    def group(self, by: str | None) -> str:
        """Returns the group of an item: the field that is chosen, else a likely one, else none."""
        names = (by,) if by else GROUPS
        if by is None and named(self._fields, names) is None:
            return ""
        return "" if self.value(names) is None else self.text(names).strip()

    def wrong(self, problem: str, advice: str = "correct or remove it") -> InputError:
        return InputError(f"{self.source} {problem}; {advice}")


def as_text(value: Any) -> str | None:
    """Returns a text, or a number as it is written; None for anything else."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # JSON can write halves of characters
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return shown_value(value) if is_number else None


class Item(NamedTuple):
    """One item: its group, the texts that a model reads, and the number of the right one."""

    group: str
    texts: tuple[str, ...]
    right: int = 0


class Judged(NamedTuple):
    """The verdicts on items: for each measure whether each is right. `cut` were too long."""

    verdicts: tuple[Sequence[bool], ...]
    cut: int


class Task:
    """A kind of task: how an item is read, and how a model is judged by all of them.

    A new kind is a file with a subclass, and a line in `parts.TASKS`.
    """

    noun: ClassVar[str]  # what an item is called
    measures: ClassVar[tuple[str, ...]]  # by which an item may be right

    @staticmethod
    def item(record: ItemRecord, group: str) -> Item:
        """Returns the item of a record. InputError if it has none."""
        raise NotImplementedError

    @staticmethod
    def judge(
        model: TransformerModel,
        tokenizer: Tokenizer,
        items: Sequence[Item],
        form: Form | None = None,
    ) -> Judged:
        """Returns the verdicts of a model on some items; form is that of what it writes."""
        raise NotImplementedError


def read_items(kind: str, path: str | PathLike[str], by: str | None = None) -> list[Item]:
    """Returns the items of a file, in its order, in groups by the field `by`.

    InputError if one of them is damaged or lacks a field.
    """
    task, name = _task(kind), shown(path)
    items = []
    for fields, where in read_fields(check_type("path", path, str, PathLike)):
        record = ItemRecord(fields, f"{name}: {where}")
        items.append(task.item(record, record.group(by)))
        if len(items) > MAX_ITEMS:
            raise InputError(f"{name} has more than {MAX_ITEMS:,} items; divide it into several")
    return items


def evaluate_task(
    model: TransformerModel,
    tokenizer: Tokenizer,
    kind: str,
    path: str | PathLike[str],
    by: str | None = None,
    skips_unknown: bool = False,
    name: str = "the model",
    form: Form | None = None,
) -> TaskResult:
    """Returns the result of a model on a file of "pairs", "choices" or "exact" answers.

    Items with characters that its tokenizer does not know are refused, or skipped and counted. `by`
    is the field of their groups, `form` that of exact answers. InputError if the file is damaged or
    has no items.
    """
    task, items = _task(kind), read_items(kind, path, by)
    known = _known(tokenizer, items, shown(path), skips_unknown, task.noun)
    doing = f"Evaluating {count_of(len(known), task.noun)}"
    with activity.doing(doing, usual=len(known) < QUICK_ITEMS):
        judged = task.judge(model, tokenizer, known, form)
    columns: dict[str, list[list[str]]] = {}
    for item, *verdicts in zip(known, *judged.verdicts, strict=True):
        found = columns.setdefault(item.group, [[] for _ in task.measures])
        for column, verdict in zip(found, verdicts, strict=True):
            column.append("01"[bool(verdict)])
    groups = tuple(
        ItemGroup(group or "(none)", tuple(map("".join, found))) for group, found in columns.items()
    )
    return TaskResult(
        kind,
        task.noun,
        shown(Path(path).name),
        hashlib.sha256(json.dumps([kind, known]).encode()).hexdigest(),
        name,
        model.precision.value,
        task.measures,
        groups,
        len(items) - len(known),
        judged.cut,
    )


def _task(kind: str) -> type[Task]:
    if check_type("kind", kind, str) not in parts.TASKS:
        raise InputError(f"task={kind!r} must be one of {', '.join(parts.TASKS)}")
    found: type[Task] = parts.load(parts.TASKS, kind)
    return found


def _known(
    tokenizer: Tokenizer, items: list[Item], name: str, skips: bool, noun: str
) -> list[Item]:
    """-> the items that the tokenizer can encode. InputError if that is not all, unless it
    `skips`.
    """
    unknown = tokenizer.unknown("".join({text for item in items for text in item.texts}))
    if not unknown:
        return items
    odd = set(unknown)
    known = [item for item in items if not any(odd.intersection(text) for text in item.texts)]
    if not known or not skips:
        count = count_of(len(items) - len(known), noun)
        characters = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        advice = "leave them out with --unknown skip, or " if known else ""
        raise InputError(
            f"{name} has {count if known else f'only {noun}s'} with characters that the model has "
            f"never seen: {characters}; {advice}retrain with --tokenizer bpe, which handles any "
            f"text"
        )
    return known

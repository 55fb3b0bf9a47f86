"""Questions with several answers to choose from: the likeliest one is the model's."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from smallmind.nn.transformer import TransformerModel
from smallmind.tasks.likelihood import Scorer
from smallmind.tasks.task import Item, ItemRecord, Judged, Task, as_text
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.form import Form

CONTEXTS = ("context", "ctx", "question", "query", "prompt", "goal", "premise", "text", "sentence")
CHOICES = ("choices", "options", "endings", "candidates", "answers")
ANSWERS = (
    "answer",
    "label",
    "gold",
    "target",
    "correct",
    "answer_index",
    "answer_idx",
    "answerKey",
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class MultipleChoice(Task):
    """Right if the right continuation is the likeliest one.

    As a whole, or per character or byte of it, which does not favour short ones.
    """

    noun = "question"
    measures = ("right", "by character", "by byte")

    @staticmethod
    def item(record: ItemRecord, group: str) -> Item:
        context, (choices, labels) = record.text(CONTEXTS), _choices(record)
        right = _right(record.value(ANSWERS), choices, labels)
        if right is None:
            raise record.wrong(
                "has an answer that is not one of its choices",
                "give its number, counting from 0, its letter, or the choice itself",
            )
        return Item(group, (context, *choices), right)

    @staticmethod
    def judge(
        model: TransformerModel,
        tokenizer: Tokenizer,
        items: Sequence[Item],
        _form: Form | None = None,
    ) -> Judged:
        pairs = [
            (context, f"{separator_of(context, choice)}{choice}")
            for _, (context, *choices), _ in items
            for choice in choices
        ]
        found = iter(Scorer(model, tokenizer).continuations(pairs))
        measured: list[tuple[bool, ...]] = []
        cut = 0
        for _, (_, *choices), right in items:
            likelihoods = list(itertools.islice(found, len(choices)))
            values = np.array([each.value for each in likelihoods])
            lengths = [[len(choice), len(choice.encode())] for choice in choices]
            characters, sizes = np.array(lengths, float).T
            chosen = (values.argmax(), (values / characters).argmax(), (values / sizes).argmax())
            measured.append(tuple(bool(choice == right) for choice in chosen))
            cut += any(each.is_cut for each in likelihoods)
        return Judged(tuple(zip(*measured, strict=True)), cut)


def separator_of(context: str, choice: str) -> str:
    """Returns a space between a context and what continues it, unless either brings one."""
    return "" if not context or context[-1].isspace() or choice[:1].isspace() else " "


def _choices(record: ItemRecord) -> tuple[list[str], list[str]]:
    """Returns the texts of the choices, and their labels if they have any."""
    value = record.value(CHOICES)
    labels: list[str] = []
    if isinstance(value, str):  # in a table
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if isinstance(value, dict):
        labels = [as_text(label) or "" for label in _list(value.get("label", value.get("labels")))]
        value = value.get("text", value.get("texts"))
    texts = [as_text(text) for text in _list(value)]
    if len(texts) < 2 or not all(texts) or len(labels) not in (0, len(texts)):
        raise record.wrong("has no list of two or more choices that are text")
    return [text for text in texts if text], labels


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _right(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int | None:
    """Returns the number of the right choice, from 0 on; None if the answer is none of them."""
    if isinstance(answer, float) and answer.is_integer():  # of a column with gaps
        answer = int(answer)
    if type(answer) is int and not labels:
        return answer if 0 <= answer < len(choices) else None
    if not (text := (as_text(answer) or "").strip()):
        return None
    for known in (labels, [choice.strip() for choice in choices], LETTERS[: len(choices)]):
        if text in list(known):
            return list(known).index(text)
    if text.isdecimal() and len(text) < 4 and int(text) < len(choices):
        return int(text)
    return None

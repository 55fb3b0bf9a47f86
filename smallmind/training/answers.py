"""Asks a model the held-out questions of its conversations, and compares what it answers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from smallmind.console.activity import clock
from smallmind.nn.transformer import TransformerModel
from smallmind.text.conversations import PackedDataset, Question
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.records import AnswersRecord
from smallmind.writing.answers import SPARE_TOKENS, answers, likeliest, written
from smallmind.writing.decoder import Continuation

MAX_QUESTIONS, MAX_SHOWN = 100, 12
MIN_QUESTIONS = 4  # however long they take
SHORT_ANSWER = 48  # tokens: longer answers are seldom the same word for word
MAX_CHARACTERS = 1000  # of a question or an answer in a record


class Answered(NamedTuple):
    """A held-out question, the answer that was wanted, and the model's likeliest one."""

    question: str
    wanted: str
    answer: str

    def __str__(self) -> str:
        return f"{self.question.strip()}\n> {self.answer.strip()}"

    @property
    def is_exact(self) -> bool:
        """True if both answers are the same, but for spaces around them."""
        return self.answer.strip() == self.wanted.strip()


def ask(
    step: int,
    model: TransformerModel,
    data: PackedDataset,
    most: int = MAX_QUESTIONS,
    check_stop: Callable[[], object] = lambda: None,
    seconds: float | None = None,
) -> AnswersRecord:
    """Asks at most this many held-out questions, with short answers if there are any.

    With `seconds` it asks MIN_QUESTIONS, and as many more as that leaves time for.
    """
    questions = data.questions(most, SHORT_ANSWER)

    def answers_to(some: Sequence[int]) -> dict[int, Answered]:
        texts = [_text(model, data.tokenizer, questions[i]) for i in some]
        found = {}
        for number in written(model, data.tokenizer, texts):
            check_stop()
            question = questions[some[number]]
            found[some[number]] = _answered(data.tokenizer, question, texts[number].text)
        return found

    everything, begun = range(len(questions)), clock()
    first = everything if seconds is None else _spread(everything, MIN_QUESTIONS)
    found = answers_to(first)
    if seconds is not None and (left := [i for i in everything if i not in found]):
        took = (clock() - begun) / len(first)
        affordable = len(left) if took <= 0 else int(seconds / took) - len(first)
        found |= answers_to(_spread(left, affordable))
    answered = [found[i] for i in sorted(found)]
    exact = sum(one.is_exact for one in answered)
    shown = tuple(
        (one.question[-MAX_CHARACTERS:], one.wanted[:MAX_CHARACTERS], one.answer[:MAX_CHARACTERS])
        for one in answered[:MAX_SHOWN]
    )
    return AnswersRecord(step, exact / len(answered), len(answered), shown)


def _spread(numbers: Sequence[int], most: int) -> Sequence[int]:
    """Returns at most `most` of these numbers, spread evenly."""
    if len(numbers) <= most:
        return numbers
    return [numbers[i * len(numbers) // most] for i in range(max(0, most))]


def answer(model: TransformerModel, tokenizer: Tokenizer, question: Question) -> Answered:
    """-> the model's likeliest answer to a question, of a few tokens more than the wanted one."""
    (text,) = answers(model, tokenizer, [_text(model, tokenizer, question)])
    return _answered(tokenizer, question, text)


def _text(model: TransformerModel, tokenizer: Tokenizer, question: Question) -> Continuation:
    most = len(_wanted(tokenizer, question)) + SPARE_TOKENS
    room = max(1, model.config.block_size - len(question.ids))
    return likeliest(tokenizer, question.ids, min(most, room), model.config.block_size)


def _wanted(tokenizer: Tokenizer, question: Question) -> np.ndarray:
    return question.answer[~np.isin(question.answer, list(tokenizer.ends))]


def _answered(tokenizer: Tokenizer, question: Question, text: str) -> Answered:
    template, asked = format_of(tokenizer), tokenizer.decode(question.asked)
    said = template.last_said(asked) if template else asked
    return Answered(said, tokenizer.decode(_wanted(tokenizer, question)), text)

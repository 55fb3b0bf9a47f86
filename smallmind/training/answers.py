"""Asks a model the held-out questions of its conversations, and compares what it answers."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from smallmind.console import activity
from smallmind.generation import Writer
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import GenerationConfig
from smallmind.text.conversations import PackedDataset, Question
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.records import AnswersRecord

MOST_ASKED, MOST_SHOWN = 100, 12
SHORT = 48  # tokens: longer answers are seldom the same word for word
MORE = 8  # tokens that an answer may be longer than the wanted one
LONGEST = 1000  # characters that are kept of a question or an answer


class Answered(NamedTuple):
    """A held-out question, the answer that was wanted, and the model's likeliest one."""

    question: str
    wanted: str
    given: str

    def __str__(self) -> str:
        return f"{self.question.strip()}\n> {self.given.strip()}"

    @property
    def is_exact(self) -> bool:
        """True if both answers are the same, but for spaces around them."""
        return self.given.strip() == self.wanted.strip()


def ask(
    step: int,
    model: TransformerModel,
    data: PackedDataset,
    most: int = MOST_ASKED,
    check_stop: Callable[[], object] = lambda: None,
) -> AnswersRecord:
    """Asks at most this many held-out questions, with short answers if there are any."""
    answers = []
    for question in activity.parts(data.questions(most, SHORT)):
        check_stop()
        answers.append(answer(model, data.tokenizer, question))
    exact = sum(one.is_exact for one in answers)
    shown = tuple(
        (one.question[-LONGEST:], one.wanted[:LONGEST], one.given[:LONGEST])
        for one in answers[:MOST_SHOWN]
    )
    return AnswersRecord(step, exact / len(answers), len(answers), shown)


def answer(model: TransformerModel, tokenizer: Tokenizer, question: Question) -> Answered:
    """The model's likeliest answer to a question, of a few tokens more than the wanted one."""
    wanted = question.answer[~np.isin(question.answer, list(tokenizer.ends))]
    room = max(1, model.config.block_size - len(question.ids))
    config = GenerationConfig(max_tokens=min(len(wanted) + MORE, room), temperature=0.0)
    (sample,) = Writer(model, tokenizer, question.ids, config).samples()
    template, asked = format_of(tokenizer), tokenizer.decode(question.asked)
    said = template.last_said(asked) if template else asked
    return Answered(said, tokenizer.decode(wanted), sample.text)

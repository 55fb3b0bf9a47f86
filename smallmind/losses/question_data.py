"""Questions as data: what is asked, and the answers that are wanted, if they are known."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_field, check_type
from smallmind.console import activity
from smallmind.settings.config import RunConfig
from smallmind.text.chat import (
    ASSISTANT,
    USER,
    ChatFormat,
    Conversation,
    Turn,
    encode_each,
    is_document,
)
from smallmind.text.conversations import PackedDataset, questions_in, spread
from smallmind.text.dataset import Batch, Dataset, Question
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer

SPARE_TOKENS = 8  # that an answer may be longer than the longest wanted one
UNKNOWN_TOKENS = 64  # of an answer at most, where none is wanted
JUDGED_TOGETHER = 64  # questions of an evaluation


class Asked(NamedTuple):
    """A question that is asked, and the answer that is wanted, if there is one."""

    ids: np.ndarray  # int32 (n,), the conversation up to where the answer begins
    said: str  # the question
    wanted: str | None
    answer: np.ndarray  # int32 (m,), the tokens of the wanted answer, with the one that ends it


class QuestionsDataset(Dataset):
    """Questions, each in a window of `answers` times T tokens: one sequence for each answer.

    T holds the longest question and an answer of `most` tokens. `conversations` are marked tokens
    of both parts, with the wanted answers. InputError without a question in either part.
    """

    is_packed, unit = True, "question"
    tokenizer: Tokenizer

    def __init__(
        self,
        train: Sequence[Asked],
        held_out: Sequence[Asked],
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int,
        answers: int,
        most: int,
        conversations: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        if not (train and held_out):
            raise InputError("rewards need at least 2 questions, one of which is held out")
        self._asked = [*train, *held_out]
        self._count, self.most, self.sequences = len(train), most, answers
        self.batch_size = check_field(RunConfig, "batch_size", batch_size)
        self.seed = check_field(RunConfig, "seed", seed)
        self.tokenizer, self._conversations = tokenizer, conversations
        self.longest = max(len(asked.ids) for asked in self._asked) + most - 1
        self.block_size = self.stride = answers * self.longest
        self.train, self.held_out = (
            _QuestionWindows(part, self.block_size) for part in (train, held_out)
        )

    @classmethod
    def of_texts(
        cls,
        tokenizer: Tokenizer,
        texts: Iterable[tuple[str, str | None]],
        answers: int,
        batch_size: int = RunConfig.batch_size,
        seed: int = RunConfig.seed,
        most: int | None = None,
    ) -> "QuestionsDataset":
        """(question, wanted answer or None) of each -> the data; the last tenth is held out.

        A prompt of a tokenizer with a template is what the user says, else a text that is
        continued.
        """
        check_type("tokenizer", tokenizer, Tokenizer)
        template, asked = format_of(tokenizer), []
        for said, wanted in texts:
            answer = np.empty(0, np.int32) if wanted is None else tokenizer.encode(wanted)
            if template:
                ids = template.prompt(tokenizer, (Turn(USER, said),))
            else:
                ids = tokenizer.prompt(said)
            asked.append(Asked(ids, said, wanted, answer))
        count = len(asked) - max(1, len(asked) // 10)
        most = most or most_tokens(asked)
        return cls(asked[:count], asked[count:], tokenizer, batch_size, seed, answers, most)

    def __repr__(self) -> str:
        return (
            f"<QuestionsDataset: {self.count_of('train'):,} training and "
            f"{self.count_of('held_out'):,} held-out questions, batches of {self.batch_size} x "
            f"{self.sequences} answers>"
        )

    @property
    def digest(self) -> str:
        """The SHA-256 of all questions and wanted answers."""
        sha = hashlib.sha256()
        for asked in self._asked:
            sha.update(repr((asked.said, asked.wanted)).encode())
            sha.update(asked.ids.astype("<i4").tobytes())
        return sha.hexdigest()

    @property
    def tokens_in_memory(self) -> int:
        return sum(len(asked.ids) + len(asked.answer) for asked in self._asked)

    @property
    def evaluated_tokens(self) -> int:
        return JUDGED_TOGETHER * self.longest

    def asked(self, number: int) -> Asked:
        """Returns a question by its number; those that are held out come last."""
        return self._asked[number]

    def first_without_answer(self) -> str | None:
        """Returns the first question to which no answer is wanted."""
        return next((asked.said for asked in self._asked if asked.wanted is None), None)

    def windows(self, starts: np.ndarray, out: Batch | None = None) -> Batch:
        """Questions that begin at starts (B,), multiples of block_size."""
        if out is None:
            shape = len(starts), self.block_size
            out = Batch(np.empty(shape, np.int32), np.empty(shape, np.int32), starts)
        batch = out.part(slice(len(starts)))
        batch.ids[...] = batch.targets[...] = 0
        for row, start in enumerate(starts.tolist()):
            ids = self._asked[start // self.block_size].ids
            batch.ids[row, : len(ids)] = ids
        return batch._replace(starts=starts, weights=None, firsts=None)

    def batches_of(self, part: str) -> int:
        """Returns the number of batches of a part, each of its questions in one."""
        return -(-self.count_of(part) // JUDGED_TOGETHER)

    def count_of(self, part: str) -> int:
        """Returns the number of questions of a part."""
        return self._count if part == "train" else len(self._asked) - self._count

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """Returns batch `number` of a part, evenly from all of it; after the last the first."""
        first = 0 if part == "train" else self._count
        count, number = self.batches_of(part), number % self.batches_of(part)
        rows = np.arange(first + number, first + self.count_of(part), count)
        nothing = np.empty((len(rows), 0), np.int32)
        return Batch(nothing, nothing, rows * self.block_size)

    @property
    def stored(self) -> Any:
        return self.train, self.held_out

    def as_written(self) -> Dataset:
        """Returns the conversations with the wanted answers. InputError if there are none."""
        if self._conversations is None or self.first_without_answer():
            raise InputError(
                "the questions have no expected answers to compute a loss on; the report of the "
                "run shows the rewards"
            )
        train, held_out = self._conversations
        sizes = self.longest, self.batch_size, self.seed
        return PackedDataset(train, held_out, *sizes, self.tokenizer)

    def as_text(self) -> Dataset:
        """Returns some questions with their answers as one text."""
        parts = [np.append(asked.ids, asked.answer) for asked in self._asked[: self._count]]
        ids = np.concatenate(parts[: 64 * self.batch_size]).astype(np.int32)
        T = min(self.longest, len(ids) // 2)
        return Dataset(ids, T, self.batch_size, self.seed)

    def questions(self, most: int, longest: int) -> list[Question]:
        """Returns the questions that are held out, evenly."""
        found = [Question(x.ids, x.ids, x.answer) for x in self._asked[self._count :]]
        found = [question for question in found if len(question.answer) <= longest] or found
        return spread(found, most)


class _QuestionWindows:
    """Windows of questions as tokens one after another, and one more: only as many as are read."""

    def __init__(self, asked: Sequence[Asked], size: int) -> None:
        self._asked, self._size = asked, size

    def __len__(self) -> int:
        return len(self._asked) * self._size + 1

    def __getitem__(self, places: slice) -> np.ndarray:
        first, last, _ = places.indices(len(self))
        found = np.zeros(max(0, last - first), np.int32)
        for row in range(first // self._size, min(len(self._asked), -(-last // self._size))):
            ids, at = self._asked[row].ids, row * self._size - first
            part = ids[max(0, -at) : max(0, len(found) - at)]
            found[max(0, at) : max(0, at) + len(part)] = part
        return found


def most_tokens(asked: Sequence[Asked]) -> int:
    """Returns how many tokens answers may have: a few more than the longest wanted one."""
    longest = max((len(one.answer) for one in asked), default=0)
    return longest + SPARE_TOKENS if longest else UNKNOWN_TOKENS


def encode_questions(
    tokenizer: Tokenizer, template: ChatFormat, conversations: Sequence[Conversation]
) -> list[tuple[list[Asked], np.ndarray]]:
    """-> of each conversation the questions in it, and its marked tokens.

    These are what comes before each answer that is learned; also a last turn of the user's, to
    which no answer is known.
    """
    with activity.doing("Encoding the questions", usual=True):
        marked = encode_each(tokenizer, template, activity.parts(conversations))
        return [
            (list(_asked_in(tokenizer, template, turns, tokens)), tokens)
            for turns, tokens in zip(conversations, marked, strict=True)
        ]


def _asked_in(
    tokenizer: Tokenizer, template: ChatFormat, turns: Conversation, marked: np.ndarray
) -> Iterator[Asked]:
    if is_document(turns):
        return
    said, answers = None, list[tuple[str | None, Turn]]()
    for turn in turns:
        if turn.role == USER:
            said = turn.text
        elif turn.role == ASSISTANT and turn.learned:
            answers.append((said, turn))
    questions = list(questions_in(marked))
    if len(questions) == len(answers):  # answers one after another are learned as one
        for question, (asked, turn) in zip(questions, answers, strict=True):
            if asked is not None:
                # Calls are in the words of the template, as the model has to write them.
                ids = question.answer[:-1] if turn.more else ()
                wanted = tokenizer.decode(ids).strip() if turn.more else turn.text
                yield Asked(question.ids, asked, wanted, question.answer)
    if turns[-1].role == USER:
        ids = template.prompt(tokenizer, turns)
        yield Asked(ids, turns[-1].text, None, np.empty(0, np.int32))

"""Evaluates a model on a text or some windows of it, also between the steps of a training."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.signals import Stopped
from smallmind.losses.cross_entropy import CrossEntropy
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Dataset, Tokens
from smallmind.text.tokenizer import Spelled, Tokenizer
from smallmind.training.answers import MAX_QUESTIONS, SHORT_ANSWER, answer, ask
from smallmind.training.records import AnswersRecord, EvaluationRecord, LossRecord
from smallmind.writing.generation import generate

Spells = Callable[[np.ndarray], Spelled]  # tokens, an array of any shape -> what they spell
# The sums that a batch adds to an evaluation: losses, what their sum is divided by, tokens,
# characters, bytes, correct.
_Counts = tuple[list[float], int, int, int, int, int]
_Batches = Sequence[Callable[[], _Counts]]  # of an evaluation: any process may compute each

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly
MAX_HELD_OUT = 1 << 18  # tokens predicted at the end of a run: the loss to 0.003 nats or so
TEXT = CrossEntropy()  # the loss of a text, whatever a run minimises
EVALUATION_SHARE = 0.1  # share of the time of a run for evaluations and questions
SAMPLE_TOKENS = 400


def evaluating_seconds(training_seconds: float) -> float:
    """Returns the time for evaluations and questions in a run whose steps take so many seconds."""
    return EVALUATION_SHARE / (1 - EVALUATION_SHARE) * training_seconds


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token over `tokens` predictions.

    `characters` and `bytes` are the UTF-8 length of the evaluated tokens. `correct` counts the
    predictions in which the model ranked the right token first.
    """

    loss: float
    tokens: int
    characters: int
    bytes: int
    correct: int

    @property
    def nats_per_character(self) -> float:
        return self.loss * self.tokens / self.characters

    @property
    def bits_per_character(self) -> float:
        return self.nats_per_character / math.log(2)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8: comparable between tokenizers."""
        return self.loss * self.tokens / self.bytes / math.log(2)

    @property
    def perplexity(self) -> float:
        """Returns exp(loss): as hard to guess as among this many equally likely tokens."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens


def _total(parts: Sequence[_Counts]) -> Evaluation:
    """The sums of all batches, in order -> the mean of the losses."""
    total = 0.0
    for loss in itertools.chain.from_iterable(part[0] for part in parts):
        total += loss  # one by one: the sum does not depend on who computed them
    divisor, tokens, characters, nbytes, correct = map(sum, list(zip(*parts, strict=True))[1:])
    return Evaluation(total / divisor, tokens, max(1, characters), max(1, nbytes), correct)


def _evaluate(batches: _Batches) -> Evaluation:
    return _total([compute() for compute in activity.parts(batches)])


def evaluate(
    model: TransformerModel,
    tokens: Tokens,
    spells: Spells = Spelled.as_bytes,
    batch_size: int = 32,
    most: int | None = None,
    shift: float = 0.0,
) -> Evaluation:
    """Evaluates a model on a text. Arguments and errors as `_text_batches`."""
    return _evaluate(_text_batches(model, tokens, spells, batch_size, most, shift))


def _text_batches(
    model: TransformerModel,
    tokens: Tokens,
    spells: Spells,
    batch_size: int,
    most: int | None = None,
    shift: float = 0.0,
) -> _Batches:
    """tokens (n,) -> the mean over all of them but the first, which nothing predicts.

    Windows overlap by half: every token is predicted from at least block_size / 2 tokens before
    it, except at the very start. With `most`, about as many predictions at most, spread evenly;
    `shift`, below 1, chooses other windows, by as much of the space between two.
    InputError for fewer than two tokens.
    """
    n = len(tokens) - 1
    if n < 1:
        raise InputError(f"an evaluation needs at least 2 tokens; the text has {len(tokens)}")
    T = min(model.config.block_size, n)

    def compute(windows: list[tuple[int, slice]]) -> _Counts:
        rows = np.stack([tokens[start : start + T + 1] for start, _ in windows])
        targets = rows[:, 1:]
        right = np.empty(targets.shape, np.bool_)
        losses, counted, characters, nbytes, correct = [], 0, 0, 0, 0
        rows_of_losses = model.losses(rows[:, :-1], targets, right)
        for (_, new), row, ids, hits in zip(windows, rows_of_losses, targets, right, strict=True):
            losses.append(float(row[new].sum(dtype=np.float64)))
            correct += int(hits[new].sum())
            spelled = spells(ids[new])
            characters, nbytes = characters + spelled.characters, nbytes + spelled.bytes
            counted += len(row[new])
        return losses, counted, counted, characters, nbytes, correct

    batches = _overlapping(n, T, batch_size, most, shift)
    return [functools.partial(compute, windows) for windows in batches]


def count_overlapping(n: int, T: int, most: int | None = None) -> int:
    """-> the number of windows `evaluate` takes for n predictions, or about `most` of them."""
    T = min(T, n)
    stride = max(1, T // 2)
    in_all = math.ceil((n - T) / stride) + 1
    return in_all if most is None else min(in_all, max(1, most // stride))


def _overlapping(
    n: int, T: int, batch_size: int, most: int | None, shift: float
) -> Iterator[list[tuple[int, slice]]]:
    """Batches of windows of T of n tokens: where each begins, and its targets that are new."""
    stride = max(1, T // 2)
    windows_in_all = math.ceil((n - T) / stride) + 1
    count = count_overlapping(n, T, most)
    skipped = int(shift * (windows_in_all // count))
    scored = 0
    for first in range(0, count, batch_size):
        # The last batch is as large as the others: arrays of its own size would take more memory.
        first = max(0, min(first, count - batch_size))
        windows = []
        for i in range(first, min(first + batch_size, count)):
            start = min((i * windows_in_all // count + skipped) * stride, n - T)
            windows.append((start, slice(max(scored - start, T - stride) if start else 0, None)))
            scored = max(scored, start + T)
        yield windows


def evaluate_held_out(
    model: TransformerModel, dataset: Dataset, batch_size: int = 32
) -> Evaluation:
    """Evaluates a model on the held-out part of a text: all of it, or about MAX_HELD_OUT."""
    dataset = dataset.as_written()
    with activity.doing("Evaluating the held-out text", usual=True):
        return _evaluate(_held_out_batches(model, dataset, batch_size, TEXT))


def _held_out_batches(
    model: TransformerModel, dataset: Dataset, batch_size: int, loss: Loss
) -> _Batches:
    if dataset.is_packed:
        most = math.ceil(MAX_HELD_OUT / dataset.evaluated_tokens)
        numbers = range(min(most, dataset.held_out_batches))
        return _packed_batches(model, dataset, "held_out", numbers, loss)
    return _text_batches(model, dataset.held_out, dataset.spelled, batch_size, MAX_HELD_OUT)


def _packed_batches(
    model: TransformerModel, dataset: Dataset, part: str, numbers: Sequence[int], loss: Loss
) -> _Batches:
    """Returns some batches of a part, whose rows have learned tokens."""
    special = list(dataset.tokenizer.special.values()) if dataset.tokenizer else []

    def compute(number: int) -> _Counts:
        losses, count, right, targets = loss.evaluated(
            model, dataset.evaluation_batch(part, number)
        )
        spelled = dataset.spelled(targets[~np.isin(targets, special)])  # the others are no text
        return losses, count, count, spelled.characters, spelled.bytes, right

    return [functools.partial(compute, number) for number in numbers]


def _part_batches(
    model: TransformerModel, dataset: Dataset, part: str, batches: int, loss: Loss
) -> _Batches:
    """Returns batches of the part "train" or "held_out": the same ones at every step.

    With 0, the whole held-out part, and as many windows of the training part.
    """
    spells, count = dataset.spelled, batches or dataset.held_out_batches
    if dataset.is_packed:
        numbers = range(min(count, dataset.batches_of(part)))
        return _packed_batches(model, dataset, part, numbers, loss)
    if part == "held_out" and not batches:
        return _text_batches(model, dataset.held_out, spells, dataset.batch_size)

    def compute(number: int) -> _Counts:
        batch = dataset.evaluation_batch(part, number)
        right = np.empty(batch.targets.shape, np.bool_)
        mean = float(model.losses(batch.ids, batch.targets, right).mean(dtype=np.float64))
        spelled, size = spells(batch.targets), batch.targets.size
        return [mean], 1, size, spelled.characters, spelled.bytes, int(right.sum())

    return [functools.partial(compute, number) for number in range(count)]


def evaluate_tokens(model: TransformerModel, tokenizer: Tokenizer, tokens: Tokens) -> Evaluation:
    with activity.doing("Evaluating the text", usual=True):
        return evaluate(model, tokens, tokenizer.spelled)


class Evaluations:
    """Evaluates a model on its data, with all processes, until the training is stopped.

    `divide(items, compute)` has each item computed by one of the processes -> all results;
    `check_stop` raises Stopped.
    """

    def __init__(
        self,
        model: TransformerModel,
        data: Dataset,
        loss: Loss,
        divide: Callable[[Sequence[Any], Callable[[Any], Any]], list[Any]],
        is_first: bool,
        check_stop: Callable[[], object],
    ) -> None:
        self.model, self.data, self.loss = model, data, loss
        self._divide, self._is_first, self._check_stop = divide, is_first, check_stop

    def evaluate(self, step: int, batches: int) -> EvaluationRecord | None:
        """Evaluates `batches` batches per part, or with 0 all held-out text; None if stopped."""
        with self._announced(f"Evaluating after step {step}"):
            train, held_out = self._compute(
                *(
                    _part_batches(self.model, self.data, part, batches, self.loss)
                    for part in ("train", "held_out")
                )
            )
            return EvaluationRecord(
                step=step,
                train_loss=train.loss,
                val_loss=held_out.loss,
                perplexity=held_out.perplexity,
                bits_per_character=held_out.bits_per_character,
                bits_per_byte=held_out.bits_per_byte,
                accuracy=held_out.accuracy,
            )
        return None

    def compare(self, step: int, batches: int) -> LossRecord | None:
        """Compares what the loss compares on some held-out batches; None if nothing, or stopped."""
        if not self.loss.comparing:
            return None

        def compute(number: int) -> list[float]:
            self._check_stop()
            return self.loss.sums(self.model, self.data.evaluation_batch("held_out", number))

        with self._announced(f"{self.loss.comparing} after step {step}"):
            available = batches or self.data.batches_of("held_out")
            most = self.loss.compared_batches or available
            numbers = range(min(most, available, self.data.batches_of("held_out")))
            return LossRecord(step, *self.loss.compared(self._divide(numbers, compute)))
        return None

    def look(self, step: int, number: int, batches: int) -> float | None:
        """-> the loss on some windows from all over the held-out part; None if it was stopped.

        Each `number` has other windows.
        """
        model, data = self.model, self.data
        with self._announced(f"Checking the held-out loss after step {step}"):
            if data.is_packed:
                numbers = range(number * batches, (number + 1) * batches)
                windows = _packed_batches(model, data, "held_out", numbers, self.loss)
            else:
                B, T = data.batch_size, min(data.block_size, len(data.held_out) - 1)
                most = min(MAX_HELD_OUT, batches * B * max(1, T // 2))
                shift, spells = number * GOLDEN % 1.0, Spelled.as_bytes
                windows = _text_batches(model, data.held_out, spells, B, most, shift)
            return self._compute(windows)[0].loss
        return None

    def evaluate_held_out(self) -> Evaluation | None:
        """Evaluates the whole held-out part, as at the end of a run; None if it was stopped."""
        with suppress(Stopped), activity.doing("Evaluating the held-out text", usual=True):
            # In batches of the run, for which there are arrays in the pool already.
            size = self.data.batch_size
            return self._compute(_held_out_batches(self.model, self.data, size, self.loss))[0]
        return None

    def ask(
        self, step: int, most: int = MAX_QUESTIONS, seconds: float | None = None
    ) -> AnswersRecord | None:
        """Asks the held-out questions of conversations; None if there are none, or it was stopped.

        With `seconds`, some of them if all would take longer. Only the first process asks.
        """
        if not isinstance(self.data, PackedDataset) or not self._is_first:
            return None  # the answers of pairs are judged, not repeated
        with self._announced("Asking the held-out questions"):
            return ask(step, self.model, self.data, most, self._check_stop, seconds)
        return None

    def sample(self, tokens: int | None = None) -> str:
        """Writes a text, the same for the same weights; empty unless it is the first process."""
        tokenizer = self.data.tokenizer
        if not self._is_first or tokenizer is None:
            return ""
        with activity.doing("Writing a sample", usual=True):
            for question in self.data.questions(1, SHORT_ANSWER):
                return str(answer(self.model, tokenizer, question))
            tokens = SAMPLE_TOKENS if tokens is None else tokens
            return generate(self.model, tokenizer, max_tokens=tokens, seed=self.data.seed)

    def _compute(self, *evaluations: _Batches) -> list[Evaluation]:
        """Divides the batches of several evaluations at once among the processes."""

        def checked(compute: Callable[[], _Counts]) -> _Counts:
            self._check_stop()
            return compute()

        results = iter(self._divide(list(itertools.chain(*evaluations)), checked))
        return [_total(list(itertools.islice(results, len(each)))) for each in evaluations]

    @contextmanager
    def _announced(self, phrase: str) -> Iterator[None]:
        """Announces and times an evaluation. The block ends early if it is stopped."""
        profile = self.model.workspace.profile
        with activity.doing(phrase, usual=True), profile("Evaluate"), suppress(Stopped):
            yield

"""Evaluations of a training between its steps: losses, answers, samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from smallmind.console import activity
from smallmind.console.signals import Stopped
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.text.conversations import PackedDataset
from smallmind.text.dataset import Dataset
from smallmind.training.answers import MOST_ASKED, SHORT, answer, ask
from smallmind.training.evaluation import (
    Evaluation,
    evaluation_record,
    held_out_batches,
    look_batches,
    part_batches,
)
from smallmind.training.ranks import Ranks
from smallmind.training.records import AnswersRecord, EvaluationRecord, LossRecord
from smallmind.writing.generation import generate

SAMPLE_TOKENS = 400
COMPARED_BATCHES = 4  # held-out ones, for what a loss compares


class Evaluations:
    """Evaluates a model on its data, with all processes, until the training is stopped."""

    def __init__(
        self,
        model: TransformerModel,
        data: Dataset,
        loss: Loss,
        ranks: Ranks,
        check_stop: Callable[[], object],
    ) -> None:
        self.model, self.data, self.loss = model, data, loss
        self._ranks, self._check_stop = ranks, check_stop

    def evaluate(self, step: int, batches: int) -> EvaluationRecord | None:
        """Evaluates `batches` batches per part, or with 0 all held-out text; None if stopped."""
        with self._announced(f"Evaluating after step {step}"):
            parts = [
                part_batches(self.model, self.data, part, batches, self.loss)
                for part in ("train", "held_out")
            ]
            return evaluation_record(step, *self._ranks.evaluate(*parts))
        return None

    def compare(self, step: int, batches: int) -> LossRecord | None:
        """Compares what the loss compares on some held-out batches; None if nothing, or stopped."""
        if not self.loss.comparing:
            return None

        def compute(number: int) -> list[float]:
            return self.loss.sums(self.model, self.data.evaluation_batch("held_out", number))

        with self._announced(f"{self.loss.comparing} after step {step}"):
            available = batches or self.data.batches_of("held_out")
            numbers = range(min(COMPARED_BATCHES, available))
            return LossRecord(step, *self.loss.compared(self._ranks.divide(numbers, compute)))
        return None

    def look(self, step: int, number: int, batches: int) -> float | None:
        """-> the loss on some windows from all over the held-out part; None if it was stopped."""
        with self._announced(f"Looking at the held-out loss after step {step}"):
            windows = look_batches(self.model, self.data, batches, number, self.loss)
            return self._ranks.evaluate(windows)[0].loss
        return None

    def evaluate_held_out(self) -> Evaluation | None:
        """Evaluates the whole held-out part, as at the end of a run; None if it was stopped."""
        with suppress(Stopped), activity.doing("Evaluating the held-out text", usual=True):
            # In batches of the run, for which there are arrays in the pool already.
            size = self.data.batch_size
            held_out = held_out_batches(self.model, self.data, size, self.loss)
            return self._ranks.evaluate(held_out)[0]
        return None

    def ask(
        self, step: int, most: int = MOST_ASKED, seconds: float | None = None
    ) -> AnswersRecord | None:
        """Asks the held-out questions of conversations; None if there are none, or it was stopped.

        With `seconds`, some of them if all would take longer. Only the first process asks.
        """
        if not isinstance(self.data, PackedDataset) or not self._ranks.is_first:
            return None
        with self._announced("Asking the held-out questions"):
            return ask(step, self.model, self.data, most, self._check_stop, seconds)
        return None

    def sample(self, tokens: int | None = None) -> str:
        """-> a text that the model writes; the same for the same weights. Only the first has
        one.
        """
        tokenizer = self.data.tokenizer
        if not self._ranks.is_first or tokenizer is None:
            return ""
        with activity.doing("Writing a sample", usual=True):
            if isinstance(self.data, PackedDataset):
                (question,) = self.data.questions(1, SHORT)
                return str(answer(self.model, tokenizer, question))
            tokens = SAMPLE_TOKENS if tokens is None else tokens
            return generate(self.model, tokenizer, max_tokens=tokens, seed=self.data.seed)

    @contextmanager
    def _announced(self, phrase: str) -> Iterator[None]:
        """Announces and times an evaluation. The block ends early if it is stopped."""
        profile = self.model.workspace.profile
        with activity.doing(phrase, usual=True), profile("Evaluate"), suppress(Stopped):
            yield

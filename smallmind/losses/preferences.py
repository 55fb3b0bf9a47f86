"""Learning from pairs of a better and a worse answer: DPO (Rafailov et al. 2023)."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from smallmind.checks import InputError, check_field, check_type, suggesting
from smallmind.losses.cross_entropy import SLACK
from smallmind.losses.loss import Loss
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.settings.config import RunConfig
from smallmind.text.chat import ASSISTANT, LEARNED, MARK_KINDS, USER, Turn
from smallmind.text.dataset import HELD_OUT, Batch, Dataset
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer

MAX_WINDOWS = 64  # windows, where the model is only evaluated


@suggesting()
class Preferences(Loss):
    """`Preferences(reference, pairs, beta=0.1)`: a model's loss on pairs, in nats per pair:

        -log sigmoid(margin),  margin = beta (log p(chosen) / q(chosen)
                                              - log p(rejected) / q(rejected))

    p are probabilities of whole answers in the model that learns, q in the reference: the model as
    it is now. Only its log-probabilities are kept, so the same model may learn afterwards. `beta`
    is how much it costs to move away from the reference.

        pairs = [("2 + 2 = ", "4", "5"), ...]  # prompt, chosen, rejected
        preferences = smallmind.Preferences.of_texts(model, tokenizer, pairs)
        loss = preferences.loss_and_gradients(model)  # of all; then optimizer.step()

    In a training, the last tenth of the pairs is held out:

        training = smallmind.Training(model, tokenizer, loss=preferences)

    `pairs` are windows of N chosen answers and then of the N rejected ones, with weights of 1 for
    the tokens of answers, as `encode_pairs` makes them. InputError if it is anything else.
    """

    name = "preferences"
    differs = "other pairs, or another beta"
    unrecorded = "the weight of each answer follows from another pass"
    sequences = 2
    forward_passes = 2
    one_process = "pairs are learned by one process: start the program without mpiexec"

    def __init__(self, reference: TransformerModel, pairs: Batch, beta: float = 0.1) -> None:
        check_type("reference", reference, TransformerModel)
        check_type("pairs", pairs, Batch)
        if pairs.weights is None or len(pairs.ids) % 2 or not len(pairs.ids):
            raise InputError(
                "pairs must be windows of the chosen answers, then as many of the rejected ones, "
                "with weights; encode_pairs makes them"
            )
        if not check_type("beta", beta, float, int) > 0:
            raise InputError(f"beta={beta} must be above 0")
        self.pairs, self.beta = pairs, float(beta)
        self._reference = _log_probabilities(reference, pairs)
        self._reference.flags.writeable = False

    @classmethod
    def of_texts(
        cls,
        reference: TransformerModel,
        tokenizer: Tokenizer,
        pairs: Iterable[Sequence[str]],
        beta: float = 0.1,
    ) -> "Preferences":
        """Pairs of texts, (prompt, chosen, rejected) each; see `encode_pairs`."""
        return cls(reference, encode_pairs(tokenizer, pairs), beta)

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self.pairs.ids) // 2

    def __repr__(self) -> str:
        return f"<Preferences: {len(self):,} pairs, beta={self.beta:g}>"

    def seen(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and targets (2 B, T) of the answers."""
        T = batch.ids.shape[1] // 2
        return batch.ids.reshape(-1, T), batch.targets.reshape(-1, T)

    def terms(self, _T: int) -> int:
        """Counts the pair of a window."""
        return 1

    def margins(
        self, model: TransformerModel, which: Batch | ArrayLike | None = None
    ) -> np.ndarray:
        """Returns the margin of each pair (N,), above 0 where the model has moved the right way.

        `which` are the numbers of some pairs, from 0, or a batch of them; None: all.
        """
        return self._margins(model, *self._part(which))

    def loss_and_gradients(
        self,
        model: TransformerModel,
        which: Batch | ArrayLike | None = None,
        scale: float = 1.0,
        _share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Returns the mean loss of all pairs or of some; adds the gradient of scale times it.

        `which` as for `margins`. Dropout is off. A pair's gradient is that of its margin times
        sigmoid(-margin), which is known only after a pass: a second one learns the chosen answers
        and unlearns the rejected ones, with this as the weight of each token.
        """
        part, reference = self._part(which)
        margins = self._margins(model, part, reference)
        N = len(margins)
        # forward: loss = mean(log(1 + exp(-margin)))
        if not np.isfinite(margins).all():
            model.flat.grad[...] = np.nan  # so that no update follows
            return math.nan
        dmargins = -np.exp(-np.logaddexp(0, margins))  # times N
        # forward: margin = beta (log p(chosen) - log p(rejected) - those of the reference)
        each = self.beta * np.concatenate([-dmargins, dmargins])
        assert part.weights is not None
        weights = part.weights * each[:, None].astype(np.float32)
        at = (at or Pass(model.passes))._replace(drops=False, first_row=0)
        model.loss_and_gradients(part.ids, part.targets, scale, at, weights=weights, divisor=N)
        return float(np.logaddexp(0, -margins).mean())

    def dataset(self, tokenizer: Tokenizer, batch_size: int, seed: int) -> Dataset:
        """Returns the pairs as data whose windows are the chosen answer and the rejected one."""
        return PairsDataset(self.pairs, tokenizer, batch_size, seed)

    def settings(self) -> dict[str, Any]:
        """Returns what a resumed run must share; its reference is that of the checkpoint."""
        digest = hashlib.sha256()
        for array in (self.pairs.ids, self.pairs.targets, self.pairs.weights):
            digest.update(np.ascontiguousarray(array).data)
        return {"pairs": digest.hexdigest(), "beta": self.beta}

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the reference's log-probabilities: the model that it was has learned since."""
        return {"reference": self._reference}

    def load_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Takes the reference of a checkpoint."""
        if tensors["reference"] is not self._reference:
            self._reference = tensors["reference"].copy()
            self._reference.flags.writeable = False

    def evaluated(
        self, model: TransformerModel, batch: Batch
    ) -> tuple[list[float], int, int, np.ndarray]:
        """Evaluates the pairs of a batch: right are those with a margin above 0."""
        margins = self.margins(model, batch)
        losses: list[float] = np.logaddexp(0, -margins).tolist()
        return losses, len(losses), int((margins > 0).sum()), np.empty(0, np.int32)

    def first_loss(self, _model: TransformerModel, _batch: Batch) -> tuple[float, float, str]:
        """Has no margin, as long as the model is the reference: ln 2."""
        return math.log(2), SLACK, "ln 2"

    def rows(self) -> list[list[str]]:
        """Returns names and values for the description of a run."""
        return [["pairs", f"{len(self):,}"], ["beta", f"{self.beta:g}"]]

    def _part(self, which: Batch | ArrayLike | None) -> tuple[Batch, np.ndarray]:
        """-> some pairs as a batch of their own, and the reference's log-probabilities of it."""
        N = len(self)
        if isinstance(which, Batch):
            which = which.starts // which.ids.shape[1]
        chosen = np.arange(N) if which is None else np.asarray(which)
        are_numbers = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
        if not (are_numbers and chosen.min() >= 0 and chosen.max() < N):
            raise InputError(f"which must be numbers of pairs, from 0 to {N - 1}, at least one")
        rows = np.concatenate([chosen, chosen + N])
        ids, targets, starts, weights, *_ = self.pairs
        assert weights is not None
        return Batch(ids[rows], targets[rows], starts[rows], weights[rows]), self._reference[rows]

    def _margins(self, model: TransformerModel, part: Batch, reference: np.ndarray) -> np.ndarray:
        chosen, rejected = np.split(_log_probabilities(model, part) - reference, 2)
        return self.beta * (chosen - rejected)


class PairsDataset(Dataset):
    """Windows of 2 T tokens, each a pair of answers of T: the chosen one, then the rejected one.

    The last tenth of the pairs, at least one, is held out. InputError for fewer than two.
    """

    is_packed = True

    def __init__(self, pairs: Batch, tokenizer: Tokenizer, batch_size: int, seed: int) -> None:
        count = len(pairs.ids) // 2
        if count < 2:
            raise InputError("a training needs at least 2 pairs, one of which is held out")
        self._count = count - max(1, int(count * HELD_OUT))  # to train on
        self._ids, self._targets = (
            np.concatenate([x[:count], x[count:]], axis=1) for x in (pairs.ids, pairs.targets)
        )
        self.block_size = self.stride = self._ids.shape[1]
        self.batch_size = check_field(RunConfig, "batch_size", batch_size)
        self.seed = check_field(RunConfig, "seed", seed)
        self.tokenizer = tokenizer
        self.train, self.held_out = (  # with the token after the last window
            np.append(part.reshape(-1), np.int32(0))
            for part in (self._ids[: self._count], self._ids[self._count :])
        )

    def windows(self, starts: np.ndarray, out: Batch | None = None) -> Batch:
        """Pairs that begin at starts (B,), multiples of block_size."""
        rows = starts // self.block_size
        if out is None:
            return Batch(self._ids[rows], self._targets[rows], starts)
        batch = out.part(slice(len(rows)))
        batch.ids[...], batch.targets[...] = self._ids[rows], self._targets[rows]
        return batch._replace(starts=starts, weights=None, firsts=None)

    def batches_of(self, part: str) -> int:
        """Returns the number of batches of a part, each of its pairs in one."""
        pairs = self._count if part == "train" else len(self._ids) - self._count
        return math.ceil(pairs / self.batch_size)

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """Returns batch `number` of a part, in order; after the last comes the first."""
        first, last = (0, self._count) if part == "train" else (self._count, len(self._ids))
        first += number % self.batches_of(part) * self.batch_size
        rows = np.arange(first, min(last, first + self.batch_size))
        return self.windows(rows * self.block_size)

    def as_text(self) -> Dataset:
        """Returns the training part as one text, with windows of one answer's length."""
        T = self.block_size // 2
        ids = self.train[: 64 * self.batch_size * T]
        return Dataset(ids, min(T, len(ids) // 2), self.batch_size, self.seed)


def encode_pairs(tokenizer: Tokenizer, pairs: Iterable[Sequence[str]]) -> Batch:
    """(prompt, chosen, rejected) of each pair -> windows of the chosen answers, then the others.

    If the tokenizer has a template, a prompt is what the user says, and an answer is the
    assistant's, with the token that ends its turn. Otherwise an answer follows its prompt, and ends
    with `<|endoftext|>` if the tokenizer has it. InputError if there is no pair, or an empty text.
    """
    check_type("tokenizer", tokenizer, Tokenizer)
    texts_of_pairs = list(check_type("pairs", pairs, Iterable))
    if not texts_of_pairs:
        raise InputError("there are no pairs; give at least one (prompt, chosen, rejected)")
    for number, texts in enumerate(texts_of_pairs):
        is_pair = isinstance(texts, tuple | list) and len(texts) == 3
        if not (is_pair and all(isinstance(text, str) and text for text in texts)):
            raise InputError(f"pair {number} must be three texts: prompt, chosen, rejected")
    answered = [(texts[0], texts[i]) for i in (1, 2) for texts in texts_of_pairs]
    template = format_of(tokenizer)
    if template:
        turns = [[Turn(USER, prompt), Turn(ASSISTANT, answer)] for prompt, answer in answered]
        marked = template.encode_all(tokenizer, turns)
        encoded = [(tokens // MARK_KINDS, tokens % MARK_KINDS == LEARNED) for tokens in marked]
    else:
        ends = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        end, encoded = np.array(ends, np.int32), []
        for prompt, answer in answered:
            before, after = (tokenizer.encode(text, special=False) for text in (prompt, answer))
            before = tokenizer.begun(before)
            tokens = np.concatenate([before, after, end])
            encoded.append((tokens, np.arange(len(tokens)) >= len(before)))
    rows, length = len(encoded), max(len(tokens) for tokens, _ in encoded) - 1
    ids, targets = np.zeros((2, rows, length), np.int32)
    weights = np.zeros((rows, length), np.float32)
    for row, (tokens, learned) in enumerate(encoded):
        count = len(tokens) - 1
        ids[row, :count], targets[row, :count] = tokens[:-1], tokens[1:]
        weights[row, :count] = learned[1:]
    return Batch(ids, targets, np.zeros(rows, np.int64), weights)


def _log_probabilities(model: TransformerModel, batch: Batch) -> np.ndarray:
    """Returns the log-probability of the answer in each window (R,), float64."""
    found = np.empty(len(batch.ids))
    for first in range(0, len(found), MAX_WINDOWS):
        rows = slice(first, first + MAX_WINDOWS)
        part = batch.part(rows)
        losses = model.losses(part.ids, part.targets)
        found[rows] = -(losses * part.weights).sum(axis=1, dtype=np.float64)
    return found

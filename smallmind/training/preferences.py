"""Learning from pairs of a better and a worse answer: DPO (Rafailov et al. 2023)."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from smallmind.checks import InputError, check_type, suggesting
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.text.chat import ASSISTANT, KINDS, LEARNED, USER, Turn
from smallmind.text.dataset import Batch
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer

TOGETHER = 64  # windows that go through the model at once where it is only evaluated


@suggesting()
class Preferences:
    """`Preferences(reference, pairs, beta=0.1)`: a model's loss on pairs, in nats per pair:

        -log sigmoid(margin),  margin = beta (log p(chosen) / q(chosen)
                                              - log p(rejected) / q(rejected))

    p are probabilities of whole answers in the model that learns, q in the reference: the model as
    it is now. Only its log-probabilities are kept, so the same model may learn afterwards. `beta`
    is how much it costs to move away from the reference.

        pairs = [("2 + 2 = ", "4", "5"), ...]  # prompt, chosen, rejected
        preferences = smallmind.Preferences.of_texts(model, tokenizer, pairs)
        loss = preferences.loss_and_gradients(model)  # of all; then optimizer.step()

    `pairs` are windows of N chosen answers and then of the N rejected ones, with weights of 1 for
    the tokens of answers, as `encode_pairs` makes them. InputError if it is anything else.
    """

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
        """The number of pairs."""
        return len(self.pairs.ids) // 2

    def __repr__(self) -> str:
        return f"<Preferences: {len(self):,} pairs, beta={self.beta:g}>"

    def margins(self, model: TransformerModel, which: ArrayLike | None = None) -> np.ndarray:
        """The margin of each pair (N,), above 0 where the model has moved the right way.

        `which` are the numbers of some pairs, from 0; None: all.
        """
        return self._margins(model, *self._part(which))

    def loss_and_gradients(
        self, model: TransformerModel, which: ArrayLike | None = None, scale: float = 1.0
    ) -> float:
        """The mean loss of all pairs or of some; adds the gradient of scale times it.

        Dropout is off. A pair's gradient is that of its margin times sigmoid(-margin), which is
        known only after a pass: a second one learns the chosen answers and unlearns the rejected
        ones, with this as the weight of each token.
        """
        part, reference = self._part(which)
        margins = self._margins(model, part, reference)
        N = len(margins)
        # forward: loss = mean(log(1 + exp(-margin)))
        dmargins = -np.exp(-np.logaddexp(0, margins))  # times N
        # forward: margin = beta (log p(chosen) - log p(rejected) - those of the reference)
        each = self.beta * np.concatenate([-dmargins, dmargins])
        assert part.weights is not None
        weights = part.weights * each[:, None].astype(np.float32)
        at = Pass(model.passes, drops=False)
        model.loss_and_gradients(part.ids, part.targets, scale, at, weights=weights, divisor=N)
        return float(np.logaddexp(0, -margins).mean())

    def _part(self, which: ArrayLike | None) -> tuple[Batch, np.ndarray]:
        """Some pairs as a batch of their own, and the reference's log-probabilities of it."""
        N = len(self)
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


def encode_pairs(tokenizer: Tokenizer, pairs: Iterable[Sequence[str]]) -> Batch:
    """(prompt, chosen, rejected) of each pair -> windows of the chosen answers, then the others.

    If the tokenizer has a template, a prompt is what the user says, and an answer is the
    assistant's, with the token that ends its turn. Otherwise an answer follows its prompt, and ends
    with `<|endoftext|>` if the tokenizer has it. InputError if there is no pair, or an empty text.
    """
    check_type("tokenizer", tokenizer, Tokenizer)
    given = list(check_type("pairs", pairs, Iterable))
    if not given:
        raise InputError("there are no pairs; give at least one (prompt, chosen, rejected)")
    for place, texts in enumerate(given):
        is_pair = isinstance(texts, tuple | list) and len(texts) == 3
        if not (is_pair and all(isinstance(text, str) and text for text in texts)):
            raise InputError(f"pair {place} must be three texts: prompt, chosen, rejected")
    asked = [(prompt, answer) for i in (1, 2) for prompt, answer in ((p[0], p[i]) for p in given)]
    template = format_of(tokenizer)
    if template:
        turns = [[Turn(USER, prompt), Turn(ASSISTANT, answer)] for prompt, answer in asked]
        marked = template.encode_all(tokenizer, turns)
        encoded = [(tokens // KINDS, tokens % KINDS == LEARNED) for tokens in marked]
    else:
        ends = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        end, encoded = np.array(ends, np.int32), []
        for prompt, answer in asked:
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
    """The log-probability of the answer in each window (R,), float64."""
    found = np.empty(len(batch.ids))
    for first in range(0, len(found), TOGETHER):
        part = batch.part(slice(first, first + TOGETHER))
        losses = model.losses(part.ids, part.targets)
        found[first : first + TOGETHER] = -(losses * part.weights).sum(axis=1, dtype=np.float64)
    return found

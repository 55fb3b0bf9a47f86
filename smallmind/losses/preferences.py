"""Learning from answers that are better or worse: DPO, IPO, ORPO and KTO.

Sources: DPO Rafailov et al. 2023, IPO Azar et al. 2023, ORPO Hong et al. 2024, KTO Ethayarajh et
al. 2024. Where a paper leaves a choice, it is that of TRL 1.16: IPO compares means over the tokens
of answers, ORPO's cross-entropy counts the prompts too, and KTO's baseline is a mean over a batch.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from smallmind.checks import InputError, check_field, check_type, suggesting
from smallmind.console import activity
from smallmind.losses.cross_entropy import SLACK, slack_of
from smallmind.losses.loss import Loss
from smallmind.losses.preference_settings import PreferencesConfig
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.settings.config import RunConfig
from smallmind.text.chat import (
    ANSWERS,
    ASSISTANT,
    CUT,
    LEARNED,
    MARK_KINDS,
    PLAIN,
    REJECTED,
    START,
    USER,
    ChatFormat,
    Conversation,
    Turn,
    encode_each,
)
from smallmind.text.conversations import PackedDataset, spread
from smallmind.text.dataset import HELD_OUT, Batch, Dataset, Question, Tokens
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer

LENGTHS = 4  # to which batches are cut: arrays of others would take more memory
MAX_WINDOWS = 64  # windows, where the model is only evaluated


class _Terms(NamedTuple):
    """The losses of N pairs, and their derivatives by the log-probabilities of the answers."""

    losses: np.ndarray  # (N,)
    dchosen: np.ndarray  # (N,)
    drejected: np.ndarray  # (N,)
    margins: np.ndarray  # (N,), above 0 where the better answer wins


class _Answers(NamedTuple):
    """The answers of N pairs: two sums of log-probabilities each, and their numbers of tokens.

    The sums are log p(answer) / q(answer), where q is the reference, or log p without one.
    """

    chosen: np.ndarray  # (N,)
    rejected: np.ndarray  # (N,)
    chosen_tokens: np.ndarray  # (N,)
    rejected_tokens: np.ndarray  # (N,)
    labels: np.ndarray | None  # (N,), False where the first answer is to be avoided, for KTO


def dpo(answers: _Answers, beta: float) -> _Terms:
    """-> -log sigmoid(margin), margin = beta (chosen - rejected)."""
    margins = beta * (answers.chosen - answers.rejected)
    dmargins = -np.exp(-np.logaddexp(0, margins))
    return _Terms(np.logaddexp(0, -margins), beta * dmargins, -beta * dmargins, margins)


def ipo(answers: _Answers, beta: float) -> _Terms:
    """-> (margin - 1 / (2 beta))^2, margin = chosen / tokens - rejected / tokens."""
    margins = answers.chosen / answers.chosen_tokens - answers.rejected / answers.rejected_tokens
    missing = margins - 1 / (2 * beta)
    dchosen = 2 * missing / answers.chosen_tokens
    return _Terms(missing**2, dchosen, -2 * missing / answers.rejected_tokens, margins)


def orpo(answers: _Answers, beta: float) -> _Terms:
    """-> -beta log sigmoid(margin), margin = log odds(chosen) - log odds(rejected).

    odds = p / (1 - p), where log p is the mean over the tokens of an answer.
    """
    means = answers.chosen / answers.chosen_tokens, answers.rejected / answers.rejected_tokens
    rest = [np.log(-np.expm1(np.minimum(mean, -TINY))) for mean in means]  # log(1 - p)
    margins = (means[0] - rest[0]) - (means[1] - rest[1])
    dmargins = -beta * np.exp(-np.logaddexp(0, margins))
    # d log odds / d log p = 1 / (1 - p)
    dchosen = dmargins * np.exp(-rest[0]) / answers.chosen_tokens
    drejected = -dmargins * np.exp(-rest[1]) / answers.rejected_tokens
    return _Terms(beta * np.logaddexp(0, -margins), dchosen, drejected, margins)


def kto(answers: _Answers, beta: float) -> _Terms:
    """-> 1 - sigmoid(margin), margin = +-beta (chosen - baseline), minus for an answer to avoid.

    The baseline is the mean of the answers that belong to other prompts, at least 0; nothing is
    learned through it.
    """
    assert answers.labels is not None
    baseline = max(0.0, float(answers.rejected.mean()))
    signs = np.where(answers.labels, 1.0, -1.0)
    margins = signs * beta * (answers.chosen - baseline)
    losses = np.exp(-np.logaddexp(0, margins))
    dchosen = -beta * signs * losses * (1 - losses)
    return _Terms(losses, dchosen, np.zeros_like(dchosen), margins)


METHODS: Mapping[str, Callable[[_Answers, float], _Terms]] = {
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
    "kto": kto,
}
TINY = 1e-12  # below which -log p is not taken: the odds of p = 1 are infinite


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
    the tokens of answers, as `encode_pairs` makes them. `method` is one of METHODS; ORPO has no
    reference and adds the cross-entropy of the chosen windows. For KTO the second windows hold
    answers to other prompts, and `labels` (N,) are False for answers to avoid. InputError if it is
    anything else.
    """

    name = "preferences"
    differs = "other pairs, or another beta"
    unrecorded = "the weight of each answer follows from another pass"
    sequences = 2
    forward_passes = 2
    comparing, compared_batches = "Comparing answers", None

    def __init__(
        self,
        reference: TransformerModel | None,
        pairs: Batch | None,
        beta: float = PreferencesConfig.dpo_beta,
        method: str = "dpo",
        labels: np.ndarray | None = None,
    ) -> None:
        if not check_type("beta", beta, float, int) > 0:
            raise InputError(f"beta={beta} must be above 0")
        if method not in METHODS:
            raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")
        self.beta, self.method = float(beta), method
        self.unit = "answer" if method == "kto" else "pair"
        self.pairs: Batch | None = None
        self.labels: np.ndarray | None = None
        self._reference: np.ndarray | None = None
        self._at_once = MAX_WINDOWS
        if pairs is not None:
            check_type("reference", reference, TransformerModel)
            self._take(check_type("pairs", pairs, Batch), labels)
            assert reference
            self._refer_to(reference)

    @classmethod
    def of_texts(
        cls,
        reference: TransformerModel,
        tokenizer: Tokenizer,
        pairs: Iterable[Sequence[str]],
        beta: float = PreferencesConfig.dpo_beta,
        method: str = "dpo",
    ) -> "Preferences":
        """Pairs of texts, (prompt, chosen, rejected) each; see `encode_pairs`."""
        return cls(reference, encode_pairs(tokenizer, pairs), beta, method)

    @classmethod
    def of(cls, _models: Sequence[TransformerModel], config: PreferencesConfig | None) -> Self:
        """Learns the pairs of the data of a run; the reference is the model before its first step.

        Its log-probabilities are computed then, unless a checkpoint has them.
        """
        config = config or PreferencesConfig()
        return cls(None, None, config.dpo_beta, config.loss or "dpo")

    def __len__(self) -> int:
        """Returns the number of pairs, 0 before they are known."""
        return 0 if self.pairs is None else len(self.pairs.ids) // 2

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        method = "" if self.method == "dpo" else f", {self.method}"
        return f"<Preferences: {len(self):,} pairs, beta={self.beta:g}{method}>"

    def prepare(self, _model: TransformerModel, data: Dataset) -> None:
        """Takes the pairs of the data of a run. InputError if it has none."""
        if self.pairs is not None:
            return
        if not isinstance(data, PairsDataset):
            raise InputError(
                f"loss={self.method!r} learns from better and worse answers, and the text has none"
            )
        self._take(data.pairs, data.labels)
        self._at_once = 2 * data.batch_size  # so that the reference takes no more than a step

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
        return self._compute(model, self._part(model, which))[0].margins

    def loss_and_gradients(
        self,
        model: TransformerModel,
        which: Batch | ArrayLike | None = None,
        scale: float = 1.0,
        _share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Returns the mean loss of all pairs or of some; adds the gradient of scale times it.

        `which` as for `margins`. Dropout is off. The gradient of an answer follows from the losses
        of its pair, which are known only after a pass: a second one learns the chosen answers and
        unlearns the rejected ones, with this as the weight of each token.
        """
        part = self._part(model, which)
        terms, losses, shares = self._compute(model, part)
        N = len(losses)
        # forward: loss = mean(losses)
        if not np.isfinite(losses).all():
            model.flat.grad[...] = np.nan  # so that no update follows
            return math.nan
        # forward: losses = terms(log p) + shares * cross-entropy, which is -log p of a token
        batch = part.batch
        assert batch.weights is not None
        weights = batch.weights * -np.concatenate([terms.dchosen, terms.drejected])[:, None]
        weights[:N] += shares
        at = (at or Pass(model.passes))._replace(drops=False, first_row=0)
        model.loss_and_gradients(
            batch.ids, batch.targets, scale, at, weights=weights.astype(np.float32), divisor=N
        )
        return float(losses.mean())

    def dataset(self, tokenizer: Tokenizer, batch_size: int, seed: int) -> Dataset | None:
        """Returns the pairs as data whose windows are the chosen answer and the rejected one."""
        if self.pairs is None:
            return None
        return PairsDataset(self.pairs, tokenizer, batch_size, seed, self.labels)

    def settings(self) -> dict[str, Any]:
        """Returns what a resumed run must share; its reference is that of the checkpoint."""
        digest = hashlib.sha256()
        assert self.pairs is not None
        for array in (self.pairs.ids, self.pairs.targets, self.pairs.weights, self.labels):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        method = {} if self.method == "dpo" else {"method": self.method}
        return {"pairs": digest.hexdigest(), "beta": self.beta, **method}

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the reference's log-probabilities: the model that it was has learned since."""
        assert self._reference is not None
        return {"reference": self._reference}

    def load_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Takes the reference of a checkpoint, unless that is of before it was computed."""
        found = tensors["reference"]
        if found is not self._reference and not np.isnan(found).any():
            self._reference = found.copy()
            self._reference.flags.writeable = False

    def evaluated(
        self, model: TransformerModel, batch: Batch
    ) -> tuple[list[float], int, int, np.ndarray]:
        """Evaluates the pairs of a batch: right are those with a margin above 0."""
        terms, losses, _ = self._compute(model, self._part(model, batch))
        return losses.tolist(), len(losses), int((terms.margins > 0).sum()), np.empty(0, np.int32)

    def sums(self, model: TransformerModel, batch: Batch) -> list[float]:
        """A batch -> the sum of its margins, how many are above 0, and their number."""
        margins = self.margins(model, batch)
        return [float(margins.sum()), float((margins > 0).sum()), float(len(margins))]

    def compared(self, sums: Sequence[Sequence[float]]) -> tuple[str, dict[str, float], str]:
        """The sums of some batches -> the mean margin, and the share of pairs that are won."""
        margin, won, count = np.sum(sums, axis=0)
        found = {"margin": float(margin / count), "won": float(won / count)}
        what = "answers judged correctly" if self.method == "kto" else "pairs won"
        text = f"held-out margin {found['margin']:.3f}, {found['won']:.1%} of {what}"
        return "preferences", found, text

    def first_loss(self, model: TransformerModel, _batch: Batch) -> tuple[float, float, str]:
        """Has no margin, as long as the model is the reference: ln 2 for DPO."""
        if self.method == "ipo":
            return 1 / (2 * self.beta) ** 2, SLACK, f"1 / (2 x {self.beta:g})^2"
        if self.method == "kto":
            return 0.5, SLACK, "1 - sigmoid(0)"
        if self.method == "orpo":
            V = model.config.vocab_size
            loss, words = math.log(V) + self.beta * math.log(2), f"ln {V} + {self.beta:g} ln 2"
            return loss, slack_of(model), words
        return math.log(2), SLACK, "ln 2"

    def widths(self, T: int) -> Sequence[int]:
        """Returns the widths of pairs that are cut to the longest of a batch, in few steps."""
        step = -(-(T // 2) // LENGTHS)
        return [2 * min(T // 2, step * i) for i in range(1, LENGTHS + 1)]

    def rehearsal(self, model: TransformerModel, tokenizer: Tokenizer) -> "Preferences":
        """Learns from a few pairs of letters."""
        return Preferences.of_texts(model, tokenizer, [("ab", "cd", "ef")] * 8)

    def rows(self) -> list[list[str]]:
        """Returns names and values for the description of a run."""
        reference = "none" if self.method == "orpo" else "the model before its first step"
        return [["loss", self.method], ["beta", f"{self.beta:g}"], ["reference", reference]]

    def _take(self, pairs: Batch, labels: np.ndarray | None) -> None:
        if pairs.weights is None or len(pairs.ids) % 2 or not len(pairs.ids):
            raise InputError(
                "pairs must be windows of the chosen answers, then as many of the rejected ones, "
                "with weights; encode_pairs makes them"
            )
        if (labels is None) == (self.method == "kto") or (
            labels is not None and np.shape(labels) != (len(pairs.ids) // 2,)
        ):
            raise InputError("labels are for method='kto': one for each pair, True or False")
        self.pairs, self.labels = pairs, labels
        self._reference = np.full(len(pairs.ids), np.nan)

    def _refer_to(self, model: TransformerModel) -> np.ndarray:
        """Computes the log-probabilities of all answers in a model, once -> those (2 N,)."""
        assert self.pairs is not None and self._reference is not None
        if np.isnan(self._reference).any():
            if self.method == "orpo":  # which has no reference
                self._reference = np.zeros(len(self.pairs.ids))
            else:
                few = len(self.pairs.ids) <= self._at_once
                with activity.doing("Computing the reference of all answers", usual=few):
                    self._reference = _log_probabilities(model, self.pairs, self._at_once)
            self._reference.flags.writeable = False
        return self._reference

    def _part(self, model: TransformerModel, which: Batch | ArrayLike | None) -> "_Pairs":
        """Returns some pairs as a batch of their own, without columns that none of them needs."""
        if self.pairs is None and isinstance(which, Batch):  # an outline of a run
            ids, targets = self.seen(which)
            seen = Batch(ids, targets, which.starts, np.ones(ids.shape, np.float32))
            return _Pairs(seen, np.zeros(len(ids)), np.ones(len(ids) // 2, np.bool_))
        N = len(self)
        if isinstance(which, Batch):
            which = which.starts // which.ids.shape[1]
        chosen = np.arange(N) if which is None else np.asarray(which)
        are_numbers = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
        if not (are_numbers and chosen.min() >= 0 and chosen.max() < N):
            raise InputError(f"which must be numbers of pairs, from 0 to {N - 1}, at least one")
        rows = np.concatenate([chosen, chosen + N])
        reference = self._refer_to(model)[rows]
        assert self.pairs is not None
        ids, targets, starts, weights, *_ = self.pairs
        assert weights is not None
        longest = int(np.flatnonzero(weights[rows].any(axis=0))[-1]) + 1
        T = next(width // 2 for width in self.widths(2 * ids.shape[1]) if width >= 2 * longest)
        batch = Batch(ids[rows, :T], targets[rows, :T], starts[rows], weights[rows, :T])
        labels = None if self.labels is None else self.labels[chosen]
        return _Pairs(batch, reference, labels)

    def _compute(
        self, model: TransformerModel, part: "_Pairs"
    ) -> tuple[_Terms, np.ndarray, np.ndarray | float]:
        """-> terms, losses (N,), and what tokens of the chosen windows (N, T) count besides.

        ORPO adds the mean cross-entropy of these windows, the prompts included, as TRL does.
        """
        batch, N = part.batch, len(part.batch.ids) // 2
        assert batch.weights is not None
        each = _token_losses(model, batch, self._at_once)
        if self.pairs is None:  # an outline of a run, in which nothing was computed
            each = np.zeros(each.shape, np.float32)
        learned = -(each * batch.weights).sum(axis=1, dtype=np.float64) - part.reference
        tokens = batch.weights.sum(axis=1, dtype=np.float64)
        sums, counts = np.split(learned, 2), np.split(tokens, 2)
        answers = _Answers(sums[0], sums[1], counts[0], counts[1], part.labels)
        with np.errstate(all="ignore"):  # a model that is not finite has such losses
            terms = METHODS[self.method](answers, self.beta)
        if self.method != "orpo":
            return terms, terms.losses, 0.0
        counted = np.cumsum(batch.weights[:N, ::-1], axis=1)[:, ::-1] > 0  # up to the last learned
        shares = counted * (N / counted.sum())
        more = (each[:N] * shares).sum(axis=1, dtype=np.float64)
        return terms, terms.losses + more, shares


class _Pairs(NamedTuple):
    """Some pairs: their windows (2 N, T), the reference's log-probabilities, their labels."""

    batch: Batch
    reference: np.ndarray  # (2 N,)
    labels: np.ndarray | None  # (N,)


class PairsDataset(Dataset):
    """Windows of 2 T tokens, each a pair of answers of T: the chosen one, then the rejected one.

    The last tenth of the pairs, at least one, is held out. InputError for fewer than two.
    """

    is_packed, sequences = True, 2

    def __init__(
        self,
        pairs: Batch,
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int,
        labels: np.ndarray | None = None,
    ) -> None:
        self.pairs, self.labels = pairs, labels
        self.unit = "pair" if labels is None else "answer"
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
        return math.ceil(self.count_of(part) / self.batch_size)

    def count_of(self, part: str) -> int:
        """Returns the number of pairs of a part."""
        return self._count if part == "train" else len(self._ids) - self._count

    def evaluation_batch(self, part: str, number: int) -> Batch:
        """Returns batch `number` of a part, in order; after the last comes the first."""
        first, last = (0, self._count) if part == "train" else (self._count, len(self._ids))
        first += number % self.batches_of(part) * self.batch_size
        rows = np.arange(first, min(last, first + self.batch_size))
        return self.windows(rows * self.block_size)

    @property
    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Both parts as marked tokens, which `of_stored` takes: two answers for each pair.

        An answer begins with START, or with CUT if it is to be avoided.
        """
        N = len(self._ids)
        return self._stored(range(self._count)), self._stored(range(self._count, N))

    @classmethod
    def of_stored(
        cls,
        parts: Sequence[Tokens],
        tokenizer: Tokenizer,
        batch_size: int,
        seed: int,
        kto: bool,
    ) -> Self:
        """Returns the data whose `stored` these are."""
        marked = np.concatenate([part[: len(part)] for part in parts])
        kinds = marked % MARK_KINDS
        begins = np.flatnonzero((kinds == START) | (kinds == CUT))
        answers = np.split(marked, begins[1:])
        labels = kinds[begins[::2]] == START
        pairs = windows_of(list(map(Encoded, answers[::2], answers[1::2], labels)))
        return cls(pairs, tokenizer, batch_size, seed, labels if kto else None)

    def as_written(self) -> Dataset:
        """Returns the answers that are not to be avoided, as conversations with their prompts."""
        parts = []
        for marked in self.stored:
            begins = np.flatnonzero((marked % MARK_KINDS == START) | (marked % MARK_KINDS == CUT))
            answers = np.split(marked, begins[1:])[::2]
            kept = [answer for answer in answers if answer[0] % MARK_KINDS == START]
            parts.append(np.concatenate([np.empty(0, np.int32), *kept]))
        train, held_out = parts
        assert self.tokenizer
        return PackedDataset(
            train, held_out, self.longest, self.batch_size, self.seed, self.tokenizer
        )

    def _stored(self, pairs: Iterable[int]) -> np.ndarray:
        N, (ids, targets, _, weights, *_) = len(self._ids), self.pairs
        assert weights is not None
        found = [np.empty(0, np.int32)]
        for pair in pairs:
            for row in (pair, pair + N):
                count = int(np.flatnonzero(weights[row])[-1]) + 1
                marked = np.append(ids[row, :1], targets[row, :count]) * MARK_KINDS
                marked[1:] += np.where(weights[row, :count] > 0, LEARNED, PLAIN).astype(np.int32)
                avoided = self.labels is not None and row < N and not self.labels[pair]
                marked[0] += CUT if avoided else START
                found.append(marked)
        return np.concatenate(found)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.block_size // 2

    def questions(self, most: int, longest: int) -> list[Question]:
        """Returns the prompts that are held out, and their better answers."""
        assert self.pairs.weights is not None
        found = []
        for row in range(self._count, len(self._ids)):
            learned = np.flatnonzero(self.pairs.weights[row])
            begin, end = learned[0] + 1, learned[-1] + 2
            ids = np.append(self.pairs.ids[row, :1], self.pairs.targets[row])[:end]
            found.append(Question(ids[:begin], ids[:begin], ids[begin:]))
        found = [question for question in found if len(question.answer) <= longest] or found
        return spread(found, most)

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
    template = format_of(tokenizer)
    if template:
        turns = [
            [Turn(USER, prompt), Turn(ASSISTANT, better), Turn(REJECTED, worse)]
            for prompt, better, worse in texts_of_pairs
        ]
        return windows_of(encode_answers(tokenizer, template, turns, "dpo"))
    ends = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    end, encoded = np.array(ends, np.int32), []
    for prompt, *answers in texts_of_pairs:
        marked = []
        for answer in answers:
            before, after = (tokenizer.encode(text, special=False) for text in (prompt, answer))
            before = tokenizer.begun(before) * MARK_KINDS
            after = np.concatenate([after, end]) * MARK_KINDS + LEARNED
            marked.append(np.concatenate([before, after]))
        encoded.append(Encoded(marked[0], marked[1], True))
    return windows_of(encoded)


class Encoded(NamedTuple):
    """Two answers as marked tokens, each after its prompt; see `encode_answers`."""

    first: np.ndarray
    second: np.ndarray
    label: bool  # False if the first one is to be avoided, for KTO

    @property
    def length(self) -> int:
        """Counts the tokens that a window needs to hold both."""
        return max(len(self.first), len(self.second)) - 1


def encode_answers(
    tokenizer: Tokenizer, template: ChatFormat, conversations: Sequence[Conversation], method: str
) -> list[Encoded]:
    """Conversations with an answer, a REJECTED one, or both -> what a method learns of them.

    That is the last answers alone, and nothing after them. KTO takes every answer by itself, beside
    that of the conversation before, to this prompt; the others take conversations with both.
    """
    asked: list[tuple[Conversation, Conversation]] = []
    for turns in conversations:
        last = max((i for i, turn in enumerate(turns) if turn.role in ANSWERS), default=-1)
        turns = turns[: last + 1]
        if not turns:
            continue
        count = 1 + (turns[-1].role == REJECTED and turns[-2].role == ASSISTANT)
        before = [turn._replace(learned=False) for turn in turns[:-count]]
        if method == "kto" or count == 2:
            asked.append((before, turns[-count:]))

    def answered(before: Conversation, answer: Turn) -> Conversation:
        return [*before, answer._replace(role=ASSISTANT, learned=True)]

    if method == "kto":
        single = [(before, answer) for before, answers in asked for answer in answers]
        each = [
            written
            for (before, answer), (_, other) in zip(
                single, [*single[-1:], *single[:-1]], strict=True
            )
            for written in (answered(before, answer), answered(before, other))
        ]
        labels = [answer.role != REJECTED for _, answer in single]
    else:
        each = [answered(before, answer) for before, answers in asked for answer in answers]
        labels = [True] * len(asked)
    with activity.doing("Encoding the answers", usual=True):
        marked = [_cut(x) for x in encode_each(tokenizer, template, activity.parts(each))]
    return list(map(Encoded, marked[::2], marked[1::2], labels))


def _cut(marked: np.ndarray) -> np.ndarray:
    """Returns what comes before the last token of an answer, and that: nothing learns the rest."""
    return marked[: int(np.flatnonzero(marked % MARK_KINDS == LEARNED)[-1]) + 1]


def windows_of(encoded: Sequence[Encoded]) -> Batch:
    """-> windows (2 N, T) of all first answers, and then of the second ones."""
    N, T = len(encoded), max(pair.length for pair in encoded)
    ids, targets = np.zeros((2, 2 * N, T), np.int32)
    weights = np.zeros((2 * N, T), np.float32)
    for row, marked in enumerate([x.first for x in encoded] + [x.second for x in encoded]):
        count, tokens = len(marked) - 1, marked // MARK_KINDS
        ids[row, :count], targets[row, :count] = tokens[:-1], tokens[1:]
        weights[row, :count] = marked[1:] % MARK_KINDS == LEARNED
    return Batch(ids, targets, np.zeros(2 * N, np.int64), weights)


def _token_losses(model: TransformerModel, batch: Batch, at_once: int) -> np.ndarray:
    """Returns the cross-entropy of each token (R, T), so many windows at a time."""
    parts = (batch.part(slice(i, i + at_once)) for i in range(0, len(batch.ids), at_once))
    return np.concatenate([model.losses(part.ids, part.targets) for part in parts])


def _log_probabilities(model: TransformerModel, batch: Batch, at_once: int) -> np.ndarray:
    """Returns the log-probability of the answer in each window (R,), float64."""
    found = np.empty(len(batch.ids))
    for first in activity.parts(range(0, len(found), at_once)):
        rows = slice(first, first + at_once)
        part = batch.part(rows)
        losses = _token_losses(model, part, at_once) * part.weights
        found[rows] = -losses.sum(axis=1, dtype=np.float64)
    return found

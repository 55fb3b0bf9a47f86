"""Learning from rewards: the model tries answers, and hears what they earn. GRPO.

Source: Shao et al. 2024, DeepSeekMath. Where the paper leaves a choice, it is that of TRL 1.16:
advantages are divided by the deviation of their group, with Bessel's correction, plus 1e-4.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import numpy as np

from smallmind.checks import InputError, count_of, suggesting
from smallmind.console import activity
from smallmind.losses.cross_entropy import SLACK
from smallmind.losses.judge import Attempt, Judge, Reward
from smallmind.losses.loss import Loss
from smallmind.losses.question_data import QuestionsDataset
from smallmind.losses.reward_settings import RewardsConfig
from smallmind.nn.cache import cache_bytes
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.randomness import hash64
from smallmind.settings.config import GenerationConfig, ModelConfig, TrainingConfig
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.templates import format_of
from smallmind.text.tokenizer import Tokenizer
from smallmind.writing.decoder import Continuation, Decoder

SMALLEST_DEVIATION = 1e-4  # of rewards, that is added to theirs
# How many times as likely a token may be in the reference before its distance grows linearly: the
# exponential of one unlikely token could outweigh all others of a step.
LINEAR_RATIO = 100.0
STREAM = 6  # of random numbers, beside those of the data
LENGTHS = 4  # to which batches are cut: arrays of others would take more memory
READ_TOGETHER = 4096  # tokens of prompts
CUT = 0.1  # of answers, from which it is said
SLOTS, CACHE_BYTES = 128, 1 << 28  # answers that are written at a time, at most


class _TokenTerms(NamedTuple):
    """The losses of some tokens, and their derivatives by the log-probabilities of these."""

    losses: np.ndarray  # (n,)
    dlogp: np.ndarray  # (n,)


def grpo(
    logp: np.ndarray,
    old: np.ndarray,
    reference: np.ndarray | None,
    advantages: np.ndarray,
    clip: float,
    beta: float,
) -> _TokenTerms:
    """-> -min(ratio A, clipped A) + beta KL, where ratio = exp(logp - old).

    All are (n,), one for each token. `clipped` is the ratio within 1 - clip and 1 + clip, and the
    KL is Schulman's estimate exp(d) - d - 1 of it, with d = reference - logp, continued by its
    tangent where d is above log(LINEAR_RATIO).
    """
    ratio = np.exp(logp - old)
    free, bound = ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages
    losses, dlogp = -np.minimum(free, bound), np.where(free <= bound, -free, 0.0)
    if reference is not None:
        d = reference - logp
        near = np.minimum(d, math.log(LINEAR_RATIO))
        losses += beta * (np.exp(near) - near - 1 + (np.exp(near) - 1) * (d - near))
        # backward: d KL / d logp = 1 - exp(d), of the tangent 1 - LINEAR_RATIO
        dlogp += beta * (1 - np.exp(near))
    return _TokenTerms(losses, dlogp)


def teaching(rewards: np.ndarray) -> np.ndarray:
    """rewards (N, G) -> True for each group whose rewards are not all equal (N,)."""
    return np.asarray(np.any(rewards != rewards[:, :1], axis=1))


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """rewards (N, G) -> by how many deviations each is above the mean of its group (N, G).

    Where all of a group are equal they are exactly 0.
    """
    above = rewards - rewards.mean(axis=1, keepdims=True)
    deviations = rewards.std(axis=1, ddof=1, keepdims=True)
    return np.where(teaching(rewards)[:, None], above / (deviations + SMALLEST_DEVIATION), 0.0)


def _first_true(teaches: np.ndarray) -> np.ndarray:
    """teaches (N,) -> the places of those that do, and of others up to one of a few numbers."""
    N, count = len(teaches), int(teaches.sum())
    step = -(-N // LENGTHS)
    order = np.argsort(~teaches, kind="stable")
    return np.sort(order[: min(N, -(-count // step) * step)])


class _Round(NamedTuple):
    """The sampled answers of W questions: G each, of at most L tokens."""

    starts: np.ndarray  # int64 (W, 2), the step and the window of each question
    tokens: np.ndarray  # int32 (W, G, L)
    counts: np.ndarray  # int32 (W, G), of tokens
    rewards: np.ndarray  # float64 (W, G)
    old: np.ndarray  # float32 (W, G, L), log-probabilities in the model that has written them
    reference: np.ndarray  # float32 (W, G, L), in the model before its first step

    @classmethod
    def empty(cls, W: int, G: int, L: int) -> "_Round":
        """Returns a round without questions, of arrays with space for them."""
        return cls(
            np.full((W, 2), -1, np.int64),
            np.zeros((W, G, L), np.int32),
            np.zeros((W, G), np.int32),
            np.zeros((W, G)),
            np.zeros((W, G, L), np.float32),
            np.zeros((W, G, L), np.float32),
        )


@suggesting()
class Rewards(Loss):
    """`Rewards(reward)`: a model's loss on the answers that it writes itself, by what they earn.

    `reward` is a function of the texts of a question, an answer and the wanted answer, a name in
    `parts.REWARDS`, or the path of a file with such a function. A round samples `answers` to each
    question of its `updates` steps, with the decoder that serves. The advantage of an answer is
    how far its reward is above the mean of its group, and its tokens become likelier or less likely
    by it, at most by `clip` in a round. `beta` is the cost of moving away from the model before its
    first step. What is sampled depends on the seed of the data, on the step, the question and the
    number of the answer alone.

        loss = smallmind.losses.rewards.Rewards(lambda question, answer, wanted: len(answer))
        data = QuestionsDataset.of_texts(tokenizer, [("2 + 2 = ", "4"), ...], answers=8)
        training = smallmind.Training(model, data=data, loss=loss)

    InputError if there is no such reward.
    """

    name = "rewards"
    differs = "another reward, or other questions"
    unrecorded = "which answers are learned follows from what they earn"
    comparing, compared_batches = "Rewarding answers", None
    unit = "question"
    first_is_known = True
    one_process = "a run that learns by rewards is for one process: start it without mpiexec"

    def __init__(
        self,
        reward: str | Reward,
        answers: int = RewardsConfig.reward_answers,
        updates: int = RewardsConfig.reward_updates,
        clip: float = RewardsConfig.reward_clip,
        beta: float = RewardsConfig.reward_beta,
        seconds: float = RewardsConfig.reward_seconds,
    ) -> None:
        self.config = RewardsConfig(
            reward=reward if isinstance(reward, str) else "function",
            reward_answers=answers,
            reward_updates=updates,
            reward_clip=clip,
            reward_beta=beta,
            reward_seconds=seconds,
        )
        self.judge = Judge(reward, seconds)
        self.sequences: int = answers  # type: ignore[misc]
        self.has_pass = updates > 1 or beta > 0  # besides the one that learns
        self.forward_passes: int = 1 + self.has_pass  # type: ignore[misc]
        self.data: QuestionsDataset | None = None
        self._weights: np.ndarray | None = None  # of the reference
        self._decoder: Decoder | None = None
        self._step, self._sampled_at = 0, -1
        self._round: _Round | None = None
        self._rows: dict[tuple[int, int], int] = {}  # of the round, by step and window
        self._asked = self._taught = 0  # questions of the steps so far, of this process
        self._judged: dict[int, float] = {}  # windows of an evaluation -> what their answers earned

    @classmethod
    def of(cls, _models: Sequence[TransformerModel], config: RewardsConfig | None) -> Self:
        """Learns the questions of the data of a run by the reward of its settings."""
        config = config or RewardsConfig(reward="length")
        assert config.reward
        return cls(
            config.reward,
            config.reward_answers,
            config.reward_updates,
            config.reward_clip,
            config.reward_beta,
            config.reward_seconds,
        )

    def __repr__(self) -> str:
        return f"<Rewards: {self.judge.name}, {self.sequences} answers to each question>"

    def prepare(self, model: TransformerModel, data: Dataset) -> None:
        """Takes the questions of the data. InputError if it has none, or no wanted answers."""
        if not isinstance(data, QuestionsDataset) or data.sequences != self.sequences:
            raise InputError(
                f"the reward {self.judge.name} needs a QuestionsDataset with "
                f"answers={self.sequences}"
            )
        if self.judge.needs_wanted and (missing := data.first_without_answer()):
            raise InputError(
                f"the reward {self.judge.name} compares with the expected answer, and the question "
                f"{missing!r:.80} has none: choose --reward json, or a Python file"
            )
        self.data = data
        if self.config.reward_beta:
            self._weights = model.flat.data.copy()
            self._weights.flags.writeable = False

    def begin(self, config: TrainingConfig) -> None:
        """Forgets the answers of an earlier run."""
        if self.data:
            W = self.config.reward_updates * config.grad_accum_steps * self.data.batch_size
            self._take(_Round.empty(W, self.sequences, self.data.most))

    def begin_step(
        self,
        model: TransformerModel,
        step: int,
        starts: Callable[[int], np.ndarray],
        check_stop: Callable[[], object],
    ) -> None:
        """Samples answers to the questions of a round, if the step is not in the last one."""
        K = self.config.reward_updates
        self._step, first = step, (step - 1) // K * K + 1
        if any((step, start) not in self._rows for start in starts(step).tolist()):
            each = ((number, x) for number in range(first, first + K) for x in starts(number))
            questions = sorted({(number, int(start)) for number, start in each})
            self._take(self._sampled(model, questions, check_stop))
            self._sampled_at = step
        self._asked += len(rewards := self._rewards_of_step())
        self._taught += int(teaching(rewards).sum())

    def seen(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and targets (G B, T) of the answers."""
        T = batch.ids.shape[1] // self.sequences
        return batch.ids.reshape(-1, T), batch.targets.reshape(-1, T)

    def terms(self, _T: int) -> int:
        """Counts the answers of a window."""
        return self.sequences

    def loss_and_gradients(
        self,
        model: TransformerModel,
        batch: Batch,
        scale: float = 1.0,
        _share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Returns the mean loss of a batch of questions; adds the gradient of scale times it.

        Dropout is off. The loss of an answer is the mean over its tokens.
        """
        at = (at or Pass(model.passes))._replace(drops=False, first_row=0)
        if self.data is None:
            return self._outlined(model, batch, at)
        found, rows, is_fresh = self._answers_to(model, batch)
        N, G, beta = len(rows), self.sequences, self.config.reward_beta
        if not beta:
            rows = rows[_first_true(teaching(found.rewards[rows]))]
        if not len(rows):
            return 0.0
        windows, mask = self._windows(found, rows)
        counts = found.counts[rows]
        is_token = np.arange(found.tokens.shape[2]) < counts[:, :, None]
        old = found.old[rows][is_token].astype(np.float64)
        logp = old  # the model has just written them
        if self.has_pass and not is_fresh:
            logp = -model.losses(windows.ids, windows.targets)[mask].astype(np.float64)
        reference = found.reference[rows][is_token].astype(np.float64) if beta else None
        per_answer = counts.reshape(-1)
        advantages = advantages_of(found.rewards[rows]).reshape(-1).repeat(per_answer)
        with np.errstate(all="ignore"):  # a model that is not finite has such losses
            terms = grpo(logp, old, reference, advantages, self.config.reward_clip, beta)
        # forward: loss = mean over questions and answers of the mean over tokens
        shares = (1 / (G * per_answer)).repeat(per_answer)
        loss = float((terms.losses * shares).sum()) / N
        if not math.isfinite(loss):
            model.flat.grad[...] = np.nan  # so that no update follows
            return math.nan
        # forward: cross-entropy of a token = -log p
        weights = np.zeros(mask.shape, np.float32)
        weights[mask] = -terms.dlogp * shares
        ids, targets = windows.ids, windows.targets
        model.loss_and_gradients(ids, targets, scale, at, weights=weights, divisor=N)
        return loss

    def _outlined(self, model: TransformerModel, batch: Batch, at: Pass) -> float:
        """Runs the passes that a batch may take, where nothing is computed."""
        ids, targets = self.seen(batch)
        N = len(batch.ids)
        weights = np.ones(ids.shape, np.float32)
        for groups in {len(_first_true(np.arange(N) < count)) for count in range(1, N + 1)}:
            part = slice(groups * self.sequences)
            if self.has_pass:
                model.losses(ids[part], targets[part])
            model.loss_and_gradients(
                ids[part], targets[part], 1.0, at, weights=weights[part], divisor=N
            )
        return 0.0

    # Answers.

    def _answers_to(self, model: TransformerModel, batch: Batch) -> tuple[_Round, np.ndarray, bool]:
        """-> a round, the numbers of the batch's questions there, True if it was just sampled."""
        asked = [(self._step, start) for start in batch.starts.tolist()]
        if self._round is not None and all(one in self._rows for one in asked):
            rows = np.array([self._rows[one] for one in asked])
            return self._round, rows, self._sampled_at == self._step
        # Outside a run, as where steps are timed.
        found = self._sampled(model, asked, lambda: None)
        return found, np.arange(len(asked)), True

    def _take(self, found: _Round) -> None:
        """Makes a round the one that the next steps learn from."""
        self._round, self._sampled_at = found, -1
        places = enumerate(map(tuple, found.starts.tolist()))
        self._rows = {place: row for row, place in places if place[0] >= 0}

    def _sampled(
        self,
        model: TransformerModel,
        questions: Sequence[tuple[int, int]],
        check_stop: Callable[[], object],
    ) -> _Round:
        """Samples answers to questions, (step, window) each, and asks what they earn."""
        assert self.data
        G, L, size = self.sequences, self.data.most, self.data.block_size
        W = max(len(questions), 0 if self._round is None else len(self._round.starts))
        found = _Round.empty(W, G, L)
        seed, groups = self.data.seed, []
        sampling = GenerationConfig(max_tokens=L, temperature=1.0)
        for step, start in questions:
            question = start // size
            seeds = [hash64(seed, STREAM, step, question, g) >> 1 for g in range(G)]
            groups.append([self._text(question, sampling, seed) for seed in seeds])
        self._write(model, groups, check_stop)
        for row, ((step, start), texts) in enumerate(zip(questions, groups, strict=True)):
            found.starts[row] = step, start
            for g, text in enumerate(texts):
                found.counts[row, g] = len(text.tokens)
                found.tokens[row, g, : len(text.tokens)] = text.tokens
        numbers = [start // size for _, start in questions]
        found.rewards[: len(questions)] = self._earned(numbers, groups)
        rows = np.arange(len(questions))
        if self.has_pass:
            self._note_log_probabilities(found.old, model, found, rows)
        if self.config.reward_beta:
            with self._as_reference(model):
                self._note_log_probabilities(found.reference, model, found, rows)
        return found

    def _text(self, question: int, config: GenerationConfig, seed: int = 0) -> Continuation:
        """Returns an answer to a question that is to be written."""
        assert self.data
        return Continuation(self.data.tokenizer, self.data.asked(question).ids, config, seed=seed)

    def _write(
        self,
        model: TransformerModel,
        groups: Sequence[Sequence[Continuation]],
        check_stop: Callable[[], object],
    ) -> None:
        """Writes texts, those of a group after the same prompt."""
        assert self.data
        if self._decoder is None or self._decoder.model is not model:
            _, slots, length = self._slots(model.config, self.data.longest)
            part = max(length, READ_TOGETHER)
            self._decoder = Decoder(model, self.data.tokenizer, slots, length, part)
        self._decoder.clear()
        steps = iter(activity.parts(range(sum(map(len, groups)))))
        # Prompts of one length are read together.
        for tokens in self._decoder.write(sorted(groups, key=lambda texts: len(texts[0].ids))):
            check_stop()
            for token in tokens:
                if token.is_last:
                    next(steps, None)
        next(steps, None)

    def _earned(
        self, numbers: Sequence[int], groups: Sequence[Sequence[Continuation]]
    ) -> np.ndarray:
        """Returns what the answers to some questions earn (N, G)."""
        assert self.data
        template = format_of(self.data.tokenizer)
        lead = template.lead if template else ""
        answers = [
            Attempt(asked.said, text.text.removeprefix(lead), asked.wanted)
            for asked, texts in zip(map(self.data.asked, numbers), groups, strict=True)
            for text in texts
        ]
        return np.array(self.judge.scores(answers)).reshape(len(numbers), -1)

    def _windows(self, found: _Round, rows: np.ndarray) -> tuple[Batch, np.ndarray]:
        """-> windows (R, T) of all answers to some questions, where their tokens are targets."""
        assert self.data
        G, size = self.sequences, self.data.block_size
        prompts = [self.data.asked(start // size).ids for start in found.starts[rows, 1].tolist()]
        longest = max(
            len(ids) - 1 + int(found.counts[row].max())
            for ids, row in zip(prompts, rows, strict=True)
        )
        T = next(width // G for width in self.widths(size) if width >= G * longest)
        ids, targets = np.zeros((2, len(rows) * G, T), np.int32)
        mask = np.zeros(ids.shape, np.bool_)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            P = len(prompt)
            ids[i * G : (i + 1) * G, :P] = prompt
            for g in range(G):
                count = found.counts[row, g]
                answer = found.tokens[row, g, :count]
                ids[i * G + g, P : P + count - 1] = answer[:-1]
                targets[i * G + g, P - 1 : P - 1 + count] = answer
                mask[i * G + g, P - 1 : P - 1 + count] = True
        return Batch(ids, targets, np.zeros(len(ids), np.int64)), mask

    def _note_log_probabilities(
        self, out: np.ndarray, model: TransformerModel, found: _Round, rows: np.ndarray
    ) -> None:
        """Writes the log-probability of each token of answers, as many at a time as in a step."""
        assert self.data
        for first in activity.parts(range(0, len(rows), self.data.batch_size)):
            some = rows[first : first + self.data.batch_size]
            windows, mask = self._windows(found, some)
            is_token = np.arange(out.shape[2]) < found.counts[some][:, :, None]
            values = np.zeros(is_token.shape, np.float32)
            values[is_token] = -model.losses(windows.ids, windows.targets)[mask]
            out[some] = values

    @contextmanager
    def _as_reference(self, model: TransformerModel) -> Iterator[None]:
        """Gives the model the weights that it had before its first step, within the block."""
        own = model.flat.data.copy()
        assert self._weights is not None
        try:
            model.flat.data[...] = self._weights
            model.flat.refresh()
            yield
        finally:
            model.flat.data[...] = own
            model.flat.refresh()

    # Checkpoints.

    def settings(self) -> dict[str, Any]:
        """Returns what a resumed run must share: the reward, its file, the questions."""
        config, data = self.config, self.data
        assert data
        found = {
            "reward": self.judge.digest or self.judge.name,
            "answers": self.sequences,
            "updates": config.reward_updates,
            "clip": config.reward_clip,
            "beta": config.reward_beta,
            "tokens": data.most,
            "questions": data.digest,
        }
        return found

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the answers of the round, if more steps learn from them, and the reference."""
        found: dict[str, np.ndarray] = {}
        if self._round is not None and self.config.reward_updates > 1:
            found |= self._round._asdict()
            if not self.config.reward_beta:
                del found["reference"]
        if self._weights is not None:
            found["weights"] = self._weights
        return found

    def load_tensors(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Restores what `tensors` returned; copies what changes."""
        weights = tensors.get("weights")
        if weights is not None and weights is not self._weights:
            self._weights = weights.copy()
            self._weights.flags.writeable = False
        if "starts" in tensors:
            names = set(_Round._fields) & tensors.keys()
            W, G, L = tensors["tokens"].shape
            self._take(
                _Round.empty(W, G, L)._replace(**{name: tensors[name].copy() for name in names})
            )

    # Evaluations, checks and memory.

    def evaluated(
        self, model: TransformerModel, batch: Batch
    ) -> tuple[list[float], int, int, np.ndarray]:
        """Asks the questions of a batch: the loss of each is minus what the likeliest answer earns.

        Right are those that earn anything.
        """
        rewards = self._judge(model, batch)
        self._judged |= dict(zip(batch.starts.tolist(), rewards, strict=True))
        right = sum(reward > 0 for reward in rewards)
        return [-x for x in rewards], len(rewards), right, np.empty(0, np.int32)

    def sampling_bytes(self, config: ModelConfig, T: int, trained: int) -> int:
        """Counts the keys and values of answers, and the weights of the reference."""
        reference = 2 * trained if self.config.reward_beta else 0  # and those that make way for it
        return self._slots(config, T)[0] + reference

    def _slots(self, config: ModelConfig, T: int) -> tuple[int, int, int]:
        """-> the bytes of the cache of a decoder, its slots, and their length in tokens."""
        length = min(config.block_size, T + 1)
        each = cache_bytes(config, length)
        slots = max(self.sequences, min(SLOTS, CACHE_BYTES // each))
        return slots * each, slots, length

    def _judge(self, model: TransformerModel, batch: Batch) -> list[float]:
        """Returns what the likeliest answer to each question of a batch earns."""
        if self.data is None:  # an outline of a run
            return [0.0] * len(batch.starts)
        numbers = [start // self.data.block_size for start in batch.starts.tolist()]
        likeliest = GenerationConfig(max_tokens=self.data.most, temperature=0.0)
        groups = [[self._text(number, likeliest)] for number in numbers]
        self._write(model, groups, lambda: None)
        found: list[float] = self._earned(numbers, groups)[:, 0].tolist()
        return found

    def sums(self, model: TransformerModel, batch: Batch) -> list[float]:
        """A batch -> the sum of what its answers earn, and their number."""
        starts = batch.starts.tolist()
        rewards = [self._judged.pop(start) for start in starts if start in self._judged]
        if len(rewards) < len(starts):
            rewards = self._judge(model, batch)
        return [sum(rewards), len(rewards)]

    def compared(self, sums: Sequence[Sequence[float]]) -> tuple[str, dict[str, float], str]:
        """The sums of some batches -> the mean reward."""
        self._judged.clear()
        reward, count = np.sum(sums, axis=0)
        mean = float(reward / count)
        return self.name, {"reward": mean}, f"held-out reward {mean:.4f}"

    def sampled(self) -> tuple[str, dict[str, float], str]:
        """Returns what the sampled answers of the step earned -> as `compared`."""
        rewards = self._rewards_of_step()
        mean, share = float(rewards.mean()), float(teaching(rewards).mean())
        text = f"reward {mean:.3f}, {share:.0%} of the questions teach"
        if not share:
            text = (
                f"reward {mean:.3f}: nothing to learn, as all answers to a question earned the same"
            )
        return self.name, {"sampled_reward": mean, "teaching": share}, text

    def _rewards_of_step(self) -> np.ndarray:
        """Returns what the answers to the questions of the step earned (N, G)."""
        assert self._round is not None
        rows = [row for (step, _), row in self._rows.items() if step == self._step]
        found: np.ndarray = self._round.rewards[rows]
        return found

    def last_words(self) -> list[str]:
        """Says how many questions taught something, and whether answers were cut at the end."""
        if not self._asked:
            return []
        lines = [
            f"{self._taught / self._asked:.1%} of {count_of(self._asked, 'question')} taught "
            "something: all answers to the others earned the same"
        ]
        if (share := self._cut()) >= CUT:
            assert self.data
            lines.append(
                f"{share:.0%} of the last answers did not end within "
                f"{count_of(self.data.most, 'token')} and were rewarded as they were: "
                "--reward-tokens sets the limit"
            )
        return lines

    def _cut(self) -> float:
        """Returns the share of the answers of the round that had no more tokens to end."""
        assert self.data and self._round is not None
        found, ends = self._round, list(self.data.tokenizer.ends)
        is_cut = (found.counts == self.data.most) & ~np.isin(found.tokens[:, :, -1], ends)
        return float(is_cut[found.starts[:, 0] >= 0].mean())

    def first_loss(self, _model: TransformerModel, _batch: Batch) -> tuple[float, float, str]:
        """Has no ratio but 1: the advantages of a group sum to zero."""
        return 0.0, SLACK, "0"

    def widths(self, T: int) -> Sequence[int]:
        """Returns the widths of answers that are cut to the longest of a batch, in few steps."""
        G = self.sequences
        step = -(-(T // G) // LENGTHS)
        return [G * min(T // G, step * i) for i in range(1, LENGTHS + 1)]

    def rehearsal(self, _model: TransformerModel, tokenizer: Tokenizer) -> "Rewards":
        """Learns from a few questions of letters."""
        loss = Rewards("length", 2, self.config.reward_updates, beta=self.config.reward_beta)
        texts = [("ab", "cd")] * 8
        loss.data = QuestionsDataset.of_texts(tokenizer, texts, 2, most=2)
        return loss

    def dataset(self, _tokenizer: Tokenizer, _batch_size: int, _seed: int) -> Dataset | None:
        """Returns the questions, if it has them already."""
        return self.data

    def rows(self) -> list[list[str]]:
        """Returns names and values for the description of a run."""
        config, data = self.config, self.data
        assert data
        rows = [
            ["reward", self.judge.name],
            ["answers", f"{self.sequences} to each question, of at most {data.most} tokens"],
        ]
        if config.reward_updates > 1:
            rows.append(["updates", f"{config.reward_updates} per round of answers"])
        if config.reward_beta:
            rows.append(["distance", f"costs {config.reward_beta:g} per nat and token"])
        return rows

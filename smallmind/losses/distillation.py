"""A student that learns from a teacher's logits as well as from the text (Hinton et al. 2015)."""

import functools
import hashlib
import math
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, Self

import numpy as np

from smallmind.checks import InputError, check_type, count_of, suggesting
from smallmind.console import activity
from smallmind.files import safetensors
from smallmind.losses.cross_entropy import slack_of
from smallmind.losses.loss import Loss
from smallmind.losses.teacher_cache import (
    TOKENS_PER_PASS,
    CacheOutline,
    TeacherCache,
    make_cache,
)
from smallmind.losses.teacher_settings import DistillationConfig
from smallmind.losses.temperature import Temperature
from smallmind.memory.tensor_pool import unbacked
from smallmind.nn.backend import Backend
from smallmind.nn.batch import Part
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.settings.config import ModelConfig, Precision, micro_batch_sizes
from smallmind.settings.settings import to_saved
from smallmind.text.dataset import Batch, Dataset

MAX_ROWS = 64  # positions whose logits are compared at a time
# Memory of top_k_log_probabilities, in sizes of the logits: it computes in float64.
CACHING_SIZES = 10


@suggesting()
class Distillation(Loss):
    """A student's loss against a teacher of the same vocabulary, in nats per token:

        (1 - alpha) cross-entropy + alpha temperature^2 KL(teacher || student)

    alpha is the teacher's share: at 0 only the text counts, at 1 only the teacher. In the KL both
    distributions are softmax(logits / temperature), and temperature^2 keeps its gradient as large
    as that of the cross-entropy at any temperature.

    With learn_temperature the temperature is a parameter too, updated at the run's learning rate.
    See temperature.py.

    `cache` names a file. If it does not exist, the teacher runs once over the training text to
    create it. The teacher is then released, and its `top_k` largest logits per token are read from
    the file. See teacher_cache.py.

    The teacher runs in float32, without dropout. InputError if a setting is out of range.
    """

    name = "distillation"
    differs = "a different teacher"

    def __init__(
        self,
        teacher: TransformerModel,
        temperature: float = DistillationConfig.temperature,
        alpha: float = DistillationConfig.alpha,
        learn_temperature: bool = False,
        cache: str | PathLike[str] | None = None,
        top_k: int = DistillationConfig.teacher_top_k,
    ) -> None:
        self.config = DistillationConfig(
            teacher="",
            temperature=temperature,
            alpha=alpha,
            learn_temperature=learn_temperature,
            teacher_top_k=top_k,
        )
        check_type("teacher", teacher, TransformerModel)
        self.teacher: TransformerModel | None = teacher
        self.models, self.comparing = [teacher], "Comparing with the teacher"
        self.teacher_config = teacher.config
        self.vocab_size = teacher.config.vocab_size
        self.top_k = min(top_k, self.vocab_size)
        self.cache_file = cache
        self.cache: TeacherCache | None = None
        self.parameter: Temperature = Temperature(self.config.temperature, learn_temperature)

    @classmethod
    def of(cls, models: Sequence[TransformerModel], config: DistillationConfig | None) -> Self:
        """Distils a teacher with these settings."""
        (teacher,), config = models, config or DistillationConfig()
        return cls(
            teacher,
            temperature=config.temperature,
            alpha=config.alpha,
            learn_temperature=config.learn_temperature,
            cache=config.teacher_cache,
            top_k=config.teacher_top_k,
        )

    def __repr__(self) -> str:
        return (
            f"<Distillation: from {count_of(self.teacher_config.n_layer, 'layer')} of "
            f"{self.teacher_config.n_embd}, alpha={self.config.alpha:g}, "
            f"temperature={self.temperature:g}>"
        )

    @property
    def temperature(self) -> float:
        return self.parameter.value

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the teacher."""
        assert self.teacher
        return model_digest(self.teacher)

    def check(self, model: ModelConfig, block_size: int) -> None:
        """Raises InputError if the teacher cannot teach such a student on windows of this size."""
        teacher = self.teacher_config
        if teacher.vocab_size != model.vocab_size:
            raise InputError(
                f"the teacher has {teacher.vocab_size} tokens, the student "
                f"vocab_size={model.vocab_size}; use a teacher with the same vocabulary"
            )
        if teacher.block_size < block_size:
            raise InputError(
                f"the teacher sees {teacher.block_size} tokens, a window has "
                f"block_size={block_size}; lower it, or use a teacher that sees more"
            )

    def prepare(self, model: TransformerModel, dataset: Dataset) -> None:
        """Opens the cache, creating it first if it does not exist.

        InputError if model, dataset and teacher, or the cache, do not belong together.
        """
        self.check(model.config, dataset.block_size)
        if self.teacher and self.teacher.workspace.dtype != model.workspace.dtype:
            raise InputError("teacher and student differ in dtype; build both with the same one")
        if self.teacher and self.teacher.precision != Precision.FLOAT32:
            raise InputError(
                f"the teacher is stored as {self.teacher.precision}; call its "
                "use_precision(Precision.FLOAT32)"
            )
        if self.cache_file is None:
            return
        digest = self.digest
        if self.teacher and not os.path.lexists(self.cache_file):
            with activity.doing(f"Running the teacher over the text once, for {self.cache_file}"):
                make_cache(self.cache_file, self.teacher, digest, self.top_k, dataset)
        self._read(TeacherCache(self.cache_file, digest, self.vocab_size, self.top_k, dataset))

    def outlined(self, config: ModelConfig) -> None:
        """Takes a cache without a file instead of the teacher, if it has one."""
        if self.cache_file is not None:
            self._read(CacheOutline(self.vocab_size, config.block_size, self.top_k))

    def _read(self, cache: TeacherCache) -> None:
        """Takes a cache instead of the teacher: it has only some windows, none of held-out text."""
        self.cache, self.stride = cache, cache.block_size
        self.teacher, self.models, self.comparing = None, [], ""
        self.one_process = "a teacher cache is for one rank: leave out --teacher-cache"

    def preparation(self, backend: Backend) -> int:
        """Counts the bytes that the teacher takes to fill the cache, besides its weights."""
        if self.cache_file is None or not self.teacher:
            return 0
        T = self.teacher_config.block_size
        ids = unbacked((max(1, TOKENS_PER_PASS // T), T), np.int32)
        chosen = CACHING_SIZES * self.teacher.with_logits(ids, lambda logits: logits.nbytes)
        return backend.pool.statistics().bytes_held + chosen

    def loss_and_gradients(
        self,
        model: TransformerModel,
        batch: Batch,
        scale: float = 1.0,
        share: float = 1.0,
        at: Pass | None = None,
    ) -> float:
        """Computes this loss and its gradients; adds share times the temperature's gradient."""
        workspace = model.workspace

        def objective(part: Part, losses: np.ndarray, *others: Any) -> None:
            dlogits, logits, targets, loss_scale, *weights = others

            def learn(teacher_logits: np.ndarray) -> None:
                dtemperatures = workspace.rent_full_precision(losses.size)
                workspace.kernels.distillation(
                    losses,
                    dlogits,
                    dtemperatures,
                    logits,
                    teacher_logits,
                    targets,
                    self.config.alpha,
                    self.temperature,
                    loss_scale,
                    *weights,
                )
                if self.parameter.is_learnt:
                    dtemperature = share * float(dtemperatures.sum())
                    self.parameter.backward(dtemperature, batch.ids.size)
                workspace.release(dtemperatures)

            self._with_teacher_logits(model, batch, part, learn, kept)

        ids, targets, kind = batch.ids, batch.targets, self._repeats_as(model, batch)
        with ExitStack() as kept:
            return model.loss_and_gradients(
                ids, targets, scale, at, objective, repeats_as=kind, **batch.weighting
            )

    @property
    def unrecorded(self) -> str:  # type: ignore[override]
        """Says why passes cannot be repeated: something but kernels computes in each of them."""
        if self.cache:
            return "the logits of the teacher are read from a file in each pass"
        return "the temperature is learned" if self.parameter.is_learnt else ""

    def _repeats_as(self, model: TransformerModel, batch: Batch) -> Hashable | None:
        """Returns what passes are given besides arrays; None if they cannot be repeated."""
        if self.unrecorded or not (self.teacher and self.teacher.workspace.new_recording):
            return None
        if self.teacher.workspace.pool is not model.workspace.pool:
            return None  # a recording rents all its arrays from one
        B, T = batch.ids.shape
        if not model.network.head.holds(max(micro_batch_sizes(B, T, model.micro_batch_size)) * T):
            return None
        return self.teacher.flat.compute_address, self.config.alpha, self.temperature

    def sums(self, model: TransformerModel, batch: Batch) -> list[float]:
        """A batch -> three sums, to be added to those of others for the correlation.

        They are sums of products of logits, of student and teacher, student and student, teacher
        and teacher; from each is subtracted the mean of its position, which softmax ignores.
        """
        sums, first = np.zeros(3), 0
        B, T = batch.ids.shape
        for size in micro_batch_sizes(B, T, model.micro_batch_size):
            part = batch.part(slice(first, first + size))
            first += size

            def compare(student: np.ndarray, part: Batch = part) -> np.ndarray:
                assert self.teacher
                use = functools.partial(_sums_of_products, student, weights=part.weights)
                return self.teacher.with_logits(part.ids, use, part.firsts)

            sums += model.with_logits(part.ids, compare, part.firsts)
        found: list[float] = sums.tolist()
        return found

    def compared(self, sums: Sequence[Sequence[float]]) -> tuple[str, dict[str, float], str]:
        """The sums of some batches -> the correlation of student and teacher; 0 if one is constant.

        Above 0.9 the student orders tokens much as the teacher does.
        """
        products, student, teacher = np.sum(sums, axis=0)
        scale = math.sqrt(student * teacher)
        share = float(products / scale) if scale > 0 else 0.0
        text = f"correlation with the teacher {share:.3f} (above 0.9 once it is learned)"
        return "teacher", {"teacher_correlation": share}, text

    def first_loss(self, model: TransformerModel, batch: Batch) -> tuple[float, float, str]:
        """Guesses among all tokens, against the teacher on this batch.

        Its cross-entropy is ln V, and its KL from the teacher ln V less the teacher's entropy. The
        slack of the KL grows with the temperature, which multiplies what is left of its gradient.
        """
        entropies: list[float] = []

        def add(logits: np.ndarray) -> None:
            scaled = logits.astype(np.float64) / self.temperature
            scaled -= scaled.max(axis=1, keepdims=True)
            total = np.exp(scaled).sum(axis=1)
            means = (np.exp(scaled) * scaled).sum(axis=1) / total
            entropies.extend(np.log(total) - means)

        for i in range(len(batch.ids)):
            windows = slice(i, i + 1)
            arrays = {"ids": batch.ids[windows]}
            if batch.firsts is not None:
                arrays["firsts"] = batch.firsts[windows]
            part = Part(windows, slice(0, batch.ids.shape[1]), arrays)
            with ExitStack() as kept:
                self._with_teacher_logits(model, batch, part, add, kept)
        guess, alpha = math.log(self.vocab_size), self.config.alpha
        kl, temperature = guess - float(np.mean(entropies)), self.temperature
        return (
            (1 - alpha) * guess + alpha * temperature**2 * kl,
            slack_of(model) * (1 - alpha + alpha * max(1.0, temperature)),
            f"{1 - alpha:g} ln {self.vocab_size} + {alpha:g} x {temperature:g}^2 x the KL from "
            "guessing",
        )

    def rows(self) -> list[list[str]]:
        """Returns names and values for the description of a run."""
        source = f"the {self.top_k} most likely tokens, from a cache"
        if self.teacher:
            size = count_of(self.teacher.config.n_layer, "layer")
            source = f"{size} of {count_of(self.teacher.config.n_embd, 'channel')}"
        learned = ", learned" if self.config.learn_temperature else ""
        return [
            ["teacher", source],
            ["weight in the loss", f"{self.config.alpha:g}"],
            ["temperature", f"{self.temperature:g}{learned}"],
        ]

    def last_words(self) -> list[str]:
        """Tells the temperature that was learned."""
        learned = self.config.learn_temperature
        return [f"Temperature at the end: {self.temperature:.3f}"] if learned else []

    def settings(self) -> dict[str, Any]:
        """Returns the settings that a resumed run must share with the run that it resumes."""
        return {
            "digest": self.digest,
            "temperature": self.config.temperature,
            "alpha": self.config.alpha,
            "learn_temperature": self.config.learn_temperature,
            "top_k": None if self.cache_file is None else self.top_k,
        }

    def _with_teacher_logits(
        self,
        model: TransformerModel,
        batch: Batch,
        part: Part,
        use: Callable[[np.ndarray], None],
        kept: ExitStack,
    ) -> None:
        """Calls use with the teacher's logits (R, V) for some rows of some windows of a batch.

        What it computes of these windows with the first rows, and needs for the others, it keeps
        until `kept` is closed, or until other windows begin.
        """
        windows, rows, inputs = part
        ids, firsts = inputs["ids"], inputs.get("firsts")
        with ExitStack() as stack:
            stack.enter_context(model.workspace.profile("Teacher"))

            def use_after_teacher(logits: np.ndarray) -> None:
                stack.close()  # the end of the teacher's part, for the profile
                use(logits)

            if self.cache:
                starts = batch.starts[windows]
                with self.cache.logits(starts, model.workspace, rows) as logits:
                    use_after_teacher(logits)
                return
            assert self.teacher
            if rows == slice(0, ids.size):
                with self.teacher.workspace.noting_with(model.workspace):
                    self.teacher.with_logits(ids, use_after_teacher, firsts)
                return
            if rows.start == 0:
                kept.close()
                shape = ids.size, self.teacher.config.n_embd
                dtype = self.teacher.workspace.activation_dtype
                self._hidden = kept.enter_context(model.workspace.pool.borrow(shape, dtype))
                self.teacher.hidden(self._hidden, ids, firsts)
            self.teacher.with_logits_of(self._hidden, rows, use_after_teacher)


def _sums_of_products(
    student: np.ndarray, teacher: np.ndarray, weights: np.ndarray | None
) -> np.ndarray:
    """Logits (R, V), weights of the positions -> what `sums` adds up."""
    sums = np.zeros(3)
    learned = np.arange(len(student)) if weights is None else np.flatnonzero(weights)
    for first in range(0, len(learned), MAX_ROWS):
        rows = learned[first : first + MAX_ROWS]
        s, t = student[rows].astype(np.float64), teacher[rows].astype(np.float64)
        s -= s.mean(axis=1, keepdims=True)
        t -= t.mean(axis=1, keepdims=True)
        sums += np.vdot(s, t), np.vdot(s, s), np.vdot(t, t)
    return sums


def model_digest(model: TransformerModel) -> str:
    config = to_saved(model.config)
    for name in ("document_token", "bigram_vocab"):
        if config[name] is None:
            del config[name]  # so that caches and runs of versions without it fit
    digest = hashlib.sha256(safetensors.to_json(config).encode())
    for value in model.parameters.values():
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()

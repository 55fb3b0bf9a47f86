"""A student that learns from a teacher's logits as well as from the text (Hinton et al. 2015)."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import numpy as np

from smallmind import safetensors
from smallmind.config import LEARNT_TEMPERATURES, DistillationConfig, InputError, Precision
from smallmind.kernels import reference
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import Dataset
from smallmind.training.teacher_cache import TeacherCache, make_cache


class Distillation:
    """What a student loses against a teacher of the same vocabulary, in nats a token:

        (1 - alpha) cross-entropy + alpha temperature^2 KL(teacher || student)

    alpha is the teacher's share: at 0 only the text counts, at 1 only the teacher. In the KL both
    distributions are softmax(logits / temperature), and temperature^2 keeps its gradient as large
    as that of the cross-entropy whatever the temperature.

    With learn_temperature the temperature is a parameter that goes down the slope of the same loss,
    by Adam at the run's learning rate, as temperature = 1 * 10^sigmoid(x): always between 1 and 10.
    It needs both ends: temperature^2 KL vanishes as the temperature nears 0, whatever the student
    has learnt, and where a teacher is much more peaked than its student the slope points upward.

    With a cache, a file, the teacher runs once over the training text, unless the file is there,
    and is let go; from then on its `top_k` largest logits a token are read. See teacher_cache.py.

    The teacher runs in float32, without dropout. InputError where a setting is out of its range.
    """

    def __init__(
        self,
        teacher: TransformerModel,
        temperature: float = 2.0,
        alpha: float = 0.5,
        learn_temperature: bool = False,
        cache: str | PathLike[str] | None = None,
        top_k: int = 16,
    ) -> None:
        self.config = DistillationConfig(
            teacher="", temperature=temperature, alpha=alpha, learn_temperature=learn_temperature,
            teacher_top_k=top_k,
        )  # fmt: skip
        self.digest = model_digest(teacher)
        self.teacher: TransformerModel | None = teacher
        self.vocab_size = teacher.config.vocab_size
        self.top_k = min(top_k, self.vocab_size)
        self.cache_file = cache
        self.cache: TeacherCache | None = None
        share = math.log(temperature, LEARNT_TEMPERATURES[1]) if learn_temperature else 0.5
        # x, its two moments and its gradient, of the mean loss of an update.
        self._x, self._m, self._v, self._dx = np.zeros((4, 1))
        self._x[0] = math.log(share / (1 - share))
        self._updates = 0

    @property
    def temperature(self) -> float:
        """The temperature now."""
        if not self.config.learn_temperature:
            return self.config.temperature
        return LEARNT_TEMPERATURES[1] ** _sigmoid(self._x[0])

    def prepare(self, model: TransformerModel, dataset: Dataset) -> None:
        """Opens the cache, making it first where it is not there; dataset then draws its windows.

        InputError where model, dataset and teacher, or the cache, do not belong together.
        """
        if self.vocab_size != model.config.vocab_size:
            raise InputError(
                f"the teacher has {self.vocab_size} tokens, the student "
                f"vocab_size={model.config.vocab_size}; take a teacher of the same vocabulary"
            )
        if self.teacher:
            self._check_teacher(self.teacher, model, dataset)
        if self.cache_file is None:
            return
        if self.teacher and not os.path.lexists(self.cache_file):
            make_cache(self.cache_file, self.teacher, self.digest, self.top_k, dataset)
        self.cache = TeacherCache(
            self.cache_file, self.digest, self.vocab_size, self.top_k, dataset
        )
        dataset.stride = dataset.block_size
        self.teacher = None

    def loss_and_gradients(
        self,
        model: TransformerModel,
        ids: np.ndarray,
        targets: np.ndarray,
        scale: float = 1.0,
        share: float = 1.0,
        starts: np.ndarray | None = None,
    ) -> float:
        """model.loss_and_gradients of this loss; adds share times the temperature's gradient.

        With a cache, starts (B,) are the places of the windows in the training part.
        """
        pool, dtype = model.workspace.pool, model.workspace.dtype

        def objective(windows: slice, losses: np.ndarray, *others: Any) -> None:
            dlogits, logits, group_targets, group_scale = others
            with (
                self._teacher_logits(model, ids, starts, windows) as teacher_logits,
                pool.borrow(losses.size, dtype) as dtemperatures,
            ):
                model.workspace.kernels.distillation(
                    losses, dlogits, dtemperatures, logits, teacher_logits, group_targets,
                    self.config.alpha, self.temperature, group_scale,
                )  # fmt: skip
                self._dx += share * float(dtemperatures.sum()) * self._slope() / np.size(ids)

        return model.loss_and_gradients(ids, targets, scale, objective)

    def zero_gradient(self) -> None:
        """Forgets the temperature's gradient, as model.zero_gradients does the model's."""
        self._dx[0] = 0

    def step(self, learning_rate: float) -> None:
        """One update of a temperature that is learnt."""
        if self.config.learn_temperature:
            self._updates += 1
            beta1, beta2 = 0.9, 0.99
            coefficients = reference.AdamWCoefficients(
                learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=1e-8,
                weight_decay=0.0, correction1=1 / (1 - beta1**self._updates),
                correction2=1 / (1 - beta2**self._updates), gradient_scale=1.0,
            )  # fmt: skip
            reference.adamw(self._x, self._dx, self._m, self._v, 0, coefficients)
        self.zero_gradient()

    def settings(self) -> dict[str, Any]:
        """What a run that goes on must have in common with the one it goes on from."""
        settings = dataclasses.asdict(self.config)
        cached = self.cache_file is not None
        return {
            "digest": self.digest,
            **{name: settings[name] for name in ("temperature", "alpha", "learn_temperature")},
            "top_k": self.top_k if cached else None,
        }

    def state(self) -> dict[str, float]:
        """What steps change, fit for JSON."""
        x, m, v = (float(array[0]) for array in (self._x, self._m, self._v))
        return {"x": x, "m": m, "v": v, "updates": self._updates}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on from what state() said."""
        self._x[0], self._m[0], self._v[0] = (float(state[name]) for name in ("x", "m", "v"))
        self._updates = int(state["updates"])

    @contextmanager
    def _teacher_logits(
        self, model: TransformerModel, ids: np.ndarray, starts: np.ndarray | None, windows: slice
    ) -> Iterator[np.ndarray]:
        """Of the windows of a batch: the teacher's logits, (B T, V), rented for the block."""
        if self.cache and starts is None:
            raise InputError("with a cache of the teacher, give the starts of the windows")
        with ExitStack() as stack:
            with model.workspace.profile("Teacher"):
                if self.cache and starts is not None:
                    source = self.cache.logits(starts[windows], model.workspace)
                else:
                    assert self.teacher
                    source = self.teacher.logits(ids[windows])
                logits = stack.enter_context(source)
            yield logits

    def _slope(self) -> float:
        """d temperature / d x."""
        # forward: temperature = 10^sigmoid(x)
        if not self.config.learn_temperature:
            return 0.0
        share = _sigmoid(self._x[0])
        return self.temperature * math.log(LEARNT_TEMPERATURES[1]) * share * (1 - share)

    def _check_teacher(
        self, teacher: TransformerModel, model: TransformerModel, dataset: Dataset
    ) -> None:
        if teacher.config.block_size < dataset.block_size:
            raise InputError(
                f"the teacher sees {teacher.config.block_size} tokens, a window has "
                f"block_size={dataset.block_size}; lower it, or take a teacher that sees more"
            )
        if teacher.workspace.dtype != model.workspace.dtype:
            raise InputError("the teacher has another dtype than the student; build both with one")
        if teacher.precision != Precision.FLOAT32:
            raise InputError(
                f"the teacher is stored as {teacher.precision}; call its "
                "use_precision(Precision.FLOAT32)"
            )


def model_digest(model: TransformerModel) -> str:
    """SHA-256 of a model's config and weights."""
    digest = hashlib.sha256(safetensors.to_json(dataclasses.asdict(model.config)).encode())
    for value in model.parameters.values():
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2  # which overflows nowhere

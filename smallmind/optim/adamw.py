"""AdamW over the flat parameter vector."""

import math
import numbers
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_field, check_type
from smallmind.config import TrainingConfig
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.reference import AdamWCoefficients
from smallmind.nn.parameters import Role
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.clipping import clipping_factor, gradient_norm

DECAYED = (Role.EMBEDDING, Role.MATRIX, Role.HEAD)
MAX_GRADIENT = 1.8e19  # the square of a larger one overflows float32, and so would the moment v


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    Matrices decay, embeddings included; biases and norms do not. The moments `m` and `v` are flat
    vectors like the model's; `learning_rate` may be set before each step. InputError if a setting
    is out of range.
    """

    def __init__(
        self,
        model: TransformerModel,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        check_type("model", model, TransformerModel)
        if len(check_type("betas", betas, tuple, list)) != 2:
            raise InputError(f"betas={betas} must be two numbers")
        beta1, beta2 = betas
        if not check_type("eps", eps, numbers.Real) >= 0:
            raise InputError(f"eps={eps} must be at least 0")
        self.model = model
        self.learning_rate: float = check_field(TrainingConfig, "learning_rate", learning_rate)
        self.betas = (
            check_field(TrainingConfig, "beta1", beta1),
            check_field(TrainingConfig, "beta2", beta2),
        )
        self.eps = eps
        self.weight_decay: float = check_field(TrainingConfig, "weight_decay", weight_decay)
        self.steps = 0
        # Matrices come first in the flat vector, so those that decay are one range.
        (decayed,) = model.flat.ranges(*DECAYED)
        self._decayed = int(decayed.stop)
        self.m = aligned_zeros(model.flat.data.size, model.flat.data.dtype)
        self.v = aligned_zeros(model.flat.data.size, model.flat.data.dtype)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: learning_rate={self.learning_rate:g}, betas={self.betas}, "
            f"weight_decay={self.weight_decay:g}, {self.steps:,} steps>"
        )

    @classmethod
    def from_config(cls, model: TransformerModel, config: TrainingConfig) -> "AdamW":
        """The optimizer that a run with this config uses."""
        betas = config.beta1, config.beta2
        return cls(model, config.learning_rate, betas, weight_decay=config.weight_decay)

    def step(
        self,
        max_grad_norm: float | None = None,
        loss_scale: float = 1.0,
        max_grad_value: float | None = None,
    ) -> float:
        """One update from the model's gradients -> their norm before clipping. Clears them.

        The gradients are those of loss_scale times the loss. If their norm is not finite, nothing
        changes, the gradients included: the caller decides what to do.

        A gradient whose norm exceeds max_grad_norm is scaled down to it (Pascanu et al. 2013);
        then each of its elements is clipped to +-max_grad_value, at most 1.8e19.
        """
        for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            check_type(name, limit, numbers.Real, None)
            if limit is not None and not limit > 0:
                raise InputError(f"{name}={limit} must be above 0, or None")
        check_type("loss_scale", loss_scale, numbers.Real)
        flat, workspace = self.model.flat, self.model.workspace
        norm = gradient_norm(self.model, loss_scale)
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        beta1, beta2 = self.betas
        coefficients = AdamWCoefficients(
            learning_rate=self.learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=self.eps,
            weight_decay=self.weight_decay,
            correction1=1 / (1 - beta1**self.steps),
            correction2=1 / (1 - beta2**self.steps),
            gradient_scale=clipping_factor(norm, max_grad_norm) / loss_scale,
            max_gradient=min(max_grad_value or math.inf, MAX_GRADIENT),
        )
        vectors = flat.data, flat.grad, self.m, self.v
        with workspace.profile("OptimizerStep"):
            workspace.kernels.adamw(*vectors, self._decayed, coefficients, flat.working)
        return norm

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays that a resumed run needs, by name."""
        return {"m": self.m, "v": self.v}

    def state(self) -> dict[str, Any]:
        """The rest of what a resumed run needs, JSON-able."""
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what state() returned."""
        self.steps = int(state["steps"])

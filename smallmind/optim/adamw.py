"""AdamW over the flat parameter vector."""

import math

from smallmind.config import InputError, TrainingConfig
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.reference import AdamWCoefficients
from smallmind.nn.transformer import TransformerModel


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    Matrices decay, embeddings included; biases and norms do not. `m` and `v` are flat vectors
    beside the model's; `learning_rate` may be set before each step. InputError where a setting is
    out of its range.
    """

    def __init__(
        self,
        model: TransformerModel,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        TrainingConfig(  # raises where one is out of its range
            learning_rate=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay
        )  # fmt: skip
        if not eps >= 0:
            raise InputError(f"eps={eps} must be at least 0")
        self.model = model
        self.learning_rate = learning_rate
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps = 0
        self.m = aligned_zeros(model.flat.data.size, model.flat.data.dtype)
        self.v = aligned_zeros(model.flat.data.size, model.flat.data.dtype)

    def step(
        self,
        max_grad_norm: float | None = None,
        loss_scale: float = 1.0,
        max_grad_value: float | None = None,
    ) -> float:
        """One update -> the norm of the gradient before clipping. Clears the gradients.

        The gradients are those of loss_scale times the loss. FloatingPointError, and nothing is
        changed, where they are not finite.

        A gradient whose norm is over max_grad_norm is scaled down to it (Pascanu et al. 2013); then
        each of its numbers is clipped to +-max_grad_value.
        """
        for name, most in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            if most is not None and not most > 0:
                raise InputError(f"{name}={most} must be above 0, or None")
        flat, workspace = self.model.flat, self.model.workspace
        with workspace.profile("ClipGradients"):
            norm = math.sqrt(workspace.kernels.sum_of_squares(flat.grad)) / loss_scale
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the gradient is {norm}; nothing was updated")
        scale = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0
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
            gradient_scale=scale / loss_scale,
            max_gradient=max_grad_value or math.inf,
        )
        with workspace.profile("OptimizerStep"):
            workspace.kernels.adamw(
                flat.data, flat.grad, self.m, self.v, flat.decayed, coefficients,
                flat.working,
            )  # fmt: skip
        return norm

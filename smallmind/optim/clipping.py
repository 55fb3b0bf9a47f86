"""The norm of the gradient, and clipping to it (Pascanu et al. 2013)."""

import math
import numbers
from typing import NamedTuple

from smallmind.checks import InputError, check_type
from smallmind.nn.transformer import TransformerModel

MAX_GRADIENT = 1.8e19  # the square of a larger one overflows float32, and so would its mean


class Clipping(NamedTuple):
    """Clips the gradient in an update: times `scale`, then each element at most max_gradient."""

    scale: float
    max_gradient: float


def clip(
    model: TransformerModel,
    max_grad_norm: float | None,
    loss_scale: float,
    max_grad_value: float | None,
) -> tuple[float, Clipping]:
    """The arguments of `Optimizer.step` -> the norm of the gradient, and how to clip it.

    InputError if one of them is out of range.
    """
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        check_type(name, limit, numbers.Real, None)
        if limit is not None and not limit > 0:
            raise InputError(f"{name}={limit} must be above 0, or None")
    check_type("loss_scale", loss_scale, numbers.Real)
    workspace = model.workspace
    with workspace.profile("ClipGradients"):
        norm = math.sqrt(workspace.kernels.sum_of_squares(model.flat.grad)) / loss_scale
    factor = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0
    return norm, Clipping(factor / loss_scale, min(max_grad_value or math.inf, MAX_GRADIENT))

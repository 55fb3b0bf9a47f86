"""The norm of the gradient, and clipping to it (Pascanu et al. 2013)."""

import math

from smallmind.nn.transformer import TransformerModel


def gradient_norm(model: TransformerModel, loss_scale: float = 1.0) -> float:
    """The norm of all gradients together, divided by the loss_scale that they contain."""
    workspace = model.workspace
    with workspace.profile("ClipGradients"):
        return math.sqrt(workspace.kernels.sum_of_squares(model.flat.grad)) / loss_scale


def clipping_factor(norm: float, max_norm: float | None) -> float:
    """The factor that scales a gradient of this norm down to max_norm; 1 if it is not larger."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0

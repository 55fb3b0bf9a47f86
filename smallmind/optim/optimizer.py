"""The base class of all optimizers, clipping (Pascanu et al. 2013), and the one that a run uses."""

import math
import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError, check_field, check_type
from smallmind.nn.parameters import Role
from smallmind.nn.transformer import TransformerModel
from smallmind.parallel.group import ALONE, Group
from smallmind.settings.config import TrainingConfig

MAX_GRADIENT = 1.8e19  # the square of a larger one overflows float32, and so would its mean


class Clipping(NamedTuple):
    """Clips the gradient in an update: times `scale`, then each element at most max_gradient."""

    scale: float
    max_gradient: float


class UpdateSize(NamedTuple):
    """The norm of an update over that of the matrix, and the setting that it follows from."""

    usual: float
    largest: float  # a larger one is a problem
    setting: str


class Optimizer:
    """Updates a model's parameters from its gradients. Subclasses say how, in `update`.

    Which parameters are trained is settled before it is made: see `TransformerModel.freeze`.
    """

    update_sizes: ClassVar[Mapping[Role, UpdateSize]]  # of matrices
    group: Group = ALONE  # the ranks that divide the update among them, if that pays
    # Tensor -> where the part of each rank begins, and the end; empty if everybody has all.
    ends: Mapping[str, Sequence[int]] = MappingProxyType({})
    scratch_size: int = 0  # elements per thread that its kernels need, besides those of a product

    def __init__(self, model: TransformerModel, learning_rate: float) -> None:
        self.model = check_type("model", model, TransformerModel)
        # May be set before each step; other rates follow it in proportion.
        self.learning_rate: float = check_field(TrainingConfig, "learning_rate", learning_rate)
        self.steps = 0  # updates so far

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
        then each of its elements is clipped to +-max_grad_value, at most 1.8e19. InputError if an
        argument is out of range.
        """
        for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
            check_type(name, limit, numbers.Real, None)
            if limit is not None and not limit > 0:
                raise InputError(f"{name}={limit} must be above 0, or None")
        check_type("loss_scale", loss_scale, numbers.Real)
        workspace = self.model.workspace
        with workspace.profile("ClipGradients"):
            squares = workspace.kernels.sum_of_squares(self.model.flat.grad)
            norm = math.sqrt(squares) / loss_scale
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        factor = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0
        limit = min(max_grad_value or math.inf, MAX_GRADIENT)
        with workspace.profile("OptimizerStep"):
            self.update(Clipping(factor / loss_scale, limit))
        return norm

    def update(self, clipping: Clipping) -> None:
        """Makes update number `steps`, from 1, of the parameters. Clears their gradients."""
        raise NotImplementedError

    def share_parameters(self, part: slice, ends: Sequence[int]) -> None:
        """Gives all ranks the parameters in a part of the vector that each has updated.

        The ends are places in this part. Clears all of its gradients.
        """
        flat = self.model.flat
        self.group.collect(flat.data[part], ends).wait()
        flat.grad[part] = 0
        if (copy := flat.copy_of(part)) is not None:
            self.model.workspace.kernels.copy_vector(copy, flat.data[part])

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a resumed run needs, by name; `step` updates them in place.

        If several ranks share them, only the part of this one.
        """
        raise NotImplementedError

    def own_part(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """A whole tensor -> the part that `tensors` has of it here."""
        return tensor[self.group.own(self.ends[name])] if name in self.ends else tensor

    def whole(self, name: str, part: np.ndarray) -> np.ndarray:
        """A part as `tensors` has it -> on rank 0 the whole tensor. All ranks call it."""
        return self.group.gather(part, self.ends[name]) if name in self.ends else part

    def state(self) -> dict[str, Any]:
        """Returns the rest of what a resumed run needs, JSON-able."""
        return {"steps": self.steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what state() returned."""
        self.steps = int(state["steps"])


def rate_settings(config: TrainingConfig) -> list[str]:
    """-> the names of the settings that the sizes of updates follow from, in alphabetical order."""
    kind = parts.load(parts.OPTIMIZERS, config.optimizer)
    return sorted({size.setting for size in kind.update_sizes.values()})


def make_optimizer(
    model: TransformerModel, config: TrainingConfig, group: Group = ALONE
) -> Optimizer:
    """Returns the optimizer of a run, as it is before the first step."""
    return parts.load(parts.OPTIMIZERS, config.optimizer).from_config(model, config, group)

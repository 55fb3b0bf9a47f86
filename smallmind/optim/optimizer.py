"""The base class of all optimizers, and the one that a run uses."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import check_field, check_type
from smallmind.nn.parameters import Role
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.clipping import Clipping, clip
from smallmind.parallel.group import ALONE, Group
from smallmind.settings.config import TrainingConfig


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
        then each of its elements is clipped to +-max_grad_value, at most 1.8e19.
        """
        norm, clipping = clip(self.model, max_grad_norm, loss_scale, max_grad_value)
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        with self.model.workspace.profile("OptimizerStep"):
            self.update(clipping)
        return norm

    def update(self, clipping: Clipping) -> None:
        """Update number `steps`, from 1, of the parameters. Clears their gradients."""
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
        """The arrays that a resumed run needs, by name; `step` updates them in place.

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

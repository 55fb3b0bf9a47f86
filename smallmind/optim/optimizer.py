"""What a run needs from its optimizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from smallmind import parts
from smallmind.config import TrainingConfig
from smallmind.nn.parameters import Role
from smallmind.nn.transformer import TransformerModel


class UpdateSize(NamedTuple):
    """The norm of an update over that of the matrix, and the setting that it follows from."""

    usual: float
    largest: float  # a larger one is a problem
    setting: str


class Optimizer(Protocol):
    """Updates a model's parameters from its gradients."""

    learning_rate: float  # may be set before each step; other rates follow it in proportion
    steps: int  # updates so far
    update_sizes: Mapping[Role, UpdateSize]  # of matrices
    scratch_size: int  # elements per thread that its kernels need, besides those of a product

    def step(
        self,
        max_grad_norm: float | None = None,
        loss_scale: float = 1.0,
        max_grad_value: float | None = None,
    ) -> float:
        """One update -> the norm of the gradient before clipping; clears the gradients.

        If the norm is not finite, nothing changes.
        """

    def tensors(self) -> dict[str, np.ndarray]:
        """The arrays that a resumed run needs, by name; `step` updates them in place."""

    def state(self) -> dict[str, Any]:
        """The rest of what a resumed run needs, JSON-able."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what state() returned."""


def rate_settings(config: TrainingConfig) -> list[str]:
    """The names of the settings that the sizes of updates follow from, in alphabetical order."""
    kind = parts.load(parts.OPTIMIZERS, config.optimizer)
    return sorted({size.setting for size in kind.update_sizes.values()})


def make_optimizer(model: TransformerModel, config: TrainingConfig) -> Optimizer:
    """The optimizer of a run, as it is before the first step."""
    kind = parts.load(parts.OPTIMIZERS, config.optimizer)
    optimizer: Optimizer = kind.from_config(model, config)
    return optimizer

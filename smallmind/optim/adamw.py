"""AdamW over the flat parameter vector."""

import numbers
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_field, check_type, suggesting
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from smallmind.nn.parameters import ALIGNED_ELEMENTS, Role
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import Clipping, Optimizer, UpdateSize
from smallmind.parallel.group import ALONE, Group
from smallmind.parallel.shards import bounds
from smallmind.settings.config import TrainingConfig

DECAYED_ROLES = (Role.EMBEDDING, Role.MATRIX, Role.HEAD)


class _Part(NamedTuple):
    """The part of a range of parameters that is updated here."""

    whole: slice
    parameters: slice
    moments: slice
    decayed: int  # of the parameters, the first ones
    ends: list[int]  # where in the range the part of each rank begins, and the end


@suggesting()
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

    Matrices decay, embeddings included; biases and norms do not. `learning_rate` may be set before
    each step. Updates the parameters with these roles; their moments `m` and `v` are flat vectors
    like the model's. Each rank of a group has a part of the moments, and updates the parameters
    that belong to it. InputError if a setting is out of range.
    """

    update_sizes: ClassVar[Mapping[Role, UpdateSize]] = dict.fromkeys(
        DECAYED_ROLES, UpdateSize(1e-3, 1e-1, "learning_rate")
    )

    def __init__(
        self,
        model: TransformerModel,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        roles: tuple[Role, ...] = tuple(Role),
        group: Group = ALONE,
    ) -> None:
        super().__init__(model, learning_rate)
        if len(check_type("betas", betas, tuple, list)) != 2:
            raise InputError(f"betas={betas} must be two numbers")
        beta1, beta2 = betas
        if not check_type("eps", eps, numbers.Real) >= 0:
            raise InputError(f"eps={eps} must be at least 0")
        self.betas = (
            check_field(TrainingConfig, "beta1", beta1),
            check_field(TrainingConfig, "beta2", beta2),
        )
        self.eps = eps
        self.weight_decay: float = check_field(TrainingConfig, "weight_decay", weight_decay)
        flat = model.flat
        # The parameters that decay come first in the flat vector.
        self._decayed = max((part.stop for part in flat.ranges(*DECAYED_ROLES)), default=0)
        self._ranges = flat.ranges(*roles)
        size = sum(part.stop - part.start for part in self._ranges)
        self.group = group
        ends = [ALIGNED_ELEMENTS * line for line in bounds(size // ALIGNED_ELEMENTS, group.size)]
        if group.size > 1:
            self.ends = {"m": ends, "v": ends}
        own = group.own(ends)
        self.m, self.v = (flat.zeros(own.stop - own.start, flat.data.dtype) for _ in range(2))
        self._parts = list(self._own_parts(own, ends))

    def __repr__(self) -> str:
        return (
            f"<AdamW: learning_rate={self.learning_rate:g}, betas={self.betas}, "
            f"weight_decay={self.weight_decay:g}, {self.steps:,} steps>"
        )

    @classmethod
    def from_config(
        cls, model: TransformerModel, config: TrainingConfig, group: Group = ALONE
    ) -> "AdamW":
        """Returns the optimizer that a run with this config uses."""
        return cls(
            model,
            config.learning_rate,
            (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            group=group if config.shard_optimizer else ALONE,
        )

    def update(self, clipping: Clipping) -> None:
        """Updates the parameters with its roles and clears their gradients."""
        flat, kernels = self.model.flat, self.model.workspace.kernels
        beta1, beta2 = self.betas
        coefficients = AdamWCoefficients(
            learning_rate=self.learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=self.eps,
            weight_decay=self.weight_decay,
            correction1=1 / (1 - beta1**self.steps),
            correction2=1 / (1 - beta2**self.steps),
            gradient_scale=clipping.scale,
            max_gradient=clipping.max_gradient,
        )
        for part in self._parts:
            if part.moments.start < part.moments.stop:
                kernels.adamw(
                    flat.data[part.parameters],
                    flat.grad[part.parameters],
                    self.m[part.moments],
                    self.v[part.moments],
                    part.decayed,
                    coefficients,
                    flat.copy_of(part.parameters),
                )
            if self.group.size > 1:
                self.share_parameters(part.whole, part.ends)

    def _own_parts(self, moments: slice, ends: list[int]) -> Iterator[_Part]:
        """Yields the part of each range of parameters to which these moments belong."""
        end = 0
        for whole in self._ranges:
            start, end = end, end + whole.stop - whole.start
            first = min(max(start, moments.start), end)
            last = max(first, min(end, moments.stop))
            own = slice(whole.start + first - start, whole.start + last - start)
            within = slice(first - moments.start, last - moments.start)
            decayed = max(0, min(own.stop, self._decayed) - own.start)
            here = [min(max(each, start), end) - start for each in ends]
            yield _Part(whole, own, within, decayed, here)

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the moments, by name."""
        return {"m": self.m, "v": self.v}

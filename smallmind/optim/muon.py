"""Muon: momentum whose update is made orthogonal, for the hidden matrices; AdamW for the rest."""

from typing import ClassVar

import numpy as np

from smallmind.checks import InputError, check_field, suggesting
from smallmind.kernels.reference_optimizers import MatrixBlocks, MuonCoefficients
from smallmind.nn.parameters import Parameters, ParameterSpec, Role
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.optimizer import Clipping, Optimizer, UpdateSize
from smallmind.parallel.group import ALONE, Group
from smallmind.settings.config import TrainingConfig

# The momentum rises to its final value: while the weights change fast, old gradients mislead. Start
# and length are those of modded-nanogpt and nanochat.
FIRST_MOMENTUM = 0.85
OTHER_ROLES = tuple(role for role in Role if role != Role.MATRIX)


@suggesting()
class Muon(Optimizer):
    """Muon (Jordan et al. 2024) for hidden matrices, AdamW for everything else.

    The update of a matrix is its momentum with all singular values made about 1. Matrices that are
    stored side by side, like those of queries, keys and values, are updated one by one. Their rate
    is matrix_learning_rate, their weight decay that of AdamW. `learning_rate` may be set before
    each step; `matrix_learning_rate` follows it in proportion. Each rank of a group updates some of
    the matrices; if `is_sharded`, it keeps only the means of these. InputError if a setting
    is out of range.
    """

    # Whatever the gradient, an update has the norm that the rate gives it: beside small initial
    # weights a large one. Embeddings learn fastest at rates that make their updates as large.
    update_sizes: ClassVar = {
        Role.EMBEDDING: UpdateSize(1e-2, 1.0, "learning_rate"),
        Role.MATRIX: UpdateSize(1e-2, 1.0, "matrix_learning_rate"),
        Role.HEAD: UpdateSize(1e-2, 1.0, "learning_rate"),
    }

    def __init__(
        self,
        model: TransformerModel,
        learning_rate: float = 1e-3,
        matrix_learning_rate: float = 0.02,
        momentum: float = 0.95,
        momentum_warmup_steps: int = 300,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        group: Group = ALONE,
        is_sharded: bool = False,
    ) -> None:
        super().__init__(model, learning_rate)
        if not self.learning_rate:
            raise InputError(
                "learning_rate=0 must be above 0 with Muon, whose matrix_learning_rate follows it"
            )
        rate = check_field(TrainingConfig, "matrix_learning_rate", matrix_learning_rate)
        self.group = group
        of_others = group if is_sharded else ALONE
        self.others = AdamW(model, learning_rate, betas, eps, weight_decay, OTHER_ROLES, of_others)
        self._peak_rates = self.learning_rate, rate
        self.momentum: float = check_field(TrainingConfig, "momentum", momentum)
        self.momentum_warmup_steps: int = check_field(
            TrainingConfig, "momentum_warmup_steps", momentum_warmup_steps
        )
        flat = model.flat
        # None if all of them are frozen.
        self._matrices = next(iter(flat.ranges(Role.MATRIX)), slice(0, 0))
        self._ends = divided_matrices(flat, self._matrices, group.size)
        self._own = group.own(self._ends)  # of the matrices
        first, last = self._own.start, self._own.stop
        self._is_sharded = is_sharded and group.size > 1
        if self._is_sharded:
            self.ends = {**self.others.ends, "matrix_mean": self._ends}
        start = self._matrices.start
        self._blocks = matrix_blocks(flat, slice(start + first, start + last))
        self.scratch_size = self._blocks.scratch_size if last > first else 0
        size = last - first if self._is_sharded else self._ends[-1]
        self.matrix_mean = flat.zeros(size, flat.data.dtype)

    def __repr__(self) -> str:
        others = self.others
        return (
            f"<Muon: learning_rate={self.learning_rate:g}, "
            f"matrix_learning_rate={self.matrix_learning_rate:g}, betas={others.betas}, "
            f"weight_decay={others.weight_decay:g}, {self.steps:,} steps>"
        )

    @classmethod
    def from_config(
        cls, model: TransformerModel, config: TrainingConfig, group: Group = ALONE
    ) -> "Muon":
        """Returns the optimizer that a run with this config uses."""
        return cls(
            model,
            config.learning_rate,
            config.matrix_learning_rate,
            config.momentum,
            config.momentum_warmup_steps,
            (config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            group=group,
            is_sharded=config.shard_optimizer,
        )

    @property
    def matrix_learning_rate(self) -> float:
        """The learning rate of the hidden matrices, which follows `learning_rate`."""
        peak, matrix_peak = self._peak_rates
        return matrix_peak * (self.learning_rate / peak)

    def update(self, clipping: Clipping) -> None:
        """Updates all parameters and clears their gradients."""
        self.others.learning_rate, self.others.steps = self.learning_rate, self.steps
        self.others.update(clipping)
        flat, part = self.model.flat, self._matrices
        coefficients = MuonCoefficients(
            learning_rate=self.matrix_learning_rate,
            momentum=self._momentum(self.steps - 1),
            weight_decay=self.others.weight_decay,
            gradient_scale=clipping.scale,
            max_gradient=clipping.max_gradient,
        )
        kernels, own = self.model.workspace.kernels, self._own
        parameters, gradients = flat.data[part], flat.grad[part]
        copy = flat.copy_of(slice(part.start + own.start, part.start + own.stop))
        mean = self.matrix_mean if self._is_sharded else self.matrix_mean[own]
        if mean.size:
            kernels.muon(parameters[own], gradients[own], mean, self._blocks, coefficients, copy)
        if self.group.size == 1 or part.start == part.stop:
            return
        if not self._is_sharded:
            for other in (slice(0, own.start), slice(own.stop, None)):
                kernels.average_gradient(self.matrix_mean[other], gradients[other], coefficients)
        self.share_parameters(part, self._ends)

    def _momentum(self, step: int) -> float:
        """step (from 0) -> the momentum of its update."""
        if step >= self.momentum_warmup_steps:
            return self.momentum
        first = min(FIRST_MOMENTUM, self.momentum)
        return first + (self.momentum - first) * step / self.momentum_warmup_steps

    def tensors(self) -> dict[str, np.ndarray]:
        """Returns the momentum of the hidden matrices and the moments of the others, by name."""
        return {**self.others.tensors(), "matrix_mean": self.matrix_mean}


def divided_matrices(flat: Parameters, part: slice, count: int) -> list[int]:
    """-> where in a part of the vector each of `count` shares of its matrices begins, and the end.

    Each has consecutive matrices, about as much work as the others.
    """
    ends, done = [0], 0.0
    matrices = [(p, spec) for p, spec in flat.places() if part.start <= p < part.stop]
    costs = [_work(spec) for _, spec in matrices]
    for (first, _), cost in zip(matrices, costs, strict=True):
        # A matrix belongs to the share of the work in which its middle lies.
        while (done + cost / 2) * count >= len(ends) * sum(costs):
            ends.append(first - part.start)
        done += cost
    return ends + [part.stop - part.start] * (count + 1 - len(ends))


def _work(spec: ParameterSpec) -> float:
    """Multiplications that the update of a parameter's matrices takes, in proportion."""
    rows, columns = spec.shape
    return float(sum(rows * width * min(rows, width) for width in spec.widths or (columns,)))


def matrix_blocks(flat: Parameters, part: slice) -> MatrixBlocks:
    """Returns the hidden matrices in a part of the vector, with their places in it.

    Those side by side in one parameter are separate. From the largest to the smallest, so that
    threads that take turns have equal work.
    """
    blocks: list[tuple[int, ...]] = []
    for first, spec in flat.places():
        if spec.role == Role.MATRIX and part.start <= first < part.stop:
            rows, stride = spec.shape
            start = first - part.start
            for columns in spec.widths or (stride,):
                blocks.append((start, rows, columns, stride))
                start += columns
    blocks.sort(key=lambda block: block[1] * block[2], reverse=True)
    fields = np.array(blocks, np.int64).reshape(-1, len(MatrixBlocks._fields)).T
    return MatrixBlocks(*map(np.ascontiguousarray, fields))

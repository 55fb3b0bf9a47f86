"""One step of training: gradients accumulated over its batches, and the update."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from smallmind.console import activity
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass
from smallmind.settings.config import Precision, TrainingConfig
from smallmind.text.dataset import Batch
from smallmind.text.samplers import Sampler
from smallmind.training.distillation import Distillation
from smallmind.training.health import not_finite
from smallmind.training.live_state import LiveState

FIRST = Pass(0)  # of a run


def set_up(model: TransformerModel, config: TrainingConfig, precision: Precision) -> None:
    """Makes the passes of a model those of a run with this config, in a precision."""
    strategy, interval = config.recompute, config.checkpoint_interval
    model.use_recompute(RecomputePlan.of(strategy, model.config.n_layer, interval))
    model.micro_batch_size = config.micro_batch_size
    model.use_precision(precision)
    if config.freeze is not None:  # else what the model trains already
        model.freeze(config.freeze)


class Summed(NamedTuple):
    """The mean loss of a step's targets, or a part of the sum, and their mean weight.

    Gradients are those of the loss. Divided by the weight, both are the weighted means, with the
    same bits however the targets are divided into batches and shards.
    """

    loss: float
    weight: float  # in windows: exact where all targets count the same

    def over(self, windows: int) -> float:
        """The divisor of the loss and the gradients of this many windows."""
        return self.weight / windows if self.weight else 1.0


# (batch, scale, share, at) -> the mean loss of the batch; adds scale times its gradient to those of
# the model. share is the batch's share of the step's windows, which scale already includes.
LossAndGradients = Callable[[Batch, float, float, Pass], float]


def make_objective(model: TransformerModel, distillation: Distillation | None) -> LossAndGradients:
    """Returns the loss of a run: the cross-entropy of its text, or that of its distillation."""
    if distillation:
        return functools.partial(distillation.loss_and_gradients, model)

    def objective(batch: Batch, scale: float, _share: float, at: Pass) -> float:
        return model.loss_and_gradients(batch.ids, batch.targets, scale, at, **batch.weighting)

    return objective


def accumulate_gradients(
    model: TransformerModel,
    sampler: Sampler,
    step: int,
    objective: LossAndGradients,
    get_batch: Callable[[int], Batch],
    loss_scale: float = 1.0,
    at: Pass = FIRST,
) -> Summed:
    """Adds loss_scale times the gradients of a step's batches -> mean loss, and its weight.

    get_batch takes the number of a batch, and may return some of its windows: the result is then
    their part of the sum. Every window counts the same, as in one large batch. `at` is the first
    pass of the step.
    """
    windows, total, weight = sampler.windows_in_step(step), 0.0, 0.0
    for number in activity.parts(sampler.batches_in_step(step)):
        with model.workspace.profile("GetBatch"):
            batch = get_batch(number)
        if len(batch.ids):  # the last update of an epoch may need fewer batches
            share = len(batch.ids) / windows
            here = at._replace(first_row=batch.first_row)
            total += share * objective(batch, loss_scale * share, share, here)
            weight += batch.windows
        # Dropout depends on the number of the batch, whichever of its windows are here.
        at = at._replace(number=at.number + (sampler.windows_in_batch(number) > 0))
    return Summed(total, weight)


def passes_in_step(sampler: Sampler, step: int) -> int:
    """Batches of a step that are not empty."""
    return sum(sampler.windows_in_batch(number) > 0 for number in sampler.batches_in_step(step))


def update(run: LiveState, divisor: float = 1.0) -> float:
    """Updates the parameters from their gradients over divisor -> the norm of that gradient.

    If it is not finite, nothing changes except the loss scale in float16.
    """
    config = run.config
    norm_limit, value_limit = config.max_grad_norm or None, config.max_grad_value or None
    norm = run.optimizer.step(norm_limit, run.loss_scale * divisor, value_limit)
    if run.scaler:
        run.scaler.update(overflowed=not math.isfinite(norm))
    return norm


def fatal_reason(run: LiveState, norm: float) -> str | None:
    """Why a run cannot continue after an update with this norm, or None."""
    if math.isfinite(norm) or (run.scaler and not run.scaler.is_lost):
        return None
    culprits = not_finite(run.model)
    if run.scaler is None:
        reason = f"the norm of the gradient is {norm}; nothing was updated"
        others = len(culprits) - 1
        more = f" (and {others} more parameters)" if others > 0 else ""
        return "; ".join([reason, *map(str, culprits[:1])]) + more
    first = culprits[0].name if culprits else "the norm of all gradients"
    return (
        f"{run.scaler.skips} gradients in a row overflowed float16, down to a loss scale of "
        f"{run.scaler.scale:g}; {first} was the first: lower the learning rate, or use precision "
        "bfloat16 or float32"
    )

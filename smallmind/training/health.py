"""The health of a run: gradients, updates and hidden units, by the name of the parameter or layer.

Problems are returned; nothing here changes what a run learns.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from smallmind.kernels.description import described
from smallmind.kernels.number_types import to_float32
from smallmind.kernels.reference_optimizers import sum_of_squares
from smallmind.nn.parameters import ZEROS, Role
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Kernel
from smallmind.optim.optimizer import UpdateSize
from smallmind.text.dataset import Batch
from smallmind.training.live_state import LiveState
from smallmind.training.records import Finding, HealthRecord

Collect = Callable[[Callable[[], Any]], list[Any]]  # what computes a result -> those of all

EXPLODING, VANISHING = 100.0, 1e-7  # norms of a gradient
NOT_FINITE = ("nan", "inf")
SPARSE_SHARE = 0.9  # share of zeros
STEPS_FROM_ZERO = 100  # steps after which a matrix that started at zero is judged like others
SMALL_SHARE = 1e-2  # share of the usual ratio of update to weight
CHUNK_SIZE = 1 << 18  # elements checked at a time: 2 MB as float64, however large the model


class GradientDiagnostics:
    """Checks one gradient, an array of any shape.

    if finding := GradientDiagnostics.check_gradients("head", gradient):
        print(finding)
    """

    @staticmethod
    def check_gradients(
        name: str, gradients: np.ndarray, verbose: bool = False, role: Role | None = None
    ) -> Finding | None:
        """Returns the problem, or None. With verbose the message ends with statistics.

        NaN, Inf, all zero, a norm above 100 (exploding) or below 1e-7 (vanishing), over 90 % zeros.
        In an embedding (by its role, or a name that ends in "embedding.weight") zero rows do not
        count: they belong to tokens that the batch does not have.
        """
        gradients = np.asarray(gradients)
        if role is None and name.endswith("embedding.weight"):
            role = Role.EMBEDDING
        problem, message = _problem(gradients, role) if gradients.size else ("", "")
        if not problem:
            return None
        if verbose:
            zeros = 1 - np.count_nonzero(gradients) / gradients.size
            message += (
                f"; norm {_norm(gradients):.3g}, mean {gradients.mean(dtype=np.float64):.3g}, "
                f"from {gradients.min():.3g} to {gradients.max():.3g}, {zeros:.1%} zeros"
            )
        return Finding(name, problem, message)

    @staticmethod
    def get_gradient_norm(gradients: np.ndarray) -> tuple[float, bool]:
        """Returns the norm, and whether check_gradients finds a problem."""
        finding = GradientDiagnostics.check_gradients("", gradients)
        return _norm(np.asarray(gradients)), finding is not None


def largest_gradients(model: TransformerModel, scale: float) -> str:
    """Names the three largest gradients, divided by scale, those not finite first."""

    def size(gradient: np.ndarray) -> float:
        norm = _norm(gradient)
        return norm / scale if math.isfinite(norm) else math.inf

    sizes = {name: size(gradient) for name, gradient in model.gradients.items()}
    names = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return ", ".join(f"{name} (norm {sizes[name]:.3g})" for name in names)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK_SIZE):
        yield flat[start : start + CHUNK_SIZE]


def _norm(array: np.ndarray) -> float:
    return math.sqrt(sum(sum_of_squares(chunk) for chunk in _chunks(array)))


def _problem(gradients: np.ndarray, role: Role | None) -> tuple[str, str]:
    """Returns the keyword and the message of the first problem found, or two empty strings."""
    nans = sum(np.count_nonzero(np.isnan(chunk)) for chunk in _chunks(gradients))
    if nans:
        return "nan", f"{nans:,} of {gradients.size:,} gradients are NaN"
    infs = sum(np.count_nonzero(np.isinf(chunk)) for chunk in _chunks(gradients))
    if infs:
        return "inf", f"{infs:,} of {gradients.size:,} gradients are infinite"
    nonzero = int(np.count_nonzero(gradients))
    if not nonzero:
        return "zero", "all gradients are zero: the loss does not depend on it"
    norm = _norm(gradients)
    if norm > EXPLODING:
        return "exploding", f"exploding gradients (norm={norm:.2f}): lower the learning rate"
    if norm < VANISHING:
        return "vanishing", f"vanishing gradients (norm={norm:.2e}): check the initialisation"
    size, where = gradients.size, ""
    if gradients.ndim == 2:
        rows = np.count_nonzero(gradients.any(axis=1))
        where = f"; {len(gradients) - rows:,} of {len(gradients):,} rows have none"
        if role == Role.EMBEDDING:
            size = rows * gradients.shape[1]
    if nonzero >= (1 - SPARSE_SHARE) * size:
        return "", ""
    return "sparse", f"{1 - nonzero / size:.1%} of its gradients are zero{where}"


def check_model(model: TransformerModel, loss_scale: float = 1.0) -> list[Finding]:
    """Returns the problems of a model's gradients, which belong to loss_scale times the loss."""
    findings = []
    for spec in model.flat.trained:
        gradient = model.gradients[spec.name]
        unscaled = gradient if loss_scale == 1 else gradient / gradient.dtype.type(loss_scale)
        check = GradientDiagnostics.check_gradients
        if finding := check(spec.name, unscaled, role=spec.role):
            findings.append(finding)
    return findings


def not_finite(model: TransformerModel) -> list[Finding]:
    """-> the gradients with NaN or Inf, in the order in which the backward pass reaches them."""
    return [finding for finding in reversed(check_model(model)) if finding.problem in NOT_FINITE]


def dead_units(
    model: TransformerModel,
    ids: np.ndarray,
    targets: np.ndarray,
    collect: Collect = lambda compute: [compute()],
) -> list[Finding]:
    """ids, targets (B, T) -> the layers with hidden units that are silent for every token.

    With several processes each has some of the windows, perhaps none: B may be 0, and `collect`
    returns the results of all. Runs one forward pass, without dropout. Keeps one number per unit.
    """
    dead: dict[str, np.ndarray] = {}  # whether each unit is silent everywhere
    for silent in collect(lambda: _silent_units(model, ids, targets)):
        for layer, units in silent.items():
            dead[layer] = np.array(units) & dead.get(layer, True)
    message = "{:,} of {:,} hidden units are dead: silent for every token of the batch"
    return [
        Finding(layer, "dead", message.format(int(units.sum()), units.size))
        for layer, units in dead.items()
        if units.any()
    ]


def _silent_units(
    model: TransformerModel, ids: np.ndarray, targets: np.ndarray
) -> dict[str, list[bool]]:
    """-> which hidden units of each layer are silent for every token; {} without tokens."""
    if not len(ids):
        return {}
    peaks: dict[str, np.ndarray] = {}  # the largest |activation| of each unit, by layer
    limits: dict[str, float] = {}

    def wrap(name: str, kernel: Kernel) -> Kernel:
        if (limit := described(name).silent) is None:
            return kernel

        def measured(activation: np.ndarray, *arguments: Any) -> None:
            kernel(activation, *arguments)
            layer = model.workspace.layer
            numbers = to_float32(activation)
            peak = np.maximum(numbers.max(axis=0), -numbers.min(axis=0))
            peaks[layer] = np.maximum(peak, peaks.get(layer, 0))
            limits[layer] = limit

        return measured

    with model.workspace.wrapped_kernels(wrap):
        model.losses(ids, targets)
    return {layer: (peak <= limits[layer]).tolist() for layer, peak in peaks.items()}


def update_ratios(model: TransformerModel, before: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Parameters before an update -> norm of the update over norm of the parameter, by name.

    Leaves out parameters that were zero; empty if nothing was updated.
    """
    ratios = {}
    for name, old in before.items():
        if norm := _norm(old):
            ratios[name] = _norm(model.parameters[name] - old) / norm
    return ratios if any(ratios.values()) else {}


def _check_ratios(
    ratios: Mapping[str, float], lr_share: float, sizes: Mapping[str, UpdateSize]
) -> list[Finding]:
    """Returns those of the matrices in `sizes` that an update changes too much or too little.

    lr_share is the learning rate as a share of its peak: when a schedule is near zero, a weight
    need not move. Vectors are left out: biases start at zero, next to which any update is large.
    """
    findings = []
    for name, size in sizes.items():
        ratio = ratios.get(name, size.usual)
        message = f"an update was {ratio:.2g} of the weight, where {size.usual} is usual"
        rate = f"the {size.setting.replace('_', ' ')}"
        if ratio > size.largest:
            advice = f"lower {rate}, or warm up longer"
            findings.append(Finding(name, "large update", f"{message}: {advice}"))
        elif ratio < SMALL_SHARE * size.usual * lr_share:
            findings.append(Finding(name, "small update", f"{message}: raise {rate}"))
    return findings


@contextmanager
def checked_update(
    run: LiveState, step: int, batch: Batch, collect: Collect
) -> Iterator[list[HealthRecord]]:
    """Wraps an update. The list that it yields holds the step's record at the end, if there is one:
    for the first step and every diagnostic_interval-th, unless a gradient is not finite.

    batch, collect: the arguments of `dead_units`.
    """
    model, config, records = run.model, run.config, list[HealthRecord]()
    due = config.check_gradient_health and (step == 1 or step % config.diagnostic_interval == 0)
    profile = model.workspace.profile
    if due:
        with profile("CheckHealth"):
            findings = check_model(model, run.loss_scale)
            findings += dead_units(model, *run.loss.seen(batch), collect)
            if step == 1 and model.config.zero_init:
                # The first gradients stop at the projections, which are zero.
                findings = [finding for finding in findings if finding.problem != "zero"]
            overflowed = any(finding.problem in NOT_FINITE for finding in findings)
            # These copies live for one update, and only at the steps that are checked.
            before = {x.name: model.parameters[x.name].copy() for x in model.flat.trained}
    yield records
    if due and not overflowed:
        with profile("CheckHealth"):
            ratios = update_ratios(model, before)
            rate, sizes = run.optimizer.learning_rate, run.optimizer.update_sizes
            lr_share = rate / config.learning_rate if config.learning_rate else 0.0
            # Any update is large beside a matrix that has just left zero.
            matrices = {
                spec.name: sizes[spec.role]
                for spec in model.flat.trained
                if spec.role in sizes and (step > STEPS_FROM_ZERO or spec.initialisation != ZEROS)
            }
            findings += _check_ratios(ratios, lr_share, matrices)
            records.append(HealthRecord(step, tuple(findings), ratios))

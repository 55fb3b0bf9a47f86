"""The health of a run: gradients, updates and hidden units by name; where the first NaN came up.

What is found is returned; nothing here changes what a run learns.
"""

import functools
import inspect
import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from smallmind.config import Precision, TrainingConfig
from smallmind.kernels.half import to_float32
from smallmind.kernels.reference import sum_of_squares
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Kernel
from smallmind.optim.loss_scaler import LossScaler
from smallmind.training.profiler import TrainingProfiler
from smallmind.training.records import Finding, HealthRecord

EXPLODING, VANISHING = 100.0, 1e-7  # norms of a gradient
NOT_FINITE = ("nan", "inf")
SPARSE = 0.9  # share of zeros
SILENT = 1e-4  # |gelu(x)| of a hidden unit: less than it gives at x = -4
LEAST_RATIO, MOST_RATIO = 1e-5, 1e-1  # of update to weight, whose usual ratio is about 1e-3
CHUNK = 1 << 18  # elements looked at together: 2 MB as float64, whatever the size of a model


class GradientDiagnostics:
    """Looks at one gradient, an array of any shape.

    if finding := GradientDiagnostics.check_gradients("head", gradient):
        print(finding)
    """

    @staticmethod
    def check_gradients(name: str, gradients: np.ndarray, verbose: bool = False) -> Finding | None:
        """What is wrong, or None. With verbose the message ends with statistics.

        NaN, Inf, all zero, a norm above 100 (exploding) or below 1e-7 (vanishing), over 90 % zeros.
        Zero rows of an embedding belong to tokens that the batch does not have: they do not count.
        """
        gradients = np.asarray(gradients)
        problem, message = _problem(name, gradients) if gradients.size else ("", "")
        if not problem:
            return None
        return Finding(name, problem, message + (_statistics(gradients) if verbose else ""))

    @staticmethod
    def get_gradient_norm(gradients: np.ndarray) -> tuple[float, bool]:
        """The norm, and whether check_gradients has something to say."""
        finding = GradientDiagnostics.check_gradients("", gradients)
        return _norm(np.asarray(gradients)), finding is not None


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def _norm(array: np.ndarray) -> float:
    return math.sqrt(sum(sum_of_squares(chunk) for chunk in _chunks(array)))


def _problem(name: str, gradients: np.ndarray) -> tuple[str, str]:
    """The first of the problems that a gradient has, in a word and in a line; or two times ""."""
    nans = sum(np.count_nonzero(np.isnan(chunk)) for chunk in _chunks(gradients))
    if nans:
        return "nan", f"{nans:,} of {gradients.size:,} gradients are NaN"
    infs = sum(np.count_nonzero(np.isinf(chunk)) for chunk in _chunks(gradients))
    if infs:
        return "inf", f"{infs:,} of {gradients.size:,} gradients are infinite"
    nonzero = int(np.count_nonzero(gradients))
    if not nonzero:
        return "zero", "all gradients are zero: nothing that the loss depends on reaches it"
    norm = _norm(gradients)
    if norm > EXPLODING:
        return "exploding", f"exploding gradients (norm={norm:.2f}): lower the learning rate"
    if norm < VANISHING:
        return "vanishing", f"vanishing gradients (norm={norm:.2e}): check the initialisation"
    sparse = _sparse(name, gradients, nonzero)
    return ("sparse", sparse) if sparse else ("", "")


def _sparse(name: str, gradients: np.ndarray, nonzero: int) -> str:
    """The line about a gradient of which too few are not zero, or ""."""
    size, where = gradients.size, ""
    if gradients.ndim == 2:
        rows = np.count_nonzero(gradients.any(axis=1))
        where = f"; {len(gradients) - rows:,} of {len(gradients):,} rows have none"
        if name.endswith("embedding.weight"):
            size = rows * gradients.shape[1]
    if nonzero >= (1 - SPARSE) * size:
        return ""
    return f"{1 - nonzero / size:.1%} of its gradients are zero{where}"


def _statistics(gradients: np.ndarray) -> str:
    """What the last words of a verbose finding say."""
    zeros = 1 - np.count_nonzero(gradients) / gradients.size
    return (
        f"; norm {_norm(gradients):.3g}, mean {gradients.mean(dtype=np.float64):.3g}, "
        f"from {gradients.min():.3g} to {gradients.max():.3g}, {zeros:.1%} zeros"
    )


def check_model(model: TransformerModel, loss_scale: float = 1.0) -> list[Finding]:
    """What is wrong with the gradients of a model, which are those of loss_scale times the loss."""
    findings = []
    for name, gradient in model.gradients.items():
        unscaled = gradient if loss_scale == 1 else gradient / gradient.dtype.type(loss_scale)
        if finding := GradientDiagnostics.check_gradients(name, unscaled):
            findings.append(finding)
    return findings


def not_finite(model: TransformerModel) -> list[Finding]:
    """The gradients with NaN or Inf, in the order in which the backward pass reaches them."""
    return [finding for finding in reversed(check_model(model)) if finding.problem in NOT_FINITE]


def dead_units(model: TransformerModel, ids: np.ndarray, targets: np.ndarray) -> list[Finding]:
    """ids, targets (B, T) -> the layers with hidden units that stay silent for every token.

    One forward pass, without dropout. What is kept of it is one number a unit.
    """
    loudest: dict[str, np.ndarray] = {}

    def listen(name: str, kernel: Kernel) -> Kernel:
        if name != "matmul_gelu":
            return kernel

        def listening(activated: np.ndarray, *arguments: Any) -> None:
            kernel(activated, *arguments)
            layer, _ = _calling_layer(name)
            numbers = to_float32(activated)
            loud = np.maximum(numbers.max(axis=0), -numbers.min(axis=0))
            loudest[layer] = np.maximum(loud, loudest.get(layer, 0))

        return listening

    with model.workspace.wrapped_kernels(listen):
        model.losses(ids, targets)
    return [
        Finding(layer, "dead", _dead_message(int(silent), loud.size))
        for layer, loud in loudest.items()
        if (silent := np.count_nonzero(loud < SILENT))
    ]


def _dead_message(dead: int, units: int) -> str:
    return f"{dead:,} of {units:,} hidden units are dead: silent for every token of the batch"


def update_ratios(model: TransformerModel, before: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Parameters before an update -> norm of the update over that of the weight, by name.

    Parameters that were zero have none; where nothing was updated at all, there are none.
    """
    ratios = {}
    for name, old in before.items():
        norm = _norm(old)
        if norm:
            ratios[name] = _norm(model.parameters[name] - old) / norm
    return ratios if any(ratios.values()) else {}


def _check_ratios(ratios: Mapping[str, float], share: float, matrices: set[str]) -> list[Finding]:
    """The weights that an update changes too much or too little.

    share: of the learning rate's peak, as a weight need not move while a schedule is near zero.
    Vectors are left out: biases begin at zero, and any update is large beside that.
    """
    findings = []
    for name, ratio in ratios.items():
        size = f"an update was {ratio:.2g} of the weight, where 0.001 is usual"
        if name in matrices and ratio > MOST_RATIO:
            message = f"{size}: lower the learning rate, or warm up longer"
            findings.append(Finding(name, "large update", message))
        elif name in matrices and ratio < LEAST_RATIO * share:
            findings.append(Finding(name, "small update", f"{size}: raise the learning rate"))
    return findings


@contextmanager
def checked_update(
    model: TransformerModel,
    config: TrainingConfig,
    step: int,
    learning_rate: float,
    batch: tuple[np.ndarray, np.ndarray],
    scaler: LossScaler | None = None,
) -> Iterator[list[HealthRecord]]:
    """Around an update: a list that holds the step's record at the end, if the step has one.

    The first step has one, and every diagnostic_interval-th, unless a gradient is not finite.
    """
    records: list[HealthRecord] = []
    due = config.check_gradient_health and (step == 1 or step % config.diagnostic_interval == 0)
    profile = model.workspace.profile
    if due:
        with profile("CheckHealth"):
            scale = scaler.scale if scaler else 1.0
            findings = [*check_model(model, scale), *dead_units(model, *batch)]
            overflowed = any(finding.problem in NOT_FINITE for finding in findings)
            # Copies live for this one update, and only at the steps that are looked at.
            before = {name: value.copy() for name, value in model.parameters.items()}
    yield records
    if due and not overflowed:
        with profile("CheckHealth"):
            ratios = update_ratios(model, before)
            matrices = {name for name, value in before.items() if value.ndim == 2}
            share = learning_rate / config.learning_rate if config.learning_rate else 0.0
            findings += _check_ratios(ratios, share, matrices)
            records.append(HealthRecord(step, tuple(findings), ratios))


@contextmanager
def instrument(
    model: TransformerModel, config: TrainingConfig, profiler: TrainingProfiler
) -> Iterator[None]:
    """Within the block the model is measured and traced as config asks."""
    with ExitStack() as stack:
        if config.enable_diagnostics:
            stack.enter_context(profiler.watch(model))
        if config.detect_anomaly:
            stack.enter_context(detect_anomaly(model))
        yield


@contextmanager
def detect_anomaly(model: TransformerModel) -> Iterator[None]:
    """Within the block a pass ends at its first NaN or Inf: FloatingPointError names the layer.

    Everything that a kernel reads and writes is looked at as soon as it is done, which makes passes
    up to half as long again. Outside the block it costs nothing. In float16 the backward pass is
    left out: there overflow is ordinary, and the loss scaler's business.
    """

    def checked(name: str, kernel: Kernel) -> Kernel:
        if name in ("adamw", "sum_of_squares"):  # of the optimizer, which no layer calls
            return kernel

        @functools.wraps(kernel)
        def checking(*arguments: Any, **named: Any) -> None:
            kernel(*arguments, **named)
            for array in (*arguments, *named.values()):
                if isinstance(array, np.ndarray) and not _is_finite(array):
                    _report_anomaly(model, name, array)

        return checking

    with model.workspace.wrapped_kernels(checked):
        yield


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(to_float32(array)).all())


def _report_anomaly(model: TransformerModel, kernel: str, array: np.ndarray) -> None:
    """FloatingPointError with one line about the first array that is not finite."""
    layer, direction = _calling_layer(kernel)
    may_overflow = direction == "backward" or layer == "loss"  # whose gradients carry the scale
    if model.precision == Precision.FLOAT16 and may_overflow:
        return
    what = "NaN" if np.isnan(to_float32(array)).any() else "Inf"
    number = model.workspace.pass_number
    where = "an evaluation" if number is None else f"training pass {number + 1}"
    place = f"the first {what} is in the {direction} pass of {layer} ({kernel}, {where})"
    for name, value in model.flat.compute.items():
        if not _is_finite(value):
            cause = f"{name} is not finite itself; go back to weights that are"
            raise FloatingPointError(f"{place}: {cause}")
    raise FloatingPointError(f"{place}; its weights are finite: lower the learning rate")


def _calling_layer(kernel: str) -> tuple[str, str]:
    """Name of the layer that calls the kernel now, and its pass, from the stack of calls."""
    direction = "forward"
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        caller: Any = frame.f_locals.get("self")
        if "backward" in frame.f_code.co_name:
            direction = "backward"
        if isinstance(caller, TransformerModel):
            # What the model does by itself, before the first layer and after the last.
            part = "head" if kernel.startswith("matmul") else "embedding"
            of_loss = kernel in ("cross_entropy", "distillation", "top_k_logits")
            return "loss" if of_loss else part, direction
        if hasattr(caller, "name"):
            return caller.name, direction
    raise RuntimeError(f"{kernel} is not called by a model")

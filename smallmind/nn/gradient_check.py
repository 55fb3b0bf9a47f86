"""Gradients checked against finite differences, along a random direction.

For y = f(x) and the gradient dx that a backward pass computes from dy = u, the central difference
<u, f(x + h v) - f(x - h v)> / 2h must equal <dx, v>, whatever u and v are. So an array of any size
takes two forward passes.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console.table import Table, Tabular
from smallmind.nn.differentiable import (
    TOO_COARSE,
    Differentiable,
    build_layer,
    is_float,
    of_function,
    of_layer,
    of_model,
)
from smallmind.nn.layer import Layer
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import ModelConfig

# Relative errors above these are wrong, by the precision that the gradients were computed in.
TOLERANCES = {np.dtype(np.float64): 1e-6, np.dtype(np.float32): 1e-3}
ROUNDING_UNITS = 10  # units in the last place by which a computed value may be off
# A layer, and the rows of its input, if none are given.
SMALL_CONFIG = ModelConfig(vocab_size=11, block_size=8, n_embd=12, n_layer=1, n_head=3)
INPUT_ROWS = 6


@dataclass(frozen=True)
class Derivative:
    """One derivative along a direction of one parameter or input, computed in two ways."""

    name: str
    analytical: float  # by the backward pass
    numerical: float  # by finite differences
    error: float  # their relative difference
    ok: bool  # it is within the tolerance, or within rounding
    note: str = ""  # what is wrong, if it is more than a number


@dataclass(frozen=True, repr=False)
class GradientCheck(Tabular):
    """The result of a gradient check: `ok` if everything is right, else `wrong` names what is not.

    Prints as a table, which a notebook shows as one.
    """

    rows: tuple[Derivative, ...]
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if all derivatives agree."""
        return not self.wrong

    def __bool__(self) -> bool:
        return self.ok  # so that `assert gradient_check(layer)` means what it says

    @property
    def wrong(self) -> list[str]:
        """The names of the parameters and inputs whose gradients are wrong."""
        return [row.name for row in self.rows if not row.ok]

    @property
    def errors(self) -> dict[str, float]:
        """The relative error of each parameter and input, by name."""
        return {row.name: row.error for row in self.rows}

    def table(self) -> Table:
        """-> the two derivatives of each parameter and input, their difference and the verdict."""
        count = "1 gradient" if len(self.rows) == 1 else f"{len(self.rows)} gradients"
        verdict = f"WRONG: {', '.join(self.wrong)}" if self.wrong else "ok"
        rows = []
        for row in self.rows:
            numbers = f"{row.analytical:.6g}", f"{row.numerical:.6g}", f"{row.error:.1e}"
            note = row.note and f"{': ' if not row.ok else ', '}{row.note}"
            rows.append((row.name, *numbers, ("ok" if row.ok else "WRONG") + note))
        title = f"Gradient check of {count}, tolerance {self.tolerance:g}: {verdict}"
        heads = ("", "backward pass", "finite difference", "relative error", "")
        return Table(title, rows, heads, "<>>><")


@suggesting()
def gradient_check(
    subject: Any,
    *inputs: Any,
    backward: Callable[..., Any] | None = None,
    config: ModelConfig | None = None,
    backend: str = "numpy",
    directions: int = 1,
    tolerance: float | None = None,
    seed: int = 0,
) -> GradientCheck:
    """Compares the gradients of a backward pass with finite differences of its forward pass.

    The subject is one of

    - a model: `gradient_check(model)`, or `gradient_check(model, ids, targets)` for a batch of
      one's own. A float32 model is compared with a copy in float64 and plain NumPy;
    - the class of a layer, or any function of a Scope that returns a layer: `gradient_check(MLP)`
      builds it in float64, or with backend="numba" in float32, for a small ModelConfig, or for
      `config`, with random parameters. The input is x (B, T, C) or (T, C) or ids (B, T), by
      default random numbers;
    - a layer of a model, with an input;
    - a function: `gradient_check(forward, x, weight, backward=backward)`. forward returns y, and
      backward(dy, x, weight) a gradient for each array of floats. If forward returns y and more in
      a tuple, backward gets that instead of the inputs: backward(dy, *more).

    Floating-point arrays among the inputs are checked, and everything else is passed on. The
    `tolerance` of the relative error is by default 1e-6 in float64 and 1e-3 in float32; inputs and
    weights should be about as large as in use. Everything that the subject holds stays unchanged.

    InputError if the subject or its inputs cannot be checked.
    """
    check_type("config", config, ModelConfig, None)
    check_type("tolerance", tolerance, numbers.Real, None)
    if check_type("directions", directions, int) < 1:
        raise InputError(f"directions={directions} must be at least 1")
    if check_type("seed", seed, int) < 0:
        raise InputError(f"seed={seed} must be at least 0")
    random = np.random.default_rng(seed)
    if isinstance(subject, TransformerModel):
        checked = of_model(subject, inputs, random)
    elif backward is not None:
        checked = of_function(subject, backward, inputs)
    else:
        checked = _of_layer(subject, inputs, config, backend, random)
    if tolerance is None:
        tolerance = TOLERANCES[np.dtype(checked.dtype)]
    worst: dict[str, Derivative] = {}
    for _ in range(directions):
        for row in _compare(checked, random, tolerance):
            worst[row.name] = max(
                (worst.get(row.name, row), row),
                key=lambda row: (not row.ok, math.isnan(row.error), row.error),
            )
    return GradientCheck(tuple(worst.values()), tolerance)


def _of_layer(
    subject: Any,
    inputs: tuple[Any, ...],
    config: ModelConfig | None,
    backend: str,
    random: np.random.Generator,
) -> Differentiable:
    """Returns a layer, or the one that a function makes, for an input of the same channels."""
    if inspect.isclass(subject) or not hasattr(subject, "forward"):
        if not callable(subject):
            raise InputError(
                f"{type(subject).__name__} cannot be checked: give a model, a layer, or a function "
                "with backward="
            )
        C = inputs[0].shape[-1] if inputs and is_float(inputs[0]) else SMALL_CONFIG.n_embd
        config = config or replace(SMALL_CONFIG, n_embd=C, n_head=math.gcd(C, SMALL_CONFIG.n_head))
        subject = build_layer(subject, config, backend, random)
        inputs = inputs or (random.standard_normal((INPUT_ROWS, config.n_embd)),)
    if not isinstance(subject, Layer):
        raise InputError(
            f"{type(subject).__name__} is not a smallmind.nn.layer.Layer; functions are checked "
            "with gradient_check(forward, x, backward=backward)"
        )
    if subject.workspace.activation_dtype is not subject.workspace.dtype:
        raise InputError(TOO_COARSE)
    if len(inputs) != 1:
        raise InputError("a layer takes one input, x or ids: gradient_check(layer, x)")
    return of_layer(subject, np.asarray(inputs[0]))


def _compare(
    subject: Differentiable, random: np.random.Generator, tolerance: float
) -> Iterator[Derivative]:
    """Yields the derivative along one direction of each array."""
    y = np.array(subject.evaluate())
    u = random.standard_normal(y.shape).astype(y.dtype) if y.ndim else np.ones_like(y)
    gradients, notes = subject.differentiate(u)
    size = float(np.linalg.norm(u.astype(np.float64) * y))
    for name, array in subject.arrays.items():
        direction = random.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        step = _step(array)
        kept = array.copy()
        try:
            array[...] = kept + step * direction
            ahead, above = array.astype(np.float64), np.array(subject.evaluate(), np.float64)
            array[...] = kept - step * direction
            behind, below = array.astype(np.float64), np.array(subject.evaluate(), np.float64)
        finally:
            array[...] = kept
        moved = (ahead - behind) / (2 * step)  # the direction, as rounded
        numerical = float(np.vdot(u, above - below)) / (2 * step)
        precision = max(float(np.finfo(kind).eps) for kind in (y.dtype, array.dtype))
        rounding = ROUNDING_UNITS * precision * size / (2 * step)
        gradient = gradients[name]
        if gradient is None or np.shape(gradient) != array.shape:
            note = "backward returned no gradient"
            if gradient is not None:
                note = f"the gradient has shape {np.shape(gradient)}, not {array.shape}"
            yield Derivative(name, math.nan, numerical, math.nan, False, note)
            continue
        analytical = float(np.vdot(gradient, moved))
        norm = float(np.linalg.norm(gradient))
        # Relative to the gradient itself, not only to its part along this direction.
        scale = max(abs(numerical), norm / math.sqrt(array.size))
        difference = abs(analytical - numerical)
        error = difference / scale if scale else 0.0
        ok, note = difference <= tolerance * scale + rounding, ""
        if ok:
            note = notes.get(name, "" if norm else "the gradient is zero")
        yield Derivative(name, analytical, numerical, error, ok and name not in notes, note)


def _step(array: np.ndarray) -> float:
    """-> the size of a step: for each element, the share of its usual size at which errors balance.

    The central difference is off by about the square of the share, and rounding by the precision
    divided by it.
    """
    share = float(np.finfo(array.dtype).eps) ** (1 / 3)
    norm = float(np.linalg.norm(array))
    return share * (norm or math.sqrt(array.size))

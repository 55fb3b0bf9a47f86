"""A temperature of logits, fixed or learnt."""

import math
from typing import Any

import numpy as np

from smallmind.kernels import reference
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from smallmind.losses.teacher_settings import LEARNT_TEMPERATURES

BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8  # of Adam


class Temperature:
    """A temperature that stays at `initial`, or that Adam learns from there as 10^sigmoid(x).

    When learnt, it stays between 1 and 10. It needs both bounds: temperature^2 KL vanishes as the
    temperature nears 0, whatever the student has learnt; and where a teacher is much more peaked
    than its student, the slope points upward.

    `x` and its gradient `dx` are arrays of one element.
    """

    def __init__(self, initial: float, is_learnt: bool) -> None:
        self.initial = initial
        self.is_learnt = is_learnt
        self.updates = 0
        self.x, self.dx, self._m, self._v = np.zeros((4, 1))
        share = math.log(initial, LEARNT_TEMPERATURES[1]) if is_learnt else 0.5
        self.x[0] = math.log(share / (1 - share))

    @property
    def value(self) -> float:
        if not self.is_learnt:
            return self.initial
        return LEARNT_TEMPERATURES[1] ** _sigmoid(self.x[0])

    def backward(self, dtemperature: float, tokens: int) -> None:
        """Adds to dx, from the sum over `tokens` of d loss / d temperature, their mean."""
        # forward: temperature = 10^sigmoid(x)
        if self.is_learnt:
            share = _sigmoid(self.x[0])
            slope = self.value * math.log(LEARNT_TEMPERATURES[1]) * share * (1 - share)
            self.dx += dtemperature * slope / tokens

    def take_gradient(self) -> float:
        """Returns the gradient so far, which is then cleared."""
        gradient, self.dx[0] = float(self.dx[0]), 0
        return gradient

    def step(self, learning_rate: float) -> None:
        """Updates it if it is learnt, and clears dx."""
        if self.is_learnt:
            self.updates += 1
            coefficients = AdamWCoefficients(
                learning_rate=learning_rate,
                beta1=BETA1,
                beta2=BETA2,
                epsilon=EPSILON,
                weight_decay=0.0,
                correction1=1 / (1 - BETA1**self.updates),
                correction2=1 / (1 - BETA2**self.updates),
                gradient_scale=1.0,
            )
            reference.adamw(self.x, self.dx, self._m, self._v, 0, coefficients)
        self.dx[0] = 0

    def state(self) -> dict[str, float]:
        """Returns the state that a resumed run needs, JSON-able."""
        x, m, v = (float(array[0]) for array in (self.x, self._m, self._v))
        return {"x": x, "m": m, "v": v, "updates": self.updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self.x[0], self._m[0], self._v[0] = (float(state[name]) for name in ("x", "m", "v"))
        self.updates = int(state["updates"])


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2  # never overflows

"""How the loss of a text falls with the size of the model and the tokens it sees: a fitted law.

    loss = E (1 + a (N / 1e5)^-alpha + b (D' / 1e6)^-beta)

for N parameters and D tokens, of which U are different ones: the form of Hoffmann et al. 2022, with
E outside, so that the other constants are alike for all texts. Tokens that are seen again teach
less (Muennighoff et al. 2023): D' = D up to U, beyond it U (1 + R (1 - exp(-(D / U - 1) / R))).

Before a text has been trained on, the law is that of other texts, see `bench/LOG.md`. Runs on the
text itself then change it, as far as they tell more: the logarithms of the constants have
normal distributions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role
from smallmind.settings.config import ModelConfig

CONSTANTS = "E", "a", "alpha", "b", "beta", "R"  # the logarithms are what is fitted
# The logarithms: their mean and deviation over texts. E depends on the text and its tokens.
MEANS = np.log([0.9, 0.3, 0.4, 0.4, 0.4, 6.5])
DEVIATIONS = np.array([2.0, 1.2, 0.3, 1.2, 0.3, 0.7])
NOISE = 0.006  # of a run's loss, by its seed and by what the law leaves out, as a share of it
NEARBY = 0.5  # growth of the noise for e times more or fewer operations than the run in question
OPERATIONS = 6  # per parameter and token of a training pass (Kaplan et al. 2020)
SIZE, LENGTH = 1e5, 1e6  # parameters and tokens in the middle of what is trained here
MAX_STEPS = 100  # of the fit, which takes ten
PRECISION = 1e-6  # of the logarithms
STEP = 1e-5  # of the differences that the derivatives are
INTERVAL_DEVIATIONS = 1.64  # to either side, that 90 % of outcomes are within
FAR_DEVIATIONS = 4.0  # from which on an outcome counts less: something may have gone wrong
PLAUSIBLE = {
    "parameters": (1e2, 1e12),
    "tokens": (1e2, 1e15),
    "unique": (1e1, 1e15),
    "loss": (1e-3, 5e1),
}


class Outcome(NamedTuple):
    """The loss that a model of so many parameters had after so many tokens of a text."""

    parameters: float
    tokens: float
    unique: float  # tokens in the training part of the text
    loss: float  # on the held-out part, in nats per token


class Trial(NamedTuple):
    """An outcome, how long its steps took (in seconds), and from how many tokens each update."""

    outcome: Outcome
    seconds: float
    batch: float | None = None  # None: as many as runs of that length have


@dataclass(frozen=True)
class Law:
    """The law of a text: the logarithms of its constants and how sure they are."""

    logarithms: np.ndarray
    covariance: np.ndarray
    noise: float = NOISE  # the deviation of an outcome, if all constants were known

    def loss(self, parameters: float, tokens: float, unique: float) -> float:
        """Returns the expected loss on held-out text, in nats per token."""
        return float(np.exp(_logarithm(self.logarithms, parameters, tokens, unique)))

    def deviation(self, parameters: float, tokens: float, unique: float) -> float:
        """Returns the standard deviation of the outcome, as a share of the expected loss."""
        N, D, U = np.array([[parameters], [tokens], [unique]], float)
        slope = _differences(lambda x: _logarithm(x, N, D, U), self.logarithms)[0]
        return float(np.sqrt(self.noise**2 + slope @ self.covariance @ slope))

    @property
    def constants(self) -> dict[str, float]:
        """Its constants by name."""
        return dict(zip(CONSTANTS, np.exp(self.logarithms).tolist(), strict=True))

    def interval(self, parameters: float, tokens: float, unique: float) -> tuple[float, float]:
        """Returns the losses between which nine of ten outcomes are."""
        loss = self.loss(parameters, tokens, unique)
        factor = float(np.exp(INTERVAL_DEVIATIONS * self.deviation(parameters, tokens, unique)))
        return loss / factor, loss * factor

    def __str__(self) -> str:
        E, a, alpha, b, beta, _ = np.exp(self.logarithms)
        return f"{E:.3g} (1 + {a:.2g} (N / 1e5)^-{alpha:.2g} + {b:.2g} (D / 1e6)^-{beta:.2g})"


def parameters_of(config: ModelConfig) -> int:
    """Counts the parameters that a token is multiplied by: all but those of tables."""
    flat = declare_parameters(config)
    tables = sum(spec.size for spec in flat.specs if spec.role == Role.EMBEDDING)
    return flat.count - tables + (config.vocab_size * config.n_embd if config.tie_weights else 0)


def is_plausible(outcome: Outcome) -> bool:
    """Returns False for an outcome that no run can have had, as in a damaged file."""
    return all(low <= getattr(outcome, x) <= high for x, (low, high) in PLAUSIBLE.items())


def law_of(outcomes: Sequence[Outcome], operations: float | None = None) -> Law:
    """Fits the law of a text to these outcomes, by Levenberg's and Marquardt's method.

    It is for runs of so many operations; None means as many as the longest outcome. The nearest
    outcome counts most, others less the further their operations are from these; so do those far
    off the law (Huber 1964). Implausible outcomes do not count.
    """
    outcomes = [outcome for outcome in outcomes if is_plausible(outcome)]
    N, D, U, losses = np.array(outcomes, float).reshape(-1, len(Outcome._fields)).T
    means, noise = MEANS.copy(), NOISE
    if len(losses):
        means[0] += np.log(losses.min())
        spent = np.log(OPERATIONS * N * D)
        far = np.abs(spent - (np.log(operations) if operations else spent.max()))
        noise = NOISE * (1 + NEARBY * (far - far.min()))

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = (_logarithm(x, N, D, U) - np.log(losses)) / noise
        errors *= np.sqrt(2 / (1 + np.hypot(1, errors / FAR_DEVIATIONS)))  # squared: pseudo-Huber
        return np.concatenate([errors, (x - means) / DEVIATIONS])

    x, damping = means, 1e-2
    with np.errstate(all="ignore"):  # a step may lead anywhere: it is not taken then
        found = residuals(x)
        for _ in range(MAX_STEPS):
            slopes = _differences(residuals, x)
            curvature = slopes.T @ slopes
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = np.linalg.solve(damped, -slopes.T @ found)
            tried = residuals(x + step)
            if tried @ tried <= found @ found:
                x, found, damping = x + step, tried, damping / 3
                if np.abs(step).max() < PRECISION:
                    break
            else:
                damping *= 3
    # A text that follows no such law is predicted badly, and this says so.
    misfit = max(1.0, np.sqrt(found @ found / max(1, len(losses))))
    return Law(x, misfit**2 * np.linalg.inv(curvature), misfit * NOISE)


def _logarithm(x: np.ndarray, N: Any, D: Any, U: Any) -> np.ndarray:
    """Returns the logarithm of the expected loss."""
    _, a, alpha, b, beta, R = np.exp(x)
    seen = np.where(D > U, U * (1 + R * (1 - np.exp(-np.maximum(D / U - 1, 0) / R))), D)
    return x[0] + np.log1p(a * (N / SIZE) ** -alpha + b * (seen / LENGTH) ** -beta)


def _differences(of: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """The derivatives of a function (n,) -> (m,), as differences (m, n)."""
    before = of(x)
    return np.stack([(of(x + step) - before) / STEP for step in STEP * np.eye(len(x))], 1)

"""The optimizers' kernels in plain NumPy, and what their updates need to know."""

import math
from typing import NamedTuple

import numpy as np

from smallmind.kernels.description import kernel, muon_operations, muon_temporaries, takes
from smallmind.kernels.number_types import round_to


@kernel("reduce", functions=2, writes=0, is_of_layer=False, division=("chunks of elements", "x"))
@takes("n: x n float32")
def sum_of_squares(x):
    """x (n,) -> the sum of the squares of its elements, as a float."""
    x = x.ravel()
    return float(np.einsum("i,i->", x, x, dtype=np.float64))


class AdamWCoefficients(NamedTuple):
    """The constants of one update of `adamw`."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    correction1: float  # 1 / (1 - beta1**step)
    correction2: float  # 1 / (1 - beta2**step)
    gradient_scale: float
    max_gradient: float = math.inf  # limit for each element of the scaled gradient


@kernel(
    functions=6,
    writes=4,
    temporaries=4,
    is_of_layer=False,
    division=("elements", "parameters"),
)
@takes(
    "n: parameters +n float32, gradients +n float32 consumed, m +n float32, v +n float32, "
    "working ?n written",
    v=lambda c: np.square(c.v),
    decayed=lambda c: c.n * 9 // 10,
    coefficients=AdamWCoefficients(1e-3, 0.9, 0.99, 1e-8, 0.1, 1.0, 1.0, 0.5),
)
def adamw(parameters, gradients, m, v, decayed, coefficients, working=None):
    """Updates parameters (n,) by gradients (n,) and moments m, v (n,). Writes all four.

    g = gradient_scale * gradients, each element clipped to +-max_gradient
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p (1 - learning_rate weight_decay)
        - learning_rate m correction1 / (sqrt(v correction2) + epsilon)
    Only the first `decayed` parameters decay. gradients become zeros, and working (n,), if it is
    not None, a copy of the parameters, rounded to its dtype. coefficients: AdamWCoefficients.
    """
    c = coefficients
    g = np.clip(gradients * c.gradient_scale, -c.max_gradient, c.max_gradient)
    m[...] = c.beta1 * m + (1 - c.beta1) * g
    v[...] = c.beta2 * v + (1 - c.beta2) * g * g
    parameters[:decayed] *= 1 - c.learning_rate * c.weight_decay
    parameters -= c.learning_rate * (m * c.correction1) / (np.sqrt(v * c.correction2) + c.epsilon)
    gradients[...] = 0
    if working is not None:
        working[...] = round_to(parameters, working.dtype)


class MatrixBlocks(NamedTuple):
    """Matrices in a flat vector: the i-th is (rows[i], columns[i]), its first element starts[i].

    From one of its rows to the next are strides[i] elements. Four arrays (n,) of int64.
    """

    starts: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    strides: np.ndarray

    @classmethod
    def of_layers(cls, L, C):
        """Returns those of L layers of C channels: four (C, C), one into 4 C, and one back."""
        shapes = ([(C, C)] * 4 + [(C, 4 * C), (4 * C, C)]) * L
        rows, columns = np.array(shapes, np.int64).T.copy()
        sizes = rows * columns
        return cls(np.cumsum(sizes) - sizes, rows, columns, columns)

    @property
    def scratch_size(self) -> int:
        """The elements of what the compiled `muon` computes for the largest matrix."""
        sizes = zip(self.rows.tolist(), self.columns.tolist(), strict=True)
        return max(2 * M * N + 4 * min(M, N) ** 2 for M, N in sizes)

    def of(self, vector):
        """Views of the matrices in a vector."""
        for start, *shape, stride in zip(*self, strict=True):
            strides = stride * vector.itemsize, vector.itemsize
            yield np.lib.stride_tricks.as_strided(vector[start:], shape, strides, subok=True)


class MuonCoefficients(NamedTuple):
    """The constants of one update of `muon`."""

    learning_rate: float
    momentum: float
    weight_decay: float
    gradient_scale: float
    max_gradient: float = math.inf  # limit for each element of the scaled gradient


# The polynomial that `newton_schulz` applies to every singular value, five times.
LINEAR, CUBIC, QUINTIC, ITERATIONS = 3.4445, -4.7750, 2.0315, 5
MIN_NORM = 1e-7  # a smaller matrix is divided by this


@kernel(
    functions=21,
    writes=3,
    temporaries=muon_temporaries,
    is_of_layer=False,
    division=("matrices", "blocks"),
    operations=muon_operations,
)
@takes(
    "L C: parameters +12*L*C*C float32, gradients +12*L*C*C float32 consumed, "
    "m +12*L*C*C float32, working ?12*L*C*C written",
    blocks=lambda c: MatrixBlocks.of_layers(c.L, c.C),
    coefficients=MuonCoefficients(0.02, 0.95, 0.1, 0.5),
)
def muon(parameters, gradients, m, blocks, coefficients, working=None):
    """Updates the matrices in parameters (n,) by gradients and their mean m (n,). Writes all.

    g = gradient_scale * gradients, each element clipped to +-max_gradient
    m = beta m + (1 - beta) g;  u = beta m + (1 - beta) g, with beta the momentum of coefficients
    p = p (1 - learning_rate weight_decay)
        - learning_rate sqrt(max(1, columns / rows)) newton_schulz(u)
    gradients become zeros, and working (n,), if it is not None, a copy of the parameters, rounded
    to its dtype. blocks: MatrixBlocks, which hold every element; coefficients: MuonCoefficients.
    """
    c, beta = coefficients, coefficients.momentum
    for p, g, mean in zip(*map(blocks.of, (parameters, gradients, m)), strict=True):
        rows, columns = p.shape
        clipped = np.clip(g * c.gradient_scale, -c.max_gradient, c.max_gradient)
        mean[...] = beta * mean + (1 - beta) * clipped
        update = newton_schulz(beta * mean + (1 - beta) * clipped)
        p *= 1 - c.learning_rate * c.weight_decay
        p -= c.learning_rate * math.sqrt(max(1, columns / rows)) * update
    gradients[...] = 0
    if working is not None:
        working[...] = round_to(parameters, working.dtype)


@kernel("muon", functions=2, writes=2, is_of_layer=False, division=("elements", "m"))
@takes(
    "n: m +n float32, gradients +n float32 consumed",
    coefficients=MuonCoefficients(0.02, 0.95, 0.1, 0.5),
)
def average_gradient(m, gradients, coefficients):
    """Writes m (n,) = beta m + (1 - beta) g, as `muon` does, for matrices that others update.

    g and beta as in `muon`. gradients (n,) become zeros. coefficients: MuonCoefficients.
    """
    c = coefficients
    g = np.clip(gradients * c.gradient_scale, -c.max_gradient, c.max_gradient)
    m[...] = c.momentum * m + (1 - c.momentum) * g
    gradients[...] = 0


def newton_schulz(x):
    """x (M, N) -> about u v^T of its singular value decomposition u s v^T (Jordan et al. 2024).

    The singular values become 0.7 to 1.2, unless they were less than a thousandth of the norm.
    """
    rows, columns = x.shape
    if rows > columns:
        return newton_schulz(x.T).T
    x = x / max(math.sqrt(sum_of_squares(x)), MIN_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = LINEAR * x + (CUBIC * gram + QUINTIC * gram @ gram) @ x
    return x

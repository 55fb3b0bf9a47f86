"""A matrix of parameters as products read it."""

from typing import Any, NamedTuple

import numpy as np


class Weight(NamedTuple):
    """A matrix (in, out): its values and, in a storage that needs them, the scale of each column.

    All products of activations with parameters are here, so that a new storage is too.
    """

    values: Any
    scales: np.ndarray | None = None  # no storage has them yet

    def multiply(
        self,
        kernels: Any,
        y: np.ndarray,
        x: np.ndarray,
        bias: np.ndarray | None = None,
        addend: np.ndarray | None = None,
    ) -> None:
        """x (R, in) -> y (R, out) = x weight [+ bias (out,)] [+ addend (R, out)]. Writes y."""
        kernels.matmul(y, x, self.values, bias, addend)

    def multiply_gelu(
        self,
        kernels: Any,
        activation: np.ndarray,
        y: np.ndarray,
        x: np.ndarray,
        bias: np.ndarray | None,
        addend: np.ndarray | None = None,
    ) -> None:
        """x (R, in) -> y (R, out) as `multiply` writes it, activation = gelu(y). Writes both."""
        kernels.matmul_gelu(activation, y, x, self.values, bias, addend)

    def multiply_transposed(self, kernels: Any, y: np.ndarray, x: np.ndarray) -> None:
        """x (R, out) -> y (R, in) = x weight^T. Writes y."""
        kernels.matmul_transpose_b(y, x, self.values)

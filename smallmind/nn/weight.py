"""A matrix of parameters as products read it."""

from typing import Any, NamedTuple

import numpy as np


class Weight(NamedTuple):
    """A matrix (in, out): its values, or blocks of integers that stand for them.

    Blocks are those of its rows, (in, out / BLOCK), or of its transpose, (out, in / BLOCK). All
    products of activations with parameters are here, so that a new storage is too.

    rounds: where weights are blocks, activations may be rounded to 8 bits if they are a few rows.
    """

    values: Any
    has_blocks: bool = False
    outputs_first: bool = False  # the blocks

    def multiply(
        self,
        kernels: Any,
        y: np.ndarray,
        x: np.ndarray,
        bias: np.ndarray | None = None,
        addend: np.ndarray | None = None,
        rounds: bool = False,
    ) -> None:
        """x (R, in) -> y (R, out) = x weight [+ bias (out,)] [+ addend (R, out)]. Writes y."""
        if not self.has_blocks:
            kernels.matmul(y, x, self.values, bias, addend)
        elif self.outputs_first:
            kernels.matmul_quantised(y, x, self.values, bias, addend, rounds)
        else:
            assert bias is None and addend is None
            kernels.matmul_quantised_transpose(y, x, self.values)

    def multiply_gelu(
        self,
        kernels: Any,
        activation: np.ndarray,
        y: np.ndarray,
        x: np.ndarray,
        bias: np.ndarray | None,
        addend: np.ndarray | None = None,
        rounds: bool = False,
    ) -> None:
        """x (R, in) -> y (R, out) as `multiply` writes it, activation = gelu(y). Writes both."""
        if self.has_blocks:
            self.multiply(kernels, y, x, bias, addend, rounds)
            kernels.gelu(activation, y)
        else:
            kernels.matmul_gelu(activation, y, x, self.values, bias, addend)

    def multiply_transposed(
        self, kernels: Any, y: np.ndarray, x: np.ndarray, rounds: bool = False
    ) -> None:
        """x (R, out) -> y (R, in) = x weight^T. Writes y."""
        if not self.has_blocks:
            kernels.matmul_transpose_b(y, x, self.values)
        elif self.outputs_first:
            kernels.matmul_quantised_transpose(y, x, self.values)
        else:
            kernels.matmul_quantised(y, x, self.values, rounds=rounds)

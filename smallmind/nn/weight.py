"""A matrix of parameters as products read it."""

from typing import Any, NamedTuple

import numpy as np


class Weight(NamedTuple):
    """A matrix (in, out): its values, or blocks of integers that stand for them.

    Blocks are those of its rows, (in, out / BLOCK). If its outputs come first, values and blocks
    are those of its transpose: (out, in), (out, in / BLOCK). All products of activations with
    parameters are here, so that a new storage is too.

    by_rows: the bits of a row of the result do not depend on other rows. Where weights are blocks,
    activations are rounded to 8 bits then. in_groups: blocks are, see `Parameters.in_groups`.
    """

    values: Any
    has_blocks: bool = False
    outputs_first: bool = False
    in_groups: bool = False

    def multiply(
        self,
        kernels: Any,
        y: np.ndarray,
        x: np.ndarray,
        bias: np.ndarray | None = None,
        addend: np.ndarray | None = None,
        by_rows: bool = False,
        activation: np.ndarray | None = None,
    ) -> None:
        """x (R, in) -> y (R, out) = x weight [+ bias (out,)] [+ addend (R, out)]. Writes y.

        And activation (R, out) = gelu(y), if there is such an array.
        """
        if self.has_blocks and not self.outputs_first:
            assert bias is None and addend is None and activation is None
            kernels.matmul_quantised_transpose(y, x, self.values)
        elif self.has_blocks:
            kernels.matmul_quantised(y, x, self.values, bias, addend, by_rows, self.in_groups)
            if activation is not None:
                kernels.gelu(activation, y)
        elif activation is None:
            kernels.matmul(y, x, self.values, bias, addend, by_rows, self.outputs_first)
        else:
            kernels.matmul_gelu(
                activation, y, x, self.values, bias, addend, by_rows, self.outputs_first
            )

    def multiply_transposed(
        self, kernels: Any, y: np.ndarray, x: np.ndarray, by_rows: bool = False
    ) -> None:
        """x (R, out) -> y (R, in) = x weight^T. Writes y."""
        if self.has_blocks:
            if self.outputs_first:
                kernels.matmul_quantised_transpose(y, x, self.values)
            else:
                kernels.matmul_quantised(y, x, self.values, None, None, by_rows, self.in_groups)
        elif self.outputs_first or by_rows:
            kernels.matmul(y, x, self.values, None, None, by_rows, not self.outputs_first)
        else:
            kernels.matmul_transpose_b(y, x, self.values)

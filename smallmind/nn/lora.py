"""y = x (weight + scale A B) + bias: a frozen matrix with a trained one of low rank beside it.

LoRA (Hu et al. 2021). B starts at zero: the first loss is that of the frozen model. Matrices that
stand side by side in one weight have an A and a B each, as they have where other programs keep them
apart.
"""

import math
from typing import Any

import numpy as np

from smallmind.nn.dropout import Dropout
from smallmind.nn.layer import Scope
from smallmind.nn.linear import Linear
from smallmind.nn.parameters import ZEROS, Normal, Role
from smallmind.settings.config import ModelConfig


class AdaptedLinear(Linear, only_kernels=True):
    """y = x (weight + scale A B) + bias, where weight and bias are frozen.

    They hold n matrices side by side, each with an A and a B of rank r.
    `lora_a` (in, n r) holds their A side by side, `lora_b` (r, out) their B. In a pass those of B
    stand along the diagonal of a matrix (n r, out), so that each layer multiplies once by both.
    """

    def __init__(self, scope: Scope, shape: tuple[int, int], **options: Any) -> None:
        super().__init__(scope, shape, **options)
        assert scope.adapter
        widths = separate_widths(scope.config, shape, options.get("widths", ()))
        r, n = scope.adapter.rank, len(widths)
        self.inner, self.scale = n * r, scope.adapter.scale
        self.starts = np.cumsum([0, *widths]).astype(np.int32)  # and the end
        # The variance of the uniform values that PEFT begins with.
        normal = Normal(1 / math.sqrt(3 * shape[0]))
        facts: dict[str, Any] = {"role": Role.MATRIX, "is_adapter": True, "quantises": False}
        self.lora_a = scope.declare("lora_a", (shape[0], n * r), normal, widths=(r,) * n, **facts)
        self.lora_b = scope.declare("lora_b", (r, shape[1]), ZEROS, widths=widths, **facts)
        # A name of its own: profiles and inspections tell its calls from those of the layer.
        self.dropout = Dropout(scope.inner("lora"), scope.adapter.dropout)
        self.dh: np.ndarray | None = None

    def multiply(
        self,
        y: np.ndarray,
        x: np.ndarray,
        addend: np.ndarray | None = None,
        activation: np.ndarray | None = None,
    ) -> np.ndarray:
        """x (R, in) -> y (R, out) [+ addend (R, out)]; keeps x. Writes y, activation = gelu(y)."""
        # First what is added: the sum of the frozen product is rounded to 16 bits only once.
        h, b = self._projected(x), self._diagonal()
        self.adapter_kernels.matmul(y, h, b, None, addend, self.workspace.by_rows())
        self.workspace.release(h, b)
        return super().multiply(y, x, y, activation)

    @property
    def adapter_kernels(self) -> Any:
        """The kernels, for calls that are the adapter's."""
        return self.workspace.kernels_for(self.dropout.name)

    def _projected(self, x: np.ndarray) -> np.ndarray:
        """x (R, in) -> dropout(x) A (R, n r), rented."""
        h = self.workspace.rent(len(x), self.inner)
        dropped = self._dropped(x)
        a, by_rows = self.lora_a.compute, self.workspace.by_rows()
        self.adapter_kernels.matmul(h, dropped, a, None, None, by_rows)
        if dropped is not x:
            self.workspace.release(dropped)
        return h

    def _dropped(self, x: np.ndarray) -> np.ndarray:
        """x (R, in) -> itself, or what dropout leaves of it, rented."""
        if not self.dropout.on:
            return x
        dropped = self.workspace.rent(*x.shape)
        self.dropout.drop(dropped, x)
        return dropped

    def _diagonal(self) -> np.ndarray:
        """-> scale B (n r, out), each matrix in its rows and columns, elsewhere 0. Rented."""
        b = self.workspace.rent(self.inner, self.shape[1])
        self.adapter_kernels.spread_columns(b, self.lora_b.compute, self.starts, self.scale)
        return b

    def backward_input(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dx (R, in); keeps the gradient of h for `backward_weight`."""
        # forward: y = x weight + bias + h b
        dx = super().backward_input(dy)
        self.dh = dh = self._backward_projected(dy)
        # forward: h = dropout(x) A
        kernels, a = self.adapter_kernels, self.lora_a.compute
        if not self.dropout.on:
            kernels.matmul_transpose_b(dx, dh, a, dx)
            return dx
        ddropped = self.workspace.rent(*dx.shape)
        kernels.matmul_transpose_b(ddropped, dh, a)
        self.dropout.drop(dx, ddropped, dx)
        self.workspace.release(ddropped)
        return dx

    def _backward_projected(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, out) -> dh (R, n r), rented."""
        # forward: y = x weight + bias + h b
        dh, b = self.workspace.rent(len(dy), self.inner), self._diagonal()
        self.adapter_kernels.matmul_transpose_b(dh, dy, b)
        self.workspace.release(b)
        return dh

    def backward_weight(self, x: np.ndarray, dy: np.ndarray) -> None:
        """x (R, in), as in forward, dy (R, out) -> adds to the gradients of A and B."""
        kernels, workspace = self.adapter_kernels, self.workspace
        dh = self._backward_projected(dy) if self.dh is None else self.dh
        self.dh = None
        if self.lora_a.grad is not None:
            # forward: y = x weight + bias + h b, where b is B, spread and scaled
            h = self._projected(x)
            db = workspace.rent_full_precision(self.inner, self.shape[1])
            kernels.matmul_transpose_a(db, h, dy)
            kernels.gather_columns(self.lora_b.grad, db, self.starts, self.scale)
            workspace.release(h, db)
            # forward: h = dropout(x) A
            dropped = self._dropped(x)
            kernels.matmul_transpose_a(self.lora_a.grad, dropped, dh, self.lora_a.grad)
            if dropped is not x:
                workspace.release(dropped)
        workspace.release(dh)


def separate_widths(
    config: ModelConfig, shape: tuple[int, ...], widths: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the columns of each matrix that has an A and a B of its own.

    Where an architecture keeps matrices as one, so do adapters for it: GPT-2's queries, keys and
    values.
    """
    return (shape[1],) if config.fuses_matrices or not widths else widths


def low_rank_product(
    a: np.ndarray, b: np.ndarray, widths: tuple[int, ...], scale: float
) -> np.ndarray:
    """lora_a (in, n r), lora_b (r, out) -> scale A B (in, out), what they add to a weight."""
    r, ends = len(b), np.cumsum(widths)
    parts = [
        a[:, i * r : (i + 1) * r] @ b[:, end - width : end]
        for i, (width, end) in enumerate(zip(widths, ends, strict=True))
    ]
    return np.float32(scale) * np.concatenate(parts, axis=1)

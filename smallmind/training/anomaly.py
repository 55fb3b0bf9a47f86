"""Stops at the first NaN or Inf of a pass, and names the layer that it comes from."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from smallmind.kernels.description import described
from smallmind.kernels.number_types import is_quantised, to_float32
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Kernel
from smallmind.settings.config import Precision


@contextmanager
def detect_anomaly(model: TransformerModel) -> Iterator[None]:
    """Raises FloatingPointError within the block at the first NaN or Inf of a pass, with its layer.

    Checks everything that a kernel reads and writes as soon as it returns, which makes passes take
    up to 50 % longer. In float16 the backward pass is not checked: overflow is normal there, and
    the loss scaler handles it.
    """

    def wrap(name: str, kernel: Kernel) -> Kernel:
        if not described(name).is_of_layer:
            return kernel

        @functools.wraps(kernel)
        def checking(*arguments: Any, **named: Any) -> Any:
            result = kernel(*arguments, **named)
            for array in (*arguments, *named.values()):
                if isinstance(array, np.ndarray) and not _is_finite(array):
                    _report(model, name, array)
            return result

        return checking

    with model.workspace.wrapped_kernels(wrap):
        yield


def _is_finite(array: np.ndarray) -> bool:
    if is_quantised(array.dtype):
        array = array["scale"]  # float16, the only numbers in a block that can be anything else
    return bool(np.isfinite(to_float32(array)).all())


def _report(model: TransformerModel, kernel: str, array: np.ndarray) -> None:
    """Raises FloatingPointError with one line about the first array that is not finite."""
    workspace = model.workspace
    layer, direction = workspace.layer, workspace.direction
    # These gradients include the loss scale.
    may_overflow = direction == "backward" or layer == "loss"
    if model.precision == Precision.FLOAT16 and may_overflow:
        return
    value = "NaN" if np.isnan(to_float32(array)).any() else "Inf"
    when = f"training pass {workspace.now.number + 1}" if workspace.now else "an evaluation"
    fault = f"the first {value} is in the {direction} pass of {layer} ({kernel}, {when})"
    for name, parameter in model.flat.compute.items():
        if not _is_finite(parameter):
            raise FloatingPointError(
                f"{fault}: {name} is not finite itself; go back to weights that are"
            )
    raise FloatingPointError(f"{fault}; its weights are finite: lower the learning rate")

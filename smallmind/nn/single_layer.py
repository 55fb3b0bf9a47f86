"""One layer outside a model, or one of a model: passes through it, for a gradient check."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.backend import open_backend
from smallmind.nn.differentiable import Differentiable, is_float
from smallmind.nn.layer import Branch, Layer, Norm, Scope
from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Pass, Workspace
from smallmind.settings.config import ModelConfig

NOISE = 0.3  # deviation by which new parameters are moved: gains leave 1, biases 0


def build_layer(
    make: Callable[[Scope], Any], config: ModelConfig, backend: str, random: np.random.Generator
) -> Any:
    """-> a layer outside a model, away from its initial values, where some mistakes do not show."""
    opened, dtype = open_backend(backend), np.float64 if backend == "numpy" else np.float32
    parameters = Parameters()
    layer = make(Scope(Workspace(opened, dtype, config.dropout, 0), parameters, config))
    parameters.allocate(dtype, opened.zeros)
    parameters.initialise(0)
    parameters.data += NOISE * random.standard_normal(parameters.data.size)
    return layer


def of_layer(layer: Layer, x: np.ndarray) -> Differentiable:
    """A layer as a function of x (B, T, C) or (T, C), or of ids (B, T), and of its parameters."""
    workspace = layer.workspace
    parameters = {name: x for name, x in layer.named_parameters() if x.grad is not None}
    arrays = {name: parameter.compute for name, parameter in parameters.items()}
    T = x.shape[-2 if is_float(x) else -1]
    if is_float(x):
        x = np.array(x.reshape(-1, x.shape[-1]), workspace.dtype)
        arrays = {"x": x} | arrays

    def run(dy: Any = None, addend: Any = None, forward: Any = layer.forward) -> np.ndarray:
        """-> y [+ addend] or, with dy, dx [+ addend], a copy. Dropout is the same each time."""

        def rented(values: np.ndarray) -> np.ndarray:
            array = workspace.rent(*values.shape)
            array[...] = values
            return array

        def compute() -> np.ndarray:
            workspace.T = T
            more = {} if addend is None else {"addend": rented(addend)}
            result = forward(rented(x) if is_float(x) else x, **(more if dy is None else {}))
            if dy is not None:
                workspace.direction = "backward"
                result = layer.backward(rented(dy), **more)
            return np.zeros(0) if result is None else np.array(result)

        with workspace.using_pool(TensorPool(allocate=_undefined)):
            return workspace.one_pass(compute, Pass(0))

    def differentiate(dy: np.ndarray) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        kept = {name: parameter.grad.copy() for name, parameter in parameters.items()}
        try:
            for parameter in parameters.values():
                parameter.grad[...] = 0
            dx = run(dy)
            once = {name: parameter.grad.copy() for name, parameter in parameters.items()}
            run(dy)
            problems = {
                name: "backward must add to the gradient, not overwrite it"
                for name, parameter in parameters.items()
                if not _is_close(parameter.grad, 2 * once[name])
            }
            if isinstance(layer, Norm) and not _is_close(run(dy, 2 * dx), 3 * dx):
                problems["x"] = "backward does not add addend, which may be the array it writes to"
            if isinstance(layer, Branch) and not _is_close(run(dy, None, layer.recompute), dx):
                problems["x"] = "differs after recompute"
            if isinstance(layer, Branch) and not _is_close(run(addend=2 * run()), 3 * run()):
                problems["x"] = "forward does not add addend"
            return {"x": dx} | once, problems
        finally:
            for name, parameter in parameters.items():
                parameter.grad[...] = kept[name]

    return Differentiable(arrays, run, differentiate, workspace.dtype)


def _undefined(size: int, dtype: Any) -> np.ndarray:
    """Sets all bits of rented arrays, which makes NaN or -1: reading before writing is noticed."""
    array = aligned_zeros(size, dtype)
    array.view(np.uint8)[...] = 255
    return array


def _is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal up to rounding, or both not finite."""
    limit = 1e-4 * np.abs(expected[np.isfinite(expected)]).max(initial=0)
    return bool(np.allclose(actual, expected, rtol=0, atol=limit, equal_nan=True))

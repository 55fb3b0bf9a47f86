"""One layer outside a model, or one of a model: passes through it, for a gradient check."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.backend import open_backend
from smallmind.nn.differentiable import TOO_COARSE, Differentiable, is_float
from smallmind.nn.layer import Branch, Layer, Norm, Scope
from smallmind.nn.parameters import Parameters
from smallmind.nn.workspace import Pass, Workspace
from smallmind.settings.config import ModelConfig

NOISE = 0.3  # deviation by which new parameters are moved: gains leave 1, biases 0
SMALL = ModelConfig(vocab_size=11, block_size=8, n_embd=12, n_layer=1, n_head=3)

ROWS = 6  # of an input, if none is given


def config_for(inputs: tuple[Any, ...]) -> ModelConfig:
    """A small model whose channels are those of the first input, if it is an array of floats."""
    channels = inputs[0].shape[-1] if inputs and is_float(inputs[0]) else SMALL.n_embd
    heads = SMALL.n_head if channels % SMALL.n_head == 0 else 1
    return dataclasses.replace(SMALL, n_embd=channels, n_head=heads)


def build_layer(
    make: Callable[[Scope], Any], config: ModelConfig, backend: str, random: np.random.Generator
) -> Any:
    """A layer outside a model, away from its initial values, where some mistakes do not show."""
    if not callable(make):
        raise InputError(
            f"{type(make).__name__} cannot be checked: give a model, a layer, or a function with "
            "backward="
        )
    opened, dtype = open_backend(backend), np.float64 if backend == "numpy" else np.float32
    parameters = Parameters()
    layer = make(Scope(Workspace(opened, dtype, config.dropout, 0), parameters, config))
    parameters.allocate(dtype, opened.zeros)
    parameters.initialise(0)
    for value in parameters.views.values():
        value += (NOISE * random.standard_normal(value.shape)).astype(dtype)
    return layer


def of_layer(layer: Any, inputs: tuple[Any, ...]) -> Differentiable:
    """A layer as a function of its input and of all its parameters.

    The input is x (B, T, C), x (T, C), which is one window, or ids (B, T).
    """
    if not isinstance(layer, Layer):
        raise InputError(
            f"{type(layer).__name__} is not a smallmind.nn.layer.Layer; functions are checked with "
            "gradient_check(forward, x, backward=backward)"
        )
    workspace = layer.workspace
    if workspace.activation_dtype is not workspace.dtype:
        raise InputError(TOO_COARSE)
    if len(inputs) != 1:
        raise InputError("a layer takes one input, x or ids: gradient_check(layer, x)")
    x = np.asarray(inputs[0])
    arrays: dict[str, np.ndarray] = {}
    T = x.shape[-1]
    if is_float(x):
        T, x = x.shape[-2], np.array(x.reshape(-1, T), workspace.dtype)
        arrays = {"x": x}
    handles = dict(layer.named_parameters())
    is_branch = isinstance(layer, Branch)

    def rented(values: np.ndarray) -> np.ndarray:
        array = workspace.rent(*values.shape)
        array[...] = values
        return array

    def run(dy: Any = None, addend: Any = None, recompute: bool = False) -> np.ndarray:
        """-> y [+ addend] or, with dy, dx [+ addend], a copy. Dropout is the same each time."""

        def compute() -> np.ndarray:
            workspace.T = T
            given, more = rented(x) if is_float(x) else x, {}
            if addend is not None:
                more["addend"] = rented(addend)
            if recompute:
                layer.recompute(given)  # type: ignore[attr-defined]
            else:
                result = layer.forward(given, **({} if dy is not None else more))
            if dy is not None:
                workspace.direction = "backward"
                result = layer.backward(rented(dy), **more)
            return np.zeros(0) if result is None else np.array(result)

        with workspace.using_pool(TensorPool(allocate=_undefined)):
            return workspace.one_pass(compute, Pass(0))

    def differentiate(dy: np.ndarray) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        kept = {name: handle.grad.copy() for name, handle in handles.items()}
        try:
            for handle in handles.values():
                handle.grad[...] = 0
            dx = run(dy)
            once = {name: handle.grad.copy() for name, handle in handles.items()}
            run(dy)
            problems = {
                name: "backward must add to the gradient, not overwrite it"
                for name, handle in handles.items()
                if not _is_close(handle.grad, 2 * once[name])
            }
            addend = np.full_like(dx, _largest(dx))
            if isinstance(layer, Norm) and not _is_close(run(dy, addend) - addend, dx):
                problems["x"] = "backward does not add addend, which may be the array it writes to"
            if is_branch and not _is_close(run(dy, recompute=True), dx):
                problems["x"] = "differs after recompute"
            if is_branch and not _is_close(run(addend=dy) - dy, run()):
                problems["x"] = "forward does not add addend"
            return ({"x": dx} if is_float(x) else {}) | once, problems
        finally:
            for name, handle in handles.items():
                handle.grad[...] = kept[name]

    arrays |= {name: handle.compute for name, handle in handles.items()}
    return Differentiable(arrays, run, differentiate, workspace.dtype)


def _undefined(size: int, dtype: Any) -> np.ndarray:
    """Fills rented arrays with NaN, so that reading before writing is noticed."""
    array = aligned_zeros(size, dtype)
    if array.dtype.kind == "f":
        array.fill(np.nan)
    return array


def _is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal up to rounding, or both not finite."""
    limit = 1e-4 * _largest(expected)
    return bool(np.allclose(actual, expected, rtol=0, atol=limit, equal_nan=True))


def _largest(array: np.ndarray) -> float:
    """The largest magnitude of the elements that are finite."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0))

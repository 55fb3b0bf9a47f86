"""A model, layer or function as a gradient check takes it: arrays, and two functions of them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.kernels.alignment import aligned_zeros
from smallmind.memory.tensor_pool import TensorPool
from smallmind.nn.backend import open_backend
from smallmind.nn.layer import Branch, Layer, Norm, Scope
from smallmind.nn.parameters import Parameters
from smallmind.nn.transformer import TransformerModel
from smallmind.nn.workspace import Pass, Workspace
from smallmind.settings.config import ModelConfig, Precision

FLOATS = (np.float64, np.float32)  # what can be checked: 16 bits are too coarse
NOISE_DEVIATION = 0.3  # by which new parameters are moved: gains leave 1, biases 0
TOO_COARSE = "16 bits are too coarse for this check: call model.use_precision('float32') first"


class Differentiable(NamedTuple):
    """Arrays that may be moved, by name, and functions of what they hold."""

    arrays: Mapping[str, np.ndarray]
    evaluate: Callable[[], np.ndarray]  # -> the result, a number or an array, not to be kept
    # The gradient of the result -> those of the arrays, and what is wrong besides, both by name.
    differentiate: Callable[[np.ndarray], tuple[Mapping[str, Any], Mapping[str, str]]]
    dtype: Any  # of the gradients


def of_model(
    model: TransformerModel, inputs: tuple[Any, ...], random: np.random.Generator
) -> Differentiable:
    """Returns the loss of a batch as a function of all parameters that are trained."""
    if model.precision.of_trained != Precision.FLOAT32:
        raise InputError(TOO_COARSE)
    if len(inputs) not in (0, 2):
        raise InputError("a model takes ids and targets, or neither: gradient_check(model)")
    if not inputs:
        tokens = (2, min(16, model.config.block_size) + 1)
        data = random.integers(0, model.config.vocab_size, tokens)
        inputs = data[:, :-1], data[:, 1:]
    ids, targets = inputs
    at = Pass(model.passes)  # dropout masks follow from it
    exact = model if np.dtype(model.workspace.dtype) == np.float64 else _float64_copy(model)

    def evaluate() -> np.ndarray:
        if not (model.config.dropout or (model.adapter and model.adapter.dropout)):
            return np.array(exact.loss(ids, targets))
        with exact.flat.other_gradients():
            return np.array(exact.loss_and_gradients(ids, targets, at=at))

    def differentiate(_: np.ndarray) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        with model.flat.other_gradients():
            model.loss_and_gradients(ids, targets, at=at)
            return {name: value.copy() for name, value in model.gradients.items()}, {}

    arrays = {name: exact.parameters[name] for name in model.gradients}
    return Differentiable(arrays, evaluate, differentiate, model.workspace.dtype)


def _float64_copy(model: TransformerModel) -> TransformerModel:
    """-> a model of the same config with the same weights, exact enough for finite differences."""
    copy = TransformerModel(
        model.config,
        seed=model.seed,
        backend="numpy",
        dtype=np.float64,
        freeze=model.frozen,
        adapter=model.adapter,
    )
    copy.flat.write(model.parameters)
    copy.micro_batch_size = model.micro_batch_size
    return copy


def of_function(
    forward: Callable[..., Any], backward: Callable[..., Any], inputs: tuple[Any, ...]
) -> Differentiable:
    """Returns a function and its backward pass."""
    names = names_of(forward, len(inputs))
    values = [np.array(value) if is_float(value) else value for value in inputs]
    arrays = {name: value for name, value in zip(names, values, strict=True) if is_float(value)}
    if not arrays:
        raise InputError("none of the inputs is an array of floats: there is nothing to check")

    def call() -> tuple[np.ndarray, list[Any]]:
        """Returns the result, and what backward gets."""
        copies = [value.copy() if is_float(value) else value for value in values]
        result = forward(*copies)
        y, kept = (result[0], list(result[1:])) if isinstance(result, tuple) else (result, copies)
        return np.asarray(y, None if is_float(y) else np.float64), kept

    def differentiate(u: np.ndarray) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        y, kept = call()
        result = backward(u.astype(y.dtype)[()], *kept)
        return by_name(result, arrays, names), {}

    dtype = np.result_type(*arrays.values())
    return Differentiable(arrays, lambda: call()[0], differentiate, dtype)


def by_name(result: Any, arrays: Mapping[str, np.ndarray], names: list[str]) -> dict[str, Any]:
    """The result of a backward pass -> the gradient of each array."""
    gradients = list(result) if isinstance(result, tuple | list) else [result]
    if len(gradients) == len(names):
        found = dict(zip(names, gradients, strict=True))
        return {name: found[name] for name in arrays}
    if len(gradients) == len(arrays):
        return dict(zip(arrays, gradients, strict=True))
    raise InputError(
        f"backward returned {len(gradients)} gradients; it must return one for each of "
        f"{', '.join(arrays)}"
    )


def is_float(value: Any) -> bool:
    """Returns True if a value is an array that has a gradient."""
    return isinstance(value, np.ndarray | np.generic) and value.dtype in FLOATS


def names_of(function: Callable[..., Any], count: int) -> list[str]:
    """Returns a function's names for its first arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    return [known[i] if i < len(known) else f"input {i}" for i in range(count)]


def build_layer(
    make: Callable[[Scope], Any], config: ModelConfig, backend: str, random: np.random.Generator
) -> Any:
    """-> a layer outside a model, away from its initial values, where some mistakes do not show."""
    opened, dtype = open_backend(backend), np.float64 if backend == "numpy" else np.float32
    parameters = Parameters()
    layer = make(Scope(Workspace(opened, dtype, config.dropout, 0), parameters, config))
    parameters.allocate(dtype, opened.zeros)
    parameters.initialise(0)
    parameters.data += NOISE_DEVIATION * random.standard_normal(parameters.data.size)
    return layer


def of_layer(layer: Layer, x: np.ndarray) -> Differentiable:
    """-> a layer as a function of x (B, T, C) or (T, C), or ids (B, T), and its parameters."""
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
    """Compares up to rounding; values that are not finite must be so in both."""
    limit = 1e-4 * np.abs(expected[np.isfinite(expected)]).max(initial=0)
    return bool(np.allclose(actual, expected, rtol=0, atol=limit, equal_nan=True))

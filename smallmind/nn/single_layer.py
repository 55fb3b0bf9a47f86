"""One layer outside a model, or one of a model: passes through it, for a gradient check."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from smallmind.checks import InputError
from smallmind.config import ModelConfig
from smallmind.nn.backend import open_backend
from smallmind.nn.differentiable import TOO_COARSE, Differentiable, by_name, is_float, names_of
from smallmind.nn.parameters import Parameter, Parameters
from smallmind.nn.scope import Scope
from smallmind.nn.workspace import Workspace

NOISE = 0.3  # deviation by which new parameters are moved: gains leave 1, biases 0
SMALL = ModelConfig(vocab_size=11, block_size=8, n_embd=12, n_layer=1, n_head=3)
ROWS = 6  # of an input, if none is given


def config_for(inputs: tuple[Any, ...]) -> ModelConfig:
    """A small model whose channels are those of the first array of floats, if there is one."""
    channels = next((value.shape[-1] for value in inputs if is_float(value)), SMALL.n_embd)
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
    opened = open_backend(backend)
    dtype = np.float64 if backend == "numpy" else np.float32
    parameters = Parameters()
    layer = make(Scope(Workspace(opened, dtype, config.dropout, 0), parameters, config))
    parameters.allocate(dtype, opened.zeros)
    parameters.initialise(0)
    for value in parameters.views.values():
        value += (NOISE * random.standard_normal(value.shape)).astype(dtype)
    return layer


def random_inputs(
    layer: Any, config: ModelConfig, random: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Arguments for `forward`, if it takes nothing but x and perhaps a residual."""
    parameters = inspect.signature(layer.forward).parameters.values()
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if names not in (["x"], ["x", "residual"]):
        wanted = ", ".join(names)
        raise InputError(f"give the arguments of forward: gradient_check(layer, {wanted})")
    return tuple(random.standard_normal((ROWS, config.n_embd)) for _ in names)


def of_layer(layer: Any, inputs: tuple[Any, ...]) -> Differentiable:
    """A layer as a function of its inputs and of all its parameters."""
    workspace = _workspace_of(layer)
    if workspace is None or not hasattr(layer, "forward") or not hasattr(layer, "backward"):
        raise InputError(
            f"{type(layer).__name__} must have workspace, forward and backward; functions are "
            "checked with gradient_check(forward, x, backward=backward)"
        )
    if workspace.activation_dtype is not workspace.dtype:
        raise InputError(TOO_COARSE)
    run = _LayerRun(layer, workspace, inputs)
    handles = dict(_parameters_of(layer, workspace, "", set()))

    def differentiate(u: np.ndarray) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        kept = {name: handle.grad.copy() for name, handle in handles.items()}
        try:
            for handle in handles.values():
                handle.grad[...] = 0
            gradients = run.backward(u)
            once = {name: handle.grad.copy() for name, handle in handles.items()}
            return gradients | once, _problems(run, u, gradients, once, handles)
        finally:
            for name, handle in handles.items():
                handle.grad[...] = kept[name]

    arrays = run.arrays | {name: handle.compute for name, handle in handles.items()}
    return Differentiable(arrays, run.forward, differentiate, workspace.dtype)


def _workspace_of(layer: Any) -> Workspace | None:
    """The workspace of a layer, or of the layer within it."""
    holders = [layer, *getattr(layer, "__dict__", {}).values()]
    found = (getattr(holder, "workspace", None) for holder in holders)
    return next((each for each in found if isinstance(each, Workspace)), None)


def _parameters_of(
    part: Any, workspace: Workspace, prefix: str, seen: set[int]
) -> Iterator[tuple[str, Parameter]]:
    """The parameters of a layer and of the layers within it, by the names of its attributes."""
    seen.add(id(part))
    for attribute, value in vars(part).items():
        several = isinstance(value, list | tuple)
        for i, item in enumerate(value if several else [value]):
            name = f"{prefix}{attribute}.{i}" if several else f"{prefix}{attribute}"
            if id(item) in seen:
                continue
            if isinstance(item, Parameter) and item.grad is not None:
                seen.add(id(item))
                yield name, item
            elif getattr(item, "workspace", None) is workspace:
                yield from _parameters_of(item, workspace, f"{name}.", seen)


class _LayerRun:
    """Passes through one layer, all with the same dropout masks. `arrays` are its inputs."""

    def __init__(self, layer: Any, workspace: Workspace, inputs: tuple[Any, ...]) -> None:
        self.layer = layer
        self.workspace = workspace
        self.names = names_of(layer.forward, len(inputs))
        dtype = self.workspace.dtype
        self.inputs = [np.array(value, dtype) if is_float(value) else value for value in inputs]
        named = zip(self.names, self.inputs, strict=True)
        self.arrays = {name: value for name, value in named if is_float(value)}
        self.arguments = names_of(layer.backward, 3)

    def forward(self) -> np.ndarray:
        """The result, a copy."""

        def compute() -> np.ndarray:
            given = self._rented()
            return np.array(_or_in_place(self.layer.forward(*given), given[0]))

        return self.workspace.one_pass(compute, number=0)

    def backward(
        self, u: np.ndarray, residual: np.ndarray | None = None, recompute: bool = False
    ) -> dict[str, np.ndarray]:
        """u, the gradient of the result -> those of the inputs; adds to those of parameters.

        A norm gets the gradient that bypasses it, if any, as blocks give it: in place of dx.
        """

        def compute() -> dict[str, np.ndarray]:
            given = self._rented()
            if recompute:
                named = zip(self.names, given, strict=True)
                self.layer.recompute(*(value for name, value in named if name != "residual"))
            else:
                self.layer.forward(*given)
            self.workspace.direction = "backward"
            dy = self.workspace.rent(*u.shape)
            dy[...] = u
            return self._gradients(self._call_backward(dy, residual), u)

        return self.workspace.one_pass(compute, number=0)

    @property
    def adds_residual(self) -> bool:
        """Whether backward takes a gradient to add, as that of norms does."""
        return "residual" in self.arguments

    def _rented(self) -> list[Any]:
        """The inputs as layers get them: rented, so that a layer may release them."""
        self.workspace.direction = "forward"
        given = list(self.inputs)
        for i, value in enumerate(given):
            if is_float(value):
                given[i] = self.workspace.rent(*value.shape)
                given[i][...] = value
        return given

    def _call_backward(self, dy: np.ndarray, residual: np.ndarray | None) -> Any:
        """What backward returns or writes."""
        if "dx" not in self.arguments[1:]:
            return _or_in_place(self.layer.backward(dy), dy)
        dx = self.workspace.rent(*next(iter(self.arrays.values())).shape)
        dx[...] = math.nan if residual is None else residual
        more = {"residual": None if residual is None else dx} if self.adds_residual else {}
        self.layer.backward(dy, dx, **more)
        return dx

    def _gradients(self, result: Any, u: np.ndarray) -> dict[str, np.ndarray]:
        """Copies, by name. A residual that is added has the gradient of the sum."""
        names = list(self.arrays)
        if "residual" in names and not isinstance(result, tuple | list):
            names.remove("residual")
        arrays = {name: self.arrays[name] for name in names}
        found = by_name(result, arrays, names) if arrays else {}
        gradients = {name: np.array(gradient) for name, gradient in found.items()}
        return {"residual": u, **gradients} if "residual" in self.arrays else gradients


def _or_in_place(result: Any, changed: Any) -> Any:
    """What a function returned or, if that is nothing, what it has changed."""
    return changed if result is None else result


def _problems(
    run: _LayerRun,
    u: np.ndarray,
    gradients: Mapping[str, np.ndarray],
    once: Mapping[str, np.ndarray],
    handles: Mapping[str, Parameter],
) -> dict[str, str]:
    """What a model needs besides right gradients: name -> what is missing.

    gradients are those of the inputs and `once` those of the parameters, after one backward pass.
    """
    problems = {}
    x = next(iter(gradients), "")
    residual = np.full_like(gradients[x], _largest(gradients[x])) if run.adds_residual else None
    again = run.backward(u, residual)
    if residual is not None and not _is_close(again[x] - residual, gradients[x]):
        problems[x] = "backward does not add residual, which may be dx itself"
    for name, handle in handles.items():
        if not _is_close(handle.grad, 2 * once[name]):
            problems[name] = "backward must add to the gradient, not overwrite it"
    if hasattr(run.layer, "recompute"):
        again = run.backward(u, recompute=True)
        problems |= {
            name: "differs after recompute"
            for name, gradient in gradients.items()
            if not _is_close(again[name], gradient)
        }
    return problems


def _is_close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Equal up to rounding, or both not finite."""
    limit = 1e-4 * _largest(expected)
    return bool(np.allclose(actual, expected, rtol=0, atol=limit, equal_nan=True))


def _largest(array: np.ndarray) -> float:
    """The largest magnitude of the elements that are finite."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0))

"""The protocol of all layers, and what they are built from."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.nn.parameters import (
    NO_PARAMETER,
    ZEROS,
    Constant,
    Normal,
    Parameter,
    Parameters,
    ParameterSpec,
    Role,
)
from smallmind.nn.workspace import Workspace
from smallmind.settings.config import Adapter, ModelConfig


class Scope(NamedTuple):
    """The arguments common to all layers. Names are dotted: blocks.0.mlp.expansion."""

    workspace: Workspace
    parameters: Parameters
    config: ModelConfig
    name: str = ""
    adapter: Adapter | None = None  # of the matrices within

    def inner(self, name: str) -> "Scope":
        """Returns the scope of a layer within this one."""
        return self._replace(name=f"{self.name}.{name}" if self.name else name)

    def adapted(self, part: str) -> "Scope":
        """Returns this scope, without the adapter if it is not on this part of a model."""
        if self.adapter is None or part in self.adapter.on:
            return self
        return self._replace(adapter=None)

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        initialisation: Normal | Constant,
        role: Role,
        widths: tuple[int, ...] = (),
        **facts: Any,
    ) -> Parameter:
        """Declares a parameter of this layer.

        widths: the columns of each matrix, if several stand side by side in this one. Facts are
        other fields of its spec.
        """
        spec = ParameterSpec(self.inner(name).name, shape, initialisation, role, widths, **facts)
        return self.parameters.declare(spec)

    def declare_bias(self, size: int, is_there: bool | None = None) -> Parameter:
        """Declares a bias, initially zero -> NO_PARAMETER without one.

        A layer has one if it says so or, by default, if the model has biases.
        """
        if not (self.config.bias if is_there is None else is_there):
            return NO_PARAMETER
        return self.declare("bias", (size,), ZEROS, Role.BIAS)


class Layer(ABC):
    """A part of a model with a forward and a backward pass over rows, one per token.

    `forward(x) -> y` keeps what `backward(dy) -> dx` needs, x included, which therefore stays as it
    is until then. `backward` adds to the gradients of parameters. The caller owns x and dy, and
    what both calls return: it is rented, and the caller releases it. A layer releases nothing but
    what it has rented to keep. Layers that work in place say so, and return what they were given.

    Layers of the residual stream also take an `addend` and add it in the same pass over memory: in
    `forward` those that end a branch, in `backward` those that begin one.

    What else can compute a layer follows from what its class declares of itself, and no subclass
    inherits it: `class Mine(Norm, only_kernels=True, page="rmsnorm")`.
    """

    forward: Any
    backward: Any
    only_kernels = False  # passes only call kernels, so that they can be recorded and repeated
    page = ""  # the name in `exchange/model.js` of the part that computes the same

    def __init_subclass__(cls, only_kernels: bool = False, page: str = "", **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.only_kernels, cls.page = only_kernels, page
        if "forward" in vars(cls) and not only_kernels:
            cls.forward = _refusing_numpy(cls.forward)

    def __init__(self, scope: Scope) -> None:
        self.workspace = scope.workspace
        self.name = scope.name
        if not self.only_kernels:
            self.workspace.new_recording = None  # it may do more than call kernels

    @property
    def kernels(self) -> Any:
        """The kernels. Tells whoever watches them that this layer is running."""
        return self.workspace.kernels_for(self.name)

    def gradient(self, parameter: Parameter) -> np.ndarray:
        """-> the array to which a kernel that computes more than that adds a parameter's gradient.

        Of one that is not trained it is thrown away at the end of the pass.
        """
        if parameter.grad is not None:
            return parameter.grad
        unused = self.workspace.rent_full_precision(*parameter.compute.shape)
        self.kernels.clear(unused)
        return unused

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yields the parameters of this layer and of those within it, by the names of their
        attributes.
        """
        for attribute, value in vars(self).items():
            if isinstance(value, Parameter) and value is not NO_PARAMETER:
                yield prefix + attribute, value
            for layer in value if isinstance(value, list) else [value]:
                if isinstance(layer, Layer):
                    yield from layer.named_parameters(f"{prefix}{attribute}.")


def _refusing_numpy(forward: Any) -> Any:
    """Returns the forward pass of a layer from another package, which fails in 16 bits if it calls
    no kernel: it has then computed with the bits as integers, and nothing would say so."""

    @functools.wraps(forward)
    def checked(layer: Layer, x: Any, *arguments: Any, **named: Any) -> Any:
        workspace = layer.workspace
        if workspace.activation_dtype is workspace.dtype:
            return forward(layer, x, *arguments, **named)
        workspace.layer = ""
        y = forward(layer, x, *arguments, **named)
        if not workspace.layer and y is not x:
            raise InputError(
                f"{type(layer).__name__} calls no kernel, and NumPy cannot compute with the 16-bit "
                "numbers of this precision: make its arithmetic a kernel, with "
                "smallmind.nn.backend.add_kernel, or train with --precision float32"
            )
        return y

    return checked


class Norm(Layer, only_kernels=True):
    """Begins a branch of the residual stream: normalises each row of x (R, C)."""

    @abstractmethod
    def forward(self, x: np.ndarray) -> np.ndarray:
        """x (R, C) -> y (R, C); keeps x."""

    @abstractmethod
    def backward(self, dy: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """dy (R, C) -> dx (R, C) or, in place of addend (R, C), addend + dx; adds to gradients."""

    def gradient_of(self, x: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
        """Returns where backward writes: to addend or, without one, to a new array."""
        return self.workspace.rent(*x.shape) if addend is None else addend


class Branch(Layer, only_kernels=True):
    """Ends a branch of the residual stream: what forward computes is added to it."""

    @abstractmethod
    def forward(self, x: np.ndarray, addend: np.ndarray | None = None) -> np.ndarray:
        """x (R, C) -> y (R, C) [+ addend (R, C)]; keeps x."""

    def recompute(self, x: np.ndarray) -> None:
        """x (R, C), as in forward; keeps what forward keeps, and may leave out what it returns."""
        self.workspace.release(self.forward(x))

    @abstractmethod
    def backward(self, dy: np.ndarray) -> np.ndarray:
        """dy (R, C) -> dx (R, C); adds to gradients. The gradient of addend is dy."""

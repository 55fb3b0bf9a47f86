"""From our parameters to the tensors of a file, and back: names, transposes, splits, order."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.console import activity
from smallmind.files.safetensors import Unread
from smallmind.kernels import reference
from smallmind.kernels.number_types import DTYPES, round_to
from smallmind.nn.loading import Stored, read_tensor
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role, Transposed
from smallmind.nn.transformer import TransformerModel
from smallmind.parts import NUMBER_TYPES, NumberType
from smallmind.settings.architectures import Architecture, Layout
from smallmind.settings.config import ModelConfig

EMBEDDING = "token_embedding.weight"  # our name of the matrix that a tied head is


class Tensor(NamedTuple):
    """A tensor of a file: some columns of one of our parameters, perhaps in another order."""

    name: str
    shape: tuple[int, ...]  # in the file
    parameter: str
    parameter_shape: tuple[int, ...]
    columns: slice
    is_transposed: bool
    swapped: tuple[int, ...]  # n, a, b: our columns are n x a x b runs, the file's n x b x a
    offset: float  # ours are larger by it
    role: Role

    def of(self, parameter: np.ndarray) -> np.ndarray:
        """Our parameter -> the tensor; a view if it has the same values in the same order."""
        part = parameter[..., self.columns]
        if self.swapped:
            runs = part.reshape(*part.shape[:-1], *self.swapped, -1)
            part = runs.swapaxes(-2, -3).reshape(part.shape)
        if self.offset:
            part = part - np.float32(self.offset)
        return part.T if self.is_transposed else part

    def of_model(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The parameters of a model -> the tensor; zeros for one that the model lacks.

        A tied head is the embedding.
        """
        parameter = parameters.get(self.parameter)
        if parameter is None and self.role == Role.HEAD:
            return parameters[EMBEDDING]
        if parameter is None:
            parameter = np.zeros(self.parameter_shape, np.float32)
        return self.of(parameter)

    def read(self, kernels: Any, parameter: np.ndarray, stored: Stored, source: str) -> None:
        """Reads the tensor into its columns of our parameter: the reverse of `of`.

        InputError if a value is not finite.
        """
        axis = 0 if self.is_transposed or len(self.shape) == 1 else 1  # of our columns
        n, a, b = self.swapped or (1, 1, 1)

        def write(first: int, rows: np.ndarray) -> None:
            if self.swapped:
                run = self.shape[axis] // (n * a * b)
                runs = rows.reshape(*rows.shape[:axis], -1, b, a, run, *rows.shape[axis + 1 :])
                rows = runs.swapaxes(axis + 1, axis + 2).reshape(rows.shape)
            if outputs_first:
                parameter[first : first + len(rows)] = rows
            elif self.is_transposed:
                kernels.transpose(parameter, rows, self.columns.start + first)
            else:
                parameter[..., self.columns][first : first + len(rows)] = rows

        outputs_first = isinstance(parameter, Transposed)
        if outputs_first:
            parameter = parameter[self.columns]
            assert self.is_transposed or not self.swapped
        if outputs_first and self.is_transposed:
            parameter = parameter.view(np.ndarray)  # its rows are those of the file
            is_straight = not self.swapped
        else:
            is_whole = outputs_first or self.shape == self.parameter_shape
            is_straight = is_whole and not (self.is_transposed or self.swapped)
        step = self.shape[0] // n if self.swapped and axis == 0 else 1
        stored = stored.plus(self.offset) if self.offset else stored
        name = f"{source}: {self.parameter}"
        read_tensor(kernels, parameter, stored, name, None if is_straight else write, step)


def tensors_of(config: ModelConfig, layout: Layout) -> Iterator[Tensor]:
    """Yields the tensors that a file holds of a model with this config, in the order of its
    layers.
    """
    widths: dict[str, tuple[int, ...]] = {}  # of the matrices of a layer, for its biases
    for spec in declare_parameters(config).specs:
        layer, _, kind = spec.name.rpartition(".")
        number = re.search(r"\d+", layer)
        names = layout.names[re.sub(r"\d+", "{}", layer)]
        names = (names,) if isinstance(names, str) else names
        widths.setdefault(layer, spec.widths)
        ends = np.cumsum(widths[layer] if len(names) > 1 else spec.shape[-1:]).tolist()
        is_transposed = spec.role == Role.HEAD or (
            spec.role == Role.MATRIX and layout.outputs_first
        )
        for name, start, end in zip(names, [0, *ends], ends, strict=False):
            shape = (*spec.shape[:-1], end - start)
            yield Tensor(
                name=f"{name.format(number and number[0])}.{kind}",
                shape=shape[::-1] if is_transposed else shape,
                parameter=spec.name,
                parameter_shape=spec.shape,
                columns=slice(start, end),
                is_transposed=is_transposed,
                swapped=_swapped(config, layout, name, end - start),
                offset=1.0 if layout.gains_less_one and spec.role == Role.GAIN else 0.0,
                role=spec.role,
            )


def _swapped(config: ModelConfig, layout: Layout, name: str, columns: int) -> tuple[int, ...]:
    """Returns how a file orders the columns of a matrix; see `Tensor`."""
    if name in layout.interleaved:  # all first channels of pairs, all second ones -> pairs
        return columns // config.head_channels, 2, config.head_channels // 2
    if name in layout.by_head:  # all queries, all keys, all values -> those of each head
        return 1, 3, config.n_head
    return ()


def written_tensors(
    config: ModelConfig, architecture: Architecture, layout: Layout
) -> list[Tensor]:
    """Returns all tensors that a file of this architecture needs of a model with this config."""
    return list(tensors_of(dataclasses.replace(config, **architecture.filled), layout))


def read_model(
    config: ModelConfig,
    layout: Layout,
    stored: Mapping[str, Stored],
    source: str,
    backend: str,
    precision: str | None = None,
) -> TransformerModel:
    """The tensors of a file -> the model with this config; see `smallmind.load` for precision.

    InputError naming the source if they are not those of such a model.
    """
    tensors = _checked(config, layout, stored, source)
    model = TransformerModel.unfilled(config, backend, precision)
    _fill(model, tensors, stored, source)
    return model


def write_model(
    model: TransformerModel,
    config: ModelConfig,
    layout: Layout,
    stored: Mapping[str, Stored],
    source: str,
) -> None:
    """Gives a model whose parameters have the shapes of this config the tensors of a file.

    Errors as `read_model`.
    """
    _fill(model, _checked(config, layout, stored, source), stored, source)


def _fill(
    model: TransformerModel, tensors: list[Tensor], stored: Mapping[str, Stored], source: str
) -> None:
    size = 4 * sum(math.prod(tensor.shape) for tensor in tensors)
    with activity.doing(f"Reading {source}", usual=size < activity.LARGE):
        for tensor in activity.parts(tensors):
            parameter = model.flat.own(tensor.parameter)
            tensor.read(model.workspace.kernels, parameter, stored[tensor.name], source)
    model.flat.refresh()


def check_tensors(
    config: ModelConfig, layout: Layout, stored: Mapping[str, Stored], source: str
) -> None:
    """Reads all tensors of a file, and keeps none. Errors as `read_model`."""
    tensors = _checked(config, layout, stored, source)
    with activity.doing(f"Checking {source}", usual=True):
        for tensor in activity.parts(tensors):
            for _ in stored[tensor.name].pieces(f"{source}: {tensor.parameter}"):
                pass


def unread_parameters(
    config: ModelConfig, layout: Layout, stored: Mapping[str, Stored], source: str
) -> dict[str, Unread]:
    """The tensors of a file -> our parameters by name, float32, in the order of declaration.

    Errors as `read_model`, those about values when a parameter is read.
    """
    parts: dict[str, list[Tensor]] = {}
    for tensor in _checked(config, layout, stored, source):
        parts.setdefault(tensor.parameter, []).append(tensor)

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        parameter = np.empty(shape, np.float32)
        for tensor in parts[name]:
            tensor.read(reference, parameter, stored[tensor.name], source)
        return parameter

    return {
        name: Unread(shape, np.dtype(np.float32), functools.partial(read, name, shape))
        for name, shape in declare_parameters(config).shapes.items()
    }


def read_parameters(
    config: ModelConfig, layout: Layout, stored: Mapping[str, Stored], source: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file -> our parameters by name, float32, one after the other.

    They have the order of `Parameters.ordered`. Errors as `read_model`.
    """
    parameters = unread_parameters(config, layout, stored, source)
    specs = declare_parameters(config).ordered
    size = 4 * sum(spec.size for spec in specs)
    with activity.doing(f"Reading {source}", usual=size < activity.LARGE):
        for spec in activity.parts(specs):
            yield spec.name, parameters[spec.name].read()


def type_of(shape: tuple[int, ...], type: str) -> NumberType:
    """Returns how a tensor is stored: vectors keep float32, rows too short for blocks 16 bits."""
    kind = NUMBER_TYPES["f32" if len(shape) == 1 else type]
    return kind if kind.fits(shape) else NUMBER_TYPES["f16"]


def encode(values: np.ndarray, kind: NumberType) -> np.ndarray:
    """values float32 of any shape that fits -> what is stored of them.

    InputError if one is too large for that.
    """
    if (largest := np.abs(values).max(initial=0)) > kind.limit:
        raise InputError(f"a weight is {largest:g}, too large for {kind.name}; choose bf16 or f32")
    return round_to(np.ascontiguousarray(values, np.float32), DTYPES[kind.name])


def _checked(
    config: ModelConfig, layout: Layout, stored: Mapping[str, Stored], source: str
) -> list[Tensor]:
    """-> the tensors of a model with this config. InputError if those of the file are others."""
    # Each block has tensors of its own: a wrong number of blocks must not take any time.
    if config.n_layer > len(stored):
        raise InputError(f"{source} has {len(stored)} tensors: too few for {config.n_layer} blocks")
    tensors = list(tensors_of(config, layout))
    expected = {tensor.name: tensor.shape for tensor in tensors}
    for name in (*expected, *stored):
        if name not in stored:
            raise InputError(f"{source} lacks the tensor {name}")
        if name not in expected:
            raise InputError(f"{source} has a tensor that is not supported: {shown_value(name)}")
        if stored[name].shape != expected[name]:
            found, wanted = map(shown_shape, (stored[name].shape, expected[name]))
            raise InputError(
                f"{source}: {name} is {found}; the model that it describes has {wanted}"
            )
    return tensors


def shown_shape(shape: tuple[int, ...]) -> str:
    """Returns a shape as messages have it: "3 x 4"."""
    return " x ".join(map(str, shape)) or "a number"

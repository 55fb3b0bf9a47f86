"""Files of models: tensors are read piece by piece into parameters, never twice in memory."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, from_json, shown_value
from smallmind.console import activity
from smallmind.files import safetensors
from smallmind.kernels import codecs, reference
from smallmind.kernels.number_types import (
    BLOCK,
    is_finite,
    is_quantised,
    kind_of,
    round_to,
    to_float32,
)
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Transposed
from smallmind.settings.config import ModelConfig
from smallmind.settings.settings import from_saved, to_saved
from smallmind.text.tokenizer import Tokenizer

FORMAT = "smallmind model 1"
CHECKPOINT_FORMAT = "smallmind checkpoint 1"
ADAPTER_FORMAT = "smallmind adapter 1"  # of a file with the parameters of an adapter alone
COPIED_ATTRIBUTES = (
    "tokenizer_digest",
    "base",
    "passes",
    "micro_batch_size",
)  # attributes of a copy
WEIGHTS_PREFIX = "model."  # with which the names of a checkpoint's parameters begin

# Bytes that are read at a time, as float32: they stay in a core's cache until they are used.
PIECE_BYTES = 2**21


class Stored(NamedTuple):
    """A tensor in a file, or anywhere else.

    `read(first, out)` writes its rows from number `first` on to out, contiguous and of `dtype`:
    float32, bits of 16-bit numbers, or blocks of integers: see `kernels.number_types`. InputError
    if they are gone.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[int, np.ndarray], None]

    @classmethod
    def of(cls, array: np.ndarray) -> "Stored":
        """Returns a tensor that is in memory."""
        rows = array.reshape(array.shape or 1)

        def read(first: int, out: np.ndarray) -> None:
            out[...] = rows[first : first + len(out)]

        return cls(array.shape, array.dtype, read)

    def plus(self, offset: float) -> "Stored":
        """Returns the tensor with a number added to each element, in float32."""

        def read(first: int, out: np.ndarray) -> None:
            rows = np.empty((len(out), *self.row_shape), self.dtype)
            self.read(first, rows)
            out[...] = to_float32(rows) + np.float32(offset)

        return Stored(self.shape, np.float32, read)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row as it is stored."""
        kind = kind_of(self.dtype)
        if kind is None or kind.block == 1:
            return self.shape[1:]
        return (*self.shape[1:-1], self.shape[-1] // kind.block)

    def pieces(
        self, name: str, step: int = 1, place: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Reads a multiple of `step` rows at a time -> the number of the first one, rows.

        They are read into their place, or one piece after another into the same memory. InputError
        if a value is not finite.
        """
        rows = self.shape[0] if self.shape else 1
        nbytes = 4 * math.prod(self.shape[1:])
        most = max(1, PIECE_BYTES // max(1, nbytes * step)) * step
        if place is None:
            piece = np.empty((min(most, rows), *self.row_shape), self.dtype)
        for first in range(0, rows, most):
            last = min(first + most, rows)
            read = piece[: last - first] if place is None else place[first:last]
            self.read(first, read)
            if not is_finite(read):
                raise InputError(f"{name} is not finite {_name(read.dtype)}")
            yield first, read
            activity.tick()

    def values(self) -> np.ndarray:
        """Returns all of it, as float32."""
        rows = np.empty((*self.shape[:1], *self.row_shape) or 1, self.dtype)
        self.read(0, rows)
        return to_float32(rows).reshape(self.shape)


def read_tensor(
    kernels: Any,
    parameter: np.ndarray,
    stored: Stored,
    name: str,
    write: Callable[[int, np.ndarray], None] | None = None,
    step: int = 1,
) -> None:
    """Writes a tensor to a parameter of the same shape, in the parameter's number type.

    If the tensor is arranged in another way, `write(first, rows)` does it, with the number of the
    first of these rows; there are a multiple of `step` of them. A parameter that is Transposed gets
    the transpose. InputError if a value is not finite, or too large.
    """
    if write is not None:
        for first, rows in stored.pieces(name, step):
            write(first, converted(kernels, rows, parameter.dtype, name))
    elif isinstance(parameter, Transposed):
        target = parameter.view(np.ndarray)
        for first, rows in stored.pieces(name, BLOCK):
            if is_quantised(target.dtype):
                values = converted(kernels, rows, np.float32, name)
                turned = np.empty(values.shape[::-1], np.float32)
                kernels.transpose(turned, values)
                blocks = target[:, first // BLOCK : (first + len(values)) // BLOCK]
                convert(kernels, blocks, turned, name)
            else:
                kernels.transpose(target, converted(kernels, rows, target.dtype, name), first)
    else:
        target = parameter if parameter.ndim else parameter.reshape(1)
        place = target if parameter.dtype == stored.dtype else None
        for first, rows in stored.pieces(name, place=place):
            if place is None:
                convert(kernels, target[first : first + len(rows)], rows, name)


def converted(kernels: Any, rows: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Rows (..., n) in any number type -> the same numbers in another. Errors as `convert`."""
    if rows.dtype == dtype:
        return rows
    sizes = [kind.block if (kind := kind_of(x)) else 1 for x in (rows.dtype, dtype)]
    columns = [x * sizes[0] // sizes[1] for x in rows.shape[-1:]]
    out = np.empty((*rows.shape[:-1], *columns), dtype)
    convert(kernels, out, rows, name)
    return out


def convert(kernels: Any, out: np.ndarray, rows: np.ndarray, name: str) -> None:
    """Writes rows to out, rounded if its number type is smaller.

    InputError if a number is too large for blocks of integers.
    """
    if rows.dtype == out.dtype:
        out[...] = rows
    elif is_quantised(out.dtype):
        _quantise(kernels, out, converted(kernels, rows, np.float32, name))
        if not is_finite(out):
            shown = f"{name} is too large for {_name(out.dtype)}"
            raise InputError(f"{shown}; choose bfloat16 or float32")
    elif kernels is reference:  # which computes in one type
        out[...] = round_to(to_float32(rows), out.dtype)
    elif not is_quantised(rows.dtype):
        matrix = (1, -1) if rows.ndim == 1 else (len(rows), -1)
        kernels.copy_columns(out.reshape(matrix), rows.reshape(matrix), 0)
    elif out.dtype != np.float32:
        convert(kernels, out, converted(kernels, rows, np.float32, name), name)
    else:
        kind = kind_of(rows.dtype)
        blocks = np.ascontiguousarray(rows).reshape(-1)
        kernels.dequantise(out.reshape(len(blocks), -1), *codecs.parts_of(blocks, kind))


def _quantise(kernels: Any, out: np.ndarray, values: np.ndarray) -> None:
    """Writes values (..., n) as blocks (..., n / BLOCK) of a number type that is computed with."""
    x = np.ascontiguousarray(values, np.float32).reshape(-1, BLOCK)
    integers = out.dtype["q"]
    scales, q = np.empty(len(x), np.float32), np.empty((len(x), *integers.shape), integers.base)
    kernels.quantise(scales, q, x)
    with np.errstate(over="ignore", invalid="ignore"):
        out["scale"] = scales.reshape(out.shape)
    out["q"] = q.reshape(*out.shape, -1)


def _name(dtype: Any) -> str:
    kind = kind_of(dtype)
    return kind.precision or kind.name if kind else str(dtype)


class Base(NamedTuple):
    """The model beside which an adapter is trained: where it is, and a digest of its weights."""

    path: str
    sha256: str


def weights(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """tensors of a checkpoint -> those that are parameters, by the names that these have."""
    return {
        name.removeprefix(WEIGHTS_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(WEIGHTS_PREFIX)
    }


def save(
    model: Any,
    path: str | PathLike[str],
    metadata: Mapping[str, str],
    announce: Callable[[str], object] | None,
) -> None:
    """Writes the file of a model, or of its adapter alone; see `TransformerModel.save`."""
    if not model.adapter:
        return save_parameters(model.config, model.parameters, path, metadata, announce)
    about = {"format": ADAPTER_FORMAT, "config": safetensors.to_json(to_saved(model.config))}
    about["adapter"] = safetensors.to_json(adapter_facts(model))
    parameters = {name: model.parameters[name] for name in model.flat.kept}
    safetensors.write(path, parameters, {**about, **metadata}, announce)


def save_parameters(
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray | safetensors.Unread],
    path: str | PathLike[str],
    metadata: Mapping[str, str],
    announce: Callable[[str], object] | None = None,
) -> None:
    """Writes the file of a model with these parameters."""
    about = {"format": FORMAT, "config": safetensors.to_json(to_saved(config))}
    safetensors.write(path, parameters, {**about, **metadata}, announce)


def adapter_facts(model: Any) -> dict[str, Any] | None:
    """Returns the adapter of a model and its base, as files keep them; None without one."""
    if not model.adapter:
        return None
    return {**model.adapter._asdict(), "base": model.base and model.base._asdict()}


def load(
    kind: Any,
    path: str | PathLike[str],
    backend: str,
    precision: str | None,
    known: Tokenizer | None = None,
) -> Any:
    """Reads a file that `save` wrote, or a checkpoint -> a model of this kind.

    known: the tokenizer in it, if that has been read.
    """
    check_type("path", path, str, os.PathLike)
    with safetensors.streaming(path) as (tensors, metadata):
        # Files of earlier versions have no format.
        found = metadata.get("format", FORMAT)
        is_adapter = found == ADAPTER_FORMAT or (
            found == CHECKPOINT_FORMAT and _has_adapter(metadata)
        )
        if is_adapter:
            raise InputError(f"{path} is only an adapter; smallmind.load reads it with its base")
        if found not in (FORMAT, CHECKPOINT_FORMAT):
            raise InputError(f"{path} is {shown_value(found)}; this version reads {FORMAT!r}")
        try:
            tokenizer = metadata.get("tokenizer")
            if found == FORMAT:
                saved = from_json(metadata["config"])
            else:
                state, tensors = from_json(metadata["state"]), weights(tensors)
                saved = state["model"]
                if tokenizer is None:  # earlier versions kept it in the state
                    tokenizer = safetensors.to_json(state["tokenizer"])
            config = from_saved(ModelConfig, saved)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a model saved by smallmind: {error}") from None
        model = from_tensors(kind, config, dict(tensors), os.fspath(path), backend, precision)
    with suppress(KeyError, TypeError, ValueError):  # the model computes without it
        if known is None and tokenizer:
            known = Tokenizer.from_saved(tokenizer)
        model.tokenizer_digest = known and known.digest
    return model


def from_tensors(
    kind: Any,
    config: ModelConfig,
    tensors: dict[str, Any],
    source: str,
    backend: str,
    precision: str | None,
) -> Any:
    """Builds a model of this kind; see `TransformerModel.from_tensors`."""
    # Before anything is allocated: a wrong config may ask for any amount of memory.
    shapes = {name: value.shape for name, value in tensors.items()}
    if config.n_layer > len(shapes) or shapes != declare_parameters(config).shapes:
        raise InputError(f"{source} does not hold the parameters that its config describes")
    model = kind.unfilled(config, backend, precision)
    for name in list(tensors):
        value = tensors.pop(name)  # freed once copied: the weights never exist twice
        if value.dtype != np.float32:
            raise InputError(f"{source}: {name} is not finite float32")
        if isinstance(value, np.ndarray):
            stored = Stored.of(value)
        else:
            stored = Stored(value.shape, value.dtype, value.read_rows)
        parameter = model.flat.own(name)
        read_tensor(model.workspace.kernels, parameter, stored, f"{source}: {name}")
    model.flat.refresh()
    return model


def _has_adapter(metadata: Mapping[str, str]) -> bool:
    """Returns True if the state of a checkpoint is that of an adapter."""
    with suppress(AttributeError, KeyError, ValueError):
        return from_json(metadata["state"]).get("adapter") is not None
    return False


def copied_state(model: Any) -> dict[str, Any]:
    """Returns what copies and pickles of a model are made of: see `restore_copied`."""
    flat = model.flat
    return {
        "arguments": {
            "config": model.config,
            "seed": model.seed,
            "dtype": model.workspace.dtype,
            "freeze": model.frozen,
            "adapter": model.adapter,
            "precision": model.precision,
            "trains": bool(flat.trained),
        },
        "backend": model.backend,
        "values": {spec.name: np.array(flat.own(spec.name)) for spec in flat.specs},
        "gradient": flat.grad.copy(),
        "plan": model.recompute_plan,
        "products": model.products,
        "others": {name: getattr(model, name) for name in COPIED_ATTRIBUTES},
    }


def restore_copied(model: Any, state: dict[str, Any]) -> None:
    """Writes a copied state to a model that was built with its arguments."""
    for name, values in state["values"].items():
        model.flat.own(name).view(np.ndarray)[...] = values
    model.flat.grad[:] = state["gradient"]
    model.flat.refresh()
    model.use_recompute(state["plan"])
    model.use_products(state["products"])
    for name, value in state["others"].items():
        setattr(model, name, value)

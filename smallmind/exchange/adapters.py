"""Adapters in formats of other programs: the A and B of each tensor of a file, and back."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.exchange.tensors import Tensor, shown_shape, tensors_of
from smallmind.kernels import reference
from smallmind.nn.adapter import SavedAdapter
from smallmind.nn.loading import Base, Stored
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role
from smallmind.settings.architectures import Layout
from smallmind.settings.config import ADAPTED, MAX_RANK, Adapter, ModelConfig


class Pair(NamedTuple):
    """The change of a matrix (out, in) of a file: scale b a."""

    a: np.ndarray  # (r, in)
    b: np.ndarray  # (out, r)
    scale: float


class Matrix(NamedTuple):
    """A matrix of a file that can have an adapter."""

    tensor: Tensor
    number: int  # of its A and B among those of our layer

    def a_of(self, lora_a: np.ndarray, rank: int) -> np.ndarray:
        """lora_a (in, n rank) of our layer -> the columns (in, rank) of this matrix."""
        return lora_a[:, self.number * rank : (self.number + 1) * rank]


def matrices_of(config: ModelConfig, layout: Layout) -> dict[str, Matrix]:
    """Returns the matrices of a file that can have an adapter, by their names without ".weight"."""
    found: dict[str, Matrix] = {}
    counts: Counter[str] = Counter()
    for tensor in tensors_of(config, layout):
        name, _, kind = tensor.name.rpartition(".")
        if kind == "weight" and tensor.role in (Role.MATRIX, Role.HEAD):
            found[name] = Matrix(tensor, counts[tensor.parameter])
            counts[tensor.parameter] += 1
    return found


def pairs_of(saved: SavedAdapter, layout: Layout) -> Iterator[tuple[str, Pair]]:
    """Yields the A and B of each matrix of a file that has some, by its name without ".weight"."""
    for name, matrix in matrices_of(saved.config, layout).items():
        layer = matrix.tensor.parameter.removesuffix("weight")
        if (a := saved.tensors.get(layer + "lora_a")) is not None:
            a = matrix.a_of(a, saved.adapter.rank)
            b = saved.tensors[layer + "lora_b"]
            b = matrix.tensor._replace(is_transposed=True).of(b)
            yield name, Pair(a.T, b, saved.adapter.scale)


def read_pairs(
    source: str,
    config: ModelConfig,
    layout: Layout,
    pairs: Mapping[str, Pair],
    dropout: float,
    base: Base | None,
) -> SavedAdapter:
    """-> the reverse, for pairs of any ranks and scales: all get the largest, filled with zeros.

    InputError naming the source if they are not those of matrices of such a model.
    """
    matrices = matrices_of(config, layout)
    rank = max((len(pair.a) for pair in pairs.values()), default=0)
    if not 0 < rank <= MAX_RANK:
        raise InputError(f"{source} has no adapter of a rank from 1 to {MAX_RANK:,}")
    for name, pair in pairs.items():
        if name not in matrices:
            raise InputError(
                f"{source} adapts {shown_value(name)}, which is not a matrix of the model"
            )
        tensor = matrices[name].tensor
        inner, outer = tensor.parameter_shape[0], tensor.columns.stop - tensor.columns.start
        expected = (len(pair.a), inner), (outer, len(pair.a))
        if (pair.a.shape, pair.b.shape) != expected:
            found = f"{shown_shape(pair.b.shape)} times {shown_shape(pair.a.shape)}"
            raise InputError(
                f"{source}: the adapter of {name} is {found}; the matrix is {outer} x {inner}"
            )
        if not (np.isfinite(pair.a).all() and np.isfinite(pair.b).all()):
            raise InputError(f"{source}: the adapter of {name} has numbers that are not finite")
    layers = {part for name in pairs for part in matrices[name].tensor.parameter.split(".")}
    scale = max(abs(pair.scale) for pair in pairs.values()) or 1.0
    adapter = Adapter(
        rank, scale * rank, dropout, tuple(part for part in ADAPTED if part in layers)
    )
    flat = declare_parameters(config, adapter)
    tensors = {name: np.zeros(flat.shapes[name], np.float32) for name in flat.kept}
    for name, (a, b, scale_of_pair) in pairs.items():
        matrix, r = matrices[name], len(a)
        layer = matrix.tensor.parameter.removesuffix("weight")
        matrix.a_of(tensors[layer + "lora_a"], rank)[:, :r] = a.T
        part = tensors[layer + "lora_b"][:r]
        stored = Stored.of(b * np.float32(scale_of_pair / scale))
        matrix.tensor._replace(is_transposed=True).read(reference, part, stored, source)
    return SavedAdapter(source, config, adapter, base, tensors)

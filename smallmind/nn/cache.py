"""The keys and values of tokens that a model has seen: it continues from them token by token."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.config import ModelConfig
from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.reference import PANEL

REFED = 4  # a full cache with learned positions drops one in so many tokens


class RepeatedArrays:
    """The arrays of a pass that is repeated with the same shapes: the n-th is always the same."""

    def __init__(self) -> None:
        self.place = 0
        self._arrays: list[np.ndarray] = []

    def next(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The next array, contents undefined."""
        if self.place < len(self._arrays):
            array = self._arrays[self.place]
            if array.shape == shape and array.dtype == dtype:
                self.place += 1
                return array
        # The first pass, or one in another precision.
        del self._arrays[self.place :]
        self._arrays.append(aligned_zeros(math.prod(shape), dtype).reshape(shape))
        self.place += 1
        return self._arrays[-1]


class Model(Protocol):
    """What has to be known of a model."""

    config: ModelConfig
    parameters: Mapping[str, np.ndarray]


class KeyValueCache:
    """`KeyValueCache(model, batch=1, length=None)`: room for the last `length` tokens of sequences.

    For `model.decode(ids, cache)`. length is at most block_size, which is the default. `start`
    counts the tokens of each sequence so far. float32, whatever the precision of the model.
    """

    def __init__(self, model: Model, batch: int = 1, length: int | None = None) -> None:
        config = model.config
        length = config.block_size if length is None else check_type("length", length, int)
        if not 1 <= length <= config.block_size:
            raise InputError(
                f"length={length} must be at least 1 and at most block_size={config.block_size}"
            )
        if check_type("batch", batch, int) < 1:
            raise InputError(f"batch={batch} must be at least 1")
        self.batch, self.length = batch, length
        self.start = 0
        self.arrays = RepeatedArrays()  # of passes of single tokens
        self.ids = np.zeros((batch, length), np.int32)  # the last ones, each at its number modulo S
        G, D = config.kv_heads, config.head_channels
        panels = -(-length // PANEL)
        dtype = next(iter(model.parameters.values())).dtype
        self._keys = np.zeros((config.n_layer, batch, G, panels, D, PANEL), dtype)
        self._values = np.zeros((config.n_layer, batch, G, length, D), dtype)
        self._documents = np.zeros(batch, np.int64)  # where the current one of each began

    def __repr__(self) -> str:
        return (
            f"<KeyValueCache: {self.start:,} tokens of {self.batch} sequences, of which the last "
            f"{self.length:,} are kept>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def latest(self) -> np.ndarray:
        """The last token of each sequence (B, 1)."""
        return self.ids[:, (self.start - 1) % self.length][:, None]

    def clear(self) -> None:
        """Forgets all tokens."""
        self.start = 0
        self._documents[:] = 0

    def repeated(self, count: int) -> "KeyValueCache":
        """A cache in which each sequence stands `count` times: to continue it in several ways."""
        made = KeyValueCache.__new__(KeyValueCache)
        made.batch, made.length, made.start = self.batch * count, self.length, self.start
        made.arrays = RepeatedArrays()
        made.ids = self.ids.repeat(count, axis=0)
        made._keys = self._keys.repeat(count, axis=1)
        made._values = self._values.repeat(count, axis=1)
        made._documents = self._documents.repeat(count)
        return made

    # What follows is for the layers of a model and for `decode`.

    def keep(self, kernels: Any, layer: int, qkv: np.ndarray) -> None:
        """qkv (B T, (H + 2 G) D) of new tokens: keeps their keys and values."""
        kernels.keep_keys_values(self._keys[layer], self._values[layer], qkv, self.start)

    def attend(
        self,
        kernels: Any,
        layer: int,
        heads: np.ndarray,
        qkv: np.ndarray,
        firsts: np.ndarray | None,
    ) -> None:
        """qkv (B T, (H + 2 G) D) of new tokens that are kept -> heads (B T, H D). Writes heads."""
        keys, values = self._keys[layer], self._values[layer]
        kernels.cached_attention(heads, qkv, keys, values, self.start, firsts)

    def count_documents(self, firsts: np.ndarray, begins: np.ndarray) -> None:
        """firsts (B, T), where documents begin among the new tokens -> in the whole sequences.

        begins (B, T): whether a token begins a document. Writes firsts.
        """
        is_older = np.maximum.accumulate(begins, axis=1) == 0
        firsts[...] = np.where(is_older, self._documents[:, None], self.start + firsts)
        self._documents[:] = firsts[:, -1]

    def append(self, ids: np.ndarray) -> None:
        """ids (B, T), new tokens that a model has seen."""
        T = ids.shape[1]
        self.ids[:, np.arange(self.start, self.start + T) % self.length] = ids
        self.start += T

    def last(self, count: int) -> np.ndarray:
        """The last `count` tokens of each sequence (B, count)."""
        return self.ids[:, np.arange(self.start - count, self.start) % self.length]

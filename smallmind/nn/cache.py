"""The keys and values of tokens that a model has seen: it continues from them token by token."""

import math
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.kernels.reference import PANEL
from smallmind.nn.recorded_passes import RecordedPasses
from smallmind.settings.config import ModelConfig

REFED = 4  # a full cache with learned positions drops one token in this many


def _recorded_step() -> RecordedPasses:
    """The pass of a single token, which is recorded at once. Caches may take turns."""
    return RecordedPasses(after=0, kinds=1, owns_arrays=True)


def cache_bytes(config: ModelConfig, length: int) -> int:
    """The size of the keys and values of one sequence of `length` tokens, in float32."""
    return 4 * sum(map(math.prod, _shapes(config, 1, length)))


def _shapes(config: ModelConfig, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of keys and of values."""
    L, G, D = config.n_layer, config.kv_heads, config.head_channels
    return (L, batch, G, math.ceil(length / PANEL), D, PANEL), (L, batch, G, length, D)


class KeyValueCache:
    """`KeyValueCache(model, batch=1, length=None)`: room for the last `length` tokens of sequences.

    For `model.decode(ids, cache)`. length is at most block_size, which is the default. float32,
    whatever the precision of the model.
    """

    def __init__(self, model: Any, batch: int = 1, length: int | None = None) -> None:
        config = model.config
        length = config.block_size if length is None else check_type("length", length, int)
        if not 1 <= length <= config.block_size:
            raise InputError(
                f"length={length} must be at least 1 and at most block_size={config.block_size}"
            )
        if check_type("batch", batch, int) < 1:
            raise InputError(f"batch={batch} must be at least 1")
        self.batch, self.length = batch, length
        # Arrays that kernels read stay in place: recorded passes read them again.
        self.position = np.zeros((), np.int64)
        self.previous = np.zeros(batch, np.int32)  # the last tokens
        self.documents = np.zeros(batch, np.int32)  # where the current one of each began
        self.step = _recorded_step()
        self.ids = np.zeros((batch, length), np.int32)  # the last ones, each at its number modulo S
        dtype = model.workspace.dtype
        keys, values = _shapes(config, batch, length)
        self._keys, self._values = np.zeros(keys, dtype), np.zeros(values, dtype)

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
    def start(self) -> int:
        """The number of tokens in each sequence so far."""
        return int(self.position)

    def clear(self) -> None:
        """Forgets all tokens."""
        for state in (self.position, self.previous, self.documents):
            state[...] = 0

    def repeated(self, count: int) -> "KeyValueCache":
        """A cache with `count` copies of each sequence, to continue it in several ways."""
        made = KeyValueCache.__new__(KeyValueCache)
        made.batch, made.length, made.step = self.batch * count, self.length, _recorded_step()
        made.position = self.position.copy()
        made.previous = self.previous.repeat(count)
        made.documents = self.documents.repeat(count)
        made.ids = self.ids.repeat(count, axis=0)
        made._keys = self._keys.repeat(count, axis=1)
        made._values = self._values.repeat(count, axis=1)
        return made

    # The rest is for the layers of a model and for `decode`.

    def keep(self, kernels: Any, layer: int, qkv: np.ndarray) -> None:
        """qkv (B T, (H + 2 G) D) of new tokens: keeps their keys and values."""
        kernels.keep_keys_values(self._keys[layer], self._values[layer], qkv, self.position)

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
        kernels.cached_attention(heads, qkv, keys, values, self.position, firsts)

    @property
    def positions(self) -> int:
        """More than the positions of the next tokens, and the same for as many as possible."""
        return max(self.length, 1 << self.start.bit_length())

    def append(self, ids: np.ndarray) -> None:
        """ids (B, T), new tokens that a model has seen."""
        T, start = ids.shape[1], self.start
        if T == 1:  # four times as fast
            self.ids[:, start % self.length] = ids[:, 0]
        else:
            self.ids[:, np.arange(start, start + T) % self.length] = ids
        self.previous[:] = ids[:, -1]
        self.position += T

    def last(self, count: int) -> np.ndarray:
        """The last `count` tokens of each sequence (B, count)."""
        return self.ids[:, np.arange(self.start - count, self.start) % self.length]

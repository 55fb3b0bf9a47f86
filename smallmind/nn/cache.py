"""The keys and values of tokens that a model has seen: it continues from them token by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, shown_value
from smallmind.kernels.alignment import aligned_zeros, give_back
from smallmind.kernels.reference import PANEL
from smallmind.nn.recorded_passes import RecordedPasses
from smallmind.settings.config import ModelConfig

DROPPED_SHARE = 4  # a full cache with learned positions drops one token in this many
WINDOW_PART = 128  # tokens that continue sequences at a time, where layers keep only a window


def cache_bytes(config: ModelConfig, length: int) -> int:
    """Returns the size of the keys and values of one sequence of `length` tokens, in float32."""
    return 4 * sum(math.prod(shape) for pair in _shapes(config, 1, length) for shape in pair)


def _shapes(config: ModelConfig, batch: int, length: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields the shapes of the keys and of the values of each layer.

    One with a window keeps what the first of several new tokens sees, and these.
    """
    G, D = config.kv_heads, config.head_channels
    for layer in range(config.n_layer):
        window = config.window_of(layer)
        S = length if window is None else min(length, window + WINDOW_PART - 1)
        yield (batch, G, math.ceil(S / PANEL), D, PANEL), (batch, G, S, D)


class KeyValueCache:
    """`KeyValueCache(model, batch=1, length=None)`: room for the last `length` tokens of sequences.

    For `model.decode(ids, cache)`. length is at most block_size, which is the default. Layers with
    a window of attention keep little more than that. float32, whatever the precision of the model.
    `select` says which sequences the next passes continue: they need not have the same number of
    tokens, and take memory for those that they have had.
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
        self.length = length
        dtype = model.workspace.dtype
        self._kept_tokens = [  # keys and values, layer by layer
            (aligned_zeros(keys, dtype, in_parts=True), aligned_zeros(values, dtype, in_parts=True))
            for keys, values in _shapes(config, batch, length)
        ]
        self._has_windows = any(values.shape[2] < length for _, values in self._kept_tokens)
        self._ids = np.zeros((batch, length), np.int32)  # the last, each at its number modulo S
        # By sequence, while it is not selected.
        self._kept = _SequenceState.zeros(batch)
        # Kernels read these, in the order of the selection. They stay in place: recorded passes
        # read them again.
        self._selected, self._slots = _SequenceState.zeros(batch), np.arange(batch)
        # The passes of a single token of each sequence, recorded at once. Caches may take turns.
        self.steps = RecordedPasses(after=0, kinds=batch, owns_arrays=True)
        self._chosen = list(range(batch))  # what is selected, as a list: quickly compared
        self._count = batch

    def __repr__(self) -> str:
        return (
            f"<KeyValueCache: up to {self.start:,} tokens of {self.batch} sequences, of which the "
            f"last {self.length:,} are kept>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, of as many tokens as there may be."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._kept_tokens)

    @property
    def batch(self) -> int:
        """The number of sequences that passes continue: those that are selected, at first all."""
        return self._count

    @property
    def start(self) -> int:
        """The number of tokens in the longest of these sequences so far."""
        return int(max(self.starts.tolist()))  # of few, in less time than NumPy's function takes

    def clear(self) -> None:
        """Forgets all tokens of the selected sequences."""
        for state in self._selected:
            state[: self._count] = 0

    def release(self, sequence: int) -> None:
        """Forgets the tokens of a sequence, by number, and gives back the memory that they took."""
        for kept, selected in zip(self._kept, self._selected, strict=True):
            kept[sequence] = 0
            selected[: self._count][self._slots[: self._count] == sequence] = 0
        for pair in self._kept_tokens:
            for array in pair:
                give_back(array[sequence])

    def select(self, sequences: Sequence[int]) -> None:
        """Makes passes continue these sequences, by number, in this order."""
        if list(sequences) == self._chosen:
            return
        before, chosen = self._slots[: self._count], np.array(sequences, np.int64)
        is_known = np.isin(chosen, np.arange(len(self._ids))).all()
        if not len(chosen) or not is_known or len(set(sequences)) < len(chosen):
            raise InputError(
                f"sequences {shown_value(list(sequences))} must be different numbers from 0 to "
                f"{len(self._ids) - 1}"
            )
        for kept, selected in zip(self._kept, self._selected, strict=True):
            kept[before] = selected[: self._count]
            selected[: len(chosen)] = kept[chosen]
        self._chosen, self._count = chosen.tolist(), len(chosen)
        self._slots[: self._count] = chosen

    @contextmanager
    def only(self, row: int) -> Iterator[None]:
        """Selects a single one of the selected sequences within the block."""
        before = self._chosen
        self.select(before[row : row + 1])
        try:
            yield
        finally:
            self.select(before)

    def copy(self, source: int, targets: Sequence[int]) -> None:
        """Makes sequences the same as another one, all by number, to continue it in several ways.

        Selects what was selected before anew.
        """
        before = self._chosen
        self.select([source, *targets])
        for state in self._selected:
            state[1 : self._count] = state[0]
        self._ids[list(targets)] = self._ids[source]
        for keys, values in self._kept_tokens:
            # Keys are copied in whole panels: tokens that are not there yet are never read.
            count = min(int(self._selected.starts[0]), values.shape[2])
            panels = math.ceil(count / PANEL)
            for target in targets:
                keys[target, :, :panels] = keys[source, :, :panels]
                values[target, :, :count] = values[source, :, :count]
        self.select(before)

    # The rest is for the layers of a model and for `decode`.

    @property
    def starts(self) -> np.ndarray:
        """The number of tokens in each selected sequence so far (B,)."""
        return self._selected.starts[: self._count]

    @property
    def previous(self) -> np.ndarray:
        """The last token of each selected sequence (B,)."""
        return self._selected.previous[: self._count]

    @property
    def documents(self) -> np.ndarray:
        """Where the last document of each selected sequence began (B,)."""
        return self._selected.documents[: self._count]

    def keep(self, kernels: Any, layer: int, qkv: np.ndarray) -> None:
        """qkv (B T, (H + 2 G) D) of new tokens: keeps their keys and values."""
        (keys, values), slots = self._kept_tokens[layer], self._slots[: self._count]
        kernels.keep_keys_values(keys, values, qkv, self.starts, slots)

    def attend(
        self,
        kernels: Any,
        layer: int,
        heads: np.ndarray,
        qkv: np.ndarray,
        firsts: np.ndarray | None,
        scale: float | None,
    ) -> None:
        """qkv (B T, (H + 2 G) D) of new tokens that are kept -> heads (B T, H D). Writes heads."""
        (keys, values), slots = self._kept_tokens[layer], self._slots[: self._count]
        kernels.cached_attention(heads, qkv, keys, values, self.starts, slots, firsts, scale)

    def feed(
        self, ids: np.ndarray, limits: bool, compute: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """ids (B, T), new tokens -> compute(ids) of the last of them, as many as fit at a time.

        If the cache `limits` the context, it drops the oldest quarter of a full sequence, and the
        rest goes through the model again.
        """
        if ids.ndim != 2 or ids.size == 0 or len(ids) != self.batch:
            raise InputError(
                f"ids has shape {ids.shape}; it must be ({self.batch}, T), as many sequences as "
                "in the cache"
            )
        ids, begin = np.require(ids, np.int32, ["C"]), 0
        while begin < ids.shape[1]:
            if limits and self.start >= self.length:
                for row in np.flatnonzero(self.starts >= self.length).tolist():
                    with self.only(row):
                        newest = self.last(self.length - max(1, self.length // DROPPED_SHARE))
                        self.clear()
                        if newest.size:
                            compute(newest)
                            self.append(newest)
            count = min(ids.shape[1] - begin, max(1, self.length - self.start))
            if self._has_windows and self.start > 0:
                count = min(count, WINDOW_PART)
            fitting = np.ascontiguousarray(ids[:, begin : begin + count])
            logits = compute(fitting)
            self.append(fitting)
            begin += count
        return logits

    @property
    def positions(self) -> int:
        """More than the positions of the next tokens, and the same for as many as possible."""
        start = self.start
        return self.length if start < self.length else 1 << start.bit_length()

    def append(self, ids: np.ndarray) -> None:
        """ids (B, T), new tokens that a model has seen."""
        T, slots, starts = ids.shape[1], self._slots[: self._count], self.starts
        if T == 1:  # four times as fast
            self._ids[slots, starts % self.length] = ids[:, 0]
        else:
            self._ids[slots[:, None], (starts[:, None] + np.arange(T)) % self.length] = ids
        self.previous[:] = ids[:, -1]
        starts += T

    def last(self, count: int) -> np.ndarray:
        """Returns the last `count` tokens of each selected sequence (B, count)."""
        slots = self._slots[: self._count]
        places = (self.starts[:, None] + np.arange(-count, 0)) % self.length
        return self._ids[slots[:, None], places]


class _SequenceState(NamedTuple):
    """A number per sequence of what it has come to."""

    starts: np.ndarray  # tokens so far
    previous: np.ndarray  # the last of them
    documents: np.ndarray  # where the last document began

    @classmethod
    def zeros(cls, batch: int) -> "_SequenceState":
        return cls(np.zeros(batch, np.int64), np.zeros(batch, np.int32), np.zeros(batch, np.int32))

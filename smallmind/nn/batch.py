"""The arrays of a batch as passes take them: checked, and divided into micro-batches."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.nn.workspace import Kernel
from smallmind.settings.config import ModelConfig, micro_batch_sizes
from smallmind.text.ids import check_ids

# Where weights are zero, the head computes only some rows: one of ROW_COUNTS numbers of them, if
# that is at most MAX_ROW_SHARE of all.
ROW_COUNTS, MAX_ROW_SHARE = 16, 0.8
# Called with the arguments of cross_entropy, preceded by the part of the batch that they belong to:
# objective(part, losses, dlogits, logits, targets, scale), and weights if there are any.
Objective = Callable[..., None]
Inputs = Mapping[str, np.ndarray]  # of a pass, by name


class Part(NamedTuple):
    """A part of a batch that an objective computes: windows, and rows of their tokens (B T,).

    `inputs` are the arrays that the pass computes these windows from: `ids` and, if there are any,
    `firsts`.
    """

    windows: slice
    rows: slice
    inputs: Inputs


def kernel_of(objective: Objective, windows: slice, inputs: Inputs, rows: slice) -> Kernel:
    """Returns the kernel that an objective is for a part of the batch."""
    return functools.partial(objective, Part(windows, rows, inputs))


class CheckedBatch(NamedTuple):
    """The arrays of a batch, each (B, T), and what the sum of its losses is divided by."""

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None
    divisor: float
    firsts: np.ndarray | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        ids: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray | None = None,
        divisor: float | None = None,
        firsts: np.ndarray | None = None,
    ) -> "CheckedBatch":
        """Checks the arrays -> a batch as kernels take it. InputError if one is wrong."""
        ids, targets = checked_ids("ids", ids, config), checked_ids("targets", targets, config)
        if ids.shape != targets.shape:
            raise InputError(f"targets have shape {targets.shape}, ids {ids.shape}")
        if weights is not None:
            weights, divisor = _checked_weights(weights, ids.shape, divisor)
        divisor = targets.size if divisor is None else divisor
        return cls(ids, targets, weights, divisor, checked_firsts(firsts, ids.shape))

    def part(self, windows: slice, selects_rows: bool = False) -> dict[str, np.ndarray]:
        """-> the arrays of some windows, by name, of which the head computes all logits.

        Or, if it selects rows, only those that have a weight: the numbers of these tokens are
        `rows` (N,), and targets and weights are theirs.
        """
        arrays = {"ids": self.ids[windows], "targets": self.targets[windows]}
        optional = {"weights": self.weights, "firsts": self.firsts}
        arrays |= {name: x[windows] for name, x in optional.items() if x is not None}
        rows = None
        if self.weights is not None and selects_rows:
            rows = learned_rows(arrays["weights"])
        if rows is not None:
            arrays |= {name: arrays[name].reshape(-1)[rows] for name in ("targets", "weights")}
            arrays["rows"] = rows
        return arrays


def micro_batches(ids: np.ndarray, micro_batch_size: int | None) -> Iterator[slice]:
    """ids (B, T) -> the parts of a batch that go through the model one after another.

    So memory does not grow with the batch. The order of all sums depends only on these sizes.
    """
    end = 0
    for size in activity.parts(micro_batch_sizes(len(ids), ids.shape[1], micro_batch_size)):
        start, end = end, end + size
        yield slice(start, end)


def checked_ids(name: str, ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Returns ids as kernels take them: C-contiguous int32 (B, T), in the vocabulary."""
    ids = check_ids(name, ids, config.vocab_size)
    if ids.ndim != 2 or ids.size == 0:
        raise InputError(f"{name} has shape {ids.shape}; it must be (B, T), not empty")
    if ids.shape[1] > config.block_size:
        raise InputError(f"{ids.shape[1]} tokens are more than block_size={config.block_size}")
    ids = np.ascontiguousarray(ids, np.int32)  # in a third of the time of np.require
    return ids if ids.flags.writeable else ids.copy()


def _checked_weights(
    weights: np.ndarray, shape: tuple[int, ...], divisor: float | None
) -> tuple[np.ndarray, float]:
    """weights, one for each target -> float32, divisor or by default their sum.

    InputError if they are not, or if some are below zero and there is no divisor.
    """
    weights = np.ascontiguousarray(check_type("weights", weights, np.ndarray), np.float32)
    if weights.shape != shape:
        raise InputError(f"weights {weights.shape} must have the shape of ids, {shape}")
    if not np.isfinite(weights).all():
        raise InputError("weights must be finite numbers")
    if divisor is not None:
        return weights, divisor
    if (weights < 0).any():
        raise InputError("weights below zero need a divisor, such as targets.size")
    return weights, float(weights.sum(dtype=np.float64))


def checked_firsts(firsts: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns where the document of each token begins, as int32. InputError if that is not so."""
    if firsts is None:
        return None
    check_type("firsts", firsts, np.ndarray)
    if firsts.shape != shape or firsts.dtype.kind not in "iu":
        raise InputError(
            f"firsts {firsts.shape} of {firsts.dtype} must be whole numbers in the shape of ids, "
            f"{shape}"
        )
    # Kernels look only at the first places of some queries: anything else would be silently wrong.
    continues = firsts[:, 1:] == firsts[:, :-1]
    begins = firsts[:, 1:] == np.arange(1, shape[1], dtype=np.int32)
    if firsts[:, 0].any() or not (continues | begins).all():
        raise InputError(
            "firsts must be 0 at the first place, and then as before or, where another document "
            "begins, the place itself"
        )
    return np.ascontiguousarray(firsts, np.int32)


def learned_rows(weights: np.ndarray) -> np.ndarray | None:
    """weights (B, T) -> the tokens (N,) whose targets have any, by number, or None for all.

    And a few others, so that N is one of few numbers: passes of the same sizes are repeated.
    """
    flat = weights.reshape(-1)
    learned = np.flatnonzero(flat)
    step = math.ceil(len(flat) / ROW_COUNTS)
    count = step * max(1, math.ceil(len(learned) / step))
    if count > MAX_ROW_SHARE * len(flat):
        return None
    others = np.flatnonzero(flat == 0)[: count - len(learned)]
    return np.sort(np.concatenate([learned, others])).astype(np.int32)

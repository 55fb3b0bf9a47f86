"""The memory of a training run before it starts, from its configs alone."""

import math
from collections import Counter
from dataclasses import dataclass

from smallmind.config import (
    ModelConfig,
    Precision,
    TrainingConfig,
    micro_batch_sizes,
    segment_length,
)
from smallmind.kernels.alignment import ALIGNMENT
from smallmind.memory.tensor_pool import bucket_size

# Python, NumPy, Numba and the compiled kernels, where these come from the cache.
PROGRAM = 130 * 2**20


@dataclass(frozen=True)
class Teacher:
    """What a student learns from; top_k where its logits are read from a cache."""

    model: ModelConfig
    top_k: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run of training will hold. Units: bytes."""

    weights: int  # float32
    working_weights: int  # their copy in 16 bits
    gradients: int
    moments: int
    snapshot: int  # of weights and moments, to go back to when the loss spikes
    activations: int  # all that the pool holds: kept for the backward pass, gradients, batches
    scratch: int  # of kernels, in all threads
    teacher: int = 0  # its weights; what it rents is among the activations
    program: int = PROGRAM

    @property
    def total(self) -> int:
        return (
            self.weights + self.working_weights + self.gradients + self.moments
            + self.snapshot + self.activations + self.scratch + self.teacher + self.program
        )  # fmt: skip


def estimate(
    model: ModelConfig,
    training: TrainingConfig,
    batch_size: int,
    threads: int = 1,
    teacher: Teacher | None = None,
) -> MemoryEstimate:
    """The memory of training on batches of batch_size windows of model.block_size tokens.

    training.requested_precision must not be AUTO, which depends on the CPU.
    """
    weights = _weights(model)
    halves = training.requested_precision in (Precision.FLOAT16, Precision.BFLOAT16)
    pool = _Ledger()
    pool.rent(batch_size * model.block_size)  # ids
    pool.rent(batch_size * model.block_size)  # targets
    # Groups of one size take turns in the same arrays: each size counts once.
    sizes = set(micro_batch_sizes(batch_size, model.block_size, training.micro_batch_size))
    size = 2 if halves else 4
    for windows in sizes:
        _rehearse(pool, model, training, windows, size, teacher)
    uneven = _Ledger()
    if training.epochs and batch_size > 1:  # the last batch of an epoch: at most as large a group
        _rehearse(uneven, model, training, max(sizes), size, teacher)
    return MemoryEstimate(
        weights=weights,
        working_weights=weights // 2 if halves else 0,
        gradients=weights,
        moments=2 * weights,
        snapshot=3 * weights if training.max_rollbacks else 0,
        activations=pool.held + uneven.held,
        scratch=_scratch(model, threads),
        # Its gradients are never touched, so they take no memory.
        teacher=_weights(teacher.model) if teacher and not teacher.top_k else 0,
    )


def _weights(model: ModelConfig) -> int:
    """Bytes of a vector of all parameters."""
    elements = ALIGNMENT // 4
    shapes = model.parameter_shapes().values()
    return 4 * sum(-(-math.prod(shape) // elements) * elements for shape in shapes)


def largest_at_once(
    model: ModelConfig,
    training: TrainingConfig,
    memory: int,
    threads: int = 1,
    teacher: Teacher | None = None,
) -> int:
    """The most windows that can be in memory at once, in batches of them; 0: not one fits."""

    def fits(windows: int) -> bool:
        settings = {**vars(training), "micro_batch_size": windows}
        config = TrainingConfig(**settings)
        return estimate(model, config, windows, threads, teacher).total <= memory

    if not fits(1):
        return 0
    least, most = 1, 2
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


class _Ledger:
    """Counts what a pool would hold, array by array, and holds nothing."""

    def __init__(self) -> None:
        self.held = 0
        self._idle: Counter[tuple[int, int]] = Counter()

    def rent(self, n: int, size: int = 4) -> tuple[int, int]:
        """n elements of `size` bytes -> what `release` takes."""
        bucket = bucket_size(n), size
        if self._idle[bucket]:
            self._idle[bucket] -= 1
        else:
            self.held += bucket[0] * size + ALIGNMENT
        return bucket

    def release(self, *buckets: tuple[int, int]) -> None:
        self._idle.update(buckets)


def _rehearse(
    pool: _Ledger,
    model: ModelConfig,
    training: TrainingConfig,
    windows: int,
    size: int,
    teacher: Teacher | None,
) -> None:
    """Rents and releases what a pass of training does, in its order; activations of `size` bytes.

    Read it beside nn/transformer.py, nn/recompute.py and nn/block.py.
    """
    R, C, V, H = windows * model.block_size, model.n_embd, model.vocab_size, model.n_head
    drops = model.dropout > 0

    def rows(channels: int) -> tuple[int, int]:
        return pool.rent(R * channels, size)

    def norm() -> list[tuple[int, int]]:
        return [rows(C), pool.rent(R), pool.rent(R)]

    def projection() -> tuple[int, int]:
        projected = [pool.rent(R * C)] if drops else []
        y = rows(C)
        pool.release(*projected)
        return y

    def attention() -> list[tuple[int, int]]:
        return [*norm(), rows(3 * C), rows(C), pool.rent(R * H), projection()]

    def forward() -> list[tuple[int, int]]:
        """A block -> what it keeps; its result comes last."""
        kept = [*attention(), *norm(), rows(4 * C)]
        activated = rows(4 * C)
        y = projection()
        pool.release(activated)
        return [*kept, y]

    def backward(kept: list[tuple[int, int]]) -> None:
        *attention_norm, qkv, heads, logsumexp, x, normed, mean, rstd, before = kept
        dropped = [rows(C)] if drops else []
        dactivated = rows(4 * C)
        pool.release(*dropped, dactivated)
        dnormed = rows(C)
        pool.release(before, x, normed, mean, rstd, dnormed)
        dropped = [rows(C)] if drops else []
        dheads = rows(C)
        pool.release(*dropped)
        dqkv = rows(3 * C)
        pool.release(dheads, heads, logsumexp, qkv)
        dnormed = rows(C)
        pool.release(dqkv, dnormed, *attention_norm)

    embedded = [pool.rent(R * C)] if drops else []
    x = rows(C)
    pool.release(*embedded)
    length = segment_length(training.recompute, model.n_layer, training.checkpoint_interval)
    *recomputed, last = range(0, model.n_layer, length)
    inputs = []
    for _ in recomputed:
        inputs.append(x)
        for block in range(length):
            *kept, y = forward()
            pool.release(*kept, *([x] if block else []))
            x = y
    blocks = []
    for _ in range(last, model.n_layer):
        *kept, y = forward()
        blocks.append((x, kept))
        x = y
    final_norm = norm()
    logits, losses = pool.rent(R * V), pool.rent(R)
    if size < 4:
        dlogits = rows(V)
        _rehearse_teacher(pool, teacher, R)
        pool.release(logits)
        logits = dlogits
    else:
        _rehearse_teacher(pool, teacher, R)
    dnormed = rows(C)
    pool.release(logits)
    dx = rows(C)
    pool.release(*final_norm, x, dnormed)
    for x, kept in reversed(blocks):
        backward(kept)
        pool.release(x)
    for x in reversed(inputs):
        blocks = []
        for _ in range(length - 1):
            *kept, y = forward()
            blocks.append((x, kept))
            x = y
        blocks.append((x, [*attention(), *norm(), rows(4 * C)]))
        for x, kept in reversed(blocks):
            backward(kept)
            pool.release(x)
    pool.release(dx, losses)


def _rehearse_teacher(pool: _Ledger, teacher: Teacher | None, R: int) -> None:
    """The same of a teacher's pass over R tokens, or of a cache that stands for it."""
    if not teacher:
        return
    C, V, H, K = (
        teacher.model.n_embd, teacher.model.vocab_size, teacher.model.n_head, teacher.top_k
    )  # fmt: skip
    if K:
        logits, K = pool.rent(R * V), min(K, V)
        pool.release(logits, pool.rent(R * K), pool.rent(R * (K + 1), 2), pool.rent(R))
        return
    x = pool.rent(R * C)
    for _ in range(teacher.model.n_layer):
        norms = [pool.rent(n) for n in (R * C, R, R) * 2]
        kept = [pool.rent(R * n) for n in (3 * C, C, H, C, 4 * C, 4 * C)]
        y = pool.rent(R * C)
        pool.release(x, *norms, *kept)
        x = y
    norm = [pool.rent(n) for n in (R * C, R, R)]
    logits = pool.rent(R * V)
    pool.release(x, *norm)
    pool.release(logits, pool.rent(R))


def _scratch(model: ModelConfig, threads: int) -> int:
    """Of the kernel that needs the most: the backward pass of attention, or a product."""
    T, D = model.block_size, model.n_embd // model.n_head
    attention = 7 * T * D + 96 * T
    product = 200 * 1024
    return 4 * threads * max(attention, product)

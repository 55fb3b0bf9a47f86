"""The memory of a training run before it starts: a dry run of the real model.

Kernels do nothing, and arrays have a shape but no memory: the pool only counts what it would hold.
"""

from dataclasses import dataclass, replace

import numpy as np

from smallmind.config import ModelConfig, Precision, TrainingConfig, micro_batch_sizes
from smallmind.kernels.half import FLOAT16
from smallmind.memory.tensor_pool import unbacked
from smallmind.nn.backend import Backend, dry_run_backend
from smallmind.nn.network import declare_parameters
from smallmind.nn.recompute import RecomputePlan
from smallmind.nn.transformer import TransformerModel
from smallmind.text.dataset import HELD_OUT
from smallmind.training.distillation import Distillation
from smallmind.training.evaluation import evaluate
from smallmind.training.teacher_cache import TeacherCache

# Python, NumPy, Numba and the compiled kernels, which come from the cache. Measured as the peak of
# small runs less everything that is counted here; 16 bits load other kernels of about that size.
PROGRAM = 116 * 2**20


@dataclass(frozen=True)
class Teacher:
    """What a student learns from; top_k if its logits are read from a cache."""

    model: ModelConfig
    top_k: int | None = None


@dataclass(frozen=True)
class TextSize:
    """The text of a run: bytes as a Python string, and its tokens, held-out ones included."""

    nbytes: int
    tokens: int


@dataclass(frozen=True)
class MemoryEstimate:
    """What a training run takes at its peak. Units: bytes."""

    weights: int  # float32
    working_weights: int  # their copy in 16 bits
    gradients: int
    moments: int
    snapshot: int  # of weights and moments: for rollbacks, and for saving in the background
    activations: int  # everything in the pool: kept for the backward pass, gradients, batches
    scratch: int  # of kernels, all threads
    teacher: int = 0  # its weights; its activations are in the pool
    text: int = 0  # and its tokens
    program: int = PROGRAM
    preparation: int = 0  # before training, while a teacher whose logits are cached is loaded

    @property
    def total(self) -> int:
        """The peak of the process."""
        training = sum(vars(self).values()) - self.preparation
        return max(training, self.program + self.text + self.preparation)


def estimate(
    model: ModelConfig,
    training: TrainingConfig,
    batch_size: int,
    threads: int = 1,
    teacher: Teacher | None = None,
    text: TextSize | None = None,
) -> MemoryEstimate:
    """The memory of training on batches of batch_size windows of model.block_size tokens.

    Without a text it is assumed to be long. training.requested_precision must not be AUTO, which
    depends on the CPU.
    """
    run = _DryRun(model, training, batch_size, teacher)
    uneven = 0
    if training.epochs and not text and batch_size > 1:
        # The last batch of an epoch has any number of windows: at most as many as the others.
        uneven = _DryRun(model, training, batch_size, teacher).held_by_training([batch_size])
    held = run.held_by_training(_batch_sizes(model, training, batch_size, text))
    held = max(held + uneven, run.held_by_evaluation(text))
    flat = run.model.flat
    teacher_weights = 4 * declare_parameters(teacher.model).padded_count if teacher else 0
    return MemoryEstimate(
        weights=flat.data.nbytes,
        working_weights=0 if flat.working is None else flat.working.nbytes,
        gradients=flat.grad.nbytes,
        moments=2 * flat.data.nbytes,
        snapshot=3 * flat.data.nbytes,
        activations=held,
        scratch=_scratch(model, threads),
        # Its gradients are never touched, so they take no memory.
        teacher=0 if teacher and teacher.top_k else teacher_weights,
        text=text.nbytes + 4 * text.tokens if text else 0,
        preparation=teacher_weights,
    )


def max_micro_batch(
    model: ModelConfig,
    training: TrainingConfig,
    memory: int,
    threads: int = 1,
    teacher: Teacher | None = None,
) -> int:
    """The largest batch that fits in memory if it goes through the model at once; 0: none."""

    def fits(windows: int) -> bool:
        config = replace(training, micro_batch_size=windows)
        return estimate(model, config, windows, threads, teacher).total <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _batch_sizes(
    model: ModelConfig, training: TrainingConfig, batch_size: int, text: TextSize | None
) -> list[int]:
    """The numbers of windows that the batches of a run have; the largest comes first."""
    if not training.epochs or not text:
        return [batch_size]
    windows = max(1, (text.tokens - _held_out(text) - 1) // model.block_size)
    sizes = [min(batch_size, windows), windows % batch_size]
    return [size for size in sizes if size]


def _held_out(text: TextSize) -> int:
    return int(text.tokens * HELD_OUT)


class _DryRun:
    """A model, as training would set it up, that allocates and computes nothing."""

    def __init__(
        self,
        config: ModelConfig,
        training: TrainingConfig,
        batch_size: int,
        teacher: Teacher | None,
    ) -> None:
        self.backend = dry_run_backend()
        self.batch_size = batch_size
        self.model = TransformerModel(config, backend=self.backend)
        self.model.use_precision(training.requested_precision)
        self.model.use_recompute(
            RecomputePlan.of(training.recompute, config.n_layer, training.checkpoint_interval)
        )
        self.at_once = training.micro_batch_size
        self.distillation = teacher and _dry_distillation(teacher, config, self.backend)

    def held_by_training(self, batch_sizes: list[int]) -> int:
        """Bytes that the pool holds after batches of these numbers of windows."""
        pool, T = self.backend.pool, self.model.config.block_size
        shape = batch_sizes[0], T
        with pool.borrow(shape, np.int32) as ids, pool.borrow(shape, np.int32) as targets:
            for windows in batch_sizes:
                # A pass returns all that it rents: one of each size is as good as all of them.
                for size in sorted(set(micro_batch_sizes(windows, T, self.at_once))):
                    self.model.micro_batch_size = size
                    self._pass(ids[:size], targets[:size])
        return pool.statistics().bytes_held

    def _pass(self, ids: np.ndarray, targets: np.ndarray) -> None:
        if self.distillation:
            batch = Batch(ids, targets, np.zeros(len(ids), np.int64))
            self.distillation.loss_and_gradients(self.model, batch)
        else:
            self.model.loss_and_gradients(ids, targets)

    def held_by_evaluation(self, text: TextSize | None) -> int:
        """Bytes that the pool holds once a run has evaluated, too."""
        model, T = self.model, self.model.config.block_size
        model.micro_batch_size = self.at_once
        held_out = _held_out(text) if text else 2 * T
        for length in (T, min(T, held_out - 1)):
            windows = unbacked((self.batch_size, length), np.int32)
            model.losses(windows, windows)
        if text and held_out <= self.batch_size * T:  # else all its batches are of that shape
            evaluate(model, unbacked(held_out, np.int32), held_out, self.batch_size)
        return self.backend.pool.statistics().bytes_held


def _dry_distillation(teacher: Teacher, config: ModelConfig, backend: Backend) -> Distillation:
    """The real objective with a teacher that computes nothing, or a cache that has no file."""
    # Built with a tiny teacher: the digest of a large one would take long and mean nothing.
    tiny = replace(teacher.model, vocab_size=1, block_size=1, n_layer=1, n_head=1, n_embd=1)
    distillation = Distillation(TransformerModel(tiny, backend=backend))
    if teacher.top_k:
        distillation.cache = _CacheWithoutFile(
            teacher.model.vocab_size, config.block_size, teacher.top_k
        )
    else:
        distillation.teacher = TransformerModel(teacher.model, backend=backend)
    return distillation


class _CacheWithoutFile(TeacherCache):
    """Logits of nothing."""

    def __init__(self, vocab_size: int, block_size: int, top_k: int) -> None:
        self.path = "a dry run"
        self.vocab_size, self.block_size = vocab_size, block_size
        K = min(top_k, vocab_size)
        indices = unbacked((block_size, K), np.int32)
        self._tensors = indices, unbacked((block_size, K + 1), FLOAT16)


def _scratch(model: ModelConfig, threads: int) -> int:
    """Of the kernel that needs the most: the backward pass of attention, or a product."""
    T, D = model.block_size, model.n_embd // model.n_head
    attention = 7 * T * D + 96 * T
    product = 200 * 1024
    return 4 * threads * max(attention, product)

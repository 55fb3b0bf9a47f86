"""The memory of a training run before it starts, and what to change if it does not fit.

A dry run of the real model counts it: kernels do nothing, and arrays have a shape but no memory.
NumPy's kernels allocate temporary arrays as well: those of the hungriest one are counted.
"""

import bisect
import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.console.table import Table, Tabular, format_bytes
from smallmind.kernels.description import described
from smallmind.losses.loss import CROSS_ENTROPY, Outline
from smallmind.memory.tensor_pool import unbacked
from smallmind.memory.tracker import peak_resident_bytes, resident_bytes
from smallmind.nn.backend import Backend, NoKernels, dry_run_backend
from smallmind.nn.cache import cache_bytes
from smallmind.nn.network import declare_parameters
from smallmind.nn.recorded_passes import MAX_BYTES
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import make_optimizer
from smallmind.parallel.gradient_sum import adding
from smallmind.parallel.shards import bounds
from smallmind.settings.config import (
    MAX_BATCH,
    CheckpointStrategy,
    ModelConfig,
    Precision,
    TrainingConfig,
    micro_batch_sizes,
)
from smallmind.settings.settings import Settings
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.samplers import Epochs, make_sampler
from smallmind.training.evaluation import SAMPLE_TOKENS, evaluate
from smallmind.training.gradients import set_up
from smallmind.training.prefetch import borrow_batches
from smallmind.training.training import Training


@dataclass(frozen=True)
class Program:
    """The memory of a process apart from a run: Python, NumPy, Numba and kernels. Units: bytes."""

    resident: int
    peak: int = 0  # of the process so far: learning tokens may have taken more than training will

    @classmethod
    def measured(cls, text: "TextSize | None" = None) -> "Program":
        """Measures this process before its model is built, perhaps with its text in memory.

        After a rehearsal it includes all kernels, and what compiling has left behind.
        """
        held = text.in_memory if text else 0
        if "smallmind.kernels.compiled" in sys.modules:
            from smallmind.kernels.codegen.scratch import scratch_bytes

            held += scratch_bytes()  # which an estimate counts itself
        return cls(max(0, resident_bytes() - held), peak_resident_bytes())


# For estimates by processes that measure nothing: some on AVX-512 and AVX2, with NumPy's kernels.
TYPICAL, PLAIN = Program(134 * 2**20), Program(51 * 2**20)


@dataclass(frozen=True)
class TextSize:
    """The text of a run: bytes as a Python string, and its tokens, held-out ones included."""

    nbytes: int
    tokens: int
    is_on_disk: bool = False
    rows: tuple[int, int] | None = None  # of both parts, if they have whole conversations
    pair: int | None = None  # tokens in a row, if it has several sequences side by side

    @classmethod
    def of(cls, nbytes: int, data: Dataset) -> "TextSize":
        sizes = len(data.train), len(data.held_out)
        rows = (sizes[0] // data.block_size, sizes[1] // data.block_size)
        pair = data.block_size if data.sequences > 1 else None
        return cls(
            nbytes, data.tokens_in_memory, data.is_on_disk, rows if data.is_packed else None, pair
        )

    def dataset(self, T: int, batch_size: int) -> Dataset:
        """Returns a dataset of this size that takes no memory."""
        if self.rows is None:
            return Dataset(unbacked(self.tokens, np.int32), T, batch_size, seed=0)
        T = self.pair or T
        parts = (unbacked(rows * T + 1, np.int32) for rows in self.rows)
        data = Dataset(next(parts), T, batch_size, seed=0, held_out=next(parts))
        data.is_packed = True
        if self.pair:
            return data
        data.weights = unbacked(len(data.train))
        data.window_weights = np.ones(self.rows[0])
        return data

    @property
    def in_memory(self) -> int:
        """Bytes that the text and its tokens take in memory."""
        return self.nbytes + (0 if self.is_on_disk else 4 * self.tokens)


# Memory besides arrays after a run has started: modules, records, the saver's thread. Measured.
STARTED_BYTES = 4 * 2**20
OPTIONAL = ("teacher", "text", "sample", "timing", "saving")  # parts that not every run has


@dataclass(frozen=True, repr=False)
class MemoryEstimate(Tabular):
    """The peak memory of a training run. Units: bytes."""

    weights: int  # float32, or as passes read them if they are frozen
    working_weights: int  # their copy in 16 bits
    gradients: int
    moments: int
    snapshot: int  # of weights and moments: for rollbacks, and for saving in the background
    activations: int  # everything in the pool: kept for the backward pass, gradients, batches
    scratch: int  # of kernels: all threads and tables of positions, or NumPy's temporary arrays
    teacher: int = 0  # its weights; its activations are in the pool
    text: int = 0  # the text and its tokens
    sample: int = 0  # keys and values while it is written
    program: int = TYPICAL.resident
    timing: int = 0  # a copy of the weights while steps are timed, in a run by minutes
    # The largest frozen weight of fewer than 32 bits, converted for a file; a compressed file.
    saving: int = 0
    preparation: int = 0  # before training, while the teacher's logits are cached
    start: int = 0  # the peak of the process so far

    @property
    def total(self) -> int:
        training = sum(vars(self).values()) - self.preparation - self.start
        return max(training, self.program + self.text + self.preparation, self.start)

    def table(self) -> Table:
        """Returns its parts, without those that this run does not have, and the total."""
        rows = [
            (name.replace("_", " ").replace("program", "the program itself"), format_bytes(nbytes))
            for name, nbytes in vars(self).items()
            if name not in ("preparation", "start") and (nbytes or name not in OPTIONAL)
        ]
        return Table("Memory", [*rows, ("total", format_bytes(self.total))])


def estimate(
    model: ModelConfig,
    training: TrainingConfig,
    batch_size: int,
    threads: int = 1,
    loss: Outline = CROSS_ENTROPY,
    text: TextSize | None = None,
    backend: str = "numba",
    timed: bool = False,
    program: Program | None = None,
) -> MemoryEstimate:
    """Counts the memory of training on batches of batch_size windows of block_size tokens.

    Without a text it is assumed to be long. training.requested_precision must not be AUTO, which
    depends on the CPU. A run is timed if its number of steps follows from its minutes. Without a
    program it is a typical one. InputError where the loss does not fit the model.
    """
    ahead = training.batches_ahead(text is not None and text.is_on_disk)
    run = _DryRun(model, training, loss, backend, ahead)
    if text:
        run.train(text.dataset(model.block_size, batch_size))
    else:
        run.train_batch(batch_size)
    held = run.held
    if training.epochs and batch_size > 1 and not text:
        # The last batch of an epoch is smaller: in other arrays, at most as large as these.
        rest = _DryRun(model, training, loss, backend, ahead)
        rest.train_batch(batch_size)
        held += rest.held
    flat = run.model.flat
    of_models = sum(4 * declare_parameters(other).padded_count for other in loss.models)
    held_weights = sum(array.nbytes for array in flat.arrays)
    if preparation := _preparation(loss, backend):
        preparation += held_weights + flat.copied_bytes + of_models
    is_plain = backend == "numpy"
    program = program or (PLAIN if is_plain else TYPICAL)
    # In arrays of their own, without padding. What is frozen is not copied.
    trained = 4 * sum(spec.size for spec in flat.trained)
    moments = sum(tensor.nbytes for tensor in run.optimizer.tensors().values())
    frozen = [(4 * x.size, flat.compute[x.name]) for x in flat.frozen if x.name in flat.kept]
    converted = max((nbytes for nbytes, array in frozen if array.nbytes < nbytes), default=0)
    sample = cache_bytes(model, min(model.block_size, 1 + SAMPLE_TOKENS))
    T = text.pair // run.loss.sequences if text and text.pair else model.block_size
    return MemoryEstimate(
        weights=held_weights,
        working_weights=flat.copied_bytes,
        gradients=flat.grad.nbytes,
        moments=moments,
        snapshot=trained + moments,
        activations=held,
        scratch=max(run.temporaries) if is_plain else _scratch(run, threads),
        # Its gradients are never touched, so they take no memory.
        teacher=of_models if run.loss.models else 0,
        text=text.in_memory if text else 0,
        sample=sample + run.loss.sampling_bytes(model, T, trained),
        program=program.resident + STARTED_BYTES,
        timing=trained if timed else 0,
        saving=converted + (trained + moments if training.compress else 0),
        preparation=preparation,
        start=program.peak,
    )


def why_not_repeated(training: Training, config: TrainingConfig) -> str | None:
    """Says why the passes of a run's steps are not repeated from a recording; None if they are.

    See `nn.recorded_passes`. Takes no account of processes, which send gradients within a pass.
    """
    model, batch_size = training.model, training.data.batch_size
    if model.backend == "numpy":
        return "plain NumPy has no compiled kernels"
    if config.products == "blas" and config.requested_precision == Precision.FLOAT32:
        return "NumPy's BLAS computes the products, and its calls cannot be recorded"
    if model.workspace.new_recording is None:
        return "the model has a layer from another package, which may do more than call kernels"
    if training.loss.unrecorded:
        return training.loss.unrecorded
    if config.detect_anomaly:
        return "--detect-anomaly looks at what each kernel has computed"
    if config.enable_diagnostics:
        return "--profile times each kernel"
    if config.requested_precision != Precision.AUTO:
        found = estimate(model.config, config, batch_size)
        nbytes = found.weights + found.working_weights + found.gradients + found.activations
        if nbytes > MAX_BYTES:
            return f"a pass takes {format_bytes(nbytes)}, and Python is a small part of its time"
    return None


FLOAT16_SETTINGS: dict[str, Any] = {"precision": Precision.FLOAT16.value}
RECOMPUTE: dict[str, Any] = {
    "use_gradient_checkpointing": True,
    "checkpoint_strategy": CheckpointStrategy.EVERY_LAYER.value,
}


@dataclass(frozen=True)
class Change:
    """New values for fields of the configs, and the bytes that the run would then take."""

    settings: dict[str, Any]
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """A training run before it starts; its precision is not AUTO."""

    settings: Settings
    loss: Outline = CROSS_ENTROPY
    text: TextSize | None = None
    program: Program | None = None  # None: a typical one

    @property
    def estimate(self) -> MemoryEstimate:
        model, training, run = self.settings.model, self.settings.training, self.settings.run
        return estimate(
            model,
            training,
            run.batch_size,
            threads=run.threads or 1,
            loss=self.loss,
            text=self.text,
            backend=run.backend,
            timed=run.minutes is not None,
            program=self.program,
        )

    @property
    def held(self) -> int:
        """The part of it that this process holds already, where that was measured."""
        held = self.program.resident if self.program else 0
        return held + (self.text.in_memory if held and self.text else 0)

    def largest_batch(self, memory: int) -> int:
        """Finds the largest batch that fits in memory in one pass of the model; 0: none."""

        def fits(windows: int) -> bool:
            return self.change(batch_size=windows, micro_batch_size=windows).total <= memory

        above = 1
        while above <= MAX_BATCH and fits(above):
            above *= 2
        batches = range(1, min(above, MAX_BATCH + 1))
        return bisect.bisect_left(batches, True, lo=above // 2, key=lambda n: not fits(n))

    def changed(self, **settings: Any) -> "MemoryPlan":
        return dataclasses.replace(self, settings=self.settings.replace(**settings))

    def change(self, **settings: Any) -> Change:
        """Returns the change to these settings, with the memory that it leads to."""
        return Change(settings, self.changed(**settings).estimate.total)

    def max_micro_batch(self, memory: int) -> int:
        """Finds the largest micro-batch of this batch that fits; 0: not even one sequence.

        Considers the sizes that split the batch into equal parts, apart from a smaller last one: a
        pool keeps arrays for each size.
        """
        batch = self.settings.run.batch_size
        sizes = {math.ceil(batch / passes) for passes in range(1, batch + 1)}
        changes = (self.change(micro_batch_size=size) for size in sorted(sizes, reverse=True))
        fitting = (change for change in changes if change.total <= memory)
        return next((change.settings["micro_batch_size"] for change in fitting), 0)

    def changes_to_fit(self, memory: int) -> list[Change]:
        """Lists changes that make the run fit, or bring it closer; the least costly comes first."""
        largest = self.max_micro_batch(memory)
        if largest:
            return [self.change(micro_batch_size=largest)]
        # 16 bits, recompute, both: as far as they are not used yet.
        model, training = self.settings.model, self.settings.training
        backend = self.settings.run.backend
        may_halve = training.requested_precision == Precision.FLOAT32 and backend == "numba"
        savings = [FLOAT16_SETTINGS] if may_halve else []
        if training.recompute != CheckpointStrategy.EVERY_LAYER:
            savings += [RECOMPUTE, *(saving | RECOMPUTE for saving in savings)]
        changes = [self.change(micro_batch_size=1, **settings) for settings in savings]
        for name, multiple in (("block_size", 1), ("n_embd", model.n_head)):
            size = getattr(model, name)
            while size >= 2 * multiple:
                size = size // 2 // multiple * multiple
                change = self.change(micro_batch_size=1, **{name: size})
                if change.total <= memory:
                    changes.append(change)
                    break
        return changes


class _DryRun:
    """A model, set up as training would do it, that allocates and computes nothing."""

    def __init__(
        self, config: ModelConfig, training: TrainingConfig, loss: Outline, name: str, ahead: int
    ) -> None:
        backend, self.temporaries = _dry_run(name)
        self.training, self.ahead, self.pool = training, ahead, backend.pool
        self.model = TransformerModel(
            config, backend=backend, freeze=training.freeze, adapter=training.adapter
        )
        set_up(self.model, training, training.requested_precision)
        self.optimizer = make_optimizer(self.model, training)
        self.loss = loss.build(backend)
        self.loss.check(config, config.block_size)
        self.loss.outlined(config)

    @property
    def held(self) -> int:
        return self.pool.statistics().bytes_held

    def train(self, data: Dataset) -> None:
        """Trains and evaluates on a batch of every size that a run on this data has."""
        sampler = make_sampler(data, self.training)
        rest = sampler.smaller_batch_size if isinstance(sampler, Epochs) else 0
        self.train_batch(sampler.max_batch_size, rest, data)
        if data.is_packed:
            self._evaluate_rows(data, "held_out", data.held_out_batches)
            return
        held_out = data.held_out[: (data.batch_size + 1) * data.block_size]
        with np.errstate(all="ignore"):  # nothing has been computed: its losses are anything
            evaluate(self.model, held_out, batch_size=data.batch_size)

    def train_batch(self, windows: int, rest: int = 0, data: Dataset | None = None) -> None:
        """Trains on a batch of windows and, if rest is not 0, a smaller one in the same buffers.

        Updates the parameters, and evaluates on the data, once.
        """
        T = data.block_size if data else self.model.config.block_size * self.loss.sequences
        shards = self.training.shards
        kinds = (data.is_weighted, data.is_packed) if data else (False, False)
        with (
            borrow_batches(self.pool, (windows, T), self.ahead, *kinds) as (batch, *_),
            adding(self.model, shards, self.training.rounds_sums) as gradient_sum,
        ):
            seen: set[tuple[int, int]] = set()
            kept = 0  # about as many sums of earlier shards, which stay rented
            for batch_size in (windows, windows, rest):
                ends = bounds(batch_size, shards)
                for shard in gradient_sum.own if batch_size else ():
                    part, kept = ends[shard + 1] - ends[shard], max(kept, shard.bit_count())
                    # A pass returns everything it rents: another one of the same size adds nothing.
                    if part and (part, kept) not in seen:
                        seen.add((part, kept))
                        self._train_windows(batch, part)
                    gradient_sum.add(shard)
                if batch_size:
                    gradient_sum.total()
            self.optimizer.step()
            self.model.micro_batch_size = self.training.micro_batch_size
            if data and self.training.val_every:
                self._evaluate_parts(data)

    def _train_windows(self, batch: Batch, windows: int) -> None:
        """Runs passes of this many windows of a batch."""
        if self.loss.sequences > 1:  # the loss divides them
            part = batch.part(slice(windows))
            for width in set(self.loss.widths(part.ids.shape[1])):
                ids = part.ids[:, :width]
                self.loss.loss_and_gradients(self.model, Batch(ids, ids, part.starts))
            return
        T = self.model.config.block_size
        for size in set(micro_batch_sizes(windows, T, self.training.micro_batch_size)):
            self.model.micro_batch_size = size
            part = batch.part(slice(size))._replace(starts=np.zeros(size, np.int64))
            if part.weights is not None:
                part.weights[...] = 0.0  # few targets are learned, which takes the most arrays
            if part.firsts is not None:
                part.firsts[...] = 0
            self.loss.loss_and_gradients(self.model, part)

    def _evaluate_parts(self, data: Dataset) -> None:
        """Evaluates a batch of each shape that evaluations during training have."""
        T = data.block_size
        if data.is_packed:
            for part in ("train", "held_out"):
                batches = self.training.val_batches or data.held_out_batches
                self._evaluate_rows(data, part, batches)
            return
        lengths = {T}
        if self.training.val_batches:  # else all of the held-out part, as after training
            lengths.add(min(T, len(data.held_out) - 1))
        for length in lengths:
            windows = unbacked((data.batch_size, length), np.int32)
            self.model.losses(windows, windows)

    def _evaluate_rows(self, data: Dataset, part: str, batches: int) -> None:
        """Evaluates whole conversations: a batch of rows, and the smaller last one if reached."""
        T, B = data.block_size, data.batch_size
        rows = len(data.train if part == "train" else data.held_out) // T
        last = rows % B if batches * B >= rows else 0
        for size in {min(B, rows), last} - {0}:
            if self.loss.sequences == 1:
                windows = unbacked((size, T), np.int32)
                self.model.losses(windows, windows, firsts=windows)
                continue
            for width in set(self.loss.widths(T)):
                windows = unbacked((size, width), np.int32)
                self.loss.evaluated(self.model, Batch(windows, windows, np.zeros(size, np.int64)))


def _dry_run(backend: str) -> tuple[Backend, list[int]]:
    """Returns a back end that computes nothing, and what its calls add to: temporary bytes."""
    temporaries = [0]

    def note(name: str, *arguments: Any, **named: Any) -> None:
        temporaries.append(described(name).temporary_bytes(*arguments, **named))

    is_plain = backend == "numpy"  # whose kernels allocate arrays
    return dry_run_backend(NoKernels(note) if is_plain else NoKernels()), temporaries


def _preparation(loss: Outline, backend: str) -> int:
    """Counts what a loss takes, besides weights, before the first step."""
    opened, temporaries = _dry_run(backend)
    nbytes = loss.build(opened).preparation(opened)
    return nbytes and max(nbytes, opened.pool.statistics().bytes_held + max(temporaries))


def _scratch(run: _DryRun, threads: int) -> int:
    """Counts what kernels keep: the scratch of the hungriest one, and tables of positions."""
    from smallmind.kernels import muon
    from smallmind.kernels.attention import backward
    from smallmind.kernels.gemm import blocked

    config, dtype = run.model.config, np.dtype(run.model.workspace.activation_dtype)
    T, D = config.block_size, config.head_channels
    attention = backward.scratch_size(T, D)
    product = blocked.SCRATCH_16 if dtype.itemsize == 2 else blocked.SCRATCH
    update = run.optimizer.scratch_size and muon.PACKING + run.optimizer.scratch_size
    tables = run.model.network.embedding.position.table_bytes(T)
    return 4 * threads * max(attention, product, update) + tables

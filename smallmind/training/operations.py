"""The operations of a run's steps, counted from shapes, and the share of the machine they used.

A dry run counts them: kernels do nothing but add up the multiplications and additions of their
products, which their descriptions know. What a backward pass computes again is counted by itself.
"""

import dataclasses
import functools
import platform
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import number
from smallmind.kernels.description import described
from smallmind.losses.loss import Loss
from smallmind.memory.tensor_pool import unbacked
from smallmind.nn.backend import NoKernels, dry_run_backend
from smallmind.nn.batch import learned_rows
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.optimizer import make_optimizer
from smallmind.settings.config import ModelConfig, Precision, TrainingConfig
from smallmind.training.gradients import set_up
from smallmind.training.records import UsageRecord

# The ceiling is the best of some turns of so many seconds. Two threads may begin on one core, and
# the system moves them between turns.
TURNS, TURN_SECONDS = 5, 0.01
MIN_GAIN = 1.01  # times as high as the one that is kept: worth writing
MAX_RATES = 1000  # steps of which the median tells the usual rate


class Operations(NamedTuple):
    """Multiplications and additions: those of a window in each pass, those of an update."""

    forward: int
    backward: int
    recompute: int  # again, in the backward pass
    update: int

    @property
    def window(self) -> int:
        """Operations of a window that any implementation has."""
        return self.forward + self.backward


@functools.lru_cache(maxsize=8)
def count_operations(
    config: ModelConfig,
    training: TrainingConfig | None = None,
    others: tuple[ModelConfig, ...] = (),
    learned: float = 1.0,
) -> Operations:
    """Counts the operations of a step, with those of other models that compute their logits.

    `learned` is the share of targets that have a weight: the head computes little else.
    """
    total = repeated = 0

    def add(name: str, *arguments: Any, **named: Any) -> None:
        nonlocal total, repeated
        if (about := described(name)).operations:
            operations = about.operations(*arguments, **named)
            total += operations
            repeated += round(about.repeats * operations)

    backend = dry_run_backend(NoKernels(add))
    T = config.block_size
    ids = unbacked((1, T), np.int32)
    weights = None if learned == 1.0 else (np.arange(T) < learned * T).astype(np.float32)[None]
    weighting: dict[str, Any] = {} if weights is None else {"weights": weights}
    rows = None if weights is None else learned_rows(weights)
    left_out = 0 if rows is None else 2 * (T - len(rows)) * config.n_embd * config.vocab_size

    def counted(call: Callable[[], object]) -> int:
        before = total
        with np.errstate(all="ignore"):  # arrays hold anything
            call()
        return total - before

    of_others = 0
    for other in others:
        of_others += counted(lambda: TransformerModel(other, backend=backend).loss(ids, ids))  # noqa: B023
    adapter = training.adapter if training else None
    model = TransformerModel(config, backend=backend, adapter=adapter)
    if training and training.freeze is not None:
        model.freeze(training.freeze)
    forward = counted(lambda: model.loss(ids, ids)) - left_out
    both = counted(lambda: model.loss_and_gradients(ids, ids, **weighting))
    backward = both - repeated - forward
    whole = both
    update = 0
    if training:
        set_up(model, training, Precision.FLOAT32)
        whole = counted(lambda: model.loss_and_gradients(ids, ids, **weighting))
        update = counted(lambda: make_optimizer(model, training).step())
    return Operations(forward + of_others, backward, whole - forward - backward, update)


def usage_of(
    model: TransformerModel, training: TrainingConfig, loss: Loss, learned: float, processes: int
) -> "Usage":
    """Counts the operations of a step, and measures what the machine can do at most."""
    training = dataclasses.replace(training, freeze=model.frozen)  # perhaps by hand
    others = tuple(other.config for other in loss.models)
    one = count_operations(model.config, training, others, 1.0 if others else learned)
    forward = one.forward * loss.sequences * loss.forward_passes
    backward, again = one.backward * loss.sequences, one.recompute * loss.sequences
    counted = Operations(forward, backward, again, one.update)
    if model.backend != "numba":
        return Usage(counted, None)
    rate, precision = multiply_add_ceiling(model.precision)
    return Usage(counted, processes * rate, precision)


def multiply_add_ceiling(precision: Precision) -> tuple[float, str]:
    """-> the operations per second of multiply-adds from registers, and the precision of these.

    It is the best rate that any process has measured in some hundredths of a second with as many
    threads: other programs make it lower, and nothing makes it higher. Kept beside the kernels.
    """
    from smallmind.kernels.codegen.isa import ISA
    from smallmind.kernels.codegen.threads import threads

    is_half = precision == Precision.BFLOAT16 and (ISA.matrix_unit or ISA.bfloat16)
    kind = Precision.BFLOAT16 if is_half else Precision.FLOAT32
    return _ceiling(threads(), kind), kind.value


def run_at_ceiling(precision: Precision) -> int:
    """Runs the multiply-adds of a precision at the CPU's peak rate -> how many operations."""
    from smallmind.kernels import ceilings

    if precision == Precision.BFLOAT16:
        return int(ceilings.multiply_bfloat16())
    return int(ceilings.multiply_add())


@functools.cache
def _ceiling(threads: int, precision: Precision) -> float:
    from smallmind.kernels.codegen.cache import CheckedFiles
    from smallmind.kernels.codegen.cache_directory import cache_directory
    from smallmind.kernels.timing import Contestant, turn

    count = run_at_ceiling(precision)
    contestant = Contestant(lambda: run_at_ceiling(precision))
    best = count / min(min(turn(contestant, TURN_SECONDS)) for _ in range(TURNS))
    directory = cache_directory("smallmind.kernels.ceilings")
    if directory is None:
        return best
    files, key = CheckedFiles(directory, "ceiling"), f"{platform.node()} {threads} {precision}"
    kept = files.load(key) or 0.0
    if best > MIN_GAIN * kept:
        with suppress(OSError):  # a disk that is full or cannot be written to
            files.save(key, best)
    return max(best, kept)


COPIED = (16_000_000, 256_000_000)  # bytes: from a cache, and from memory


def copy_rates() -> dict[str, float]:
    """Returns the bytes per second that a copy reads and writes, by how many they are."""
    from smallmind.kernels import ceilings
    from smallmind.kernels.timing import Contestant, turn

    found = {}
    for nbytes in COPIED:
        source, target = np.ones((2, nbytes // 8), np.float32)
        contestant = Contestant(functools.partial(ceilings.copy, target, source))
        found[str(nbytes)] = nbytes / min(turn(contestant, TURN_SECONDS))
    return found


@dataclass
class Usage:
    """Adds up the steps of a session. Units: seconds, operations per second."""

    operations: Operations
    ceiling: float | None  # of all processes; None without compiled kernels
    ceiling_precision: str = "float32"  # of the multiply-adds at that rate
    seconds: float = 0.0
    waiting: float = 0.0  # for batches
    windows: int = 0
    updates: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RATES))  # of each step

    def count(self, seconds: float, waiting: float, windows: int) -> None:
        """Counts a step."""
        self.seconds += seconds
        self.waiting += waiting
        self.windows += windows
        self.updates += 1
        if seconds > 0:
            needed = self.operations.window * windows + self.operations.update
            self.rates.append(needed / seconds)

    def since(self, earlier: "Usage") -> "Usage":
        """Returns the sums of the steps since those of an earlier copy."""
        names = "seconds", "waiting", "windows", "updates"
        sums = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return dataclasses.replace(self, **sums)

    @property
    def rate(self) -> float:
        """Operations per second, without those that are computed again."""
        needed = self.operations.window * self.windows + self.operations.update * self.updates
        return needed / self.seconds if self.seconds > 0 else 0.0

    @property
    def typical_rate(self) -> float:
        """The rate of the median step: other programs and the first steps change it little."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def waiting_share(self) -> float:
        """The share of their time that steps wait for batches."""
        return min(1.0, self.waiting / self.seconds) if self.seconds > 0 else 0.0

    def record(self, step: int) -> UsageRecord:
        """Returns the record of the whole session."""
        again = self.operations.recompute * self.windows
        # Where steps were faster, other programs slowed down whatever measured it.
        ceiling = self.ceiling if self.ceiling and self.ceiling >= self.typical_rate else None
        return UsageRecord(
            step=step,
            used_forward=self.operations.forward * self.windows,
            used_backward=self.operations.backward * self.windows,
            used_update=self.operations.update * self.updates,
            used_recompute=again,
            used_gflops=self.typical_rate / 1e9,
            ceiling_gflops=ceiling and ceiling / 1e9,
            used_share=ceiling and self.typical_rate / ceiling,
            used_seconds=self.seconds,
            used_waiting=self.waiting,
            ceiling_precision=self.ceiling_precision,
        )


def usage_text(record: Mapping[str, Any]) -> str:
    """-> the fields of a UsageRecord, which a file may have changed, in a sentence; or nothing."""
    values = {name: number(value) for name, value in record.items() if name != "kind"}
    names = "forward", "backward", "update", "recompute", "gflops", "seconds", "waiting"
    found = [values.get(f"used_{name}", -1.0) for name in names]
    if not all(0 <= value < np.inf for value in found) or not found[-2]:
        return ""
    forward, backward, update, again, rate, seconds, waiting = found
    text = f"Training did {_operations(forward + backward + update)} of work at {_rate(rate)}"
    share = values.get("used_share", -1.0)
    if 0 <= share <= 1:  # earlier versions measured a ceiling that other programs had lowered
        kind = "bfloat16" if record.get("ceiling_precision") == "bfloat16" else "float32"
        text += f", {share:.0%} of this CPU's {kind} peak"
    if again:
        text += f", plus {_operations(again)} recomputing activations"
    return f"{text}; {waiting / seconds:.1%} of the time was spent waiting for data"


def _operations(count: float) -> str:
    return f"{count / 1e12:,.1f} TFLOP" if count >= 1e12 else f"{count / 1e9:,.1f} GFLOP"


def _rate(gflops: float) -> str:
    return f"{gflops:,.0f} GFLOP/s" if gflops >= 10 else f"{gflops:.2g} GFLOP/s"

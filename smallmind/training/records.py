"""Reports of a run: records of its steps, evaluations and problems, and its progress.

`kind` says in the metrics which record a line is.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Record:
    """A report after a step. Subclasses are in the order of their columns in a table."""

    kind: ClassVar[str]
    step: int

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the metrics keep, by name."""
        return {"step": self.step, "kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class StepRecord(Record):
    """One update: loss in nats per token, gradient norm before clipping.

    step_ms and tokens_per_second are means since the previous record, without evaluations.
    clip_share covers all updates so far; memory is that of the whole process, in bytes. gflops are
    the operations of products per nanosecond, without recompute, and waiting_share that part of
    their time that steps wait for batches, both since the previous record.
    """

    kind = "step"
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    elapsed_seconds: float
    step_ms: float
    windows: int  # averaged over in this update: the effective batch size
    precision: str
    loss_scale: float  # 1 without loss scaling
    clip_share: float
    memory: int
    peak_memory: int
    gflops: float = 0.0
    waiting_share: float = 0.0


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """Mean losses in nats per token over fixed windows of the training and the held-out part.

    The other fields describe the held-out part; `accuracy` is the share of tokens that the model
    ranked first.
    """

    kind = "evaluation"
    train_loss: float
    val_loss: float
    perplexity: float
    bits_per_character: float
    bits_per_byte: float  # of UTF-8
    accuracy: float


@dataclass(frozen=True)
class LossRecord(Record):
    """A comparison by the loss of a run at an evaluation: numbers, and a line for people."""

    kind = "loss"
    of: str  # the kind that the metrics keep
    numbers: Mapping[str, float]
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """The numbers, each by its name."""
        return {"step": self.step, "kind": self.of, **self.numbers}


@dataclass(frozen=True)
class SampleRecord(Record):
    """A text that the model wrote."""

    kind = "sample"
    text: str


@dataclass(frozen=True)
class AnswersRecord(Record):
    """Held-out questions: how many were asked, and the share that was answered word for word.

    `answers` are (question, wanted, given); they are kept in a file of their own.
    """

    kind = "answers"
    exact_match: float
    asked: int
    answers: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class OverflowRecord(Record):
    """A skipped update: the gradient overflowed float16, and the loss scale was lowered."""

    kind = "overflow"
    loss_scale: float


@dataclass(frozen=True)
class FallingScaleRecord(OverflowRecord):
    """An overflow after which the loss scale keeps falling, and who has the largest gradients."""

    largest_gradients: str


@dataclass(frozen=True)
class RollbackRecord(Record):
    """A loss spike: the run is back at `step`, at half the learning rate, and will skip the
    batches of `spike_step`."""

    kind = "rollback"
    spike_step: int
    spike_loss: float | None  # None: not finite
    average_loss: float | None  # None: no step yet
    lr_factor: float  # multiplies the schedule's learning rate from now on
    next_lr: float  # the learning rate of the step after `step`


@dataclass(frozen=True)
class Finding:
    """A problem of one parameter or layer: a keyword and a message."""

    name: str
    problem: str  # nan, inf, zero, exploding, vanishing, sparse, dead, large or small update
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class HealthRecord(Record):
    """The findings at a step, and for each parameter norm(update) / norm(parameter)."""

    kind = "health"
    findings: tuple[Finding, ...]
    update_ratios: Mapping[str, float]


@dataclass(frozen=True)
class EarlyStopRecord(Record):
    """The run ends because its held-out loss no longer falls."""

    kind = "early_stop"
    best_step: int
    best_loss: float


@dataclass(frozen=True)
class LookRecord(Record):
    """The held-out loss between two evaluations, in a run with target_loss: an estimate."""

    kind = "look"
    look_loss: float


@dataclass(frozen=True)
class TargetRecord(Record):
    """The run ends because its held-out loss has reached target_loss."""

    kind = "target"
    look_loss: float
    target: float


@dataclass(frozen=True)
class SaveFailedRecord(Record):
    """A checkpoint could not be written; the next save tries again."""

    kind = "save_failed"
    reason: str


@dataclass(frozen=True)
class SaveRecord(Record):
    """A compressed checkpoint: its size, that of what is in it, and the seconds that it took.

    The save was in the background; the best checkpoint, if it was one, is part of these seconds.
    """

    kind = "save"
    saved_bytes: int
    uncompressed_bytes: int
    save_seconds: float


@dataclass(frozen=True)
class FileWarningRecord(Record):
    """Something happened to a file of the run, which goes on."""

    kind = "warning"
    warning: str


@dataclass(frozen=True)
class FailureRecord(Record):
    """The run has failed, and would fail in the same way if it were resumed."""

    kind = "failure"
    failure: str


@dataclass(frozen=True)
class FinalRecord(Record):
    """The whole held-out part at the end of the run; the fields are those of EvaluationRecord."""

    kind = "final"
    final_loss: float
    final_perplexity: float
    final_bits_per_character: float
    final_bits_per_byte: float
    final_accuracy: float


@dataclass(frozen=True)
class UsageRecord(Record):
    """The share of the machine that the steps of a session used, at its end.

    Operations are those of products, in the forward pass, the backward pass, updates, and what is
    computed again for the backward pass. Rates are without the latter, those of the median step;
    used_share is that of the ceiling, the rate of multiply-adds from registers, of which
    ceiling_precision tells the type; None if that is not known. Times are in seconds, without
    evaluations, samples and saves.
    """

    kind = "usage"
    used_forward: int
    used_backward: int
    used_update: int
    used_recompute: int
    used_gflops: float
    ceiling_gflops: float | None  # None without compiled kernels
    used_share: float | None
    used_seconds: float
    used_waiting: float  # for batches
    ceiling_precision: str = "float32"


@dataclass(frozen=True)
class EnergyRecord(Record):
    """The joules that the CPU's packages took during a session, where their counters are readable.

    Other programs are included.
    """

    kind = "energy"
    joules: float
    energy_seconds: float


@dataclass(frozen=True)
class InstructionSetRecord(Record):
    """The run continues on another kind of CPU: from here on its results differ in the last digits
    from those that it would have had."""

    kind = "instruction_set"
    saved_instruction_set: str
    instruction_set: str


@dataclass(frozen=True)
class ThreadsRecord(Record):
    """From here on the steps are computed on another number of threads, of those that are set."""

    kind = "threads"
    threads: int
    most_threads: int


@dataclass
class RunProgress:
    """The progress of a run. All fields are JSON-able."""

    step: int = 0  # updates so far, including those that overflowed or were skipped
    clipped: int = 0  # updates whose gradient was clipped by its norm
    far_clipped: int = 0  # of these, those whose norm was over 1000 times the limit
    evaluated: int = 0  # step of the last evaluation
    best_loss: float | None = None  # lowest held-out loss so far
    best_step: int = 0
    waited: int = 0  # evaluations since one that was lower by early_stopping_min_delta
    ended: bool = False  # by early stopping, or at the target loss
    # These are set in a run with a target loss; see `training.target`.
    looks: int = 0  # so far
    first_look: int = 0  # its step
    looked: int = 0  # step of the last look
    look_batches: int = 0  # that all looks have taken
    look_loss: float | None = None  # held-out loss at the last look
    look_variance: float = 0.0  # of that estimate
    look_training_loss: float | None = None  # smoothed, at that time
    # "total" includes the others.
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "evaluations": 0.0, "looks": 0.0, "samples": 0.0}
    )

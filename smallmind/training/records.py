"""What a run tells of itself, record by record, and where it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One update: loss in nats a token, norm of the gradient before clipping.

    Milliseconds and tokens a second are means since the record before, evaluations left out.
    `clip_share` is of all updates so far; memory is of the whole process, in bytes.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    elapsed_seconds: float
    step_ms: float
    windows: int  # that the update is the mean of: the effective batch
    precision: str
    loss_scale: float  # 1 where nothing is scaled
    clip_share: float
    memory: int
    peak_memory: int


@dataclass(frozen=True)
class OverflowRecord:
    """A step whose gradient was too large for float16: no update, and a smaller loss scale."""

    step: int
    loss_scale: float


@dataclass(frozen=True)
class RollbackRecord:
    """A loss that spiked: the run is as it was after `step`, at half the learning rate, and will
    leave out the batches of `spike_step`."""

    step: int
    spike_step: int
    spike_loss: float | None  # None: not finite
    average_loss: float | None  # None: of no step yet
    lr_factor: float  # on the schedule's learning rate from now on


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean losses in nats a token over the same windows every time, of the training and of the
    held-out part; what follows is of the held-out part. `accuracy` is the share of tokens that the
    model thought the likeliest."""

    step: int
    train_loss: float
    val_loss: float
    perplexity: float
    bits_per_character: float
    accuracy: float


@dataclass(frozen=True)
class SaveRecord:
    """The moment to save `Training.checkpoint()`; as the best one too, where its loss is."""

    step: int
    best: bool = False


@dataclass(frozen=True)
class EarlyStopRecord:
    """The end of a run whose loss on the held-out part no longer falls."""

    step: int
    best_step: int
    best_loss: float


@dataclass(frozen=True)
class Finding:
    """A problem of one parameter or layer: a keyword and a message."""

    name: str
    problem: str  # nan, inf, zero, exploding, vanishing, sparse, dead, large or small update
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class HealthRecord:
    """The findings at a step, and for each parameter norm(update) / norm(parameter)."""

    step: int
    findings: tuple[Finding, ...]
    update_ratios: Mapping[str, float]


Record = (
    StepRecord | EvaluationRecord | OverflowRecord | RollbackRecord | HealthRecord | SaveRecord
    | EarlyStopRecord
)  # fmt: skip


@dataclass
class RunProgress:
    """Where a run is, fit for JSON."""

    step: int = 0  # updates so far, those that overflowed or were left out included
    clipped: int = 0  # updates whose gradient was clipped by its norm
    evaluated: int = 0  # the step of the last evaluation
    best_loss: float | None = None  # of all evaluations, on the held-out part
    best_step: int = 0
    waited: int = 0  # evaluations since one that was lower by early_stopping_min_delta
    ended: bool = False  # by early stopping
    # Of all steps and evaluations, and of the evaluations among them.
    seconds: dict[str, float] = field(default_factory=lambda: {"total": 0.0, "evaluations": 0.0})

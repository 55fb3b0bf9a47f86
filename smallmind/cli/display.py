"""Shows a run while it trains, and its results at the end."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smallmind import parts
from smallmind.charts.text import BLOCKS, sparkline
from smallmind.cli.console import INDENT, Console, line_width
from smallmind.console.live_line import can_print
from smallmind.console.table import GAP
from smallmind.settings.config import TrainingConfig
from smallmind.settings.presets import PRESETS
from smallmind.training.evaluation import Evaluation
from smallmind.training.progress import StatusText
from smallmind.training.records import (
    EarlyStopRecord,
    EvaluationRecord,
    FileWarningRecord,
    HealthRecord,
    InstructionSetRecord,
    OverflowRecord,
    Record,
    RollbackRecord,
    SampleRecord,
    SaveFailedRecord,
    StepRecord,
    TargetRecord,
)
from smallmind.views.run_view import RunView

if TYPE_CHECKING:
    from smallmind.runs.run import Run
    from smallmind.training.training import Training

PLAIN_EVERY = 10  # records per line, if the output is not a terminal
# Shares of the steps and of the time above which advice is given.
MAX_CLIPPED = 0.1
USUAL_NORM = 1.0  # to which gradients are clipped
MAX_EVALUATING = 0.2
MIN_SECONDS = 10.0  # of evaluations, below which there is little to save
# val_every and val_batches as nobody has set them: no advice about the program's own choice.
NOT_CHOSEN = [
    tuple(preset.get(name, getattr(TrainingConfig, name)) for name in ("val_every", "val_batches"))
    for preset in ({}, *PRESETS.values())
]
FEWEST_LOSSES = 4  # for a curve
MIN_SPARKLINE, MAX_SPARKLINE = 8, 40  # characters
MAX_FINDINGS = 3  # lines about one problem at one step


class ProgressDisplay:
    """The progress of a run: one live line on a terminal; elsewhere a line every few records, or
    every minute if they take longer."""

    def __init__(self, console: Console, steps: int, token: str = "token") -> None:
        self.console = console
        self.steps = steps
        self.token = token  # what to call one, such as "char"
        self.step_records = 0
        self.progress = StatusText(steps, console.stream)
        self.health_checks = 0
        self.known: set[tuple[str, str]] = set()  # findings that were shown: name and problem

    def show(self, record: Record) -> None:
        """Shows a record whose kind is in SHOW; others are only for the metrics."""
        if show := SHOW.get(type(record)):
            show(self, record)

    def show_health(self) -> None:
        """At the end: says that health was checked, if there was nothing to warn about."""
        if self.health_checks and not self.known:
            checks = "1 check" if self.health_checks == 1 else f"{self.health_checks} checks"
            self.console.line(f"Health: {checks}, no problems")

    def show_step(self, record: StepRecord) -> None:
        """Loss, learning rate, speed and the time that is left."""
        self.progress.update(record)
        is_tenth = self.step_records % PLAIN_EVERY == 0
        if not self.console.is_terminal and (is_tenth or record.step == self.steps):
            self.console.line(self.progress.plain())
        else:
            self._show_progress()
        self.step_records += 1

    def during_step(self, step: int, so_far: str) -> None:
        """Shows how far a step is."""
        self._show_progress(step, so_far)

    def _show_progress(self, step: int | None = None, so_far: str = "") -> None:
        if self.console.is_terminal:
            self.console.live(*self.progress.live(step, so_far))
        else:
            self.console.live(self.progress.plain(step, so_far))

    def show_evaluation(self, record: EvaluationRecord) -> None:
        """The loss on both parts of the text; the rest is about the held-out part."""
        self.progress.update(record)
        losses = f"training loss {record.train_loss:.4f}  held-out loss {record.val_loss:.4f}"
        scores = _scores(record, self.token)
        self.console.line(f"{self._place(record)}  {losses}")
        below = " " * len(self._place(record)) + GAP
        # On a narrow terminal the losses are wrapped, and nothing is below them.
        below = below if len(below + scores) <= line_width() else INDENT
        self.console.line(below + scores)

    def show_sample(self, record: SampleRecord) -> None:
        """A text that the model wrote."""
        self.console.line(f"{self._place(record)}  sample:")
        self.console.quote(record.text)

    def show_rollback(self, record: RollbackRecord) -> None:
        """Shows what happened, and how the run continues."""
        loss, average = record.spike_loss, record.average_loss
        problem = "is not finite" if loss is None else f"rose to {loss:.4f}"
        usual = "" if average is None else f" from an average of {average:.4f}"
        self.console.warning(
            f"Step {record.spike_step}: the loss {problem}{usual}. Rolled back to step "
            f"{record.step}; continuing at {record.lr_factor:g} times the learning rate, without "
            f"that batch. The rate is now {record.next_lr:.1e}."
        )

    def show_overflow(self, record: OverflowRecord) -> None:
        """A step without an update, in float16."""
        self.console.warning(
            f"Step {record.step}: Gradient overflow detected, skipping update. "
            f"Loss scale: {record.loss_scale:g}"
        )

    def show_failed_save(self, record: SaveFailedRecord) -> None:
        """Why a checkpoint is missing."""
        self.console.warning(
            f"A checkpoint could not be saved; the next save tries again: {record.reason}"
        )

    def show_file_warning(self, record: FileWarningRecord) -> None:
        """Shows what happened to a file of the run."""
        self.console.warning(record.warning)

    def show_instruction_set(self, record: InstructionSetRecord) -> None:
        """That the run has moved to another kind of CPU."""
        self.console.warning(
            f"The checkpoint was saved with {record.saved_instruction_set}, and this CPU computes "
            f"with {record.instruction_set}: the results differ in the last digits."
        )

    def show_early_stop(self, record: EarlyStopRecord) -> None:
        """Why the run has ended."""
        self.console.line(
            f"{self._place(record)}  stopped early: the lowest held-out loss was "
            f"{record.best_loss:.4f}, after step {record.best_step}"
        )

    def show_target(self, record: TargetRecord) -> None:
        """That the run has ended because it is good enough."""
        self.console.line(
            f"{self._place(record)}  the held-out loss has reached the target of "
            f"{record.target:g}: {record.look_loss:.4f}"
        )

    def show_health_record(self, record: HealthRecord) -> None:
        """Each finding once per run; of several similar ones, the first few and their number."""
        self.health_checks += 1
        new = [f for f in record.findings if (f.name, f.problem) not in self.known]
        self.known |= {(finding.name, finding.problem) for finding in new}
        for problem in dict.fromkeys(finding.problem for finding in new):
            similar = [finding for finding in new if finding.problem == problem]
            for finding in similar[:MAX_FINDINGS]:
                self.console.warning(f"Step {record.step}: {finding}")
            if (more := len(similar) - MAX_FINDINGS) > 0:
                self.console.warning(
                    f"Step {record.step}: {problem} {more} more times, see metrics.jsonl"
                )

    def _place(self, record: Record) -> str:
        return f"step {record.step:{len(str(self.steps))}}/{self.steps}"


SHOW: dict[type, Callable[[ProgressDisplay, Any], None]] = {
    StepRecord: ProgressDisplay.show_step,
    EvaluationRecord: ProgressDisplay.show_evaluation,
    SampleRecord: ProgressDisplay.show_sample,
    RollbackRecord: ProgressDisplay.show_rollback,
    OverflowRecord: ProgressDisplay.show_overflow,
    SaveFailedRecord: ProgressDisplay.show_failed_save,
    FileWarningRecord: ProgressDisplay.show_file_warning,
    EarlyStopRecord: ProgressDisplay.show_early_stop,
    TargetRecord: ProgressDisplay.show_target,
    HealthRecord: ProgressDisplay.show_health_record,
    InstructionSetRecord: ProgressDisplay.show_instruction_set,
}


def show_losses(console: Console, run: "Run") -> None:
    """The training loss from the first step to the last, also of earlier sessions, in a line."""
    losses = RunView(run.path, fields=("loss",)).curves["loss"].finite().smoothed().values
    if len(losses) < FEWEST_LOSSES:
        return
    begin, end = f"Training loss: {losses[0]:.4f} ", f" {losses[-1]:.4f}"
    ascii_only = not can_print(console.stream, BLOCKS)
    room = max(MIN_SPARKLINE, line_width() - len(begin) - len(end))
    console.line(begin + sparkline(losses, min(room, MAX_SPARKLINE), ascii_only) + end)


def show_costs(console: Console, training: "Training") -> None:
    """The share of time in evaluations and of clipped gradients, with advice if it is large.

    The evaluation after the last step does not count: it belongs to the result.
    """
    progress, config = training.progress, training.config
    seconds, evaluating = progress.seconds["total"], progress.seconds["evaluations"]
    for kind in ("last evaluation", "final evaluation"):
        seconds -= progress.seconds.get(kind, 0.0)
    if evaluating > 0 and seconds > 0:  # the clock may have been set
        share = evaluating / seconds
        text = f"Evaluations took {evaluating:.1f} of {seconds:.1f} seconds ({share:.0%})"
        is_chosen = (config.val_every, config.val_batches) not in NOT_CHOSEN
        if is_chosen and share > MAX_EVALUATING and evaluating > MIN_SECONDS:
            console.warning(
                f"{text}: evaluate less often (--val-every) or on less text (--val-batches)"
            )
        else:
            console.line(text)
    if config.max_grad_norm and (updates := training.optimizer.steps):
        share = progress.clipped / updates
        text = f"{share:.1%} of the gradients were clipped to max_grad_norm={config.max_grad_norm}"
        # Clipping most gradients does no harm (see bench/LOG.md): AdamW undoes a common factor.
        if config.max_grad_norm < USUAL_NORM and progress.far_clipped > MAX_CLIPPED * updates:
            console.warning(
                f"{text}, which is far below their norms: raise --max-grad-norm, for example to "
                f"{USUAL_NORM:g}"
            )
        else:
            console.line(text)


def show_looks(console: Console, training: "Training") -> None:
    """With a target loss: when and how often the run has looked at its held-out loss."""
    progress, config = training.progress, training.config
    if config.target_loss is None:
        return
    seconds, looking = progress.seconds["total"], progress.seconds["looks"]
    text = "Looks at the held-out loss between evaluations: none"
    if progress.looks:
        share = f" ({looking / seconds:.0%})" if seconds > 0 else ""
        text = (
            f"Looks at the held-out loss: {progress.looks}, after steps {progress.first_look:,} to "
            f"{progress.looked:,}; they took {looking:.1f} of {seconds:.1f} seconds{share}"
        )
    if not progress.ended and progress.look_loss is not None:
        text += f"; the last one found {progress.look_loss:.4f}"
    console.line(text)


def show_result(console: Console, run: "Run") -> None:
    """The loss on the whole held-out part, and for the stories its distance to their entropy."""
    result = run.final
    if not result:
        return
    scores = _scores(result, token_name(run.training.tokenizer.kind))
    held_out = len(run.training.data.held_out) - 1
    part = "Whole held-out text"
    if result.tokens < held_out:
        part = f"Held-out text, {result.tokens:,} of {held_out:,} tokens"
    console.line(f"{part}: {result.loss:.4f} nats per token")
    console.line(f"  {scores}")
    if run.settings.run.text is None:
        floor, excess = floor_of_stories(result)
        console.line(
            f"The entropy of the stories is {floor:.4f} nats per character: the model is "
            f"{excess:.2f} nats above that floor"
        )


def floor_of_stories(result: Evaluation) -> tuple[float, float]:
    """The entropy of the built-in stories and a model's distance from it, in nats per character."""
    from smallmind.text.stories import entropy_per_character

    floor = entropy_per_character()
    return floor, result.nats_per_character - floor


def token_name(kind: str) -> str:
    """The word for one token of a kind of tokenizer: char or token."""
    return "char" if parts.load(parts.TOKENIZERS, kind).unit == "characters" else "token"


def _scores(result: Evaluation | EvaluationRecord, token: str) -> str:
    """2.879 bits/char, perplexity 7.36, next char right 39.4%

    Bits per byte as well where they differ, or tokens are no characters.
    """
    bits = f"{result.bits_per_character:.3f} bits/char"
    if token != "char" or f"{result.bits_per_byte:.3f}" != f"{result.bits_per_character:.3f}":
        bits += f", {result.bits_per_byte:.3f} bits/byte"
    return (
        f"{bits}, "
        f"perplexity {format_perplexity(result.perplexity)}, "
        f"next {token} right {result.accuracy:.1%}"
    )


def format_perplexity(value: float) -> str:
    """Three significant digits: 7.36, 47.5, 1,234."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"

"""Shows a run while it trains, and its results at the end."""

import dataclasses
import math
from typing import TYPE_CHECKING

from smallmind import parts
from smallmind.charts.text import BLOCKS, sparkline
from smallmind.checks import count_of
from smallmind.cli.console import INDENT, Console, line_width
from smallmind.console import activity
from smallmind.console.live_line import can_print
from smallmind.console.table import GAP, format_bytes
from smallmind.forecast.pace import MAX_PASSES
from smallmind.losses.reward_settings import OF_REWARDS
from smallmind.optim.loss_scaler import FALLS, PERIOD
from smallmind.runs.summary import metrics_so_far
from smallmind.settings.config import TrainingConfig
from smallmind.settings.presets import PRESETS
from smallmind.text import questions, stories
from smallmind.training import records
from smallmind.training.evaluation import Evaluation
from smallmind.training.operations import usage_text
from smallmind.training.progress import StatusText

if TYPE_CHECKING:
    from smallmind.runs.run import Run
    from smallmind.training.training import Training

PLAIN_EVERY = 10  # records per line, if the output is not a terminal
# Shares of the steps and of the time above which advice is given.
MAX_CLIPPED = 0.1
USUAL_NORM = 1.0  # to which gradients are clipped
MAX_EVALUATING = 0.2
MIN_SECONDS = 10.0  # of evaluations, below which there is little to save
MIN_UNUSED = 0.1  # of the minutes, from which it is said why
LONGER_MEMORISES = (
    f"more than {MAX_PASSES} passes over the text would only memorise it (--steps N trains longer)"
)
MAX_WAITING, MIN_WAITING = 0.05, 1.0  # share and seconds that steps may wait for batches
# val_every and val_batches as nobody has set them: no advice about the program's own choice.
NOT_CHOSEN = [
    tuple(fields.get(name, getattr(TrainingConfig, name)) for name in ("val_every", "val_batches"))
    for fields in ({}, *PRESETS.values(), questions.BUILT_IN_FIELDS, stories.BUILT_IN_FIELDS)
]
MIN_LOSSES = 4  # for a curve
QUESTION = "question"  # the unit of what answers earn
JUDGED = {"pair": "pairs won", "answer": "answers judged correctly"}  # of losses besides tokens
MIN_SPARKLINE, MAX_SPARKLINE = 8, 40  # characters
MAX_FINDINGS = 3  # lines about one problem at one step


class ProgressDisplay:
    """The progress of a run: one live line on a terminal; elsewhere a line every few records."""

    def __init__(self, console: Console, steps: int, token: str = "token") -> None:
        self.console = console
        self.token = token  # what to call one, such as "char"
        self.step_records = 0
        self.progress = StatusText(steps, console.stream)
        self.health_checks = 0
        self.knows_nothing_taught = False  # by some step of a run by rewards
        self.known: set[tuple[str, str]] = set()  # findings that were shown: name and problem

    @property
    def steps(self) -> int:
        """The length of the run as it is now."""
        return self.progress.steps

    def show(self, record: records.Record) -> None:
        """Shows a record, unless its kind is only for the metrics."""
        warn = self.console.warning
        prefix = f"step {record.step:{len(str(self.steps))}}/{self.steps}"
        match record:
            case records.StepRecord():
                self._show_step(record)
            case records.EvaluationRecord():
                self._show_evaluation(record, prefix)
            case records.LossRecord() if record.of == OF_REWARDS:
                self._show_reward(record, prefix)
            case records.LossRecord():
                self.console.line(f"{prefix}  {record.text}")
            case records.HealthRecord():
                self._show_findings(record)
            case records.AnswersRecord(exact_match=share, asked=asked):
                self.console.line(f"{prefix}  {exact(share, asked)}")
            case records.SampleRecord():
                self.console.line(f"{prefix}  sample:")
                self.console.quote(record.text)
            case records.RollbackRecord(spike_loss=loss, average_loss=average):
                problem = "is not finite" if loss is None else f"rose to {loss:.4f}"
                usual = "" if average is None else f" from an average of {average:.4f}"
                warn(
                    f"Step {record.spike_step}: the loss {problem}{usual}. Rolled back to step "
                    f"{record.step}; continuing at {record.lr_factor:g} times the learning rate, "
                    f"without that batch. The rate is now {record.next_lr:.1e}."
                )
            case records.OverflowRecord():
                warn(
                    f"Step {record.step}: Gradient overflow detected, skipping update. "
                    f"Loss scale: {record.loss_scale:g}"
                )
                if isinstance(record, records.FallingScaleRecord):
                    warn(
                        f"The loss scale was halved {FALLS} times in {PERIOD} steps. The largest "
                        f"gradients: {record.largest_gradients}. Lower --learning-rate, or use "
                        "--precision bfloat16."
                    )
            case records.SaveFailedRecord():
                warn(f"A checkpoint could not be saved; the next save tries again: {record.reason}")
            case records.FileWarningRecord():
                warn(record.warning)
            case records.SaveRecord(saved_bytes=size, uncompressed_bytes=whole):
                self.console.line(
                    f"{prefix}  saved {format_bytes(size)} instead of {format_bytes(whole)}, "
                    f"in {record.save_seconds:.2f} s"
                )
            case records.InstructionSetRecord():
                warn(
                    f"The checkpoint was saved with {record.saved_instruction_set}, and this CPU "
                    f"computes with {record.instruction_set}: the results differ in the last "
                    "digits."
                )
            case records.ThreadsRecord(threads=threads, most_threads=most):
                text = f"using all {most} threads again"
                if threads < most:  # because of other programs, or of a small model
                    text = f"using {threads} of {most} threads: more would only wait for each other"
                self.console.line(f"{prefix}  {text}")
            case records.EarlyStopRecord():
                self.console.line(
                    f"{prefix}  stopped early: the best held-out loss was "
                    f"{record.best_loss:.4f}, after step {record.best_step}"
                )
            case records.TargetRecord():
                self.console.line(
                    f"{prefix}  the held-out loss has reached the target of {record.target:g}: "
                    f"{record.look_loss:.4f}"
                )

    def show_health(self) -> None:
        """Says at the end that health was checked, if there was nothing to warn about."""
        if self.health_checks and not self.known:
            checks = count_of(self.health_checks, "check")
            self.console.line(f"Health: {checks}, no problems")

    def _show_step(self, record: records.StepRecord) -> None:
        """Shows loss, learning rate, speed and the time that is left."""
        self.progress.update(record)
        is_tenth = self.step_records % PLAIN_EVERY == 0
        if not self.console.is_terminal and (is_tenth or record.step == self.steps):
            self.console.line(*self.progress.variants(is_live=False))
        else:
            self.during_step()
        self.step_records += 1

    def during_step(self, step: int | None = None, so_far: str = "") -> None:
        """Shows how far a step is, by default the newest that has ended."""
        self.console.live(*self.progress.variants(self.console.is_terminal, step, so_far))

    def _show_evaluation(self, record: records.EvaluationRecord, prefix: str) -> None:
        """Shows the loss on both parts of the text; the rest is about the held-out part."""
        self.progress.update(record)
        if self.token == QUESTION:  # what answers earned comes in a record of its own
            return
        # The training loss is that of steps, on other windows.
        losses = f"held-out loss {record.val_loss:.4f}  on training text {record.train_loss:.4f}"
        self.console.line(f"{prefix}  {losses}")
        if self.token in JUDGED:
            return
        scores = _scores(record, self.token)
        below = " " * len(prefix) + GAP
        # On a narrow terminal the losses are wrapped, and nothing is below them.
        below = below if len(below + scores) <= line_width() else INDENT
        self.console.line(below + scores)

    def _show_reward(self, record: records.LossRecord, prefix: str) -> None:
        """Shows what held-out answers earned, and the first step that taught nothing."""
        self.progress.update(record)
        teaches_nothing = record.numbers.get("teaching") == 0
        if "reward" in record.numbers or teaches_nothing > self.knows_nothing_taught:
            self.console.line(f"{prefix}  {record.text}")
        self.knows_nothing_taught |= teaches_nothing

    def _show_findings(self, record: records.HealthRecord) -> None:
        """Shows each finding once per run; of similar ones, the first few and their number."""
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


def show_losses(console: Console, run: "Run") -> None:
    """Shows the training loss from the first step to the last, also of earlier sessions."""
    metrics = metrics_so_far(run.path)
    if not metrics:
        return
    title, curve = "Reward of sampled answers", metrics.curve("sampled_reward")
    if not curve.values:
        title, curve = "Training loss", metrics.curve("loss")
    losses = curve.smoothed().values
    if len(losses) < MIN_LOSSES:
        return
    begin, end = f"{title}: {losses[0]:.4f} ", f" {losses[-1]:.4f}"
    ascii_only = not can_print(console.stream, BLOCKS)
    width = max(MIN_SPARKLINE, line_width() - len(begin) - len(end))
    console.line(begin + sparkline(losses, min(width, MAX_SPARKLINE), ascii_only) + end)


def show_minutes(console: Console, run: "Run") -> None:
    """Says how steps were fitted to the minutes of a run, and why these were not all taken."""
    fitted, minutes = run.training.config.fitted, run.settings.run.minutes
    if not (fitted and minutes and run.session.deadline and run.final):
        return
    progress, planned = run.training.progress, fitted[0][1]
    seconds, left = 60 * minutes, run.session.deadline - activity.clock()
    if len(fitted) > 1:
        console.line(
            f"Steps were adjusted to the time as the run went: {planned:,} planned, "
            f"{progress.step:,} done"
        )
    if abs(left) <= MIN_UNUSED * seconds:
        return
    reason = "the machine slowed down, or the work after the last step took longer than expected"
    if progress.ended:
        reason = "the held-out loss had stopped improving"
    elif left > 0:
        reason = LONGER_MEMORISES
    taken = activity.duration(seconds - left)
    console.line(f"The run took {taken} of {activity.duration(seconds)}: {reason}")


def show_costs(console: Console, run: "Run") -> None:
    """Shows the share of time in evaluations before the last, and of clipped gradients."""
    training = run.training
    progress, config = training.progress, training.config
    seconds, evaluating = progress.seconds["total"], progress.seconds["evaluations"]
    for kind in ("last evaluation", "final evaluation"):
        seconds -= progress.seconds.get(kind, 0.0)
    if evaluating > 0 and seconds > 0:  # the clock may have been set
        share = evaluating / seconds
        text = f"Evaluations took {evaluating:.1f} of {seconds:.1f} seconds ({share:.0%})"
        is_chosen = (config.val_every, config.val_batches) not in NOT_CHOSEN
        is_chosen = is_chosen and not run.files.config.limits_evaluations
        if is_chosen and share > MAX_EVALUATING and evaluating > MIN_SECONDS:
            console.warning(
                f"{text}: evaluate less often (a larger --val-every) or on less text (fewer "
                "--val-batches)"
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


def show_usage(console: Console, training: "Training") -> None:
    """Shows the share of the machine that steps used, with advice if they waited for data."""
    usage = training.usage
    if not usage or not usage.updates:
        return
    text = usage_text(dataclasses.asdict(usage.record(training.progress.step)))
    if usage.waiting > max(MIN_WAITING, MAX_WAITING * usage.seconds):
        console.warning(
            f"{text}: prepare batches in the background (--prefetch 4), and encode the text once "
            "with `smallmind prepare`, on a fast disk"
        )
    elif text:
        console.line(text)


def show_looks(console: Console, training: "Training") -> None:
    """Shows when and how often a run with a target has looked at its held-out loss."""
    progress, config = training.progress, training.config
    if config.target_loss is None:
        return
    seconds, looking = progress.seconds["total"], progress.seconds["looks"]
    text = "Checks of the held-out loss between evaluations: none"
    if progress.looks:
        share = f" ({looking / seconds:.0%})" if seconds > 0 else ""
        text = (
            f"Checks of the held-out loss: {progress.looks}, after steps {progress.first_look:,} "
            f"to {progress.looked:,}, in {looking:.1f} of {seconds:.1f} seconds{share}"
        )
    if not progress.ended and progress.look_loss is not None:
        text += f"; the last one found {progress.look_loss:.4f}"
    console.line(text)


def show_result(console: Console, run: "Run") -> None:
    """Shows the loss on the whole held-out part; of the stories also how far it is from optimal."""
    result = run.final
    if not result:
        return
    unit = run.training.loss.unit
    if unit == QUESTION:
        count = count_of(result.tokens, f"held-out {unit}")
        console.line(f"Final held-out reward: {0 - result.loss:.4f} per question, on {count}")
        return
    if unit in JUDGED:
        won = f"{result.accuracy:.1%} of {JUDGED[unit]}"
        console.line(
            f"Final held-out loss: {result.loss:.4f} nats per {unit}, {won}, on "
            f"{count_of(result.tokens, 'held-out ' + unit)}"
        )
        return
    scores = _scores(result, token_name(run.training.tokenizer.kind))
    held_out = len(run.training.data.held_out) - 1
    part = "the whole held-out text"
    if result.tokens < held_out:
        part = f"{result.tokens:,} of {held_out:,} held-out tokens"
        if run.files.source.is_chat and run.settings.run.learn == "answers":
            part = f"the answers ({part})"
    console.line(f"Final held-out loss: {result.loss:.4f} nats per token, on {part}")
    config = run.settings.training
    if config.val_every and config.val_batches:
        batches = count_of(config.val_batches, "batch", "batches")
        console.line(f"  Earlier evaluations used {batches} of it")
    console.line(f"  {scores}")
    if run.session.ended.asked:
        answers = exact(run.session.ended.asked.exact_match, run.session.ended.asked.asked)
        console.line(answers.capitalize())
    elif run.settings.run.text is None:
        floor, excess = floor_of_stories(result)
        console.line(
            f"The entropy of the stories is {floor:.4f} nats per character: the model is "
            f"{excess:.2f} nats above that limit"
        )


def exact(share: float, asked: int) -> str:
    """Returns how many held-out questions were answered word for word."""
    return f"exact answers: {round(share * asked):,} of {asked:,} held-out questions"


def floor_of_stories(result: Evaluation) -> tuple[float, float]:
    """-> the entropy of the built-in stories, and how far a model is above, per character."""
    from smallmind.text.stories import ENTROPY_PER_CHARACTER

    return ENTROPY_PER_CHARACTER, result.nats_per_character - ENTROPY_PER_CHARACTER


def token_name(kind: str) -> str:
    """Returns the word for one token of a kind of tokenizer: char or token."""
    return "char" if parts.load(parts.TOKENIZERS, kind).unit == "characters" else "token"


def _scores(result: Evaluation | records.EvaluationRecord, token: str) -> str:
    """-> "2.879 bits/char, perplexity 7.36, next-char accuracy 39.4%"; bits/byte if different."""
    bits = f"{result.bits_per_character:.3f} bits/char"
    if token != "char" or f"{result.bits_per_byte:.3f}" != f"{result.bits_per_character:.3f}":
        bits += f", {result.bits_per_byte:.3f} bits/byte"
    perplexity = format_perplexity(result.perplexity)
    return f"{bits}, perplexity {perplexity}, next-{token} accuracy {result.accuracy:.1%}"


def format_perplexity(value: float) -> str:
    """-> three significant digits: 7.36, 47.5, 1,234."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"

"""What a run of training shows: tables before it, a line on the way, results at its end."""

from typing import TYPE_CHECKING, Any

from smallmind.cli.console import Console, duration
from smallmind.config import CheckpointStrategy, Precision, RunConfig, TrainingConfig

if TYPE_CHECKING:
    # NumPy and Numba take half a second to import, which --help does not need.
    from smallmind.nn.transformer import TransformerModel
    from smallmind.runs.directory import RunDirectory
    from smallmind.text.dataset import Dataset
    from smallmind.text.tokenizer import Tokenizer
    from smallmind.training.distillation import Distillation
    from smallmind.training.loop import Training
    from smallmind.training.records import HealthRecord, Record, RollbackRecord, StepRecord

SAMPLE_TOKENS = 400
PLAIN_EVERY = 10  # records between lines where no line can be rewritten
MUCH_CLIPPED, MUCH_EVALUATED = 0.1, 0.2  # shares of the steps and of the time, worth a word
FINDINGS_SHOWN = 3  # of one kind at one step


def describe(
    console: Console,
    name: str,
    text: str,
    training: "Training",
    training_config: TrainingConfig,
    run: RunConfig,
) -> None:
    """All that is known before the first step."""
    dataset, model = training.dataset, training.model
    _describe_model(console, model)
    _describe_data(console, name, text, training.tokenizer, dataset)
    if training.distillation:
        _describe_distillation(console, training.distillation)
    _describe_run(console, training_config, run, dataset.block_size, model.precision)


def _describe_model(console: Console, model: "TransformerModel") -> None:
    rows: dict[str, list[Any]] = {}
    for name, value in model.parameters.items():
        # One row for what all blocks have in common.
        words = name.split(".")
        layer = f"{model.config.n_layer} x {words[2]}" if words[0] == "blocks" else words[0]
        row = rows.setdefault(layer.replace("_", " "), [[], 0])
        if value.ndim == 2:
            shape = f"{value.shape[0]} x {value.shape[1]}"
            row[0] += [shape] if shape not in row[0] else []
        row[1] += value.size
    if model.config.tie_weights:
        rows["head"] = [["the token embedding"], 0]
    table = [[layer, ", ".join(shapes), f"{count:,}"] for layer, (shapes, count) in rows.items()]
    total = sum(value.size for value in model.parameters.values())
    console.table("Model", [*table, ["parameters", "", f"{total:,}"]])


def _describe_data(
    console: Console, name: str, text: str, tokenizer: "Tokenizer", dataset: "Dataset"
) -> None:
    console.table(
        "Data",
        [
            ["text", name],
            ["characters", f"{len(text):,}"],
            ["tokens", f"{len(dataset.train) + len(dataset.held_out):,}"],
            ["vocabulary", f"{tokenizer.vocab_size} {tokenizer.unit}"],
            ["trained on", f"{len(dataset.train):,} tokens"],
            ["held out", f"{len(dataset.held_out):,} tokens, the end of the text"],
        ],
    )


def _describe_distillation(console: Console, distillation: "Distillation") -> None:
    config, teacher = distillation.config, distillation.teacher
    if teacher:
        said_by = f"{teacher.config.n_layer} layers of {teacher.config.n_embd} channels"
    else:
        said_by = f"its {distillation.top_k} likeliest tokens, from {distillation.cache_file}"
    learnt = ", learnt" if config.learn_temperature else ""
    rows = [
        ["teacher", said_by],
        ["its share of the loss", f"{config.alpha:g}"],
        ["temperature", f"{distillation.temperature:g}{learnt}"],
    ]
    console.table("Distillation", rows)


def _describe_run(
    console: Console,
    training: TrainingConfig,
    run: RunConfig,
    block_size: int,
    precision: Precision,
) -> None:
    windows = run.batch_size * training.grad_accum_steps
    tokens = f"{windows * block_size:,} ({windows} windows of {block_size})"
    chosen = " (auto)" if training.requested_precision == Precision.AUTO else ""
    epochs = f" ({training.epochs} epochs)" if training.epochs else ""
    rows = [
        ["steps", f"{training.steps:,}{epochs}"],
        ["tokens a step", tokens],
        ["precision", f"{precision}{chosen}"],
    ]
    if training.recompute != CheckpointStrategy.NONE:
        rows.append(["activations", f"recomputed, {training.recompute}"])
    if run.backend == "numba":
        from smallmind.kernels.codegen.isa import ISA
        from smallmind.kernels.codegen.threads import threading_layer

        rows += [
            ["threads", f"{run.threads}"],
            ["threading layer", threading_layer()],
            ["instruction set", ISA.name],
        ]
    else:
        rows.append(["kernels", "plain NumPy"])
    console.table("Run", [*rows, ["directory", str(run.out)]])


class ProgressDisplay:
    """One line that is rewritten on a terminal; some lines where there is none."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.records = 0
        self.first: StepRecord | None = None
        self.looks = 0  # at the health of the run
        self.known: set[tuple[str, str]] = set()  # what they found: name and problem

    def show(self, record: "Record") -> None:
        from smallmind.training.records import (
            EarlyStopRecord,
            EvaluationRecord,
            HealthRecord,
            OverflowRecord,
            RollbackRecord,
            SaveFailedRecord,
            StepRecord,
        )

        width = len(str(self.steps))
        place = f"step {record.step:{width}}/{self.steps}"
        if isinstance(record, EvaluationRecord):
            losses = f"training text {record.train_loss:.4f}  held-out text {record.val_loss:.4f}"
            self.console.line(
                f"{place}  {losses}: {record.bits_per_character:.3f} bits a character, perplexity "
                f"{record.perplexity:.4g}, {record.accuracy:.1%} right"
            )
            return
        if isinstance(record, RollbackRecord):
            self._show_rollback(record)
            return
        if isinstance(record, EarlyStopRecord):
            self.console.line(
                f"{place}  stops early: the lowest loss on held-out text was "
                f"{record.best_loss:.4f}, after step {record.best_step}"
            )
            return
        if isinstance(record, SaveFailedRecord):
            self.console.warning(
                f"A checkpoint could not be saved; the next save tries again: {record.reason}"
            )
            return
        if isinstance(record, OverflowRecord):
            self.console.warning(
                f"Step {record.step}: Gradient overflow detected, skipping update. "
                f"Loss scale: {record.loss_scale:g}"
            )
            return
        if isinstance(record, HealthRecord):
            self._show_health(record)
            return
        if not isinstance(record, StepRecord):
            return
        if self.first is None:
            self.first = record  # it may have waited for kernels to compile
        elapsed = record.elapsed_seconds - self.first.elapsed_seconds
        left = elapsed / max(1, record.step - self.first.step) * (self.steps - record.step)
        text = f"{place}  loss {record.loss:.4f}  lr {record.lr:.1e}"
        if elapsed:
            text += f"  {record.tokens_per_second:,.0f} tokens/s  {duration(left)} left"
        if self.console.is_terminal:
            self.console.live(text)
        elif self.records % PLAIN_EVERY == 0 or record.step == self.steps:
            self.console.line(text)
        self.records += 1

    def _show_health(self, record: "HealthRecord") -> None:
        """A line a finding, once in a run; of many alike the first few and their number."""
        self.looks += 1
        place = f"Step {record.step}"
        new = [f for f in record.findings if (f.name, f.problem) not in self.known]
        self.known |= {(finding.name, finding.problem) for finding in new}
        for problem in dict.fromkeys(finding.problem for finding in new):
            alike = [finding for finding in new if finding.problem == problem]
            for finding in alike[:FINDINGS_SHOWN]:
                self.console.warning(f"{place}: {finding}")
            if (more := len(alike) - FINDINGS_SHOWN) > 0:
                self.console.warning(f"{place}: {problem} {more} times more, all in metrics.jsonl")

    def _show_rollback(self, record: "RollbackRecord") -> None:
        loss, average = record.spike_loss, record.average_loss
        what = "is not finite" if loss is None else f"rose to {loss:.4f}"
        before = "" if average is None else f", where {average:.4f} was usual"
        self.console.warning(
            f"Step {record.spike_step}: the loss {what}{before}. Back to step {record.step}, at "
            f"{record.lr_factor:g} of the learning rate and without that batch."
        )

    def show_health_of_run(self) -> None:
        """So that who asked for it hears of good health too."""
        if self.looks and not self.known:
            self.console.line(f"Health: nothing found in {self.looks} looks at the run")


def show_costs(console: Console, training: "Training") -> None:
    """What share of the time evaluations took and of the steps was clipped, and what to change."""
    progress, config = training.progress, training.config
    seconds, evaluating = progress.seconds["total"], progress.seconds["evaluations"]
    if evaluating:
        share = evaluating / seconds
        text = f"Evaluations took {evaluating:.1f} of {seconds:.1f} seconds ({share:.0%})"
        if share > MUCH_EVALUATED:
            console.warning(f"{text}: evaluate less often (--val-every) or less (--val-batches)")
        else:
            console.line(text)
    if config.max_grad_norm and training.optimizer.steps:
        share = progress.clipped / training.optimizer.steps
        text = f"{share:.1%} of the gradients were clipped to max_grad_norm={config.max_grad_norm}"
        if share > MUCH_CLIPPED:
            advice = "lower the learning rate, warm up longer, or raise --max-grad-norm"
            console.warning(f"{text}: {advice}")
        else:
            console.line(text)


def show_result(console: Console, training: "Training", of_stories: bool) -> None:
    """The loss over the whole held-out part, beside the floor where it is known."""
    from smallmind.training.evaluation import evaluate

    dataset, model = training.dataset, training.model
    held_out = dataset.held_out
    characters = len(training.tokenizer.decode(held_out))
    # In batches of the size that the run had, whose arrays are there already.
    result = evaluate(model, held_out, characters, dataset.batch_size)
    console.line(
        f"Whole held-out text: {result.loss:.4f} nats a token, "
        f"{result.bits_per_character:.4f} bits a character, perplexity {result.perplexity:.4g}, "
        f"{result.accuracy:.1%} of the next tokens right"
    )
    if of_stories:
        from smallmind.text.stories import entropy_per_character

        floor = entropy_per_character()
        excess = result.nats_per_character - floor
        console.line(
            f"The stories' own entropy is {floor:.4f} nats a character: "
            f"{excess:.2f} nats above the best possible"
        )


def show_sample(
    console: Console, training: "Training", step: int, directory: "RunDirectory"
) -> None:
    from smallmind.generation import generate

    seed = training.dataset.seed
    sample = generate(training.model, training.tokenizer, max_tokens=SAMPLE_TOKENS, seed=seed)
    directory.save_sample(step, sample)
    console.line("\nIt writes:")
    console.quote(sample)


def show_checks(console: Console, training: "Training") -> int:
    """A line a check and the verdict -> exit status."""
    from smallmind.training.preflight import preflight

    failed = checks = 0
    for check in preflight(training):
        verdict = "ok    " if check.passed else "FAILED"
        console.line(f"{verdict}  {check.name}: {check.measured}; expected {check.expected}")
        checks, failed = checks + 1, failed + (not check.passed)
    if failed:
        console.line(f"{failed} of {checks} checks failed: this model would not train as it should")
    else:
        console.line(f"All {checks} checks passed: nothing was written, the run can start")
    return 1 if failed else 0


def suggested_prompt(text: str) -> str:
    """The flag with the first two words of the text, if it begins with words."""
    words = "".join(c if c.isalnum() else " " for c in text[:200]).split()[:2]
    prompt = " ".join(words)
    return f' --prompt "{prompt}"' if prompt and len(prompt) <= 40 and prompt in text else ""

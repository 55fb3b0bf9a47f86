"""Tables of what is known about a run before its first step."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from smallmind.checks import count_of
from smallmind.cli.console import Console, shorten
from smallmind.cli.timing import slower_than_float32, time_of_run
from smallmind.corpus.reading import Report
from smallmind.losses.preferences import PairsDataset
from smallmind.losses.question_data import QuestionsDataset
from smallmind.nn.parameters import size_rows
from smallmind.nn.position import Position, position_class
from smallmind.settings.config import (
    CheckpointStrategy,
    ModelConfig,
    Precision,
    RunConfig,
    TrainingConfig,
)
from smallmind.settings.settings import Settings
from smallmind.text.conversations import PackedDataset

if TYPE_CHECKING:
    from smallmind.corpus.tokens import TokensOnDisk
    from smallmind.nn.transformer import TransformerModel
    from smallmind.runs.run import Run
    from smallmind.runs.source import Source
    from smallmind.text.dataset import Dataset
    from smallmind.text.tokenizer import Tokenizer

MAX_HEAD_SHARE = 0.5  # share of the arithmetic
MAX_SKIPPED_SHOWN = 5  # files that are named
MAX_KINDS_SHOWN = 12  # suffixes of files
MIN_PER_TOKEN = 100  # tokens of the text for each of the vocabulary
# Measured, see "Short texts" in bench/LOG.md: after so many passes over a text, or fewer with so
# many parameters for each of its tokens, the held-out loss has risen again.
MAX_PASSES, FEWER_PASSES, MAX_PARAMETERS_PER_TOKEN = 64, 24, 12
ENOUGH_PAIRS = 50_000  # conversations: fewer teach the form of an answer, not the language
ENOUGH_CHARACTERS = 50_000  # characters: a small model then writes more than what it has read


def describe(console: Console, run: "Run") -> None:
    """Prints the model, the data, the loss and the run, and where its files go."""
    from smallmind.optim.schedule import too_short

    model = run.training.model
    console.table("Model", size_rows(model.config, model.flat))
    console.line(_parts_of(model.config))
    if model.adapter:
        console.line(_adapter_of(model))
    _describe_data(console, run)
    loss = run.training.loss
    if rows := loss.rows():
        console.table(loss.name.capitalize(), rows)
    _describe_run(console, run)
    precision, backend = run.training.model.precision, run.settings.run.backend
    if slower := slower_than_float32(run) or about_precision(precision, backend):
        console.line(slower)
    console.line(f"Directory: {run.path}")
    if run.settings.run.tensorboard:
        console.command("Watch it with:", ["tensorboard", "--logdir", str(run.path.parent)])
    if shortcoming := too_short(run.settings.training, has_begun=run.newest() is not None):
        console.warning(shortcoming)


def about_precision(precision: str, backend: str) -> str:
    """Says that 16 bits make steps slower on this CPU, where they are known to; else nothing."""
    from smallmind.nn.backend import faster_precision

    faster = faster_precision(Precision(precision), backend)
    if faster is None:
        return ""
    return f"{precision} saves memory, not time: on this CPU, steps in {faster} are faster"


def _parts_of(config: ModelConfig) -> str:
    """Returns the parts of a model in a line, after the name of its architecture."""
    name = f"{config.architecture}: " if config.architecture else "Parts: "
    heads = count_of(config.n_head, "head")
    if config.head_size:
        heads += f" of {config.head_size} channels"
    if config.kv_heads < config.n_head:
        heads += f", {count_of(config.kv_heads, 'key/value head')}"
    has_positions = position_class(config) is not Position
    positions = f"{config.position} positions" if has_positions else "no positions"
    extras = {
        "normalised queries and keys": config.qk_norm,
        "first values mixed into each block": config.value_residual,
        "embedding mixed into each block": config.x0_scalars,
        "bigram embedding": config.bigram_rows,
        "zero initialisation": config.zero_init,
        "logit soft cap": config.logit_softcap,
        "documents masked": config.document_token is not None,
    }
    parts = [config.norm, positions, config.mlp, heads]
    parts += [extra for extra, is_on in extras.items() if is_on]
    return name + ", ".join(parts)


def _adapter_of(model: "TransformerModel") -> str:
    """Tells what is trained beside which model, in a line."""
    adapter = model.adapter
    assert adapter
    beside = f", beside {shorten(model.base.path)}" if model.base else ""
    parts = ", ".join(adapter.on)
    return f"Adapter: rank {adapter.rank}, alpha {adapter.alpha:g}, on {parts}{beside}"


def model_for_minutes(settings: Settings) -> str:
    """Says how large a model a run of that many minutes trains."""
    model, run = settings.model, settings.run
    assert run.minutes
    return (
        f"For {count_of(run.minutes, 'minute')}: {count_of(model.n_layer, 'layer')} of "
        f"{count_of(model.n_embd, 'channel')}, {count_of(run.batch_size, 'window')} of "
        f"{count_of(model.block_size, 'token')}, dropout {model.dropout:g}, "
        f"weight decay {settings.training.weight_decay:g}"
    )


def _describe_data(console: Console, run: "Run") -> None:
    tokenizer, dataset = run.training.tokenizer, run.training.data
    source = run.files.source
    rows = [["text", shorten(run.files.name)], *text_rows(source, tokenizer, dataset)]
    if source.on_disk:
        rows.append(["read from", shorten(source.on_disk)])
    console.table("Data", rows)
    if source.report:
        describe_reading(console, source.report)
    for advice in filter(None, (_grown(run), _advice_on_vocabulary(run), _advice_on_length(run))):
        console.line(advice)


def text_rows(
    source: "Source", tokenizer: "Tokenizer", data: "Dataset | TokensOnDisk"
) -> list[list[str]]:
    """Returns the size of a text and of both of its parts, in rows of a table."""
    held_out = "the last documents" if source.held_out else "the end of the text"
    if source.is_chat:
        held_out = "the last conversations"
    rows = [
        ["characters", f"{source.characters:,}"],
        ["tokens", f"{len(data.train) + len(data.held_out):,}"],
        ["vocabulary", f"{tokenizer.vocab_size:,} {tokenizer.unit}"],
    ]
    if isinstance(data, PackedDataset):
        rows += _packing_rows(data)
    elif isinstance(data, PairsDataset | QuestionsDataset):
        parts = (("training", data.count_of("train")), ("held out", data.count_of("held_out")))
        rows[1] = ["longest", f"{data.longest:,} tokens, including the prompt"]
        rows += [[name, count_of(count, data.unit)] for name, count in parts]
    else:
        rows += [
            ["training", f"{len(data.train):,} tokens"],
            ["held out", f"{len(data.held_out):,} tokens, {held_out}"],
        ]
    if report := source.report:
        read = [["files", f"{report.files:,}"], ["documents", f"{report.documents:,}"]]
        if report.conversations:
            read.append(["conversations", f"{report.conversations:,}, {report.turns:,} turns"])
        rows[:0] = read
    return rows


def _packing_rows(data: "PackedDataset") -> list[list[str]]:
    """Returns how conversations fill windows, and how much of them is learned."""
    rows = []
    for name, part in (("training", data.train), ("held out", data.held_out)):
        share, windows = part.learned / max(1, part.tokens), count_of(part.count, "window")
        rows.append([name, f"{part.tokens:,} tokens, {share:.0%} learned, in {windows}"])
    rows.append(["padding", f"{data.train.padding:.1%}"])
    pieces = data.train.pieces
    longer = {
        "split at a turn": pieces.divided,
        "truncated": pieces.cut_short,
        "skipped": pieces.left_out,
    }
    rows += [[x, f"{n:,} longer than a window"] for x, n in longer.items() if n]
    return rows


def describe_reading(console: Console, report: Report) -> None:
    """Prints how the texts were cleaned, and which files were left out."""
    if len(report.kinds) > 1:
        rest = [sum(n) for n in zip(*(n for _, *n in report.kinds[MAX_KINDS_SHOWN:]), strict=True)]
        kinds = [*report.kinds[:MAX_KINDS_SHOWN], *([("others", *rest)] if rest else [])]
        heads = ["kind", "files", "documents", "characters"]
        rows = [[kind or "no suffix", *(f"{n:,}" for n in counts)] for kind, *counts in kinds]
        console.table("Read", [heads, *rows])
    for note in report.notes:
        console.line(note)
    if report.empty:
        console.line(f"Left out: {count_of(report.empty, 'record')} without text")
    if report.unanswered:
        left_out = count_of(report.unanswered, "conversation")
        console.line(f"Left out: {left_out} without an answer")
    for skipped in report.skipped[:MAX_SKIPPED_SHOWN]:
        console.line(f"Skipped: {skipped}")
    if (more := len(report.skipped) - MAX_SKIPPED_SHOWN) > 0:
        console.line(f"Skipped: {more:,} more")


def _grown(run: "Run") -> str:
    """Says which characters the model gets to know that it starts from; nothing without any."""
    from smallmind.exchange.stored import find
    from smallmind.runs.assembly import new_characters

    start = run.settings.run.init_from
    if start is None or not Path(start).exists():
        return ""
    new = new_characters(find(start).tokenizer(), run.training.tokenizer)
    return f"The vocabulary grows by {new} that {shorten(start)} does not know" if new else ""


def _advice_on_vocabulary(run: "Run") -> str:
    """Returns what speaks against the size of a learned vocabulary, if anything does."""
    tokenizer, model, tokens = run.training.tokenizer, run.training.model, run.training.data.train
    name, V = tokenizer.settings.get("vocab_size"), tokenizer.vocab_size
    if name is None or run.settings.run.tokenizer != tokenizer.kind:
        return ""
    wanted = getattr(run.settings.run, name)
    if wanted > V:
        return f"Only {V:,} of {wanted:,} tokens: no further pair occurs twice in the text"
    # An embedding is looked up; all else is multiplied with.
    head = V * model.config.n_embd
    blocks = [spec for spec in model.flat.specs if spec.name.startswith("blocks.")]
    share = head / (head + sum(x.size for x in blocks))
    if wanted == getattr(RunConfig, name):  # nobody has chosen it
        return ""
    if share > MAX_HEAD_SHARE:
        return (
            f"The output layer takes {share:.0%} of the arithmetic: a smaller --vocab-size or a "
            "larger model would learn more in the same time"
        )
    if len(tokens) < MIN_PER_TOKEN * V:
        return (
            f"The text has only {len(tokens) / V:.0f} tokens per entry of the vocabulary, too few "
            "to learn them all well: a smaller --vocab-size would do better"
        )
    return ""


def _advice_on_length(run: "Run") -> str:
    """Returns what to expect of a text that is short, or short for so many steps; else nothing."""
    data, training, source = run.training.data, run.settings.training, run.files.source
    characters, report = source.characters, source.report
    if report and report.conversations:
        if run.settings.run.init_from or report.conversations >= ENOUGH_PAIRS:
            return ""
        return (
            f"{count_of(report.conversations, 'conversation')} teach a model how answers look, not "
            "the language: expect fluent nonsense. To avoid that, start from a model trained on a "
            "text, or an imported one: --init-from RUN"
        )
    if source.is_chat:  # built in, and new each time
        return ""
    tokens = len(data.train)
    passes = training.steps * training.grad_accum_steps * data.batch_size * data.block_size / tokens
    is_large = run.training.model.flat.data.size > MAX_PARAMETERS_PER_TOKEN * tokens
    if passes > (FEWER_PASSES if is_large else MAX_PASSES):
        enough = max(ENOUGH_CHARACTERS, math.ceil(characters * passes / FEWER_PASSES))
        scale = 10 ** (len(str(enough)) - 2)
        fewer = ", or train for fewer steps" if characters >= ENOUGH_CHARACTERS else ""
        return (
            f"The model will memorise these {characters:,} characters: it reads them "
            f"{passes:,.0f} times. For new text, use {-(-enough // scale) * scale:,} characters or "
            f"more{fewer}"
        )
    if characters < ENOUGH_CHARACTERS and not run.settings.run.init_from:
        return (
            f"{characters:,} characters are too few: the model will recite fragments. For new "
            f"text, use {ENOUGH_CHARACTERS:,} or more"
        )
    return ""


def _describe_run(console: Console, run: "Run") -> None:
    training, config = run.settings.training, run.settings.run
    block_size = run.training.data.block_size
    windows = config.batch_size * training.grad_accum_steps
    shape = f"{count_of(windows, 'window')} of {block_size:,}"
    epochs = f" ({count_of(training.epochs, 'epoch')})" if training.epochs else ""
    rows = [
        ["steps", f"{training.steps:,}{epochs}"],
        ["tokens per step", f"{windows * block_size:,} ({shape})"],
        ["optimizer", _optimizer_of(training)],
        ["precision", f"{run.training.model.precision}"],
    ]
    if (size := run.session.leader.size) > 1:
        fewest, others = divmod(training.shards, size)
        each = f"{fewest} or {fewest + 1}" if others else f"{fewest}"
        rows.append(["processes", f"{size}, each with {each} of {training.shards} data shards"])
    if training.recompute != CheckpointStrategy.NONE:
        rows.append(["activations", f"recomputed, {training.recompute}"])
    if config.backend == "numba":
        from smallmind.kernels.codegen.threads import threading_layer, threads

        rows += [
            ["threads", f"{threads()}"],
            ["threading layer", threading_layer()],
            ["instruction set", run.training.model.instruction_set],
        ]
    else:
        rows.append(["kernels", "plain NumPy"])
    rows.append(["time", time_of_run(run)])
    console.table("Run", rows)


def _optimizer_of(config: TrainingConfig) -> str:
    """Returns its name, and the rates that it has besides the learning rate."""
    from smallmind.optim.optimizer import rate_settings

    others = [name for name in rate_settings(config) if name != "learning_rate"]
    rates = [f"{name.replace('_', ' ')} {getattr(config, name):g}" for name in others]
    return ", ".join([config.optimizer, *rates])

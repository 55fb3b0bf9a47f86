"""The outcomes of short trials and of runs on a text: how fast it has been learned.

Trials are kept in the directory of runs, in plans/<digest of the text>.jsonl, a line for each. Runs
are read where they are. Only outcomes of runs that learn alike belong to one law: all their
settings are the same but those that follow from the time.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smallmind import parts
from smallmind.checks import InputError, number, whole
from smallmind.console import activity
from smallmind.console.activity import clock
from smallmind.files import durable
from smallmind.forecast.budget import regularization, tokens_per_step
from smallmind.forecast.law import Outcome, Trial, is_plausible, parameters_of
from smallmind.forecast.threads import choose_threads
from smallmind.runs.assembly import build_training
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import CONFIG, METRICS
from smallmind.runs.metrics_file import MetricsFile
from smallmind.runs.source import Source
from smallmind.settings.config import __version__
from smallmind.settings.settings import LOSS_SETTINGS, Settings
from smallmind.settings.sources import MODEL_FIELDS
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.records import StepRecord

PLANS = "plans"
FORMAT = 1
MAX_BYTES = 2**24  # of a file that is read
MAX_TRIALS = 1000  # that count: the last ones
MAX_BATCH = 1e9  # tokens of an update: a line with more is damaged
MIN_STEPS = 200  # of a run that counts: shorter ones follow no law
USUAL_DROPOUT = 0.05  # more or less than the recipe's is still alike
# Settings by which runs learn differently, beside those of the model that do not follow from the
# time. What follows from the number of tokens in a batch, such as beta2, is not among them.
DIFFERENT = (
    "optimizer",
    "learning_rate",
    "matrix_learning_rate",
    "momentum",
    "momentum_warmup_steps",
    "beta1",
    "schedule",
    "lr_decay_factor",
    "lr_decay_every",
    "lr_decay_share",
    "weight_decay",
    "max_grad_norm",
    "max_grad_value",
    "tokenizer",
    "bpe_vocab_size",
    "bpe_split",
    "mask_documents",
)
# Settings by which the steps of a run that learns the same take longer.
SLOWER = (
    "backend",
    "precision",
    "use_mixed_precision",
    "products",
    "micro_batch_size",
    "use_gradient_checkpointing",
    "checkpoint_strategy",
    "checkpoint_interval",
    "data_shards",
    "reduce_precision",
    "block_size",
    "detect_anomaly",
    "enable_diagnostics",
    "check_gradient_health",
)
# Follow from the time, or from the tokens, which the rest determines.
FREE = {"n_layer", "n_embd", "n_head", "block_size", "dropout"}
FREE |= {"vocab_size", "document_token", "bigram_vocab"}
# Without these a run learns all weights, from its text alone, and to its end.
PLAIN = (
    "init_from",
    *(loss.chosen_by for loss in LOSS_SETTINGS.values()),
    "freeze",
    "lora_rank",
    "chat",
    "target_loss",
    "early_stopping_patience",
)


def train(settings: Settings, source: Source, tokenizer: Tokenizer) -> Trial:
    """Trains a new model as the settings say, but only for its outcome: nothing is written."""
    settings = settings.replace(val_every=0, sample_every=0, save_every=0, log_every=1)
    data = source.dataset(tokenizer, settings.model.block_size, settings.run)
    training = build_training(settings, data, tokenizer)
    steps, ends = settings.training.steps, []
    records = training.steps(settings.training)
    for _ in activity.parts(range(steps)):
        next(record for record in records if isinstance(record, StepRecord))
        ends.append(clock())
    for _ in records:
        pass
    # The first step may wait for kernels.
    seconds = (ends[-1] - ends[0]) * steps / max(1, steps - 1)
    evaluation = training.evaluate_held_out()
    assert evaluation
    outcome = outcome_of(settings, len(data.train), evaluation.loss)
    return Trial(outcome, seconds, tokens_per_step(settings.fields))


def outcome_of(settings: Settings, unique: int, loss: float) -> Outcome:
    """Returns the outcome of a run with these settings that has ended with this loss."""
    tokens = settings.training.steps * tokens_per_step(settings.fields)
    return Outcome(parameters_of(settings.model), tokens, unique, loss)


class History:
    """The known outcomes of a text, for runs that learn as these settings say.

    `folders` are those of runs; trials are added in the first one. `tokenizer` is that of the
    runs, `unique` the number of tokens to learn from, and `chosen` has the user's choices.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        sha256: str,
        settings: Settings,
        tokenizer: Tokenizer,
        unique: int,
        chosen: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.sha256, self.unique, self.chosen = sha256, unique, dict(chosen)
        self.folders = list({folder.resolve(): folder for folder in folders}.values())
        # Tokens on disk name their text themselves: what they say may not lead elsewhere.
        name = hashlib.sha256(sha256.encode(errors="replace")).hexdigest()[:32]
        self.files = [folder / PLANS / f"{name}.jsonl" for folder in self.folders]
        self.weight_decay = settings.training.weight_decay
        self.kind = _kind(settings, tokenizer)
        for name, mark in (("dropout", "-"), ("weight_decay", "-w")):
            if name in chosen:  # even what the recipe would choose
                self.kind += f"{mark}{chosen[name]:g}"
        self.machine = _machine(settings)

    def add(self, trial: Trial) -> None:
        """Keeps a trial. OSError if the disk refuses it."""
        fields = {"format": FORMAT, "kind": self.kind, **trial.outcome._asdict()}
        fields |= {"seconds": trial.seconds, "batch": trial.batch}
        fields |= {"machine": self.machine, "smallmind": __version__}
        path = self.files[0]
        with durable.naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = durable.open_to_append(path)
            try:
                # A line that was cut short, as by a full disk, ends here.
                start = "" if durable.ends_with_line(file) else "\n"
                line = f"{start}{json.dumps(fields)}\n"
                durable.write_all(file, memoryview(line.encode()))
                durable.files.fsync(file)
            finally:
                durable.files.close(file)

    def outcomes(self) -> list[Outcome]:
        """Reads the trials that are kept. Lines that are damaged, or newer, are left out."""
        return [trial.outcome for trial, _ in self._trials()]

    def timed(self) -> list[Trial]:
        """Reads the trials that this machine made: they tell how fast it is."""
        return [trial for trial, machine in self._trials() if machine == self.machine]

    def _trials(self) -> list[tuple[Trial, Any]]:
        return [trial for path in self.files for trial in self._read(path)][-MAX_TRIALS:]

    def _read(self, path: Path) -> Iterator[tuple[Trial, Any]]:
        content = b""
        with suppress(OSError, ValueError), durable.open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_BYTES))
            content = file.read(MAX_BYTES)
        for line in content.splitlines():
            with suppress(ValueError, RecursionError, KeyError, TypeError):
                fields = json.loads(line)
                if fields["format"] != FORMAT or fields["kind"] != self.kind:
                    continue
                *values, seconds = (number(fields[x]) for x in (*Outcome._fields, "seconds"))
                batch = fields.get("batch")  # lines of earlier versions lack it
                if batch is not None and not 1 <= number(batch) <= MAX_BATCH:
                    continue
                if is_plausible(outcome := Outcome(*values)) and 1e-3 < seconds < 1e9:
                    yield Trial(outcome, seconds, batch), fields.get("machine")

    def runs(self) -> list[Outcome]:
        """Reads outcomes of finished runs, and of those in sweeps, that learned this text alike."""
        found: list[Outcome] = []
        configs: list[Path] = []
        for folder in self.folders:
            configs += sorted(folder.glob(f"*/{CONFIG}")) + sorted(folder.glob(f"*/*/{CONFIG}"))
        with activity.doing("Reading the outcomes of runs", usual=True):
            for path in activity.parts(configs):
                with suppress(InputError, OSError, ValueError):
                    if outcome := self._outcome(RunDirectory(path.parent)):
                        found.append(outcome)
        return found

    def _outcome(self, directory: RunDirectory) -> Outcome | None:
        """Returns the outcome of a run; None if it tells nothing about runs with these settings."""
        config = directory.load_config()
        settings, fields = config.settings, config.settings.fields
        in_one_go = not (config.imported or config.extended_after)
        if config.text_sha256 != self.sha256 or not in_one_go or any(fields[x] for x in PLAIN):
            return None
        tokenizer = directory.load_tokenizer()
        steps = whole(settings.training.steps)
        if tokenizer is None or steps < MIN_STEPS:
            return None
        outcome = outcome_of(settings, self.unique, math.nan)
        usual = regularization(*outcome[:3]) | self.chosen
        is_alike = abs(settings.model.dropout - usual["dropout"]) <= USUAL_DROPOUT
        if not is_alike or settings.training.weight_decay != usual["weight_decay"]:
            return None
        settings = settings.replace(weight_decay=self.weight_decay)
        if _kind(settings, tokenizer) != self.kind.split("-")[0]:
            return None
        for record in MetricsFile(directory.path / METRICS, sparse=True).read():
            if "final_loss" in record and record["step"] == steps:
                outcome = outcome._replace(loss=number(record["final_loss"]))
        return outcome if is_plausible(outcome) else None


def _kind(settings: Settings, tokenizer: Tokenizer) -> str:
    """Returns a digest of all settings that two runs must share to learn alike."""
    fields = settings.fields | {"min_lr": settings.training.resolved_min_lr}
    if settings.run.tokenizer not in parts.TOKENIZERS:  # a file
        fields["tokenizer"] = tokenizer.digest
    names = sorted({*(MODEL_FIELDS - FREE), *DIFFERENT, "min_lr"})
    return hashlib.sha256(repr([(name, fields[name]) for name in names]).encode()).hexdigest()[:16]


def _machine(settings: Settings) -> str:
    """Describes all that makes steps slower or faster: trials elsewhere say nothing of it."""
    import llvmlite.binding as llvm

    threads = choose_threads(settings.run)
    values = [f"{name}={settings.fields[name]}" for name in SLOWER]
    return f"{llvm.get_host_cpu_name()}, threads={threads}, {', '.join([*values, __version__])}"

"""The outcomes of short trials and of runs on a text: how fast it has been learned.

Trials are kept in the directory of runs, in plans/<digest of the text>.jsonl, a line for each. Runs
are read where they are. Only outcomes of runs that learn alike tell anything about each other: all
their settings are the same but those that follow from the time.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from smallmind.checks import InputError, number, whole
from smallmind.console import activity
from smallmind.console.activity import clock
from smallmind.files import durable
from smallmind.runs.assembly import build_training
from smallmind.runs.directory import RunDirectory
from smallmind.runs.files import CONFIG
from smallmind.runs.metrics import read_metrics
from smallmind.runs.scaling import Outcome, parameters_of
from smallmind.runs.source import Source
from smallmind.settings.config import __version__
from smallmind.settings.settings import Settings
from smallmind.settings.sources import MODEL_FIELDS
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.records import StepRecord

PLANS = "plans"
FORMAT = 1
MOST_BYTES = 2**24  # of a file that is read
# Settings by which runs learn differently, beside those of the model that do not follow from the
# time. What follows from the number of tokens in a batch, such as beta2, is not among them.
LEARNING = (
    "optimizer",
    "learning_rate",
    "matrix_learning_rate",
    "min_lr",
    "schedule",
    "weight_decay",
    "max_grad_norm",
    "max_grad_value",
    "tokenizer",
    "bpe_vocab_size",
    "bpe_split",
    "mask_documents",
)
# Follow from the time, or from the tokens, which the rest determines.
FREE = {"n_layer", "n_embd", "n_head", "block_size", "dropout", "vocab_size", "document_token"}
FREE |= {"bigram_vocab"}
# Without these a run learns from its text alone, and to its end.
PLAIN = (
    "init_from",
    "teacher",
    "freeze",
    "lora_rank",
    "chat",
    "target_loss",
    "early_stopping_patience",
)


class Trial(NamedTuple):
    """An outcome, and how long it took. Units: seconds."""

    outcome: Outcome
    seconds: float


def kind_of(settings: Settings) -> str:
    """A digest of all settings that two runs must share to learn alike."""
    fields = settings.fields | {"min_lr": settings.training.resolved_min_lr}
    names = sorted((MODEL_FIELDS - FREE) | set(LEARNING))
    return hashlib.sha256(repr([(name, fields[name]) for name in names]).encode()).hexdigest()[:16]


def train(settings: Settings, source: Source, tokenizer: Tokenizer) -> Trial:
    """Trains a new model as the settings say, but only for its outcome: nothing is written."""
    settings = settings.replace(val_every=0, sample_every=0, save_every=0, log_every=1)
    data = source.dataset(tokenizer, settings.model.block_size, settings.run)
    training = build_training(settings, data, tokenizer)
    start, records = clock(), training.steps(settings.training)
    for _ in activity.parts(range(settings.training.steps)):
        next(record for record in records if isinstance(record, StepRecord))
    for _ in records:
        pass
    seconds = clock() - start
    evaluation = training.evaluate_held_out()
    assert evaluation
    outcome = outcome_of(settings, len(data.train), evaluation.loss)
    return Trial(outcome, seconds)


def outcome_of(settings: Settings, unique: int, loss: float) -> Outcome:
    """The outcome of a run with these settings that has ended with this loss."""
    config, run = settings.training, settings.run
    batch = run.batch_size * settings.model.block_size * config.grad_accum_steps
    return Outcome(parameters_of(settings.model), config.steps * batch, unique, loss)


class Kept:
    """The trials of a text that are kept on disk, for runs that learn as these settings say."""

    def __init__(self, folder: Path, sha256: str, settings: Settings) -> None:
        self.path = folder / PLANS / f"{sha256[:32]}.jsonl"
        self.kind = kind_of(settings)

    def add(self, trial: Trial) -> None:
        """Adds a trial. OSError if the disk refuses it."""
        fields = {"format": FORMAT, "kind": self.kind, **trial.outcome._asdict()}
        fields |= {"seconds": trial.seconds, "smallmind": __version__}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(self.path, [self._read(), f"{json.dumps(fields)}\n".encode()])

    def trials(self) -> list[Trial]:
        """Reads them. Lines that are damaged, or of later versions, are left out."""
        return list(self._trials())

    def _read(self) -> bytes:
        try:
            with durable.open_regular(self.path) as file:
                content = file.read(MOST_BYTES)
        except (OSError, ValueError):
            return b""
        return content if content.endswith(b"\n") or not content else content + b"\n"

    def _trials(self) -> Iterator[Trial]:
        for line in self._read().splitlines():
            with suppress(ValueError, RecursionError, KeyError, TypeError):
                fields = json.loads(line)
                if fields["format"] != FORMAT or fields["kind"] != self.kind:
                    continue
                values = [number(fields[name]) for name in (*Outcome._fields, "seconds")]
                if all(math.isfinite(value) and value > 0 for value in values):
                    *outcome, seconds = values
                    yield Trial(Outcome(*outcome), seconds)


def known(folder: Path, sha256: str, settings: Settings, unique: int) -> list[Outcome]:
    """Every outcome that is known of this text, which has so many tokens to learn from."""
    kept = [trial.outcome for trial in Kept(folder, sha256, settings).trials()]
    return kept + of_runs(folder, sha256, settings, unique)


def of_runs(folder: Path, sha256: str, settings: Settings, unique: int) -> list[Outcome]:
    """The outcomes of the runs in a folder, and in sweeps in it, that learned this text alike."""
    kind, found = kind_of(settings), []
    configs = sorted([*folder.glob(f"*/{CONFIG}"), *folder.glob(f"*/*/{CONFIG}")])
    for path in configs:
        with suppress(InputError, OSError):
            config = RunDirectory(path.parent).load_config()
            fields = config.settings.fields
            if config.text_sha256 != sha256 or any(fields[name] for name in PLAIN):
                continue
            if config.imported or kind_of(config.settings) != kind:
                continue
            losses = read_metrics(path.parent).curve("final_loss")
            if losses.steps and losses.steps[-1] == whole(config.settings.training.steps):
                found.append(outcome_of(config.settings, unique, losses.values[-1]))
    return found

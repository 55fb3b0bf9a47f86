"""What a run leaves on disk, in formats that other programs read."""

import dataclasses
import datetime
import json
import math
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import durable, safetensors
from smallmind.config import (
    DistillationConfig,
    InputError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    __version__,
    current_names,
)
from smallmind.nn.transformer import TransformerModel
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.checkpoint import newest
from smallmind.training.records import Record
from smallmind.training.state import RunState

CONFIG, METRICS, MODEL, SAMPLES = (
    "config.json",
    "metrics.jsonl",
    "model.safetensors",
    "samples.txt",
)
LARGEST_CONFIG = 1_000_000  # bytes; ours have 2,000


def _step_of(line: bytes) -> float:
    """The step of a line of the metrics; infinity where it is broken."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


def unfinished_run(parent: Path = Path("runs")) -> Path:
    """The directory of the newest run below parent that can go on. InputError where none is."""
    configs = sorted(parent.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
    for path in (config.parent for config in reversed(configs)):
        with suppress(InputError):  # what is no run of this version is not the one
            config = RunDirectory(path).load_config()["training"]
            checkpoint, _ = newest(path)
            if checkpoint is None or not is_finished(checkpoint, config):
                return path
    raise InputError(f"{parent} holds no unfinished run; name the directory of one")


def is_finished(checkpoint: RunState, config: TrainingConfig) -> bool:
    """Whether a run with this config has nothing left to do after the checkpoint."""
    progress = checkpoint.state.get("progress")
    if not isinstance(progress, dict):
        raise InputError(f"the checkpoint of step {checkpoint.step} lacks its progress")
    return bool(progress.get("ended")) or checkpoint.step >= config.steps


def default_directory(name: str) -> Path:
    """runs/<date>-<name>, with a number behind it where that is taken."""
    base = Path("runs") / f"{datetime.date.today().isoformat()}-{name}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


class RunDirectory:
    """A directory with the resolved config, the metrics, the model and its samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten = b""  # lines that the disk has not taken yet

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """InputError where path holds a run already, or cannot be written."""
        try:
            if any((path / name).exists() for name in (CONFIG, METRICS, MODEL, SAMPLES)):
                raise InputError(f"{path} already holds a run; choose another --out or remove it")
            path.mkdir(parents=True, exist_ok=True)
            # Of two runs that begin at one time, one finds it there.
            (path / METRICS).touch(exist_ok=False)
        except FileExistsError:
            raise InputError(
                f"{path} already holds a run or a file; choose another --out or remove it"
            ) from None
        except OSError as error:
            raise InputError(
                f"cannot write to {path}: {error.strerror}; choose another --out"
            ) from None
        return cls(path)

    def save_config(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        run: RunConfig,
        text_sha256: str,
        distillation: DistillationConfig | None = None,
        teacher_sha256: str | None = None,
    ) -> None:
        config = {
            "model": dataclasses.asdict(model),
            "training": dataclasses.asdict(training.with_min_lr()),
            "run": dataclasses.asdict(run),
            "distillation": dataclasses.asdict(distillation or DistillationConfig()),
            "text_sha256": text_sha256,
            "teacher_sha256": teacher_sha256,
            "smallmind": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        durable.write(self.path / CONFIG, [text.encode()])

    def discard(self) -> None:
        """Removes what a run without a model has left, so that another may take the directory."""
        for name in (CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def log(self, record: Record) -> None:
        """Appends one line to the metrics; where the disk is full, with a later one."""
        self._unwritten += json.dumps(dataclasses.asdict(record)).encode() + b"\n"
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Brings all lines of the metrics to the file. OSError where it does not take them."""
        with open(self.path / METRICS, "ab", buffering=0) as file:
            while self._unwritten:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]

    def cut_metrics(self, step: int) -> None:
        """Drops the lines of later steps, which a resumed run writes again, and broken ones."""
        lines = (self.path / METRICS).read_bytes().splitlines(keepends=True)
        durable.write(self.path / METRICS, [line for line in lines if _step_of(line) <= step])

    def has_model(self) -> bool:
        return (self.path / MODEL).exists()

    def save_model(self, model: TransformerModel, tokenizer: Tokenizer) -> None:
        model.save(self.path / MODEL, {"tokenizer": safetensors.to_json(tokenizer.state())})

    def save_sample(self, step: int, text: str) -> None:
        """Appends a sample of generated text."""
        with open(self.path / SAMPLES, "a", encoding="utf-8", newline="") as file:
            file.write(f"--- step {step}\n{text}\n")

    def load_config(self) -> dict[str, Any]:
        """The configs that save_config wrote, by name. InputError where there are none."""
        try:
            with durable.open_regular(self.path / CONFIG) as file:
                config = safetensors.from_json(file.read(LARGEST_CONFIG))
            return {
                "model": ModelConfig(**config["model"]),
                "training": TrainingConfig(**current_names(config["training"])),
                "run": RunConfig(**config["run"]),
                "distillation": DistillationConfig(**config["distillation"]),
                "text_sha256": str(config["text_sha256"]),
                "teacher_sha256": config["teacher_sha256"],
            }
        except OSError:
            raise InputError(f"{self.path} holds no run: cannot read its {CONFIG}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.path / CONFIG} is not one of smallmind's: {error}") from None

    def load_model(self, backend: str = "numba") -> tuple[TransformerModel, Tokenizer]:
        """The model and its tokenizer. InputError where there is none."""
        if not self.path.is_dir():
            raise InputError(f"{self.path} is not the directory of a run")
        return load_model(self.path / MODEL, backend)


def load_model(path: Path, backend: str = "numba") -> tuple[TransformerModel, Tokenizer]:
    """The model and its tokenizer that a run has left in a file. InputError where it has not."""
    model = TransformerModel.load(path, backend)
    metadata = safetensors.read_metadata(path)
    try:
        tokenizer = Tokenizer.from_state(safetensors.from_json(metadata["tokenizer"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} has no tokenizer in its metadata: {error}") from None
    if tokenizer.vocab_size != model.config.vocab_size:
        raise InputError(f"{path}: tokenizer and model have different vocabularies")
    return model, tokenizer

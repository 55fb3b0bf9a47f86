"""What a run leaves on disk, in formats that other programs read."""

import dataclasses
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from smallmind import safetensors
from smallmind.config import InputError, ModelConfig, RunConfig, TrainingConfig, __version__
from smallmind.nn.transformer import TransformerModel
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.training import Record

CONFIG, METRICS, MODEL, SAMPLES = (
    "config.json",
    "metrics.jsonl",
    "model.safetensors",
    "samples.txt",
)


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

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """InputError where path holds a run already, or cannot be written."""
        try:
            if any((path / name).exists() for name in (CONFIG, METRICS, MODEL, SAMPLES)):
                raise InputError(f"{path} already holds a run; choose another --out or remove it")
            path.mkdir(parents=True, exist_ok=True)
            (path / METRICS).touch()
        except OSError as error:
            raise InputError(
                f"cannot write to {path}: {error.strerror}; choose another --out"
            ) from None
        return cls(path)

    def save_config(
        self, model: ModelConfig, training: TrainingConfig, run: RunConfig, text_sha256: str
    ) -> None:
        config = {
            "model": dataclasses.asdict(model),
            "training": dataclasses.asdict(training),
            "run": dataclasses.asdict(run),
            "text_sha256": text_sha256,
            "smallmind": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (self.path / CONFIG).write_text(text, encoding="utf-8")

    def discard(self) -> None:
        """Removes what a run without a model has left, so that another may take the directory."""
        for name in (CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def log(self, record: Record) -> None:
        """Appends one line to the metrics."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")

    def save_model(self, model: TransformerModel, tokenizer: Tokenizer) -> None:
        model.save(self.path / MODEL, {"tokenizer": safetensors.to_json(tokenizer.state())})

    def save_sample(self, step: int, text: str) -> None:
        """Appends a sample of generated text."""
        with open(self.path / SAMPLES, "a", encoding="utf-8", newline="") as file:
            file.write(f"--- step {step}\n{text}\n")

    def load_config(self) -> dict[str, Any]:
        """The dictionary that save_config wrote. InputError where there is none."""
        try:
            config = json.loads((self.path / CONFIG).read_text(encoding="utf-8"))
            run = RunConfig(**config["run"])
            return {**config, "run": run, "text_sha256": str(config["text_sha256"])}
        except OSError:
            raise InputError(f"{self.path} holds no run: cannot read its {CONFIG}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.path / CONFIG} is not one of smallmind's: {error}") from None

    def load_model(self, backend: str = "numba") -> tuple[TransformerModel, Tokenizer]:
        """The model and its tokenizer. InputError where there is none."""
        path = self.path / MODEL
        if not self.path.is_dir():
            raise InputError(f"{self.path} is not the directory of a run")
        model = TransformerModel.load(path, backend)
        _, metadata = safetensors.read(path)
        try:
            tokenizer = Tokenizer.from_state(safetensors.from_json(metadata["tokenizer"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} has no tokenizer in its metadata: {error}") from None
        if tokenizer.vocab_size != model.config.vocab_size:
            raise InputError(f"{path}: tokenizer and model have different vocabularies")
        return model, tokenizer

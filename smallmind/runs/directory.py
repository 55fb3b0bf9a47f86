"""The files of a run, in formats that other programs read."""

import dataclasses
import datetime
import json
import math
import platform
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallmind import durable, safetensors
from smallmind.config import InputError, Settings, __version__
from smallmind.nn.transformer import TransformerModel
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.records import Record

RUNS = "runs"  # the directory of new runs, in the working directory
CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
SAMPLES = "samples.txt"
TEXT = "text.txt"  # written if the text was not a file
MAX_CONFIG_BYTES = 1_000_000  # a real one has 2,000


class SavedConfig(NamedTuple):
    """What config.json holds: settings, and hashes of the other things a run depends on."""

    settings: Settings
    text_sha256: str
    teacher_sha256: str | None = None
    initial_sha256: str | None = None  # of the weights that the run started from, if not its own
    extended_after: int = 0  # the step after which the run was last made longer


def newest_run(parent: str | PathLike[str] = RUNS) -> Path:
    """The directory below parent whose run was created last. InputError if there is none."""
    created: list[tuple[int, Path]] = []
    for config in Path(parent).glob(f"*/{CONFIG}"):
        with suppress(OSError):  # removed meanwhile
            created.append((config.stat().st_mtime_ns, config.parent))
    if not created:
        raise InputError(f"{parent} holds no run; give RUN, the directory of one")
    return max(created)[1]


def default_directory(name: str) -> Path:
    """runs/<date>-<name>, with a number appended if that exists."""
    base = Path(RUNS) / f"{datetime.date.today().isoformat()}-{name}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


class RunDirectory:
    """The directory of a run: its resolved config, metrics, model and samples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created: list[Path] = []  # by `create`, innermost first
        self._unwritten = b""  # lines of the metrics that are not on disk yet

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Makes the directory. InputError if it already holds a run or is not writable."""
        directory = cls(path)
        try:
            if any((path / name).exists() for name in (CONFIG, METRICS, MODEL, SAMPLES)):
                raise InputError(f"{path} already holds a run; choose another --out or remove it")
            directory._created = [p for p in (path, *path.parents) if not p.exists()]
            path.mkdir(parents=True, exist_ok=True)
            # If two runs start at the same time, only one of them creates this file.
            (path / METRICS).touch(exist_ok=False)
        except FileExistsError:
            raise InputError(
                f"{path} already holds a run or a file; choose another --out or remove it"
            ) from None
        except OSError as error:
            raise InputError(
                f"cannot write to {path}: {error.strerror}; choose another --out"
            ) from None
        return directory

    def discard(self) -> None:
        """Removes the files of a run without a model, and the directories that `create` made."""
        for name in (CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)
        for directory in self._created:
            with suppress(OSError):  # not empty
                directory.rmdir()

    def save_config(self, config: SavedConfig) -> None:
        """Writes settings, hashes and the versions that the run was made with."""
        fields = {
            **config.settings.to_dict(),
            "text_sha256": config.text_sha256,
            "teacher_sha256": config.teacher_sha256,
            "initial_sha256": config.initial_sha256,
            "extended_after": config.extended_after,
            "smallmind": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        durable.write(self.path / CONFIG, [text.encode()])

    def load_config(self) -> SavedConfig:
        """Reads what save_config wrote, in any version. InputError if there is none."""
        file = self.path / CONFIG
        try:
            with durable.open_regular(file) as opened:
                saved = safetensors.from_json(opened.read(MAX_CONFIG_BYTES))
            return SavedConfig(
                Settings.from_dict(saved),
                str(saved["text_sha256"]),
                saved.get("teacher_sha256"),
                saved.get("initial_sha256"),
                int(saved.get("extended_after", 0)),
            )
        except OSError:
            raise InputError(f"{self.path} is not a run: cannot read its {CONFIG}") from None
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{file} was not written by smallmind: {error}") from None

    def log(self, record: Record) -> None:
        """Appends a line to the metrics; while the disk is full, keeps it for the next call."""
        self._unwritten += json.dumps(dataclasses.asdict(record)).encode() + b"\n"
        with suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes the metrics that are not on disk yet. OSError if that fails."""
        with open(self.path / METRICS, "ab", buffering=0) as file:
            while self._unwritten:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]

    def cut_metrics(self, step: int) -> None:
        """Removes damaged lines, and those of later steps, which a resumed run writes again."""
        lines = (self.path / METRICS).read_bytes().splitlines(keepends=True)
        durable.write(self.path / METRICS, [line for line in lines if _step_of(line) <= step])

    def has_model(self) -> bool:
        """Whether the final model has been saved."""
        return (self.path / MODEL).exists()

    def save_model(self, model: TransformerModel, tokenizer: Tokenizer, step: int) -> None:
        """Writes model and tokenizer to one file, with the step that they were saved after."""
        saved = {"tokenizer": safetensors.to_json(tokenizer.state()), "step": str(step)}
        model.save(self.path / MODEL, saved)

    def save_sample(self, step: int, text: str) -> None:
        """Appends a sample of generated text."""
        with open(self.path / SAMPLES, "a", encoding="utf-8", newline="") as file:
            file.write(f"--- step {step}\n{text}\n")


def _step_of(line: bytes) -> float:
    """The step of a line of the metrics; infinity if the line is damaged."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf

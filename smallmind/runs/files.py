"""Names: of the files of a run, of runs, of their texts. Needs no NumPy."""

import datetime
import re
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path

from smallmind.checks import InputError, check_type

RUNS = "runs"  # the directory of new runs, in the working directory
CONFIG = "config.json"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"
IMPORTED = "model.gguf"  # in its place: a copy of the file that was imported
SAMPLES = "samples.txt"
SAMPLE = re.compile(rb"^--- step (\d{1,18})$", re.MULTILINE)  # the line before each
PROFILE = "profile.json"  # of a run with enable_diagnostics
PRECISIONS = "precisions.json"  # losses of the model in several precisions
TASKS = "tasks.json"  # results of the model on tasks
TOKENIZER = "tokenizer.json"
PUBLISHED = "published.json"  # what else is known of a tokenizer that was imported
TEXT = "text.txt"  # written if the text was not a file
FILES = {CONFIG, METRICS, MODEL, IMPORTED, SAMPLES, PROFILE, PRECISIONS, TASKS}
FILES |= {TOKENIZER, PUBLISHED, TEXT}
MAX_PATH_CHARACTERS = 1000  # a longer string is a text

Text = str | PathLike[str] | Sequence[str | PathLike[str]] | None


def newest_run() -> Path:
    """-> the directory in RUNS whose run was created last. InputError if there is none."""
    created: list[tuple[int, Path]] = []
    for config in Path(RUNS).glob(f"*/{CONFIG}"):
        with suppress(OSError):  # removed meanwhile
            created.append((config.stat().st_mtime_ns, config.parent))
    if not created:
        raise InputError(f"no runs in {RUNS}; give the directory of one as RUN")
    return max(created)[1]


def model_in(directory: Path) -> Path | None:
    """Returns the file of the final model of a run; None if it has none yet."""
    files = (directory / name for name in (MODEL, IMPORTED))
    return next((file for file in files if file.exists()), None)


def default_directory(name: str) -> Path:
    """-> runs/<date>-<name>, with a number appended if that exists."""
    base = Path(RUNS) / f"{datetime.date.today().isoformat()}-{name}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


def paths_of(text: Text) -> list[str | PathLike[str]]:
    """Returns the paths that name a text; none for built-in stories."""
    if text is None:
        return []
    paths = [text] if isinstance(text, str | PathLike) else list(text)
    for path in paths:
        check_type("text", path, str, PathLike)
    return paths


def name_of(text: Text, is_chat: bool = False) -> str:
    """-> a short name for the text of some paths: that of the first, or of what is built in."""
    paths = paths_of(text)
    return Path(paths[0]).stem if paths else "questions" if is_chat else "stories"


def is_literal(text: Text) -> bool:
    """Tells whether a string is a text itself rather than the path of one."""
    return isinstance(text, str) and ("\n" in text or len(text) > MAX_PATH_CHARACTERS)

"""The files of a run, in formats that other programs read."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, from_json, number, whole
from smallmind.console import activity
from smallmind.exchange.format import ExternalModel
from smallmind.files import durable, safetensors
from smallmind.files.checkpoint_names import TIMING
from smallmind.files.lock import NAME as LOCK
from smallmind.files.lock import RunLock, is_held
from smallmind.memory.tracker import MemorySnapshot
from smallmind.nn.loading import save_parameters
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import TransformerModel
from smallmind.runs.event_file import PATTERN, EventFile
from smallmind.runs.files import (
    CONFIG,
    FILES,
    IMPORTED,
    METRICS,
    MODEL,
    PROFILE,
    PUBLISHED,
    SAMPLE,
    SAMPLES,
    TEXT,
    TOKENIZER,
    model_in,
)
from smallmind.runs.metrics_file import record_of
from smallmind.settings.config import __version__
from smallmind.settings.settings import Settings
from smallmind.text.tokenizer import Tokenizer
from smallmind.text.tokenizer_json import encoded
from smallmind.training import checkpoint
from smallmind.training.profiler import ProfileRow
from smallmind.training.records import FailureRecord, FinalRecord, Record

ENDING_FIELDS = {  # fields of the records that end a run
    field.name
    for kind in (FailureRecord, FinalRecord)
    for field in dataclasses.fields(kind)
    if field.name != "step"
}
# In config.json.
OPTIONAL_TEXTS = ("teacher_sha256", "initial_sha256", "imported", "template_time")
OPTIONAL_FLAGS = ("awaits_timing", "limits_evaluations", "begins_texts", "packs_evenly")
PIECE_BYTES = 2**20  # that are read at a time
MAX_CONFIG_BYTES = 1_000_000  # a real one has 2,000
SAMPLES_BEGIN = re.compile(rb"^(?=--- step \d+$)", re.MULTILINE)


class SavedConfig(NamedTuple):
    """The content of config.json: settings, and hashes of the other things a run depends on."""

    settings: Settings
    text_sha256: str
    teacher_sha256: str | None = None
    initial_sha256: str | None = None  # of the weights that the run started from, if not its own
    imported: str | None = None  # the model that was imported in place of training
    extended_after: int = 0  # the step after which the run was last made longer
    # Its steps do not follow from its minutes yet, or its evaluations from the time that they take.
    awaits_timing: bool = False
    limits_evaluations: bool = False  # to a share of its time: nobody has chosen them
    begins_texts: bool = False  # where its tokenizer does; earlier versions never did
    packs_evenly: bool = False  # conversations; earlier versions filled windows in another order
    # Names of files -> their SHA-256; of a model also that of the one before. None in old runs.
    sha256: Mapping[str, Sequence[str]] = MappingProxyType({})
    # The seconds of a run by minutes from its first step on, and its pace as that was measured.
    timing: Mapping[str, float] | None = None
    template_time: str | None = None  # of conversations, for templates that write it: ISO 8601


class RunDirectory:
    """The directory of a run: its lock, resolved config, metrics, model and samples.

    `problems` are sentences about its files that the user should read, each once; whoever shows
    them clears the list, and adds them to `reported`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.reported: set[str] = set()
        self._lock: RunLock | None = None
        self._files: list[Path] = []  # that belong to the run if `create` has claimed them
        self._directories: list[Path] = []  # that `create` made, innermost first
        self._events: EventFile | None = None  # for TensorBoard, if that was asked for
        self._unwritten = b""  # lines of the metrics that are not on disk yet
        self._in_line = False  # the metrics on disk end within a line, which `_unwritten` continues

    def create(self, text: str | None = None) -> "RunDirectory":
        """Makes and locks the directory -> itself; a text is written to text.txt in it.

        Takes over what a start has left that was killed. InputError if it already holds a run, or
        part of one, or is not writable. Nothing is left behind then.
        """
        path = self.path
        self.check_free(text)
        was_begun = os.path.lexists(path / METRICS)
        try:
            self._directories = [p for p in (path, *path.parents) if not p.exists()]
            self._make_and_lock()
            self._claim(text, was_begun)
            if text is not None and path / TEXT in self._files:
                durable.write(path / TEXT, [text.encode()])
        except OSError as error:
            self.discard()
            raise InputError(
                f"cannot write to {path}: {error.strerror}; choose another --out"
            ) from None
        except BaseException:
            self.discard()
            raise
        return self

    def lock(self) -> bool:
        """Keeps other processes out, or InputError -> True if it was not locked by this one."""
        if self._lock:
            return False
        self._lock = RunLock(self.path)
        # Every run that could be writing these would hold the lock.
        with suppress(OSError):
            durable.clear_stale(self.path, 0, FILES)
        for left in self.path.glob(f"{TIMING}*"):
            shutil.rmtree(left, ignore_errors=True)
        with suppress(InputError):
            checkpoint.clear_stale(self.path)
        return True

    def unlock(self) -> None:
        """Lets other processes in. Calling it again does nothing."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def discard_untrained(self) -> None:
        """Removes what `create` made if no step was trained, unless another process locks it."""
        try:
            self.lock()
        except InputError:
            return
        trained = any(record["step"] for record in map(_record, self._metrics()) if record)
        if not (trained or self.has_model() or checkpoint.exist(self.path)):
            self.discard()
        self.unlock()

    def discard(self) -> None:
        """Removes the files and directories that `create` made, and unlocks the directory."""
        try:
            for file in [*self._files, *([self._events.path] if self._events else [])]:
                with suppress(OSError):
                    file.unlink()
        finally:
            self.unlock()
        for directory in self._directories:
            with suppress(OSError):  # not empty
                directory.rmdir()
        self._files, self._directories = [], []

    def save_config(self, config: SavedConfig) -> None:
        """Writes settings, hashes, the size and the versions that the run was made with."""
        others = config._asdict()
        fields = {
            **others.pop("settings").to_dict(),
            **others,
            "sha256": dict(config.sha256),
            "parameters": declare_parameters(config.settings.model).count,  # for who looks at runs
            "smallmind": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
        durable.write(self.path / CONFIG, [text.encode()])

    def load_config(self) -> SavedConfig:
        """Reads what save_config wrote, in any version. InputError if there is none.

        The text of a run that has one of its own is there, wherever the run was created.
        """
        file, text = self.path / CONFIG, self.path / TEXT
        try:
            with durable.open_regular(file) as opened:
                saved = from_json(opened.read(MAX_CONFIG_BYTES))
            settings = Settings.from_dict(saved)
            recorded = settings.run.text
            if isinstance(recorded, str) and Path(recorded).name == TEXT and text.is_file():
                settings = settings.replace(text=str(text.resolve()))
            return SavedConfig(
                settings,
                check_type("text_sha256", saved["text_sha256"], str),
                **{name: check_type(name, saved.get(name), str, None) for name in OPTIONAL_TEXTS},
                extended_after=whole(saved.get("extended_after", 0)),
                **{name: check_type(name, saved.get(name, False), bool) for name in OPTIONAL_FLAGS},
                sha256=_digests(saved.get("sha256", {})),
                timing=_timing(saved.get("timing")),
            )
        except OSError:
            raise InputError(self._without_config()) from None
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{file} was not written by smallmind: {error}") from None

    def restore_config(self, config: SavedConfig) -> None:
        """Writes the config again if something has removed it."""
        if (self.path / CONFIG).exists():
            return
        with self._noting(f"{CONFIG} was removed and cannot be written"):
            self.save_config(config)
            self.problems.append(f"{CONFIG} was removed; wrote it again")

    @contextmanager
    def _noting(self, sentence: str) -> Iterator[None]:
        """Makes an OSError of the block one of the problems: the sentence, and the reason."""
        try:
            yield
        except OSError as error:
            self.problems.append(f"{sentence}: {error.strerror}")

    def log(self, record: Record, seconds: float) -> None:
        """Appends a line to the metrics, or keeps it for the next call while the disk is full."""
        fields = record.fields
        fields.setdefault("elapsed_seconds", seconds)
        self._unwritten += json.dumps(fields).encode() + b"\n"
        with self._noting(f"{METRICS} cannot be written, the next record tries again"):
            self.flush()
        if self._events:
            self._add_event(fields)

    def begin_events(self, step: int) -> None:
        """Makes `log` write an event file too; the first one of a run gets its earlier records."""
        is_first = not any(self.path.glob(PATTERN))
        self._events = EventFile(self.path, 0 if is_first else step)
        if is_first:
            for record in filter(None, map(_record, self._metrics())):
                self._add_event(record)

    def _add_event(self, record: Mapping[str, Any]) -> None:
        assert self._events
        name = self._events.path.name
        with self._noting(f"{name} cannot be written, the next record tries again"):
            self._events.add(record)

    def flush(self) -> None:
        """Writes the metrics that are not on disk yet. OSError if that fails."""
        path = self.path / METRICS
        with durable.naming(path):
            if not path.exists():
                self.problems.append(f"{METRICS} was removed; its earlier records are lost")
            file = durable.open_to_append(path)
            try:
                if not self._in_line and not durable.ends_with_line(file):
                    self._unwritten, self._in_line = b"\n" + self._unwritten, True
                while self._unwritten:
                    count = durable.files.write(file, memoryview(self._unwritten))
                    self._in_line = not self._unwritten[:count].endswith(b"\n")
                    self._unwritten = self._unwritten[count:]
            finally:
                os.close(file)

    def cut_metrics(self, step: int) -> None:
        """Removes lines that are damaged, of later steps or end a run; writes the rest again."""
        path = self.path / METRICS
        unwritten, self._unwritten = self._unwritten.splitlines(keepends=True), b""
        is_in_line, self._in_line = self._in_line, False
        if not path.exists():
            if step:
                self.problems.append(f"{METRICS} was removed; its earlier records are lost")
            with suppress(OSError):
                path.touch()
            return
        lines = self._metrics()
        count = len(lines)
        if is_in_line and lines and unwritten:
            lines[-1] += unwritten.pop(0)
        # An interrupt may have come just after these had been written.
        lines += [line for line in unwritten if line not in lines]
        records = [_record(line) for line in lines]
        if damaged := records.count(None):
            self.problems.append(f"removed damaged lines from {METRICS}: {damaged}")
        kept = [
            line
            for line, record in zip(lines, records, strict=True)
            if record and record["step"] <= step and not ENDING_FIELDS & record.keys()
        ]
        if len(kept) == len(lines) == count and not is_in_line:
            return
        with self._noting(f"{METRICS} keeps records from before this start"):
            durable.write(path, kept)

    def cut_samples(self, step: int) -> None:
        """Removes the samples of later steps, which a run that resumes after this one writes."""
        texts = SAMPLES_BEGIN.split(self._read(SAMPLES))
        kept = [
            text for text in texts if not (begin := SAMPLE.match(text)) or int(begin[1]) <= step
        ]
        if len(kept) == len(texts):
            return
        with self._noting(f"{SAMPLES} keeps samples from before this start"):
            durable.write(self.path / SAMPLES, kept)

    def failure(self) -> str | None:
        """-> why the run ended for good, if it did: a resumed one would fail in the same way."""
        lines = self._metrics()
        record = _record(lines[-1]) if lines else None
        return str(record["failure"]) if record and "failure" in record else None

    def has_model(self) -> bool:
        return model_in(self.path) is not None

    def save_model(
        self,
        model: TransformerModel,
        tokenizer: Tokenizer,
        step: int,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        """Writes model and tokenizer to one file; `announce` gets its SHA-256 before."""
        saved = {"tokenizer": tokenizer.saved, "step": str(step)}
        with activity.doing("Saving the model", usual=model.flat.data.nbytes < activity.LARGE):
            model.save(self.path / MODEL, saved, announce)

    def import_model(self, model: ExternalModel, tokenizer: Tokenizer) -> None:
        """Writes a model of another program: a copy if it is one file, with blocks as they are."""
        if not model.is_one_file:
            saved = {"tokenizer": tokenizer.saved, "step": "0"}
            with activity.doing(f"Reading {model.path}"):
                save_parameters(model.config, model.unread(), self.path / MODEL, saved)
            return
        model.check()
        source = model.path
        with activity.doing(f"Copying {source}", usual=source.stat().st_size < activity.LARGE):
            durable.copy(source, self.path / IMPORTED)

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer that the run keeps to its end."""
        tokenizer.save(self.path / TOKENIZER)
        if tokenizer.published:
            durable.write(self.path / PUBLISHED, [_published(tokenizer.published)])

    def digests(self) -> dict[str, Sequence[str]]:
        """Returns the SHA-256 of the files of a new run that only the run may change."""
        paths = [self.path / name for name in (TOKENIZER, PUBLISHED, MODEL, IMPORTED)]
        return {path.name: [digest_of_file(path)] for path in paths if path.exists()}

    def load_tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer of the run; None if an earlier version made the directory."""
        path, published = self.path / TOKENIZER, self.path / PUBLISHED
        if not path.exists():
            return None
        tokenizer = Tokenizer.load(path)
        if not published.exists():
            return tokenizer
        try:
            with durable.open_regular(published) as file:
                said = safetensors.from_json(file.read(safetensors.MAX_TEXT))
            return tokenizer.with_published(said)
        except OSError as error:
            raise InputError(f"cannot read {published}: {error.strerror}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{published} was not written by smallmind: {error}") from None

    def save_profile(
        self, rows: Sequence[ProfileRow], memory: MemorySnapshot, copies: Mapping[str, float]
    ) -> None:
        """Writes a profile, with the bytes per second of copies of some sizes."""
        profile: dict[str, Any] = {"format": 1, "rows": [dataclasses.asdict(row) for row in rows]}
        profile["copy_bytes_per_second"] = copies
        profile["memory"] = dataclasses.asdict(memory)
        durable.write(self.path / PROFILE, [json.dumps(profile).encode()])

    def save_sample(self, step: int, text: str) -> None:
        """Adds a sample of generated text, unless there is one of this step."""
        samples = self._read(SAMPLES)
        if not _is_sampled(samples, step):
            durable.write(self.path / SAMPLES, [samples, f"--- step {step}\n{text}\n".encode()])

    def is_complete(self, step: int) -> bool:
        """Tells whether all is saved that comes after the last step."""
        # The sample comes last: without it, other things may be missing too.
        return self.has_model() and _is_sampled(self._read(SAMPLES), step)

    def _metrics(self) -> list[bytes]:
        """Returns the lines of the metrics; none if the file is missing."""
        return self._read(METRICS).splitlines(keepends=True)

    def _read(self, name: str) -> bytes:
        """-> the content of one of its files; empty if it is missing."""
        path = self.path / name
        try:
            with durable.open_regular(path, follow=False) as file:
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path}: {error}; remove it") from None

    def _make_and_lock(self) -> None:
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise InputError(f"{self.path} is a file; choose another --out") from None
            try:
                self.lock()
                return
            except InputError:
                if self.path.exists():
                    raise
                # A run that could not start has just removed its directory.

    def _claim(self, text: str | None, was_begun: bool) -> None:
        """Creates the metrics, which shows that the directory is taken even where locks fail."""
        self._check_names(text)
        if not was_begun:
            self._files = [self.path / METRICS]  # an interrupt may come as soon as it is there
        try:
            (self.path / METRICS).touch(exist_ok=was_begun)
        except FileExistsError:
            self._files = []
            raise self._taken() from None
        # An identical text may be the user's own file.
        made = [n for n in _new_files(text) if n != TEXT or not os.path.lexists(self.path / n)]
        self._files = [self.path / name for name in made]

    def check_free(self, text: str | None = None) -> None:
        """Raises InputError if the directory holds part of a run, or one is starting there."""
        self._check_names(text)
        if os.path.lexists(self.path / METRICS) and is_held(self.path):
            raise InputError(
                f"{self.path} is in use by another process; wait for it, end it, or choose "
                "another --out"
            )

    def _check_names(self, text: str | None) -> None:
        """Raises InputError if the directory holds more of a run than what a start has left."""
        names = {name for name in _new_files(text) if os.path.lexists(self.path / name)}
        if checkpoint.exist(self.path) or names - self._left_by_a_start(text):
            raise self._taken()

    def _left_by_a_start(self, text: str | None = None) -> set[str]:
        """Returns the files of a start that was killed before it could save its config.

        It makes empty metrics before all others. Files that the user has put there since do not
        count: only a tokenizer that was written here, what was published with it, the same text.
        """
        if _content(self.path / METRICS) != b"":
            return set()
        names = TOKENIZER, PUBLISHED, TEXT
        left, content = {METRICS}, {name: _content(self.path / name) for name in names}
        with suppress(InputError):
            if content[TOKENIZER] == encoded(Tokenizer.load(self.path / TOKENIZER).as_json()):
                left.add(TOKENIZER)
        with suppress(TypeError, ValueError):
            if content[PUBLISHED] == _published(safetensors.from_json(content[PUBLISHED] or b"")):
                left.add(PUBLISHED)
        if text is not None and content[TEXT] == text.encode():
            left.add(TEXT)
        return left

    def _without_config(self) -> str:
        """Returns why the directory is not a run, and what to do if one has been started there."""
        reason = f"{self.path} is not a run: cannot read its {CONFIG}"
        if not any(os.path.lexists(self.path / name) for name in (METRICS, LOCK)):
            return reason
        if is_held(self.path):
            return f"{reason}, and another process is using the directory; wait for it"
        with suppress(InputError):
            self._check_names(None)
            return f"{reason}; its start was cut short, so start it again with --out {self.path}"
        return reason

    def _taken(self) -> InputError:
        return InputError(
            f"{self.path} already holds a run or part of one; choose another --out or remove it"
        )


def _timing(saved: Any) -> dict[str, float] | None:
    """Checks the timing of a run by minutes, as it was saved."""
    if saved is None:
        return None
    found = {name: number(value) for name, value in check_type("timing", saved, dict).items()}
    if not all(0 <= value < math.inf for name, value in found.items() if name != "seconds"):
        raise ValueError("its timing is damaged")
    return found


def _new_files(text: str | None) -> list[str]:
    """-> names the files that a new run may not find, in the order in which they are discarded."""
    # The metrics come last: until then they show that the others belong to a run.
    first = [CONFIG, MODEL, IMPORTED, SAMPLES, TOKENIZER, PUBLISHED]
    return [*first, *([] if text is None else [TEXT]), METRICS]


def _content(path: Path) -> bytes | None:
    """Returns the content of a regular file; None if there is none."""
    with suppress(OSError, ValueError), durable.open_regular(path, follow=False) as file:
        return file.read()
    return None


def _digests(saved: Any) -> Mapping[str, Sequence[str]]:
    """Returns the SHA-256 of files in config.json. TypeError if it has something else there."""
    for name, digests in check_type("sha256", saved, Mapping).items():
        for digest in check_type(name, digests, list):
            check_type(name, digest, str)
    return dict(saved)


def digest_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file; of safetensors the one that it holds, which readers check."""
    if path.suffix == ".safetensors":
        return safetensors.read_digest(path)
    sha256 = hashlib.sha256()
    with durable.explained(path, "file"), durable.open_regular(path) as file:
        usual = os.fstat(file.fileno()).st_size < activity.LARGE
        with activity.doing(f"Checking {path}", usual=usual):
            while piece := file.read(PIECE_BYTES):
                sha256.update(piece)
                activity.tick()
    return sha256.hexdigest()


def fault_of(path: Path, digests: Sequence[str]) -> str | None:
    """Says what is wrong with a file of a run unless it has one of these digests."""
    try:
        if not path.exists():
            return "it is missing; restore it from a copy"
        if digest_of_file(path) not in digests:
            return "it was changed, or belongs to another run; restore it from a copy"
    except InputError as error:
        return str(error)
    return None


def _published(said: Mapping[str, Any]) -> bytes:
    return safetensors.to_json(dict(said)).encode()


def _is_sampled(samples: bytes, step: int) -> bool:
    return b"%d" % step in SAMPLE.findall(samples)


def _record(line: bytes) -> dict[str, Any] | None:
    """Returns a line of the metrics; None if it is damaged or incomplete."""
    return record_of(line) if line.endswith(b"\n") else None

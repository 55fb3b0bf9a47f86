"""A run seen from outside: its settings, its metrics and its state, as they are on disk now."""

import enum
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from smallmind.charts.curve import Curve
from smallmind.checks import InputError, from_json, number, shown_value, whole
from smallmind.files import durable
from smallmind.files.checkpoint_names import CHECKPOINTS, saved_steps
from smallmind.files.lock import is_held
from smallmind.files.safetensors_header import read_header
from smallmind.runs.files import CONFIG, METRICS, MODEL, SAMPLE, SAMPLES, model_in, name_of
from smallmind.runs.metrics_file import MetricsFile
from smallmind.settings.settings import LOSS_RECORDS, Settings

MAX_CONFIG_BYTES = 1_000_000  # a real one has 3,000
MAX_NOTES = 1000  # the last ones are kept
MAX_SECONDS = 1e10  # of training: three centuries
RECENT_SECONDS = 600.0  # a run on another host that wrote something since is running
PLOTTED = ("loss", "val_loss", "lr", "grad_norm")  # fields of records that are shown as curves


class State(enum.StrEnum):
    """The state of a run."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"  # it can be resumed
    FINISHED = "finished"
    FAILED = "failed"  # it would fail again
    IMPORTED = "imported"  # from another program


class RunView:
    """A run as it is on disk: `refresh` reads what is new, and only that.

    `curves` has one for each of the fields of records in `fields`; without any, as for a table of
    many runs, few lines of the metrics are read at all. `evaluations` are all of them as they were
    logged. What a rollback undid is gone from both. While config.json cannot be read, `settings` is
    None and `problem` says why.

    Nothing is locked or written, so that a run notices nothing.
    """

    def __init__(self, path: str | PathLike[str], fields: Sequence[str] = PLOTTED) -> None:
        self.path = Path(path)
        self.fields = tuple(fields)
        self.saved: dict[str, Any] = {}  # config.json
        self.settings: Settings | None = None
        self._problems: dict[str, str] = {}  # file -> what is wrong with it
        self.created = math.nan  # when config.json was written, in seconds since 1970
        self._config_stat: tuple[int, ...] = ()
        self._metrics = MetricsFile(self.path / METRICS, sparse=not self.fields)
        self._restarts = 0
        self._clear()
        self.refresh()

    def __repr__(self) -> str:
        return f"<RunView {self.path}: {self.state}, step {self.step:,}>"

    def _clear(self) -> None:
        self.curves = {field: Curve() for field in self.fields}
        self.evaluations: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None  # the evaluation at the end
        self.answers: list[dict[str, Any]] = []  # to held-out questions, each time they were asked
        self.energy: dict[str, Any] = {}  # that the CPU took in the last session
        self.usage: dict[str, Any] = {}  # the share of the machine that the last session used
        self.failure: str | None = None
        self.health_checks = 0
        self.notes: list[str] = []  # problems: of health, rollbacks, files
        self.seconds = 0.0  # of training
        self._seconds_per_step = 0.0
        self._logged = 0  # the last step in the metrics
        self._timed = 0  # the last one whose seconds are known
        self._ended = 0  # the step after which the run has ended early

    @property
    def problem(self) -> str | None:
        """Why something is missing here, if its files cannot be read."""
        return next((f"{file} {problem}" for file, problem in self._problems.items()), None)

    @property
    def is_run(self) -> bool:
        """True if the directory holds a run, or the beginning of one that is starting."""
        metrics = self.path / METRICS
        if self.settings is not None or not metrics.is_file():
            return self.settings is not None
        # Empty metrics alone are what a start leaves that is killed.
        return bool(self._config_stat or self._metrics.lines or self._metrics.partial) or (
            self._is_held()
        )

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name or self.path.resolve().name

    @property
    def text(self) -> str | None:
        """A short name of its text; None if it is not known, or there is none."""
        if self.settings is None or self.saved.get("imported"):
            return None
        run = self.settings.run
        return name_of(run.text, bool(run.chat))

    @property
    def architecture(self) -> str | None:
        """The published architecture of its model, or "own parts"; None if it is not known."""
        return (self.settings.model.architecture or "own parts") if self.settings else None

    @property
    def parameters(self) -> int | None:
        """The number of its model's parameters; None if it is not known."""
        with suppress(KeyError, ValueError):
            return whole(self.saved["parameters"])
        # Earlier versions did not save it.
        with suppress(OSError, KeyError, TypeError, ValueError):
            return _count_parameters(self.path / MODEL)
        return None

    @property
    def step(self) -> int:
        """The steps done, as far as the metrics and the checkpoints say."""
        with suppress(OSError):
            return max([self._logged, *saved_steps(self.path / CHECKPOINTS)])
        return self._logged

    @property
    def steps(self) -> int | None:
        """The steps planned; None if they are not known, or there are none."""
        if self.settings is None or self.saved.get("imported"):
            return None
        return self.settings.training.steps

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The evaluation with the lowest held-out loss; None without any."""
        losses = [x for x in self.evaluations if math.isfinite(number(x.get("val_loss")))]
        return min(losses, key=lambda x: float(x["val_loss"]), default=None)

    @property
    def state(self) -> State:
        """The state of the run."""
        if self.saved.get("imported"):
            return State.IMPORTED
        if self._is_held():
            return State.RUNNING
        if self._is_finished():
            return State.FINISHED
        return State.FAILED if self.failure is not None else State.INTERRUPTED

    def refresh(self) -> bool:
        """Reads what is new since the last time -> True if there was something."""
        is_new = self._read_config()
        records: Iterable[dict[str, Any]] = ()
        self._problems.pop(METRICS, None)
        try:
            records = self._metrics.read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._problems[METRICS] = _cannot_be_read(error)
        if self._metrics.restarts != self._restarts:
            self._restarts, is_new = self._metrics.restarts, True
            self._clear()
        for record in records:
            self._add(record)
            is_new = True
        return is_new

    def _read_config(self) -> bool:
        """Reads config.json if it has changed -> True if it has."""
        file = self.path / CONFIG
        try:
            stat = os.stat(file)
        except OSError as error:
            if not self._config_stat:
                self._problems[CONFIG] = _cannot_be_read(error)
            return False
        if (key := (stat.st_mtime_ns, stat.st_size, stat.st_ino)) == self._config_stat:
            return False
        self._config_stat, self.created = key, stat.st_mtime
        self.settings, self.saved = None, {}
        self._problems.pop(CONFIG, None)
        try:
            with durable.open_regular(file) as opened:
                saved = from_json(opened.read(MAX_CONFIG_BYTES))
            if "text_sha256" not in saved:  # another program's file of this name
                raise KeyError("text_sha256")
            self.saved = dict(saved)
            self.settings = Settings.from_dict(saved)
        except InputError as error:
            self._problems[CONFIG] = f"cannot be read: {error}"
        except OSError as error:
            self._problems[CONFIG] = _cannot_be_read(error)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._problems[CONFIG] = "was not written by smallmind"
        return True

    def _add(self, record: dict[str, Any]) -> None:
        """Takes in a record of any kind, of this or any other version."""
        step = record["step"]
        self._note(record)
        if "spike_step" in record:  # the run is back at this step
            self._cut_evaluations(step)
            for curve in self.curves.values():
                curve.cut(step)
            self._logged = min(self._logged, step)
            return
        seconds = number(record.get("elapsed_seconds"))
        if 0 <= seconds < MAX_SECONDS:
            self.seconds, self._timed = seconds, step
            if "step_ms" in record:
                self._seconds_per_step = number(record["step_ms"]) / 1000
        elif step > self._timed and math.isfinite(self._seconds_per_step):
            seconds = self.seconds + (step - self._timed) * self._seconds_per_step
        else:
            seconds = self.seconds
        self._logged = step
        if "failure" in record:
            self.failure = _text(record["failure"])
        if "best_step" in record or "target" in record:
            self._ended = step
        elif "final_loss" in record:
            self.final = record
        elif "exact_match" in record:
            self.answers.append(record)
        elif "joules" in record:
            self.energy = record
        elif "used_gflops" in record:
            self.usage = record
        elif (numbers := LOSS_RECORDS.keys() & record.keys()) and self.evaluations:
            if self.evaluations[-1]["step"] == step:
                found = {name: record[name] for name in numbers}
                self.evaluations[-1] = {**self.evaluations[-1], **found}
        elif "val_loss" in record:
            self._cut_evaluations(step - 1)
            self.evaluations.append(record)
        if "target" in record:  # whose loss is that of an evaluation
            return
        for field, curve in self.curves.items():
            if field in record:
                curve.add(step, seconds, number(record[field]))

    def _note(self, record: dict[str, Any]) -> None:
        """Keeps what is wrong, in a line each."""
        step = f"Step {record['step']:,}: "
        if isinstance(findings := record.get("findings"), list):
            self.health_checks += 1
            for finding in (each for each in findings if isinstance(each, dict)):
                name, message = _text(finding.get("name")), _text(finding.get("message"))
                self.notes.append(f"{step}{name}: {message}")
        if "spike_step" in record:
            spike = _text(record["spike_step"])
            self.notes.append(f"{step}rolled back to here, as the loss of step {spike} was a spike")
        for name in ("warning", "failure"):
            if name in record:
                self.notes.append(step + _text(record[name]))
        del self.notes[:-MAX_NOTES]

    def samples(self) -> list[tuple[int, str]]:
        """Returns the texts that the model wrote, each with its step, as they are on disk now."""
        try:
            with durable.open_regular(self.path / SAMPLES) as file:
                _, *parts = SAMPLE.split(file.read())
        except (OSError, ValueError):
            return []
        texts = [part.decode("utf-8", "replace").strip("\n") for part in parts[1::2]]
        return [(int(step), text) for step, text in zip(parts[::2], texts, strict=True)]

    def _cut_evaluations(self, step: int) -> None:
        """Removes those after a step."""
        while self.evaluations and self.evaluations[-1]["step"] > step:
            self.evaluations.pop()

    def _is_held(self) -> bool:
        held = is_held(self.path)
        if held is None:  # by a process that cannot be asked
            with suppress(OSError):
                return time.time() - (self.path / METRICS).stat().st_mtime < RECENT_SECONDS
        return bool(held)

    def _is_finished(self) -> bool:
        """-> True if it has ended by itself, as `Run.is_finished` says: its sample comes last."""
        if self.settings is None or not model_in(self.path):
            return False
        step, extended = self.step, number(self.saved.get("extended_after", 0))
        has_ended = self._ended == step and step > extended
        if step < self.settings.training.steps and not has_ended:
            return False
        with suppress(OSError, ValueError), durable.open_regular(self.path / SAMPLES) as file:
            return b"%d" % step in SAMPLE.findall(file.read())
        return False


def open_view(path: str | PathLike[str], fields: Sequence[str] = PLOTTED) -> RunView:
    """Returns the run in a directory. InputError if there is none."""
    view = RunView(path, fields)
    if not view.path.is_dir():
        raise InputError(f"{path} is not a directory; give that of a run, such as runs/NAME")
    if not view.is_run:
        raise InputError(
            f"{path} is not a run: {view.problem}; `smallmind runs` lists those in runs/"
        )
    return view


def finite(value: Any) -> float | None:
    """Returns a number of a record; None if it is none, or not finite."""
    return found if math.isfinite(found := number(value)) else None


def _text(value: Any) -> str:
    """Returns a text of a record, which may be anything."""
    return value if isinstance(value, str) else shown_value(value)


def _cannot_be_read(error: Exception) -> str:
    return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _count_parameters(model: Path) -> int:
    """Returns the elements of the tensors in a model file; any error if it is damaged."""
    with durable.open_regular(model) as file:
        _, header = read_header(file, os.fstat(file.fileno()).st_size)
    shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    return whole(sum(math.prod(map(whole, shape)) for shape in shapes))

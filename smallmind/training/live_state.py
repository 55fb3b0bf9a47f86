"""Everything that the steps of a run change: captured as a RunState, and restored from one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from smallmind.checks import InputError, number
from smallmind.files import safetensors
from smallmind.losses.loss import Loss
from smallmind.nn.loading import WEIGHTS_PREFIX, adapter_facts, weights
from smallmind.nn.parameters import shape_of
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.loss_scaler import LossScaler
from smallmind.optim.optimizer import Optimizer
from smallmind.optim.schedule import Schedule, schedule
from smallmind.settings.config import NEUTRAL, ModelConfig, Precision, TrainingConfig, __version__
from smallmind.settings.settings import from_saved, to_saved
from smallmind.text.dataset import Dataset
from smallmind.training.records import RunProgress
from smallmind.training.spikes import Spikes
from smallmind.training.state import SNAPSHOT, TOKENIZER, RunState, split_snapshot, with_snapshot

# Settings that say how numbers are stored; a state records what that was on its CPU.
STORAGE = ("precision", "use_mixed_precision")

# Prefixes of the names of tensors.
MOMENTS, OF_LOSS = "optimizer", "loss."

# Settings and state of the loss, under the names of the first loss that had some.
LOSS, LOSS_STATE = "teacher", "temperature"

# Parts of a state that never change during a run, and what an error calls a different one.
FIXED = {
    "model": "a different model",
    "data": "a different batch size or seed",
    TOKENIZER: "a different tokenizer",
    "config": "different training settings",
    LOSS: "another loss",
    "adapter": "another adapter",
}


class LiveState:
    """A run in memory: its model, its optimizer, and everything else that its steps change."""

    def __init__(
        self,
        config: TrainingConfig,
        model: TransformerModel,
        data: Dataset,
        loss: Loss,
        optimizer: Optimizer,
    ) -> None:
        self.config = config
        self.model = model
        self.data = data
        self.loss = loss
        self.progress = RunProgress()
        self.passes = 0  # batches trained on so far: dropout masks depend on it
        self.optimizer = optimizer
        self.schedule: Schedule = schedule(config)
        self.scaler = LossScaler() if model.precision == Precision.FLOAT16 else None
        self.spikes = Spikes(config.max_rollbacks)

    @property
    def loss_scale(self) -> float:
        """1 without loss scaling."""
        return self.scaler.scale if self.scaler else 1.0

    def refit(self, steps: int) -> None:
        """Gives the run another length from here on, which the schedule follows."""
        self.config = self.config.fitted_to(steps, self.progress.step)
        state, self.schedule = self.schedule.state(), schedule(self.config)
        self.schedule.load_state(state)

    def clear_gradients(self) -> None:
        """Sets all gradients to zero, those of the loss included."""
        self.model.zero_gradients()
        if self.loss.parameter:
            self.loss.parameter.take_gradient()

    def capture_model(self) -> RunState:
        """Returns the state that outlives a run: weights, dropout counter, loss. Copies nothing."""
        flat = self.model.flat
        tensors = {f"{WEIGHTS_PREFIX}{name}": flat.stored[name] for name in flat.kept}
        tensors |= {f"{OF_LOSS}{name}": value for name, value in self.loss.tensors().items()}
        parameter = self.loss.parameter
        state = {"passes": self.passes, LOSS_STATE: parameter and parameter.state()}
        return RunState(self.progress.step, tensors, state)

    def capture(self) -> RunState:
        """-> the whole state except the snapshot. Its tensors are the live ones, not copies."""
        tokenizer, model = self.data.tokenizer, self.capture_model()
        moments = self.optimizer.tensors()
        config = dataclasses.asdict(self.config.as_of(self.progress.step))
        state = {
            **model.state,
            "progress": dataclasses.asdict(self.progress),
            "optimizer": self.optimizer.state(),
            "schedule": self.schedule.state(),
            "scaler": self.scaler and self.scaler.state(),
            "spikes": self.spikes.state(),
            "config": {name: value for name, value in config.items() if name not in NEUTRAL},
            "model": to_saved(self.model.config),
            "data": {"batch_size": self.data.batch_size, "seed": self.data.seed},
            TOKENIZER: tokenizer and tokenizer.saved,
            LOSS: self.loss.settings(),
            "smallmind": __version__,
            "precision": self.model.precision.value,
            "instruction_set": self.model.instruction_set,
        }
        if adapter := adapter_facts(self.model):
            state["adapter"] = adapter
        tensors = {f"{MOMENTS}.{name}": value for name, value in moments.items()}
        return RunState(model.step, {**model.tensors, **tensors}, state)

    def capture_all(self) -> RunState:
        """Returns the whole state, including the snapshot if that is of an earlier step."""
        return with_snapshot(self.capture(), self.spikes.good)

    def gathered(self, state: RunState) -> RunState:
        """Returns a state to be saved, with the parts of it that other processes have."""
        return self._with_moments(state, self.optimizer.whole)

    def _with_moments(
        self, state: RunState, change: Callable[[str, np.ndarray], np.ndarray]
    ) -> RunState:
        """-> a state whose tensors of the optimizer, also those of its snapshot, are changed."""
        if not self.optimizer.ends:
            return state
        tensors = dict(state.tensors)
        for name in tensors:
            parts = name.removeprefix(SNAPSHOT).split(".", 1)
            if parts[0] == MOMENTS:
                tensors[name] = change(parts[1], tensors[name])
        return RunState(state.step, tensors, state.state)

    def load_model(self, state: RunState) -> None:
        self.model.flat.write(weights(state.tensors))
        self.passes = int(state.state["passes"])
        if self.loss.parameter:
            self.loss.parameter.load_state(state.state[LOSS_STATE])
        own = ((name.removeprefix(OF_LOSS), x) for name, x in state.tensors.items())
        self.loss.load_tensors({name: x for name, x in own if name in self.loss.tensors()})

    def load(self, state: RunState) -> None:
        """Restores what capture returned, except what is known about spikes."""
        self.load_model(state)
        for name, value in self.optimizer.tensors().items():
            value[...] = state.tensors[f"{MOMENTS}.{name}"]
        self.optimizer.load_state(state.state["optimizer"])
        self.schedule.load_state(state.state["schedule"])
        if self.scaler:
            self.scaler.load_state(state.state["scaler"])
        progress = RunProgress(**state.state["progress"])
        saved = {name: max(0.0, number(value)) for name, value in progress.seconds.items()}
        seconds = {**RunProgress().seconds, **saved}
        self.progress = dataclasses.replace(progress, seconds=seconds)

    def resume(self, state: RunState) -> None:
        """Restores a state and its snapshot. InputError if it belongs to another run."""
        source, here = f"the checkpoint of step {state.step}", self.capture()
        state = self._with_moments(state, self.optimizer.own_part)
        now, good = split_snapshot(state)
        saved_parts = _fixed_parts(now.state)
        for part, value in _fixed_parts(here.state).items():
            if saved_parts[part] != value:
                other = self.loss.differs if part == LOSS else FIXED[part]
                raise InputError(f"{source} was saved with {other}")
        if (precision := saved_precision(state)) not in (Precision.AUTO, self.model.precision):
            raise InputError(
                f"{source} was saved in {precision}, and this run is in {self.model.precision}: "
                f"set precision={precision.value!r}"
            )
        for saved in (now, good or now):
            for name in saved.state.keys() & here.state.keys() - FIXED.keys():
                _check_kind(source, name, saved.state[name], here.state[name])
            if _shapes(saved) != _shapes(here):
                raise InputError(f"{source} was saved with different tensors")
        try:
            self.load(now)
            self.spikes.load_state(now.state["spikes"])
        except KeyError as error:
            raise InputError(f"{source} lacks {error}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{source} cannot be resumed: {error}") from None
        if self.progress.step != state.step:
            raise InputError(f"{source} holds the state of step {self.progress.step}")
        if good:
            tensors = self.capture_model().tensors
            frozen = {name: x for name, x in tensors.items() if not x.flags.writeable}
            self.spikes.keep(dataclasses.replace(good, tensors={**good.tensors, **frozen}))


def saved_precision(state: RunState) -> Precision:
    """-> the precision of the run that was saved; AUTO if the file does not say what that became.

    InputError if this version does not know it.
    """
    saved = state.state.get("precision")
    if saved is None:  # a file of version 0.1.0
        try:
            return from_saved(TrainingConfig, state.state["config"]).requested_precision
        except (KeyError, TypeError, AttributeError, ValueError):
            return Precision.AUTO  # it belongs to no run: `resume` says so
    if saved not in tuple(Precision):
        raise InputError(
            f"the checkpoint of step {state.step} has precision {saved!r}, which this version does "
            "not know"
        )
    return Precision(saved)


def _fixed_parts(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fixed parts of a state, in today's names and with today's fields, as JSON."""
    parts = {part: state.get(part) for part in FIXED}
    parts["model"] = _completed(ModelConfig, parts["model"])
    if isinstance(adapter := parts["adapter"], dict):  # its base may have moved
        parts["adapter"] = {name: value for name, value in adapter.items() if name != "base"}
    parts["config"] = config = _completed(TrainingConfig, parts["config"])
    if isinstance(config, dict):
        # A run may be made longer, but an epoch's order is not that of random windows.
        varies = {"steps": None, "lengths": None, "epochs": bool(config.get("epochs"))}
        parts["config"] = config | varies
    return {part: safetensors.to_json(value) for part, value in parts.items()}


def _completed(kind: type, saved: Any) -> Any:
    """Returns the fields of a config that any version saved, with defaults for those it lacked."""
    try:
        config = from_saved(kind, saved)
    except (TypeError, ValueError):
        return saved  # not a config: it equals none
    variable = (*NEUTRAL, *STORAGE)
    return {k: v for k, v in to_saved(config).items() if k not in variable}


def _check_kind(source: str, name: str, saved: Any, here: Any) -> None:
    """Raises InputError unless a saved value is of the same kind as the one of its name here.

    None, which is not known yet, may be a number.
    """
    if isinstance(here, dict) and isinstance(saved, dict):
        for key in saved.keys() & here.keys():
            _check_kind(source, f"{name}.{key}", saved[key], here[key])
        return
    if here is None or saved is None:
        known = saved if here is None else here
        is_same = known is None or _is_number(known)
    elif _is_number(here):
        is_same = _is_number(saved) and not (isinstance(here, int) and isinstance(saved, float))
    elif isinstance(here, str):  # perhaps an enumeration's
        is_same = isinstance(saved, str)
    elif isinstance(here, list):  # of steps
        is_same = isinstance(saved, list) and all(type(x) is int and _is_number(x) for x in saved)
    else:
        is_same = type(saved) is type(here)
    if not is_same:
        raise InputError(f"{source} has a wrong value for {name}; resume from another checkpoint")


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and 0 <= value < 2**63)


def _shapes(state: RunState) -> dict[str, tuple[int, ...]]:
    return {name: shape_of(tensor) for name, tensor in state.tensors.items()}

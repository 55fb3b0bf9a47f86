"""What a model is and how it is trained: frozen records whose every field checks itself.

The command line's flags, the saved `config.json` and the library's keyword arguments all come from
these fields.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


class InputError(ValueError):
    """Something the user gave that cannot work; its one line says what to do."""


def setting(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its help text and what it may be: low <= value <= high, value < below."""
    limits = {"help": help, "low": low, "high": high, "below": below, "choices": choices}
    return dataclasses.field(default=default, metadata=limits)


def _check(config: Any) -> None:
    """InputError naming field, value and what is allowed, for the first field that is wrong."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata
        if value is None:
            continue
        if limits["choices"] and value not in limits["choices"]:
            raise InputError(
                f"{field.name}={value!r} must be one of {', '.join(limits['choices'])}"
            )
        if field.type in (int, int | None) and (isinstance(value, bool) or int(value) != value):
            raise InputError(f"{field.name}={value!r} must be a whole number")
        low, high, below = limits["low"], limits["high"], limits["below"]
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if (
            not math.isfinite(value)
            or (low is not None and value < low)
            or (high is not None and value > high)
            or (below is not None and value >= below)
        ):
            raise InputError(f"{field.name}={value} must be {_range(low, high, below)}")


def _range(low: float | None, high: float | None, below: float | None) -> str:
    words = []
    if low is not None:
        words.append(f"at least {low}")
    if high is not None:
        words.append(f"at most {high}")
    if below is not None:
        words.append(f"below {below}")
    return " and ".join(words) or "finite"


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 style transformer (Radford et al. 2019)."""

    vocab_size: int = setting(256, "distinct tokens; follows from the text", low=1)
    block_size: int = setting(64, "tokens of context", low=1)
    n_layer: int = setting(4, "transformer blocks", low=1)
    n_head: int = setting(4, "attention heads a block", low=1)
    n_embd: int = setting(128, "channels; a multiple of n_head", low=1)
    dropout: float = setting(0.0, "share of activations dropped in training", low=0.0, below=1.0)
    tie_weights: bool = setting(True, "use the token embedding as output matrix too")
    bias: bool = setting(True, "biases in linear layers and layer norms")

    def __post_init__(self) -> None:
        _check(self)
        if self.n_embd % self.n_head:
            near = max(1, round(self.n_embd / self.n_head)) * self.n_head
            raise InputError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, "
                f"for example {near}"
            )


@dataclass(frozen=True)
class TrainingConfig:
    """How a model learns: length, schedule, optimiser, evaluation."""

    steps: int = setting(2000, "updates of the weights", low=0)
    learning_rate: float = setting(1e-3, "peak learning rate", low=0.0)
    min_lr: float = setting(1e-4, "learning rate at the end of the cosine", low=0.0)
    warmup_steps: int = setting(100, "steps of linear warmup", low=0)
    weight_decay: float = setting(0.1, "AdamW's decay of matrices", low=0.0)
    beta1: float = setting(0.9, "AdamW's memory of gradients", low=0.0, below=1.0)
    beta2: float = setting(0.99, "AdamW's memory of squared gradients", low=0.0, below=1.0)
    max_grad_norm: float = setting(1.0, "clip the gradient to this norm; 0: never", low=0.0)
    grad_accum_steps: int = setting(1, "batches whose gradients make one update", low=1)
    val_every: int = setting(250, "steps between evaluations; 0: none", low=0)
    val_batches: int = setting(20, "batches of an evaluation", low=1)
    log_every: int = setting(10, "steps between records of the loss", low=1)

    def __post_init__(self) -> None:
        _check(self)
        if self.min_lr > self.learning_rate:
            raise InputError(
                f"min_lr={self.min_lr} must be at most learning_rate={self.learning_rate}"
            )


@dataclass(frozen=True)
class RunConfig:
    """What a run reads, draws, computes on and writes."""

    text: str | None = setting(None, "a UTF-8 text file; without it, built-in stories")
    tokenizer: str = setting("char", "what a token is", choices=("char", "byte"))
    batch_size: int = setting(12, "windows of text a batch", low=1)
    seed: int = setting(1337, "of weights, batches, dropout and samples", low=0, below=2**63)
    threads: int | None = setting(None, "threads; default: all cores", low=1)
    backend: str = setting("numba", "kernels: compiled, or plain NumPy", choices=("numba", "numpy"))
    out: str | None = setting(None, "directory of the run; default: runs/<date>-<text>")

    def __post_init__(self) -> None:
        _check(self)

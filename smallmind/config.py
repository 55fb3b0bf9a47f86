"""All settings: frozen dataclasses whose fields check themselves.

The command line's flags, the saved `config.json` and the library's keyword arguments are all made
from these fields.
"""

import dataclasses
import enum
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smallmind import parts

__version__ = "0.2.0"
FORMAT = 1  # of config.json


class InputError(ValueError):
    """Invalid input from the user; the message is one line that says what to do."""


class Precision(enum.StrEnum):
    """How weights and activations are stored while a model runs; sums are always float32."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    AUTO = "auto"  # bfloat16 if the CPU has instructions for it, else float32


class CheckpointStrategy(enum.StrEnum):
    """Which activations are kept for the backward pass; the others are recomputed."""

    NONE = "none"  # keep all
    EVERY_LAYER = "every_layer"  # keep the input of every block
    SQRT_LAYERS = "sqrt_layers"  # keep the inputs of √n_layer blocks
    CUSTOM = "custom"  # keep the input of every checkpoint_interval-th block


def segment_length(strategy: str, n_layer: int, interval: int) -> int:
    """-> the number of blocks per segment, which keeps only its input; n_layer: no recompute."""
    if strategy == CheckpointStrategy.EVERY_LAYER:
        return 1
    if strategy == CheckpointStrategy.SQRT_LAYERS:
        return max(1, round(math.sqrt(n_layer)))
    return interval if strategy == CheckpointStrategy.CUSTOM else n_layer


def setting(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    before: Any = dataclasses.MISSING,
) -> Any:
    """A field with its help text and allowed values.

    low <= value <= high, above < value < below, or one of choices. None is allowed where it is the
    default. `before` is what a file means that lacks the field; give it when the default changes.
    Whole numbers are always below 2**63, and those that a model's size or a loop depends on have a
    `high`: a file from anywhere must not make a command endless.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    before = default if before is dataclasses.MISSING else before
    metadata = {"help": help, "limits": limits, "choices": choices, "before": before}
    return dataclasses.field(default=default, metadata=metadata)


MAX_LAYERS = 1024
MAX_BATCH = 2**16
SCHEDULES = tuple(parts.SCHEDULES)

COMPARISONS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """value as a plain Python number, string or bool for this field.

    InputError naming the field, the value and what is allowed, if the value is not.
    """
    if value is None and field.default is None:
        return None
    shown, choices = f"{field.name}={_shown(value)}", field.metadata["choices"]
    if choices and not (isinstance(value, str) and value in choices):
        raise InputError(f"{shown} must be one of {', '.join(choices)}")
    if field.type is bool and not isinstance(value, bool):
        raise InputError(f"{shown} must be true or false")
    if field.type in (str, str | None) and not isinstance(value, str):
        raise InputError(f"{shown} must be text in quotes")
    if isinstance(value, str) and not _is_unicode(value):
        raise InputError(f"{shown} is not valid UTF-8; rename it")
    if field.type not in (int, int | None, float, float | None):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{shown} must be a number")
    if field.type in (int, int | None) and not isinstance(value, numbers.Integral):
        raise InputError(f"{shown} must be a whole number")
    limits = field.metadata["limits"]
    if field.type in (int, int | None) and limits["high"] is None and limits["below"] is None:
        limits = {**limits, "below": 2**63}
    rules = [(*COMPARISONS[name], limits[name]) for name in COMPARISONS if limits[name] is not None]
    is_finite = field.type in (int, int | None) or _is_finite(value)
    if not is_finite or not all(holds(value, limit) for _, holds, limit in rules):
        words = [f"{word} {_number(limit)}" for word, _, limit in rules]
        if not is_finite and limits["high"] is None and limits["below"] is None:
            words.insert(0, "finite")
        raise InputError(f"{shown} must be {' and '.join(words)}")
    # JSON cannot hold NumPy's numbers.
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number of more than 308 digits
        return False


def _is_unicode(text: str) -> bool:
    """False for bytes of a file name or command line that are not UTF-8: lone surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _shown(value: Any) -> str:
    """A value in a message: what comes from a file may be of any size."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"(a number of about {round(value.bit_length() * math.log10(2))} digits)"
    return repr(value) if isinstance(value, str | numbers.Number) else reprlib.repr(value)


def check_type(name: str, value: Any, *kinds: type | None) -> Any:
    """value, if it is of one of these types, of which None is one. TypeError naming it otherwise.

    True and False are no numbers.
    """
    types = tuple(type(None) if kind is None else kind for kind in kinds)
    if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
        return value
    wanted = " or ".join(_type_name(kind) for kind in kinds)
    shown = repr(value) if isinstance(value, int | float | str | None) else "an object"
    shown = f"{shown[:37]}..." if len(shown) > 40 else shown
    raise TypeError(f"{name} must be {wanted}, not {shown} of type {type(value).__name__}")


def _type_name(kind: type | None) -> str:
    names: dict[Any, str] = {
        None: "None",
        numbers.Real: "a number",
        numbers.Integral: "a whole number",
    }
    return names.get(kind) or str(getattr(kind, "__name__", kind))


def _number(limit: float) -> str:
    """1.0 -> '1', 0.5 -> '0.5', 2**63 -> all its digits."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def check_field(config: type, name: str, value: Any) -> Any:
    """value as `check` returns it for the field with this name."""
    return check(next(f for f in dataclasses.fields(config) if f.name == name), value)


def _check(config: Any) -> None:
    """Checks and normalises every field; InputError for the first invalid one."""
    for field in dataclasses.fields(config):
        value = check(field, getattr(config, field.name))
        object.__setattr__(config, field.name, value)


@dataclass(frozen=True)
class ModelConfig:
    """A GPT-2 style transformer (Radford et al. 2019)."""

    vocab_size: int = setting(256, "distinct tokens; follows from the text", low=1, high=2**24)
    block_size: int = setting(64, "tokens of context", low=1, high=2**20)
    n_layer: int = setting(4, "transformer blocks", low=1, high=MAX_LAYERS)
    n_head: int = setting(4, "attention heads per block", low=1, high=2**16)
    n_embd: int = setting(128, "channels; a multiple of n_head", low=1, high=2**16)
    dropout: float = setting(0.0, "share of activations to drop in training", low=0.0, below=1.0)
    tie_weights: bool = setting(True, "use the token embedding as output matrix too")
    bias: bool = setting(True, "biases in linear layers and layer norms")
    norm: str = setting("layernorm", "norm before each layer", choices=tuple(parts.NORMS))
    mlp: str = setting("gelu", "perceptron of a block", choices=tuple(parts.MLPS))
    positions: str = setting("learned", "how positions enter", choices=tuple(parts.POSITIONS))

    def __post_init__(self) -> None:
        _check(self)
        if self.n_embd % self.n_head:
            near = max(1, round(self.n_embd / self.n_head)) * self.n_head
            raise InputError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, "
                f"for example {near}"
            )


def micro_batch_sizes(windows: int, tokens: int, max_windows: int | None) -> list[int]:
    """windows in a batch, tokens per window -> the sizes of its micro-batches, nearly equal.

    At most max_windows windows each; by default 2048 tokens, beyond which nothing gets faster.
    """
    count = math.ceil(windows / (max_windows or max(1, 2048 // tokens)))
    return [windows * (i + 1) // count - windows * i // count for i in range(count)]


# Fields of TrainingConfig that observe a run without changing what it learns.
OBSERVING = ("enable_diagnostics", "check_gradient_health", "diagnostic_interval", "detect_anomaly")


@dataclass(frozen=True)
class TrainingConfig:
    """How a model learns: length, schedule, optimizer, evaluation."""

    steps: int = setting(2000, "number of weight updates", low=0)
    epochs: int = setting(
        0, "passes over the training text, each window once, instead of --steps", low=0
    )
    learning_rate: float = setting(1e-3, "peak learning rate", low=0.0)
    min_lr: float | None = setting(
        None, "learning rate at the end of the decay; default: a tenth of the peak", low=0.0
    )
    warmup_steps: int = setting(
        100, "steps of linear warmup; one-cycle always takes a tenth of all steps", low=0
    )
    schedule: str = setting("cosine", "learning rate after the warmup", choices=SCHEDULES)
    lr_decay_factor: float = setting(
        0.5, "factor that step and plateau multiply the learning rate by", above=0.0, below=1.0
    )
    lr_decay_every: int = setting(500, "steps between decays, for the schedule step", low=1)
    lr_decay_share: float = setting(
        0.1, "share of the steps, at the end, in which wsd decays", low=0.0, high=1.0
    )
    plateau_patience: int = setting(
        3, "evaluations without a lower loss before plateau decays", low=1
    )
    optimizer: str = setting("adamw", "update rule", choices=tuple(parts.OPTIMIZERS))
    weight_decay: float = setting(0.1, "AdamW's weight decay, of matrices only", low=0.0)
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient", low=0.0, below=1.0)
    beta2: float = setting(0.99, "AdamW's decay of the mean squared gradient", low=0.0, below=1.0)
    max_grad_norm: float = setting(1.0, "clip the gradient to this norm; 0: never", low=0.0)
    max_grad_value: float = setting(
        0.0, "then clip each element of the gradient to this; 0: never", low=0.0
    )
    grad_accum_steps: int = setting(1, "batches per update, whose gradients are averaged", low=1)
    val_every: int = setting(250, "steps between evaluations; 0: none", low=0)
    val_batches: int = setting(20, "batches per evaluation; 0: all held-out text", low=0)
    save_every: int = setting(250, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = setting(3, "newest checkpoints to keep, besides the best", low=1)
    early_stopping_patience: int = setting(
        0, "evaluations without a lower loss before the run ends early; 0: never", low=0
    )
    early_stopping_min_delta: float = setting(
        0.0, "nats by which a loss must be below the best to count as lower", low=0.0
    )
    max_rollbacks: int = setting(
        3, "times a run rolls back after a loss spike before it gives up; 0: never", low=0
    )
    log_every: int = setting(10, "steps between records of the loss", low=1)
    use_mixed_precision: bool = setting(False, "same as --precision float16")
    precision: str | None = setting(
        None, "storage of weights and activations; default: float32", choices=tuple(Precision)
    )
    micro_batch_size: int | None = setting(
        None, "windows in memory at once; default: 2048 tokens' worth", low=1
    )
    enable_diagnostics: bool = setting(False, "report at the end where time and memory went")
    check_gradient_health: bool = setting(
        False, "check gradients, updates and hidden units for problems"
    )
    diagnostic_interval: int = setting(100, "steps between health checks", low=1)
    detect_anomaly: bool = setting(
        False, "stop at the first NaN or Inf and name its layer; makes steps slower"
    )
    use_gradient_checkpointing: bool = setting(
        False, "keep fewer activations and recompute them in the backward pass"
    )
    checkpoint_strategy: str | None = setting(
        None,
        "which activations to keep in that case; default: sqrt_layers",
        choices=tuple(CheckpointStrategy),
    )
    checkpoint_interval: int = setting(3, "blocks per segment, with the strategy custom", low=1)

    def __post_init__(self) -> None:
        _check(self)
        if self.resolved_min_lr > self.learning_rate:
            raise InputError(
                f"min_lr={self.min_lr} must be at most learning_rate={self.learning_rate}; "
                "lower it, or leave it out for a tenth of learning_rate"
            )
        if self.schedule == "exponential" and self.resolved_min_lr == 0:
            raise InputError(
                f"min_lr={self.resolved_min_lr} must be above 0 with schedule='exponential', which "
                "never reaches 0; 'linear' and 'cosine' do"
            )
        if self.schedule == "plateau" and self.val_every == 0:
            raise InputError(
                "val_every=0 must be at least 1 with schedule='plateau', which depends on "
                "evaluations"
            )
        if self.use_mixed_precision and self.precision not in (None, Precision.FLOAT16):
            raise InputError(
                f"precision={self.precision!r} contradicts use_mixed_precision=True, which means "
                "float16; leave one of them out"
            )

    @property
    def resolved_min_lr(self) -> float:
        """min_lr, or a tenth of learning_rate if it is None."""
        return self.learning_rate / 10 if self.min_lr is None else self.min_lr

    def with_min_lr(self) -> "TrainingConfig":
        """The same config with min_lr as a number, as it is saved with a run."""
        return dataclasses.replace(self, min_lr=self.resolved_min_lr)

    @property
    def requested_precision(self) -> Precision:
        """The precision that use_mixed_precision and precision together ask for."""
        default = Precision.FLOAT16 if self.use_mixed_precision else Precision.FLOAT32
        return Precision(self.precision or default)

    @property
    def recompute(self) -> CheckpointStrategy:
        """The strategy that use_gradient_checkpointing and checkpoint_strategy together ask for."""
        if not self.use_gradient_checkpointing:
            return CheckpointStrategy.NONE
        return CheckpointStrategy(self.checkpoint_strategy or CheckpointStrategy.SQRT_LAYERS)


@dataclass(frozen=True)
class RunConfig:
    """The run: text, batches, seed, machine, directory."""

    text: str | None = setting(None, "a UTF-8 text file; without it, built-in stories")
    init_from: str | None = setting(
        None, "a run, checkpoint or model file: start from its weights, with its tokenizer"
    )
    tokenizer: str = setting("char", "what a token is", choices=tuple(parts.TOKENIZERS))
    batch_size: int = setting(12, "windows of text per batch", low=1, high=MAX_BATCH)
    seed: int = setting(
        1337, "random seed for weights, batches, dropout and samples", low=0, below=2**63
    )
    minutes: float | None = setting(
        None, "train for about N minutes; the number of steps is chosen by timing a few", above=0.0
    )
    threads: int | None = setting(None, "threads; default: one per core", low=1)
    backend: str = setting("numba", "compiled kernels or plain NumPy", choices=("numba", "numpy"))
    out: str | None = setting(None, "directory of the run; default: runs/<date>-<text>")

    def __post_init__(self) -> None:
        _check(self)


LEARNT_TEMPERATURES = (1.0, 10.0)  # the range of a learned temperature


@dataclass(frozen=True)
class DistillationConfig:
    """How a student learns from a teacher (Hinton et al. 2015)."""

    teacher: str | None = setting(None, "a run or a model file with the same vocabulary")
    temperature: float = setting(
        2.0, "divides the logits of teacher and student", low=0.1, high=100.0
    )
    alpha: float = setting(
        0.5, "weight of the teacher in the loss; the rest is the text's", low=0.0, high=1.0
    )
    learn_temperature: bool = setting(False, "learn the temperature too, between 1 and 10")
    teacher_cache: str | None = setting(
        None, "file of the teacher's logits, read instead of running it; created if missing"
    )
    teacher_top_k: int = setting(16, "logits per token kept in the cache", low=1)

    def __post_init__(self) -> None:
        _check(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if self.teacher is None and value != field.default:
                raise InputError(f"{field.name}={value!r} needs a teacher")
        low, high = LEARNT_TEMPERATURES
        if self.learn_temperature and not low < self.temperature < high:
            raise InputError(
                f"temperature={self.temperature} must be above {low:g} and below {high:g} "
                "with learn_temperature"
            )


@dataclass(frozen=True)
class GenerationConfig:
    """How text is sampled from a model."""

    max_tokens: int = setting(500, "tokens to write", low=0)
    temperature: float = setting(
        0.8, "divides the logits; 0: always the most likely token", low=0.0
    )
    top_k: int | None = setting(None, "sample from the k most likely tokens only", low=1)
    top_p: float | None = setting(
        None,
        "sample from the fewest tokens whose probabilities add up to p",
        above=0.0,
        high=1.0,
    )
    seed: int = setting(1337, "random seed; the same seed gives the same text", low=0, below=2**63)

    def __post_init__(self) -> None:
        _check(self)


# Fields that earlier versions wrote under another name: old name -> current name.
RENAMED = {"windows_at_once": "micro_batch_size"}


def current_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by name, as any version wrote them -> the same fields under their current names."""
    return {RENAMED.get(name, name): value for name, value in fields.items()}


def from_saved(kind: Any, saved: Mapping[str, Any]) -> Any:
    """The fields of a config of this kind, as any version wrote them -> the config.

    TypeError or ValueError where they are something else.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"{_shown(saved)} is not a JSON object")
    before = {field.name: field.metadata["before"] for field in dataclasses.fields(kind)}
    return kind(**{**before, **current_names(saved)})


def check_format(saved: Mapping[str, Any]) -> None:
    """InputError if a newer version wrote this config. Version 0.1.0 wrote no format number."""
    number = saved.get("format", FORMAT)
    if not isinstance(number, int) or number > FORMAT:
        raise InputError(
            f"a newer smallmind wrote it, in format {number!r}; this version reads formats up to "
            f"{FORMAT}: upgrade smallmind"
        )


@dataclass(frozen=True)
class Settings:
    """Everything that describes a run: the model, its training, the run itself, a teacher."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    run: RunConfig = RunConfig()
    distillation: DistillationConfig = DistillationConfig()

    def __post_init__(self) -> None:
        for name, kind in SECTIONS.items():
            check_type(name, getattr(self, name), kind)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Settings":
        """Fields of the four configs by name -> settings. No two configs share a field name.

        InputError for an unknown name or the first value that is out of range.
        """
        check_type("fields", fields, Mapping)
        _check_names(fields)
        return cls(**{name: kind(**_own(kind, fields)) for name, kind in SECTIONS.items()})

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Settings":
        """The settings that `to_dict` of this or an earlier version returned.

        Missing sections and fields take the values that versions without them used.
        InputError where a newer version wrote it; KeyError, TypeError or ValueError where it is
        something else.
        """
        check_type("saved", saved, Mapping)
        check_format(saved)
        return cls(
            **{name: from_saved(kind, saved.get(name, {})) for name, kind in SECTIONS.items()}
        )

    def to_dict(self) -> dict[str, Any]:
        """The format number, and section -> field -> value, JSON-able."""
        return {"format": FORMAT} | {
            name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS
        }

    def replace(self, **fields: Any) -> "Settings":
        """The same settings with other values for these fields, whichever config has them.

        InputError for an unknown name or a value out of range.
        """
        _check_names(fields)
        return Settings(
            **{
                name: dataclasses.replace(config, **_own(type(config), fields))
                for name in SECTIONS
                for config in [getattr(self, name)]
            }
        )


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "run": RunConfig,
    "distillation": DistillationConfig,
}


def _own(kind: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a config of this kind has."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _check_names(fields: Mapping[str, Any]) -> None:
    """InputError for a name that no config has, suggesting the most similar one."""
    known = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            import difflib  # takes milliseconds to import

            (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise InputError(f"unknown setting {name!r}; did you mean {nearest}?")

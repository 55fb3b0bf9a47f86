"""All settings: frozen dataclasses whose fields check themselves (`checks`).

The command line's flags, the saved `config.json` and the library's keyword arguments are all made
from these fields.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smallmind import parts
from smallmind.checks import InputError, check, check_all, setting, shown_value, suggesting
from smallmind.settings.architectures import PUBLISHED, UNPUBLISHED, Architecture

__version__ = "0.2.0"


class Precision(enum.StrEnum):
    """Number formats of weights and activations while a model runs; sums are always float32.

    Those of blocks are for weights that are not trained; everything else is float32 then.
    """

    FLOAT32 = parts.NUMBER_TYPES["f32"].precision
    FLOAT16 = parts.NUMBER_TYPES["f16"].precision
    BFLOAT16 = parts.NUMBER_TYPES["bf16"].precision
    AUTO = "auto"  # bfloat16 if the CPU multiplies it faster, else float32
    # Blocks of integers with a scale, as in llama.cpp: Q8_0 and others.
    locals().update({name.upper(): name for name in parts.QUANTISED})

    @property
    def has_blocks(self) -> bool:
        """True for blocks of integers."""
        return self in parts.QUANTISED

    @property
    def has_16_bits(self) -> bool:
        """True for numbers of 16 bits."""
        return self != Precision.AUTO and parts.PRECISIONS[self].nbytes == 2

    @property
    def of_trained(self) -> "Precision":
        """The precision of what is trained, and of activations."""
        return Precision.FLOAT32 if self.has_blocks else self


OF_BLOCKS = (  # the purpose of a precision that has them
    "only for frozen weights: to run a model, as in smallmind.load(path, precision='q8_0'), or "
    "with --lora-rank or --freeze; use float32 or bfloat16 to train all weights"
)


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


MAX_LAYERS = 1024
MAX_RANK = 1024  # of an adapter
SHARD_TOKENS = 100_000_000  # in a file: 200 MB, or 400 MB if the vocabulary is large
MAX_BATCH = 2**16
MAX_SHARDS = 2**10
MAX_SCALING = 2.0**40  # of rope frequencies: any of the numbers that describe it
MAX_WIDTH = 2**18  # hidden channels of a perceptron; channels of all heads of a block
SCHEDULES = tuple(parts.SCHEDULES)
OWN_WARMUP = ("schedule", *(name for name in SCHEDULES if name != "one-cycle"))


@suggesting()
@dataclass(frozen=True)
class ModelConfig:
    """The layers of a transformer. Without any other setting they are those of GPT-2.

    Radford et al. (2019). The command line and `Run.create` take theirs from a recipe instead: by
    default the parts of Qwen3.
    """

    vocab_size: int = setting(256, "distinct tokens; set from the text", low=1, high=2**24)
    block_size: int = setting(64, "tokens of context", low=1, high=2**20)
    n_layer: int = setting(4, "transformer blocks", low=1, high=MAX_LAYERS)
    n_head: int = setting(4, "attention heads per block", low=1, high=2**16)
    n_embd: int = setting(
        128, "channels; a multiple of n_head unless head_size is set", low=1, high=2**16
    )
    dropout: float = setting(0.0, "fraction of activations to drop in training", low=0.0, below=1.0)
    tie_weights: bool = setting(True, "use the token embedding as the output matrix too")
    bias: bool = setting(True, "biases in linear layers and layer norms")
    norm: str = setting("layernorm", "norm before each layer", choices=parts.NORMS)
    norm_epsilon: float = setting(
        1e-5, "epsilon added to the variance inside norms", low=1e-12, high=0.1
    )
    mlp: str = setting("gelu", "activation of the MLPs", choices=parts.MLPS)
    mlp_width: int | None = setting(
        None,
        "hidden channels of an MLP; default: 4 n_embd, with swiglu or geglu 8/3 n_embd rounded up "
        "to a multiple of 32",
        low=1,
        high=MAX_WIDTH,
    )
    position: str = setting(
        "learned",
        "position encoding: a learned embedding, rotated queries and keys, or none",
        choices=parts.POSITIONS,
    )
    rope_theta: float = setting(
        1e4, "base of the rope wavelengths", above=1.0, high=1e30, needs=("position", "rope")
    )
    head_size: int | None = setting(
        None, "channels per head; default: n_embd / n_head", low=1, high=2**16
    )
    n_kv_head: int | None = setting(
        None, "key/value heads; must divide n_head; default: n_head", low=1
    )
    qk_norm: bool = setting(False, "normalise queries and keys, head by head")
    value_residual: bool = setting(False, "mix the first block's values into those of each block")
    x0_scalars: bool = setting(False, "mix the embedding into the input of each block")
    bigram_rows: int = setting(
        0,
        "rows in an embedding of token pairs, hashed if there are more pairs; 0: none",
        low=0,
        high=2**24,
    )
    bigram_vocab: int | None = setting(
        None,
        "tokens by which pairs are numbered: those of the model whose vocabulary has grown since",
        low=1,
        high=2**24,
    )
    zero_init: bool = setting(False, "initialise projections into the residual stream to zero")
    logit_softcap: float = setting(
        0.0, "cap logits smoothly at +-X, with tanh; 0: no cap", low=0.0, high=1e3
    )
    document_token: int | None = setting(
        None,
        "id of the token that starts each document; attention stops there. Set from the text",
        low=0,
        high=2**24 - 1,
    )
    # An architecture may choose parts from other tables of `parts.LAYERS`, and set what these read.
    # A mapping, kept as pairs; files lack it if it is empty.
    part_settings: tuple[tuple[str, Any], ...] = setting(
        (), "settings of parts that an architecture brings, by name"
    )

    def __post_init__(self) -> None:
        check_all(self)
        object.__setattr__(self, "part_settings", _checked(_pairs(self.part_settings)))
        if self.head_size is None and self.n_embd % self.n_head:
            raise InputError(
                f"n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, "
                f"for example {self.divisible_n_embd}, unless head_size is set"
            )
        if self.n_head * self.head_channels > MAX_WIDTH:
            raise InputError(
                f"head_size={self.head_size} must be at most {MAX_WIDTH // self.n_head} with "
                f"n_head={self.n_head}"
            )
        if self.document_token is not None and self.document_token >= self.vocab_size:
            raise InputError(
                f"document_token={self.document_token} must be below vocab_size={self.vocab_size}"
            )
        if 0 < self.logit_softcap < 0.01:
            raise InputError(f"logit_softcap={self.logit_softcap} must be 0 or at least 0.01")
        if self.n_head % self.kv_heads:
            divisors = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.kv_heads))
            raise InputError(
                f"n_kv_head={self.n_kv_head} must be a divisor of n_head={self.n_head}, "
                f"for example {nearest}"
            )

    @property
    def head_channels(self) -> int:
        return self.head_size or self.n_embd // self.n_head

    @property
    def divisible_n_embd(self) -> int:
        """The multiple of n_head that is nearest to n_embd."""
        return max(1, round(self.n_embd / self.n_head)) * self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def rotary_channels(self) -> int:
        """How many of the channels of a head rope rotates: the first ones, in pairs."""
        D, share = self.head_channels, self.part_setting("rotary_share")
        return D if share is None else int(round(D * share, 6))  # 0.29 * 100 is below 29

    @property
    def hidden_size(self) -> int:
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp in ("swiglu", "geglu"):
            return math.ceil(8 * self.n_embd / 3 / 32) * 32
        return 4 * self.n_embd

    @classmethod
    def with_parts(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Builds a config from fields and, by names that no field has, `part_settings`."""
        fields = {field.name for field in dataclasses.fields(cls)}
        chosen = {name: value for name, value in values.items() if name in fields}
        others = [(name, x) for name, x in values.items() if name not in fields and x is not None]
        chosen["part_settings"] = (*chosen.get("part_settings", ()), *others)
        return cls(**chosen)

    def having_parts(self, **settings: Any) -> "ModelConfig":
        """Returns a copy with these part settings, without those that are None."""
        kept = {**dict(self.part_settings), **settings}
        pairs = tuple((name, value) for name, value in kept.items() if value is not None)
        return dataclasses.replace(self, part_settings=pairs)

    def part(self, slot: str) -> str:
        """Returns the name of a part in its table, such as "rmsnorm" for the slot "norm"."""
        usual = next(iter(parts.LAYERS[slot]))
        return str(getattr(self, slot, None) or self.part_setting(slot) or usual)

    def part_setting(self, name: str) -> Any:
        """Returns one of `part_settings`, or its default."""
        return dict(self.part_settings).get(name, getattr(_PartSettings, name, None))

    def of_block(self, name: str, number: int) -> Any:
        """Returns one of `part_settings` that differs by block, its values taken in turn."""
        values = self.part_setting(name)
        return values[number % len(values)]

    def window_of(self, number: int) -> int | None:
        """Returns how many of the last tokens are seen in a block; None: all."""
        return self.part_setting("window") if self.of_block("window_layers", number) else None

    def values(self) -> dict[str, Any]:
        """-> the fields by name, with what follows from them, as files of other programs say it."""
        fields = {name: value for name, value in vars(self).items() if name != "part_settings"}
        follows = {"n_kv_head": self.kv_heads, "head_size": self.head_channels}
        follows |= {"hidden_size": self.hidden_size, "rotary_channels": self.rotary_channels}
        settings = {field.name: field.default for field in dataclasses.fields(_PartSettings)}
        settings |= self.part_defaults | dict(self.part_settings)
        has_window = settings["window"] is not None
        if not has_window:
            settings["window_layers"] = (0,)
        return {**fields, **follows, **settings, "has_window": has_window}

    @property
    def part_defaults(self) -> dict[str, Any]:
        """The part settings that are None, and follow from the fields then."""
        return {
            "qkv_bias": self.bias,
            "rotary_share": 1.0,
            "score_divisor": self.head_channels,
            "window_theta": self.rope_theta,
        }

    def changes_to(self, published: Architecture) -> dict[str, Any]:
        """Returns the changes that would make this a model of a published architecture."""
        # Transformers refuses any other width of a Llama, whatever the size of its heads.
        needed = {**UNPUBLISHED, **published.parts, "n_embd": self.divisible_n_embd}
        whole = {"n_kv_head": self.n_head, "head_size": self.divisible_n_embd // self.n_head}
        needed |= {name: x for name, x in whole.items() if name not in published.config.keys}
        unknown = dict(self.part_settings).keys() - published.config.keys.keys()
        needed = {**dict.fromkeys(sorted(unknown)), **needed}
        values = self.values()
        return {name: value for name, value in needed.items() if values.get(name) != value}

    @property
    def fuses_matrices(self) -> bool:
        """True if other programs keep queries, keys and values in one matrix, as for GPT-2."""
        nearest = min(PUBLISHED, key=lambda published: len(self.changes_to(published)))
        return isinstance(nearest.tensors.names["blocks.{}.attention.qkv"], str)

    @property
    def architecture(self) -> str | None:
        """The name of the published architecture that this is; None if it is none of them."""
        for published in PUBLISHED:
            if self.bias == published.fields["bias"] and not self.changes_to(published):
                is_odd = published.rotates and self.head_channels % 2
                return None if is_odd else published.name
        return None


@dataclass(frozen=True)
class _PartSettings:
    """The names that parts read in `part_settings`, checked as the fields of a config are.

    Blocks that have something are a list of 1 and 0 for block after block, repeated to the last.
    """

    qkv_bias: bool | None = setting(None, "biases of queries, keys and values; default: bias")
    score_divisor: float | None = setting(
        None, "scores are divided by its square root; default: head_size", above=0.0, high=1e6
    )
    window: int | None = setting(None, "tokens that a query sees; default: all", low=1, high=2**30)
    window_layers: tuple[int, ...] = setting((1,), "blocks that have the window")
    window_theta: float | None = setting(
        None,
        "base of the rope wavelengths in blocks with a window; default: rope_theta",
        above=1.0,
        high=1e30,
    )
    rotary_layers: tuple[int, ...] = setting((1,), "blocks whose queries and keys are rotated")
    rotary_share: float | None = setting(
        None, "share of a head's channels that rotate, the first; default: all", above=0.0, high=1.0
    )
    rope_scaling: tuple[Any, ...] | None = setting(
        None, "how rope frequencies are scaled: linear and a factor, or llama3 and four numbers"
    )
    parallel_residual: bool = setting(True, "parallel branches, in blocks that have them")


def _checked(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Returns the part settings, those of `_PartSettings` checked, lists by block not repeated."""
    known = {field.name: field for field in dataclasses.fields(_PartSettings)}
    found = {name: check(known[name], x) if name in known else x for name, x in pairs}
    for name in found.keys() & {"window_layers", "rotary_layers"}:
        values = found[name]
        is_list = isinstance(values, tuple) and 0 < len(values) <= MAX_LAYERS
        if not is_list or any(type(x) is not int or x not in (0, 1) for x in values):
            raise InputError(f"{name}={shown_value(values)} must be a list of 0 and 1, by layer")
        count = len(values)
        repeated = (values[:n] for n in range(1, count + 1) if values[:n] * (count // n) == values)
        found[name] = next(repeated)
    numbers: tuple[Any, ...] = ("",)
    match found.get("rope_scaling"):
        case None:
            numbers = ()
        case ("linear", factor):
            numbers = (factor,)
        case ("llama3", factor, low, high, context):
            numbers = factor, low, high, context
    are_numbers = all(type(x) in (int, float) and 0 < x < MAX_SCALING for x in numbers)
    if not are_numbers or (len(numbers) > 1 and numbers[1] >= numbers[2]):
        raise InputError(
            f"rope_scaling={shown_value(found['rope_scaling'])} must be linear and a factor, or "
            "llama3, a factor, a low and a higher frequency factor, and a number of tokens"
        )
    return tuple(sorted(found.items()))


def _pairs(values: Any) -> tuple[tuple[str, Any], ...]:
    """A mapping, or pairs as a file has them -> pairs in the order of their names, hashable."""
    try:
        pairs = dict(values)
        known = {name: tuple(x) if isinstance(x, list) else x for name, x in pairs.items()}
        hash(tuple(known.values()))
        if not all(isinstance(name, str) and name.isidentifier() for name in known):
            raise ValueError("a name is not one")
        return tuple(sorted(known.items()))
    except (TypeError, ValueError):
        raise InputError(
            f"part_settings={shown_value(values)} needs a number, a word or a list for each name"
        ) from None


def micro_batch_sizes(windows: int, tokens: int, max_windows: int | None) -> list[int]:
    """windows in a batch, tokens per window -> the sizes of its micro-batches, nearly equal.

    At most max_windows windows each; by default 2048 tokens, beyond which nothing gets faster.
    """
    count = math.ceil(windows / (max_windows or max(1, 2048 // tokens)))
    return [windows * (i + 1) // count - windows * i // count for i in range(count)]


class Adapter(NamedTuple):
    """LoRA (Hu et al. 2021): each matrix W of some parts becomes W + alpha / rank A B.

    A (in, rank) and B (rank, out) are trained, and nothing else is.
    """

    rank: int
    alpha: float
    dropout: float = 0.0  # of what A multiplies
    on: tuple[str, ...] = ("attention", "mlp")  # parts of the model, of ADAPTED

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / self.rank

    @classmethod
    def from_saved(cls, saved: Any) -> "Adapter":
        """-> the adapter whose fields a file holds. An error of some kind if it holds others."""
        adapter = cls(saved["rank"], float(saved["alpha"]), saved["dropout"], tuple(saved["on"]))
        if TrainingConfig(**adapter.settings).adapter != adapter:  # InputError for most of it
            raise ValueError("its rank is 0, or its parts are in another order")
        return adapter

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of TrainingConfig that describe it."""
        return {
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "lora_on": ",".join(self.on),
        }


ADAPTED = ("attention", "mlp", "head")


# Settings that do not change what a run learns: a resumed run may have others.
NEUTRAL = (
    "adapt_threads",
    "tensorboard",
    "prefetch",
    "sample_every",
    "compress",
    "enable_diagnostics",
    "check_gradient_health",
    "diagnostic_interval",
    "detect_anomaly",
    "shard_optimizer",
    "allow_mixed_cpus",
    "rank_timeout",
)
PREFETCH = 2  # batches, for data on a disk: one may be slow, the next is there already


@suggesting()
@dataclass(frozen=True)
class TrainingConfig:
    """Training: length, schedule, optimizer, evaluation."""

    steps: int = setting(2000, "number of weight updates", low=0)
    epochs: int = setting(
        0, "passes over the training text, each window once, instead of --steps", low=0
    )
    sampling: str = setting(
        "random",
        "windows of a batch: any of the text, or each one once in a pass over it",
        choices=("random", "shuffled"),
        needs=("epochs", 0),
    )
    lengths: str | None = setting(
        None,
        "planned lengths of a run with --minutes, as STEP:STEPS separated by commas; set by the "
        "run",
    )
    learning_rate: float = setting(1e-3, "peak learning rate", low=0.0)
    min_lr: float | None = setting(
        None,
        "learning rate at the end of the decay; default: a tenth of the peak",
        low=0.0,
        needs=("schedule", *(name for name in SCHEDULES if name != "constant")),
    )
    warmup_steps: int = setting(
        100,
        "steps of linear warmup; one-cycle always takes a tenth of all steps",
        low=0,
        needs=OWN_WARMUP,
    )
    warmup_share: float | None = setting(
        None,
        "warmup as a fraction of the steps, instead of --warmup-steps",
        low=0.0,
        high=1.0,
        needs=OWN_WARMUP,
    )
    warmup_epochs: float | None = setting(
        None,
        "warmup in passes over the training text, instead of --warmup-steps",
        low=0.0,
        needs=OWN_WARMUP,
    )
    schedule: str = setting("cosine", "learning rate after the warmup", choices=SCHEDULES)
    lr_decay_factor: float = setting(
        0.5,
        "factor of each decay, for the schedules step and plateau",
        above=0.0,
        below=1.0,
        needs=("schedule", "step", "plateau"),
    )
    lr_decay_every: int = setting(
        500, "steps between decays, for the schedule step", low=1, needs=("schedule", "step")
    )
    lr_decay_share: float = setting(
        0.1,
        "fraction of the steps, at the end, over which wsd decays",
        low=0.0,
        high=1.0,
        needs=("schedule", "wsd"),
    )
    plateau_patience: int = setting(
        3,
        "evaluations without a lower loss before plateau decays",
        low=1,
        needs=("schedule", "plateau"),
    )
    optimizer: str = setting("adamw", "update rule", choices=parts.OPTIMIZERS)
    matrix_learning_rate: float = setting(
        0.02,
        "Muon's peak learning rate for hidden matrices, on the same schedule",
        low=0.0,
        needs=("optimizer", "muon"),
    )
    momentum: float = setting(
        0.95, "Muon's decay of the mean gradient", low=0.0, below=1.0, needs=("optimizer", "muon")
    )
    momentum_warmup_steps: int = setting(
        300,
        "steps over which Muon's momentum rises from 0.85 to --momentum",
        low=0,
        needs=("optimizer", "muon"),
    )
    freeze: str | None = setting(
        None,
        "parts to freeze, separated by commas: embedding, blocks.N, blocks.N-M, final_norm, head; "
        "with tied weights, embedding includes the head",
        metavar="PARTS",
    )
    lora_rank: int = setting(
        0,
        "train an adapter of this rank, such as 8 or 16, beside the frozen model of --init-from "
        "(LoRA); 0: train the model",
        low=0,
        high=MAX_RANK,
    )
    lora_alpha: float | None = setting(
        None, "scale adapters by X / rank; default: twice the rank", above=0.0
    )
    lora_dropout: float = setting(
        0.0, "fraction of an adapter's inputs to drop in training", low=0.0, below=1.0
    )
    lora_on: str = setting(
        "attention,mlp",
        f"parts with an adapter, separated by commas: {', '.join(ADAPTED)}",
        metavar="PARTS",
    )
    weight_decay: float = setting(0.1, "decoupled weight decay, of matrices only", low=0.0)
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient", low=0.0, below=1.0)
    beta2: float = setting(0.99, "AdamW's decay of the mean squared gradient", low=0.0, below=1.0)
    max_grad_norm: float = setting(1.0, "clip the gradient to this norm; 0: never", low=0.0)
    max_grad_value: float = setting(
        0.0, "then clip each gradient element to +-X; 0: never", low=0.0
    )
    grad_accum_steps: int = setting(1, "batches per update; their gradients are averaged", low=1)
    data_shards: int | None = setting(
        None,
        "split each batch into N shards, at least one per rank; results depend on this number, not "
        "on the number of ranks; default: 1, or 8 with mpiexec",
        low=1,
        high=MAX_SHARDS,
    )
    reduce_precision: str = setting(
        "float32",
        "number type for summing shard gradients; bfloat16 halves network traffic",
        choices=tuple(kind.precision for kind in parts.types_for("sum")),
    )
    shard_optimizer: bool = setting(False, "divide the optimizer's state among the ranks")
    allow_mixed_cpus: bool = setting(
        False,
        "let ranks have different instruction sets; results then depend on the number of ranks",
    )
    rank_timeout: float = setting(
        600.0, "stop if a rank has not answered for N seconds", above=0.0, high=1e6
    )
    val_every: int = setting(250, "steps between evaluations; 0: none", low=0)
    val_batches: int = setting(20, "batches per evaluation; 0: all held-out text", low=0)
    sample_every: int = setting(0, "steps between sample texts; 0: only at the end", low=0)
    save_every: int = setting(250, "steps between checkpoints; 0: only at the end", low=0)
    keep: int = setting(3, "newest checkpoints to keep, besides the best", low=1)
    compress: bool = setting(False, "compress checkpoints by a sixth, in the background")
    early_stopping_patience: int = setting(
        0, "evaluations without a lower loss before the run ends early; 0: never", low=0
    )
    early_stopping_min_delta: float = setting(
        0.0, "smallest improvement that counts, in nats", low=0.0
    )
    target_loss: float | None = setting(
        None,
        "stop once the held-out loss reaches X; it is checked more often as it gets close",
        low=0.0,
    )
    max_rollbacks: int = setting(
        3, "rollbacks after loss spikes before the run gives up; 0: never roll back", low=0
    )
    log_every: int = setting(10, "steps between logged losses", low=1)
    use_mixed_precision: bool = setting(False, "same as --precision float16")
    precision: str | None = setting(
        None, "number type of weights and activations; default: float32", choices=tuple(Precision)
    )
    products: str | None = setting(
        None,
        "float32 matrix products: numba, or NumPy's blas, whose results may differ between "
        "machines in the last digits; default: on macOS the faster one, elsewhere numba",
        choices=("numba", "blas"),
    )
    micro_batch_size: int | None = setting(
        None, "windows per forward pass; default: 2048 tokens' worth", low=1
    )
    prefetch: int | None = setting(
        None,
        "batches that a background thread prepares in advance; default: 2 when reading from disk, "
        "else 0",
        low=0,
        high=2**10,
    )
    enable_diagnostics: bool = setting(
        False, "report at the end where time and memory went", flag="--profile"
    )
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
        "which activations gradient checkpointing keeps; default: sqrt_layers",
        choices=tuple(CheckpointStrategy),
        needs=("use_gradient_checkpointing", True),
    )
    checkpoint_interval: int = setting(
        3,
        "blocks per segment, with the strategy custom",
        low=1,
        needs=("checkpoint_strategy", "custom"),
    )

    def __post_init__(self) -> None:
        check_all(self)
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
        if self.target_loss is not None and self.val_every == 0:
            raise InputError(
                f"val_every=0 must be at least 1 with target_loss={self.target_loss}, which "
                "evaluations compare with"
            )
        if self.optimizer == "muon" and self.learning_rate == 0:
            raise InputError(
                "learning_rate=0 must be above 0 with optimizer='muon', whose "
                "matrix_learning_rate follows it"
            )
        if self.warmup_share is not None and self.warmup_epochs is not None:
            raise InputError(
                f"warmup_share={self.warmup_share} and warmup_epochs={self.warmup_epochs} both set "
                "the warmup; give only one"
            )
        if self.use_mixed_precision and self.precision not in (None, Precision.FLOAT16):
            raise InputError(
                f"precision={self.precision!r} contradicts use_mixed_precision=True, which means "
                "float16; leave one of them out"
            )
        self._check_adapter()
        _ = self.fitted  # raises early

    @property
    def fitted(self) -> tuple[tuple[int, int], ...]:
        """The steps after which a run by minutes got another length, and the lengths."""
        if self.lengths is None:
            return ()
        try:
            pairs = [map(int, pair.split(":")) for pair in self.lengths.split(",")]
            found = tuple((step, steps) for step, steps in pairs)
        except ValueError:
            found = ((0, 0),)
        starts = [step for step, _ in found]
        are_later = all(step < steps for step, steps in found)
        if starts != sorted({0, *starts}) or not are_later or found[-1][1] != self.steps:
            raise InputError(
                f"lengths={shown_value(self.lengths)} must be STEP:STEPS, ..., from step 0 on, and "
                f"end with steps={self.steps}; leave it out"
            )
        return found

    def fitted_to(self, steps: int, step: int = 0) -> "TrainingConfig":
        """Copies the config of a run by minutes with another length from a step on."""
        before = [pair for pair in self.fitted if pair[0] < step]
        return self._with_lengths([*before, (step, steps)])

    def as_of(self, step: int) -> "TrainingConfig":
        """Copies the config as it was when this step had been trained: with the length of then."""
        if self.lengths is None:
            return self
        return self._with_lengths([pair for pair in self.fitted if pair[0] < max(1, step)])

    def _with_lengths(self, fitted: Sequence[tuple[int, int]]) -> "TrainingConfig":
        lengths = ",".join(f"{step}:{steps}" for step, steps in fitted)
        return dataclasses.replace(self, steps=fitted[-1][1], lengths=lengths)

    def _check_adapter(self) -> None:
        """Raises InputError for settings of an adapter that there is not, or that contradict it."""
        if not self.lora_rank:
            for name in ("lora_alpha", "lora_dropout", "lora_on"):
                if (value := getattr(self, name)) != getattr(TrainingConfig, name):
                    raise InputError(f"{name}={shown_value(value)} has no effect without lora_rank")
            return
        names = [name.strip() for name in self.lora_on.split(",")]
        if unknown := [name for name in names if name not in ADAPTED]:
            raise InputError(
                f"lora_on={shown_value(self.lora_on)}: {shown_value(unknown[0])} must be one of "
                f"{', '.join(ADAPTED)}"
            )
        if self.optimizer != "adamw":
            raise InputError(
                f"optimizer={self.optimizer!r} is not for adapters; use optimizer='adamw' with "
                f"lora_rank={self.lora_rank}"
            )

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the settings describe; None without lora_rank."""
        if not self.lora_rank:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        named = {name.strip() for name in self.lora_on.split(",")}
        on = tuple(name for name in ADAPTED if name in named)
        return Adapter(self.lora_rank, alpha, self.lora_dropout, on)

    @property
    def resolved_min_lr(self) -> float:
        return self.learning_rate / 10 if self.min_lr is None else self.min_lr

    def with_min_lr(self) -> "TrainingConfig":
        """Copies the config with min_lr as a number, as it is saved with a run."""
        return dataclasses.replace(self, min_lr=self.resolved_min_lr)

    def with_warmup(self, steps_per_epoch: int) -> "TrainingConfig":
        """Copies the config with its warmup in steps, as it is saved with a run."""
        if self.warmup_share is not None:
            warmup = round(self.warmup_share * self.steps)
        elif self.warmup_epochs is not None:
            warmup = round(self.warmup_epochs * steps_per_epoch)
        else:
            return self
        return dataclasses.replace(self, warmup_steps=warmup, warmup_share=None, warmup_epochs=None)

    @property
    def shards(self) -> int:
        return self.data_shards or 1

    @property
    def rounds_sums(self) -> bool:
        """True if the gradients of shards are rounded as they are added."""
        return self.reduce_precision != Precision.FLOAT32

    @property
    def requested_precision(self) -> Precision:
        """The precision that use_mixed_precision and precision together ask for."""
        default = Precision.FLOAT16 if self.use_mixed_precision else Precision.FLOAT32
        return Precision(self.precision or default)

    def batches_ahead(self, is_on_disk: bool) -> int:
        """Returns prefetch, or the default for the data if it is None."""
        if self.prefetch is None:
            return PREFETCH if is_on_disk else 0
        return self.prefetch

    @property
    def recompute(self) -> CheckpointStrategy:
        """The strategy that use_gradient_checkpointing and checkpoint_strategy together ask for."""
        if not self.use_gradient_checkpointing:
            return CheckpointStrategy.NONE
        return CheckpointStrategy(self.checkpoint_strategy or CheckpointStrategy.SQRT_LAYERS)


@suggesting()
@dataclass(frozen=True)
class RunConfig:
    """The run: text, batches, seed, machine, directory."""

    text: str | tuple[str, ...] | None = setting(
        None, "files, folders or patterns; default: built-in stories"
    )
    exclude: str | tuple[str, ...] | None = setting(
        None,
        "skip files and folders that match this name, such as '*.min.js' or node_modules, or this "
        "path if it has a slash; may be repeated",
        metavar="PATTERN",
    )
    include: str | tuple[str, ...] | None = setting(
        None,
        "in folders, read only files that match this name, such as '*.py', or this path if it has "
        "a slash, even generated ones; may be repeated",
        metavar="PATTERN",
    )
    gitignore: bool = setting(
        True,
        "in folders, skip what .gitignore lists, and minified and generated files",
        before=False,
    )
    text_field: str | None = setting(
        None,
        "the field or column with the text, in .jsonl, .json, .csv, .tsv and .parquet files",
        flag="--field",
        metavar="NAME",
    )
    text_encoding: str | None = setting(
        None,
        "the encoding of texts without a byte order mark; default: UTF-8",
        flag="--encoding",
        metavar="NAME",
    )
    text_separator: str | None = setting(
        None,
        "the character between documents; default: a line break",
        needs=("tokenizer", "char", "byte"),
        flag="--separator",
        metavar="CHARACTER",
    )
    chat: bool | None = setting(
        None,
        "read conversations: messages, or prompts or questions with answers; default: if a file "
        "has them. Without a text: questions about the built-in stories",
        before=False,
    )
    assistant: str | None = setting(
        None,
        "the speaker to imitate in chats exported from Telegram, WhatsApp, Discord, Slack, "
        "Messenger or Instagram; without it, speakers are listed",
        metavar="NAME",
    )
    chat_template: str | None = setting(
        None,
        "format of turns; default: that of --init-from, else one whose tokens its vocabulary has, "
        "else chatml",
        choices=parts.CHAT_TEMPLATES,
    )
    template_args: str | None = setting(
        None,
        "variables for the chat template of --init-from, saved with the run, as in "
        """'{"enable_thinking": false}'""",
        metavar="JSON",
    )
    learn: str = setting(
        "answers",
        "which tokens of conversations to learn: the assistant's, or all",
        choices=("answers", "all"),
    )
    init_from: str | None = setting(
        None,
        "start from the weights and tokenizer of a run, a checkpoint or model file, a Hugging Face "
        "model folder, or a GGUF file",
        metavar="RUN_OR_MODEL",
    )
    tokenizer: str = setting(
        "char",
        f"kind of token: {', '.join(parts.LEARNED_TOKENIZERS)}, or a tokenizer.json or "
        "tokenizer.model; the default recipe uses bpe for texts of a megabyte or more",
        metavar="KIND",
    )
    # Some kinds of tokenizer have these settings, and name them in `Tokenizer.settings`.
    bpe_vocab_size: int = setting(
        512,
        "vocabulary size: 256 bytes, the end of text, and frequent pieces of the text",
        low=257,
        high=2**20,
        needs=("tokenizer", "bpe"),
        flag="--vocab-size",
    )
    bpe_split: str = setting(
        "gpt2",
        'word pattern of the tokenizer; "-digits" makes each digit a word',
        choices=("gpt2", "gpt4", "gpt2-digits", "gpt4-digits"),
        needs=("tokenizer", "bpe"),
        flag="--split",
    )
    mask_documents: bool = setting(
        False,
        "keep attention inside each document: not past the last <|endoftext|>, or with --tokenizer "
        "char or byte the last line break; on by default with bpe if a text has several documents",
    )
    batch_size: int = setting(12, "windows of text per batch", low=1, high=MAX_BATCH)
    seed: int = setting(
        1337, "random seed for weights, batches, dropout and samples", low=0, below=2**63
    )
    minutes: float | None = setting(
        None,
        "finish in about N minutes: steps are timed, and their number is adjusted during the run; "
        "the default recipe also chooses model, batch, dropout and weight decay",
        above=0.0,
        high=1e6,
    )
    threads: int | None = setting(
        None, "threads; default: one per core, fewer for small models", low=1
    )
    adapt_threads: bool = setting(
        True,
        "use fewer threads while that is faster, for example beside other programs; --threads "
        "turns this off",
    )
    backend: str = setting("numba", "compiled kernels or plain NumPy", choices=("numba", "numpy"))
    tensorboard: bool = setting(False, "also write event files, for tensorboard --logdir runs")
    out: str | None = setting(None, "directory of the run; default: runs/<date>-<text>")

    def __post_init__(self) -> None:
        check_all(self)
        if self.text_separator is not None and len(self.text_separator) != 1:
            raise InputError(
                f"text_separator={shown_value(self.text_separator)} must be one character"
            )
        is_file = self.tokenizer.endswith((".json", ".model"))
        if self.tokenizer not in parts.TOKENIZERS and not is_file:
            kinds = ", ".join(parts.LEARNED_TOKENIZERS)
            raise InputError(
                f"tokenizer={shown_value(self.tokenizer)} must be one of {kinds}, or the path of a "
                "tokenizer.json or tokenizer.model"
            )


@suggesting()
@dataclass(frozen=True)
class GenerationConfig:
    """Settings for sampling text from a model."""

    max_tokens: int = setting(500, "number of tokens to write", low=0)
    temperature: float = setting(
        0.8, "divides the logits; 0: always the most likely token", low=0.0
    )
    top_k: int | None = setting(None, "sample from the k most likely tokens only", low=1)
    top_p: float | None = setting(
        None,
        "sample from the smallest set of tokens whose probabilities add up to p",
        above=0.0,
        high=1.0,
    )
    min_p: float | None = setting(
        None,
        "sample only from tokens at least p times as likely as the most likely one",
        low=0.0,
        high=1.0,
    )
    repetition_penalty: float = setting(
        1.0, "divides the positive logits of tokens in the text so far", above=0.0
    )
    presence_penalty: float = setting(0.0, "subtracted from the logits of tokens already written")
    frequency_penalty: float = setting(
        0.0, "subtracted from a token's logit for each time it was written"
    )
    stop: str | tuple[str, ...] | None = setting(
        None, "stop before this text; may be repeated", metavar="TEXT"
    )
    seed: int = setting(1337, "random seed; the same seed gives the same text", low=0, below=2**63)

    def __post_init__(self) -> None:
        check_all(self)

"""What can be known before a run: does the model begin, learn and differentiate as it should."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from smallmind.config import ModelConfig
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.text.dataset import Batch, Dataset
from smallmind.training.health import check_model
from smallmind.training.loop import Training

FIRST_LOSS_SLACK = 0.2  # nats: what a batch may be above or below by chance
SAMPLES, SAMPLE_TOKENS = 8, 16  # windows to memorise, and their length
MEMORISED = 0.1  # nats a token
MEMORISING_STEPS, WARMUP = 100, 10
RATE_BY_WIDTH = 0.3  # learning rate times channels, at which models of any width memorise quickly
H = 1e-5  # of finite differences
GRADIENT_ERROR = 1e-6  # relative, in float64
KERNEL_ERROR = 1e-3  # relative, in float32


@dataclass(frozen=True)
class Check:
    """One thing that was looked at before a run."""

    name: str
    passed: bool
    measured: str
    expected: str


def preflight(training: Training) -> Iterator[Check]:
    """Checks a model and its text before a run, one after another; both stay as they are.

    In the time of some hundred steps with 128 tokens, and memory for two more models.
    """
    model, dataset = _copy(training.model), training.dataset
    yield first_loss(model, dataset.batch(0))
    yield every_gradient(model, dataset.batch(0))
    samples = distinct_samples(dataset)
    if model.backend != "numpy":
        yield kernels_agree(model, samples)
    yield memorise(model, samples)
    yield gradient_check(model.config)


def _copy(model: TransformerModel, backend: str | None = None) -> TransformerModel:
    """A model with the same weights and dropout, on the same kernels or another back end's."""
    copy = TransformerModel(
        **dataclasses.asdict(model.config), seed=model.seed, backend=backend or model.backend
    )
    copy.flat.data[:] = model.flat.data
    return copy


def first_loss(model: TransformerModel, batch: Batch) -> Check:
    """ids, targets (B, T): before it has learnt anything, a model guesses among all V tokens.

    Logits are sums of C products with weights of deviation 0.02, which lifts the loss above ln V by
    half their variance, C 0.02^2 / 2; twice that is allowed.
    """
    expected = math.log(model.config.vocab_size)
    slack = FIRST_LOSS_SLACK + model.config.n_embd * INITIAL_DEVIATION**2
    loss = model.loss(*batch)
    return Check(
        "loss at the start",
        abs(loss - expected) <= slack,
        f"{loss:.3f} nats a token",
        f"ln {model.config.vocab_size} = {expected:.3f}, give or take {slack:.2f}",
    )


def every_gradient(model: TransformerModel, batch: Batch) -> Check:
    """ids, targets (B, T): the loss depends on every parameter."""
    model.zero_gradients()
    model.loss_and_gradients(*batch)
    wrong = [x for x in check_model(model) if x.problem in ("nan", "inf", "zero")]
    count = len(model.gradients)
    others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Check(
        "gradient of every parameter",
        not wrong,
        f"{wrong[0]}{others}" if wrong else f"{count} of {count} finite and not zero",
        f"all {count}",
    )


def distinct_samples(dataset: Dataset) -> Batch:
    """Windows of the training text, ids and targets (B, T), of which no two begin alike.

    All that comes later is then a function of what was before, and can be known by heart.
    """
    T = min(SAMPLE_TOKENS, dataset.block_size)
    samples: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for number in range(-(-4 * SAMPLES // dataset.batch_size)):
        for ids, targets in zip(*dataset.batch(number), strict=True):
            if len(samples) < SAMPLES:
                samples.setdefault(int(ids[0]), (ids[:T], targets[:T]))
    ids, targets = zip(*samples.values(), strict=True)
    return np.stack(ids), np.stack(targets)


def memorise(model: TransformerModel, samples: Batch) -> Check:
    """ids, targets (B, T): a model that learns at all knows a few windows by heart in 100 steps.

    Without dropout, and at a learning rate of its own. Trains the model.
    """
    model.workspace.dropout = 0.0
    model.zero_gradients()
    rate = RATE_BY_WIDTH / max(16, model.config.n_embd)
    steps, loss = _learn(model, samples, rate)
    B, T = samples[0].shape
    return Check(
        f"memorising {B} windows of {T} tokens",
        loss < MEMORISED,
        f"loss {loss:.3f} after {steps} steps at learning rate {rate:.1e}",
        f"under {MEMORISED} within {MEMORISING_STEPS} steps",
    )


def _learn(model: TransformerModel, samples: Batch, rate: float) -> tuple[int, float]:
    """Steps it took until the samples were memorised, or in vain; and the loss after them."""
    optimizer = AdamW(model, weight_decay=0.0)
    for step in range(MEMORISING_STEPS):
        loss = model.loss_and_gradients(*samples)
        if not loss >= MEMORISED:  # or NaN
            return step, loss
        optimizer.learning_rate = rate * min(1.0, (step + 1) / WARMUP)
        try:
            optimizer.step(max_grad_norm=1.0)
        except FloatingPointError:
            return step, math.nan
    return MEMORISING_STEPS, model.loss(*samples)


def gradient_check(config: ModelConfig) -> Check:
    """The backward pass of a small model of the same kind, in float64 on plain NumPy."""
    small = small_config(config)
    model = TransformerModel(**dataclasses.asdict(small), backend="numpy", dtype=np.float64)
    # Away from the initialisation, where gains are 1 and biases 0.
    random = np.random.default_rng(0)
    for value in model.parameters.values():
        value += 0.3 * random.standard_normal(value.shape)
    errors = gradient_errors(model, *_random_batch(small, random))
    worst = _worst(errors)
    shape = f"{small.n_layer} x {small.n_embd} channels, {small.n_head} heads"
    return Check(
        f"gradient check, float64, {shape}",
        errors[worst] <= GRADIENT_ERROR,
        f"relative error {errors[worst]:.1e}, the largest of {len(errors)}: {worst}",
        f"at most {GRADIENT_ERROR:.0e}",
    )


def small_config(config: ModelConfig) -> ModelConfig:
    """The same biases, weights tied or not, dropout; sizes at which a pass takes a millisecond.

    Channels enough that dropout never takes all of a token: the gain of a norm of zeros is so steep
    that finite differences say nothing.
    """
    n_head = min(config.n_head, 3)
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, 13),
        block_size=min(config.block_size, 7),
        n_layer=min(config.n_layer, 2),
        n_head=n_head,
        n_embd=8 * n_head,
        dropout=min(config.dropout, 0.2),
    )


def _random_batch(config: ModelConfig, random: np.random.Generator) -> Batch:
    ids = random.integers(0, config.vocab_size, (3, config.block_size + 1))
    return ids[:, :-1], ids[:, 1:]


def gradient_errors(
    model: TransformerModel, ids: np.ndarray, targets: np.ndarray
) -> dict[str, float]:
    """Relative error of the gradient of each parameter of a float64 model, along one direction.

    By central differences, (loss(p + h v) - loss(p - h v)) / 2h against <gradient, v>: two passes a
    parameter, whatever its size. All take the dropout masks of the pass that comes next.
    """
    passes = model.passes

    def loss() -> float:
        model.passes = passes
        return model.loss_and_gradients(ids, targets)

    model.zero_gradients()
    loss()
    gradients = {name: gradient.copy() for name, gradient in model.gradients.items()}
    random = np.random.default_rng(1)
    errors = {}
    for name, value in model.parameters.items():
        direction = random.standard_normal(value.shape)
        direction /= np.linalg.norm(direction)
        kept = value.copy()
        value[...] = kept + H * direction
        above = loss()
        value[...] = kept - H * direction
        numerical = (above - loss()) / (2 * H)
        value[...] = kept
        actual = float(np.vdot(gradients[name], direction))
        # Relative to the gradient itself, not only to its part along this direction.
        norm = float(np.linalg.norm(gradients[name]))
        scale = max(abs(numerical), norm / math.sqrt(value.size))
        errors[name] = abs(actual - numerical) / scale if scale else 0.0
    model.zero_gradients()
    return errors


def kernels_agree(model: TransformerModel, samples: Batch) -> Check:
    """ids, targets (B, T): the compiled kernels give the gradients that plain NumPy gives."""
    plain = _copy(model, backend="numpy")
    for each in (model, plain):
        each.passes = 0  # the same dropout
        each.zero_gradients()
        each.loss_and_gradients(*samples)
    errors = {
        name: _relative_error(model.gradients[name], gradient)
        for name, gradient in plain.gradients.items()
    }
    worst = _worst(errors)
    return Check(
        "compiled kernels against NumPy",
        errors[worst] <= KERNEL_ERROR,
        f"gradients differ by {errors[worst]:.1e} at most: {worst}",
        f"at most {KERNEL_ERROR:.0e}",
    )


def _worst(errors: Mapping[str, float]) -> str:
    """The name of the largest; NaN is larger than all else."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def _relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(actual - expected))
    return error / norm if norm else error

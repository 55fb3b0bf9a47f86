"""Checks before a run that the model starts, learns and differentiates as it should."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from smallmind.checks import count_of
from smallmind.console.table import Table, Tabular
from smallmind.losses.loss import Loss
from smallmind.nn.gradient_check import gradient_check
from smallmind.nn.linear import INITIAL_DEVIATION
from smallmind.nn.transformer import TransformerModel
from smallmind.optim.adamw import AdamW
from smallmind.optim.optimizer import make_optimizer, rate_settings
from smallmind.optim.schedule import schedule
from smallmind.settings.config import Adapter, ModelConfig, Precision, TrainingConfig
from smallmind.text.dataset import Batch, Dataset
from smallmind.text.samplers import RandomWindows, draw
from smallmind.training.evaluation import TEXT
from smallmind.training.gradients import FIRST_PASS
from smallmind.training.health import check_model
from smallmind.training.training import Training

MAX_SAMPLES, SAMPLE_TOKENS = 8, 16  # windows to memorise, and their length
MEMORISED = 0.1  # nats per token
MEMORISING_STEPS, WARMUP = 100, 10
PEAK_STEPS, MIN_PROGRESS = 60, 1e-6  # at the run's own learning rate; nats per token
MIN_GAIN, MAX_TENTHS = 0.1, 6  # nats by which a tenth of a rate is better; tenths that are tried
RATE_BY_WIDTH = 0.3  # learning rate times channels, at which models of any width memorise quickly
# Windows are memorised as a whole: the start of a masked document follows from nothing before it.
UNMASKED = {"document_token": None}
KERNEL_ERROR = 1e-3  # relative, in float32


@dataclass(frozen=True, repr=False)
class Check(Tabular):
    """The result of one check. Prints as a line."""

    name: str
    passed: bool
    measured: str
    expected: str

    def __repr__(self) -> str:
        verdict = "ok    " if self.passed else "FAILED"
        return f"{verdict}  {self.name}: {self.measured}; expected {self.expected}"

    def table(self) -> Table:
        """Returns the measured and the expected value, in one row."""
        row = (self.name, self.measured, self.expected, "ok" if self.passed else "FAILED")
        return Table("", [row], ("check", "measured", "expected", ""), "<<<<")


def preflight(
    training: Training, config: TrainingConfig | None = None, untrained: bool = True
) -> Iterator[Check]:
    """Checks a model and its text before a run, one check after another; both stay unchanged.

    With the config of the run also its learning rate; the loss at the start only if the weights are
    untrained, or it does not depend on them. Takes the time of a few hundred steps of 128 tokens,
    and memory for another model.
    """
    model = training.model
    with training.preserved():
        model.use_precision(Precision.FLOAT32)
        model.freeze(None)
        data = training.data.as_text()
        batch = draw(RandomWindows(data), 0)
        if untrained:
            yield first_loss(model, TEXT, data)
        if training.loss.name and (untrained or training.loss.first_is_known):
            yield first_loss(model, training.loss, training.data)
        yield every_gradient(model, batch)
        samples = distinct_samples(data)
        if model.backend != "numpy":
            yield kernels_agree(model, samples)
        yield memorise(copy_model(model, dropout=0.0, **UNMASKED), samples)
        if config and config.steps:
            yield learns_at_peak(model, samples, config)
        yield backward_pass(model.config, model.adapter)


def copy_model(
    model: TransformerModel, backend: str | None = None, **fields: Any
) -> TransformerModel:
    """-> a float32 model with the same weights, perhaps with another back end or settings."""
    config = dataclasses.replace(model.config, **fields) if fields else model.config
    copy = TransformerModel(
        config, seed=model.seed, backend=backend or model.backend, adapter=model.adapter
    )
    copy.flat.write(model.parameters)
    return copy


def first_loss(model: TransformerModel, loss: Loss, data: Dataset) -> Check:
    """Checks that an untrained model guesses: its loss on a batch is what the loss expects."""
    batch = draw(RandomWindows(data, stride=max(data.stride, loss.stride)), 0)
    expected, slack, formula = loss.first_loss(model, batch)
    value = loss.loss_and_gradients(copy_model(model, dropout=0.0), batch, 1.0, 0.0)
    return Check(
        f"loss{loss.name and f' of {loss.name}'} at the start",
        abs(value - expected) <= slack,
        f"{value:.3f} nats per {loss.unit}",
        f"{formula} = {expected:.3f} +/- {slack:.2f}",
    )


def every_gradient(model: TransformerModel, batch: Batch) -> Check:
    """Checks that the loss depends on every parameter."""
    model = copy_model(model)
    # Away from the initialisation, where a projection of zeros hides all parameters behind it.
    random = np.random.default_rng(0)
    for name, value in model.parameters.items():
        noise = INITIAL_DEVIATION * random.standard_normal(value.shape, value.dtype)
        model.flat.write({name: value + noise})
    model.loss_and_gradients(batch.ids, batch.targets)
    wrong = [x for x in check_model(model) if x.problem in ("nan", "inf", "zero")]
    count = len(model.gradients)
    others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return Check(
        "gradient of every parameter",
        not wrong,
        f"{wrong[0]}{others}" if wrong else f"{count} of {count} finite, nonzero",
        f"all {count}",
    )


def distinct_samples(dataset: Dataset) -> Batch:
    """Windows of the training text, cut to 16 tokens, each with a different first token.

    Each token then follows from those before it, so that all can be memorised.
    """
    T = min(SAMPLE_TOKENS, dataset.block_size)
    sampler = RandomWindows(dataset)
    starts: dict[int, int] = {}  # by first token
    for number in range(math.ceil(4 * MAX_SAMPLES / dataset.batch_size)):
        for start in sampler.starts(number):
            if len(starts) < MAX_SAMPLES:
                starts.setdefault(int(dataset.train[start]), int(start))
    batch = dataset.windows(np.array(list(starts.values())))
    return Batch(batch.ids[:, :T], batch.targets[:, :T], batch.starts)


def memorise(model: TransformerModel, samples: Batch) -> Check:
    """Checks that a model without dropout memorises a few windows in 100 steps.

    Trains the model, at a learning rate of its own.
    """
    rate = RATE_BY_WIDTH / max(16, model.config.n_embd)
    steps, loss = _learn(model, samples, rate)
    B, T = samples.ids.shape
    return Check(
        f"memorising {count_of(B, 'window')} of {count_of(T, 'token')}",
        loss < MEMORISED,
        f"loss {loss:.3f} after {count_of(steps, 'step')} at learning rate {rate:.1e}",
        f"under {MEMORISED} within {MEMORISING_STEPS} steps",
    )


def _learn(model: TransformerModel, samples: Batch, rate: float) -> tuple[int, float]:
    """Trains until the samples are memorised, or for MEMORISING_STEPS -> steps, and the loss."""
    optimizer = AdamW(model, weight_decay=0.0)
    for step in range(MEMORISING_STEPS):
        loss = model.loss_and_gradients(samples.ids, samples.targets)
        if not loss >= MEMORISED:  # or NaN
            return step, loss
        optimizer.learning_rate = rate * min(1.0, (step + 1) / WARMUP)
        if not math.isfinite(optimizer.step(max_grad_norm=1.0)):
            return step, math.nan
    return MEMORISING_STEPS, model.loss(samples.ids, samples.targets)


def learns_at_peak(model: TransformerModel, samples: Batch, config: TrainingConfig) -> Check:
    """Checks that the optimizer lowers the loss at the highest learning rate of the run.

    And that no tenth, hundredth ... of it gets much further in as many steps: such a rate was
    better for whole runs too (see bench/LOG.md).
    """
    planned = schedule(config)
    rate = planned.lr(min(planned.warmup, config.steps - 1))
    losses = _losses_at(rate, model, samples, config)
    start, loss = losses[0], _last_loss(losses)
    measured = f"loss from {start:.3f} to {loss:.3f} after {count_of(len(losses), 'step')}"
    advice = "raise --learning-rate"
    better, lower = rate, loss
    for _ in range(MAX_TENTHS):
        if lower < MEMORISED:
            break
        tenth = _last_loss(_losses_at(better / 10, model, samples, config))
        if math.isfinite(tenth) and not tenth < lower - MIN_GAIN:
            break
        better, lower = better / 10, tenth
    if better < rate:
        measured += f", at {better:.1e} to {lower:.3f}"
        advice = f"lower --learning-rate, for example to {better:.0e}"
        for name in rate_settings(config)[1:]:
            advice += f", and --{name.replace('_', '-')} in proportion"
    is_lower = loss < MEMORISED or loss < start - MIN_PROGRESS
    return Check(
        f"learning at the peak rate, {rate:.1e}",
        is_lower and better == rate,
        measured,
        f"a lower loss than at the start and at lower rates; if not, {advice}",
    )


def _losses_at(
    rate: float, model: TransformerModel, samples: Batch, config: TrainingConfig
) -> list[float]:
    """Returns the losses of a copy of the model, trained on the samples; fewer if it diverges."""
    copy = copy_model(model, **UNMASKED)
    copy.freeze(config.freeze)
    optimizer = make_optimizer(copy, config)
    losses = []
    for step in range(PEAK_STEPS):
        losses.append(copy.loss_and_gradients(samples.ids, samples.targets))
        optimizer.learning_rate = rate * min(1.0, (step + 1) / WARMUP)
        max_value = config.max_grad_value or None
        norm = optimizer.step(config.max_grad_norm or None, max_grad_value=max_value)
        if not math.isfinite(losses[-1] + norm):
            break
    return losses


def _last_loss(losses: list[float]) -> float:
    """Returns the mean of the last few losses; infinity if one is NaN."""
    mean = math.fsum(losses[-WARMUP:]) / len(losses[-WARMUP:])
    return mean if math.isfinite(mean) else math.inf


def backward_pass(config: ModelConfig, adapter: Adapter | None = None) -> Check:
    """Checks the gradients of a small model of the same kind, in float64 with plain NumPy."""
    small = small_config(config)
    model = TransformerModel(small, backend="numpy", dtype=np.float64, adapter=adapter)
    # Away from the initialisation, where gains are 1 and biases 0.
    random = np.random.default_rng(0)
    for name, value in model.parameters.items():
        model.flat.write({name: value + 0.3 * random.standard_normal(value.shape)})
    tokens = random.integers(0, small.vocab_size, (3, small.block_size + 1))
    found = gradient_check(model, tokens[:, :-1], tokens[:, 1:])
    worst = _worst(found.errors)
    shape = f"{small.n_layer} x {small.n_embd} channels, {count_of(small.n_head, 'head')}"
    return Check(
        f"gradient check, float64, {shape}",
        found.ok,
        f"relative error {found.errors[worst]:.1e}, the largest of {len(found.rows)}: {worst}",
        f"at most {found.tolerance:.0e}",
    )


def small_config(config: ModelConfig) -> ModelConfig:
    """Returns a model of this architecture, small enough for a pass to take a millisecond.

    Has enough channels that dropout never drops all those of a token: a norm of zeros is so steep
    that finite differences mean nothing.
    """
    shares_keys = config.kv_heads < config.n_head
    n_head = 4 if shares_keys else min(config.n_head, 3)
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, 13),
        block_size=min(config.block_size, 7),
        n_layer=min(config.n_layer, 2),
        n_head=n_head,
        n_embd=8 * n_head,
        head_size=None if config.head_size is None else 6,
        n_kv_head=2 if shares_keys else None,
        mlp_width=None if config.mlp_width is None else min(config.mlp_width, 29),
        bigram_rows=min(config.bigram_rows, 200),
        dropout=min(config.dropout, 0.2),
        document_token=None if config.document_token is None else 0,
        bigram_vocab=None,
    )


def kernels_agree(model: TransformerModel, samples: Batch) -> Check:
    """Checks that the compiled kernels compute the same gradients as plain NumPy."""
    plain = copy_model(model, backend="numpy")
    for each in (model, plain):
        each.zero_gradients()
        # Both have the same dropout masks.
        each.loss_and_gradients(samples.ids, samples.targets, at=FIRST_PASS)
    norm = np.linalg.norm
    errors = {
        name: float(norm(model.gradients[name] - gradient) / (norm(gradient) or 1.0))
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
    """Returns the name of the largest error; NaN is the largest of all."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))

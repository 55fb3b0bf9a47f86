"""The model and the batch that learn most in a given time: what `--minutes` and `plan` choose.

A small model has too few parameters, a large one sees too few tokens: a few passes tell how many,
and the law of the text which model ends at the lowest loss, see `law`. Constants are measured,
see `bench/LOG.md`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.forecast import pace
from smallmind.forecast.law import (
    OPERATIONS,
    SIZE,
    Law,
    Outcome,
    Trial,
    law_of,
    parameters_of,
)
from smallmind.forecast.threads import choose_threads, use_threads
from smallmind.nn.transformer import TransformerModel
from smallmind.settings.config import ModelConfig, RunConfig, TrainingConfig
from smallmind.settings.presets import Fields
from smallmind.settings.rules import FITTED_FIELDS, Choices, resolve
from smallmind.settings.settings import Settings
from smallmind.settings.sources import MODEL_FIELDS
from smallmind.text.dataset import HELD_OUT, Dataset
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.training import Training

STEPS_SHARE = 0.9  # of the time is spent in steps; the rest evaluates and saves
MAX_TIMING_SHARE = 0.01  # of the time, for the passes of a size that is timed
UPDATES = 1000  # that a batch is made for: fewer of a larger batch learn less from as many tokens
MIN_BATCH, MAX_BATCH = 768, 8192  # tokens
PARAMETERS_PER_TOKEN = 4.0  # of the text: more of them memorise it
CHARACTERS_PER_TOKEN = 1.9  # of 512 tokens learned from English text
# Dropout for a pass over the text by a model with a parameter for each of its tokens, the power by
# which it grows with both, and its limits: less than the least is none.
DROPOUT, DROPOUT_POWER, MIN_DROPOUT, MAX_DROPOUT = 0.0075, 0.65, 0.015, 0.2
WEIGHT_DECAY = 0.3  # beside dropout
TAUGHT = 0.2  # of that dropout, beside a teacher, whose targets are soft: see bench/LOG.md


class ModelShape(NamedTuple):
    """The size of a model."""

    n_layer: int
    n_embd: int


class Size(NamedTuple):
    """A model for a time, the batch that it learns from, and what to expect of it."""

    fields: Fields  # settings that follow from the time
    parameters: int
    tokens: float  # that it sees
    updates: float
    passes: float  # over the text
    loss: float  # expected, in nats per token
    interval: tuple[float, float]  # of the losses of nine runs in ten


HEAD, SMALL_HEAD = 32, 16  # channels of a head, and of one in a model that is not wide
WIDE_CHANNELS = 128
WINDOW, LONG_WINDOW = 128, 256  # tokens; long ones teach less at first
LONG_RUN = 1e7  # tokens that a run sees, from which on its windows are long
WIDTHS = {  # in channels, by the number of layers
    2: (32,),
    3: (32,),
    4: (32, 48, 64, 80, 96, 112, 128, 160, 192),
    6: (192, 224, 256, 320),
    8: (320, 384, 448, 512),
    12: (512, 640),
}
# From the smallest to the largest.
SHAPES = [ModelShape(layers, width) for layers, widths in WIDTHS.items() for width in widths]
TIMED_SHAPES = [SHAPES[2], SHAPES[8], SHAPES[14]]  # small ones multiply less in a second
MAX_TIMED_PARAMETERS = 10_000_000  # larger ones take long, and as long for each


class Cost(NamedTuple):
    """The time that training a model takes. Units: seconds."""

    token: float  # both passes over it
    update: float  # of the parameters, once per batch

    def seconds(self, tokens: float, batch: float | None = None) -> float:
        """-> the time for so many tokens, in batches of so many, by default `batch_for` them."""
        return tokens * (self.token + self.update / (batch or batch_for(tokens)))

    def tokens(self, seconds: float, batch: float | None = None) -> float:
        """-> the tokens that fit in a time: inverse of `seconds`."""
        batch = batch or batch_for((seconds - UPDATES * self.update) / self.token)
        return seconds / (self.token + self.update / batch)


Costs = Callable[[int], Cost]  # of a model with so many parameters


def fit(
    choices: Choices,
    tokens: float,
    vocab_size: int = ModelConfig.vocab_size,
    known: Sequence[Outcome] = (),
    timed: Sequence[Trial] = (),
    processes: int = 1,
) -> Fields:
    """Chooses model, windows, batch, dropout and weight decay for the `minutes` -> their fields.

    The text has `tokens`, and outcomes that are `known`; trials tell how fast this machine is, or
    several `processes` like this one. InputError for a setting that is out of range.
    """
    # Refuses values that are out of range, before anything computes.
    fields = resolve(choices).chosen | {"vocab_size": vocab_size}
    seconds = 60 * float(fields["minutes"])
    costs = corrected(costs_of(choices, seconds, processes), timed)
    law = law_for(known, seconds, costs)
    return best(sizes_for(choices.chosen, fields, tokens, seconds, costs, law)).fields


def tokens_per_step(fields: Fields) -> int:
    """Returns the tokens from which an update is computed."""
    windows = fields["batch_size"] * fields.get("grad_accum_steps", 1)
    return int(windows * fields["block_size"])


def tokens_of(fields: Fields, characters: int) -> float:
    """Returns about how many tokens a text has."""
    kind = fields.get("tokenizer", RunConfig.tokenizer)
    is_learned = kind not in parts.TOKENIZERS or parts.load(parts.TOKENIZERS, kind).is_learned
    return characters / (CHARACTERS_PER_TOKEN if is_learned else 1)


def law_for(known: Sequence[Outcome], seconds: float, costs: Costs) -> Law:
    """Returns the law of a text with these outcomes, for runs of so many seconds."""
    return law_of(known, OPERATIONS * SIZE * costs(int(SIZE)).tokens(STEPS_SHARE * seconds))


def sizes_for(
    chosen: Fields, fields: Fields, text: float, seconds: float, costs: Costs, law: Law
) -> list[Size]:
    """-> each shape, as it would be trained in this time, from the smallest on.

    `fields` are all settings, `chosen` those that stay; `text` is the number of its tokens. Shapes
    that are too large for the text, and those that nothing can be made of, are left out.
    """
    shapes = [_fields(shape, chosen) for shape in SHAPES]
    counted = {N: shape for shape in reversed(shapes) if (N := parameters(fields | shape))}
    # If none of these fields makes a model, the error says why.
    (smallest, shape), *larger = sorted(counted.items(), key=lambda item: item[0]) or [
        (1, shapes[0])
    ]
    fitting = [(N, shape) for N, shape in larger if N / text <= PARAMETERS_PER_TOKEN]
    return [
        _size_for(fields, shape, N, text, STEPS_SHARE * seconds, costs(N), law)
        for N, shape in [(smallest, shape), *fitting]
    ]


def _size_for(
    fields: Fields, shape: Fields, N: int, text: float, seconds: float, cost: Cost, law: Law
) -> Size:
    """Returns the batches and the regularization of N parameters that learn for so many seconds."""
    unique = (1 - HELD_OUT) * text
    most = pace.MAX_PASSES * unique
    tokens, chosen = min(most, cost.tokens(seconds)), shape
    for _ in range(2):  # the windows follow from the tokens, and how many fit from the windows
        chosen = windows_for(tokens, text, fields, shape)
        tokens = min(most, cost.tokens(seconds, tokens_per_step(fields | chosen)))
    seen = N, tokens, unique
    chosen = regularization(*seen, is_taught=bool(fields.get("teacher"))) | chosen
    updates = tokens / tokens_per_step(fields | chosen)
    # All tokens as likely: no run ends higher.
    guess = math.log(max(2, fields.get("vocab_size", ModelConfig.vocab_size)))
    loss, low, high = (min(guess, x) for x in (law.loss(*seen), *law.interval(*seen)))
    return Size(chosen, N, tokens, updates, tokens / unique, loss, (low, high))


def batch_for(tokens: float) -> float:
    """Returns the tokens from which each update of a run that sees so many is computed."""
    return min(MAX_BATCH, max(MIN_BATCH, tokens / UPDATES))


def windows_for(tokens: float, text: float, fields: Fields, chosen: Fields) -> Fields:
    """-> the chosen fields, with windows for so many tokens of a text where they have none."""
    # One fits into the text many times, also into its held-out part.
    T = min(LONG_WINDOW if tokens >= LONG_RUN else WINDOW, max(8, int(text // 40)))
    T = chosen.get("block_size", T)
    windows = max(1, round(batch_for(tokens) / T / fields.get("grad_accum_steps", 1)))
    return {"block_size": T, "batch_size": windows} | chosen


def regularization(
    parameters: float, tokens: float, unique: float, is_taught: bool = False
) -> Fields:
    """Regularizes so many parameters more the more they could memorise -> their fields."""
    share = DROPOUT * (parameters / unique * (tokens / unique)) ** DROPOUT_POWER
    if share < MIN_DROPOUT:
        return {"dropout": 0.0, "weight_decay": TrainingConfig.weight_decay}
    share = min(MAX_DROPOUT, share) * (TAUGHT if is_taught else 1.0)
    return {"dropout": round(share, 2), "weight_decay": WEIGHT_DECAY}


def best(sizes: Sequence[Size]) -> Size:
    """Returns the size with the lowest expected loss; the smallest of equal ones."""
    return min(sizes, key=lambda size: size.loss)


def _fields(shape: ModelShape, chosen: Fields) -> Fields:
    """Returns the fields of a shape and those chosen, with heads that divide its channels."""
    C = chosen.get("n_embd", shape.n_embd)
    size = chosen.get("head_size") or (HEAD if C >= WIDE_CHANNELS else SMALL_HEAD)
    n_head = chosen.get("n_head") or next(h for h in range(max(1, C // size), 0, -1) if C % h == 0)
    fields = {**shape._asdict(), "n_head": n_head, "n_embd": max(1, round(C / n_head)) * n_head}
    return fields | {name: chosen[name] for name in FITTED_FIELDS if name in chosen}


def parameters(fields: Fields) -> int | None:
    """Returns the parameters of the model that has these fields; None if there is no such model."""
    try:
        config = ModelConfig(**{name: fields[name] for name in MODEL_FIELDS & fields.keys()})
    except InputError:
        return None
    return parameters_of(config)


def costs_of(choices: Choices, seconds: float, processes: int = 1) -> Costs:
    """Returns how long models of the choices learn on this machine, of which some sizes are timed.

    Sizes for which that would take much of so many seconds are not timed: the largest one that was
    stands for them. Several processes divide the tokens of a step; this one times its own part.
    """
    timed: dict[int, Cost] = {}
    for fields in _timed(choices):
        settings = choices.having(**fields).settings()
        N = parameters_of(settings.model)
        if N in timed:
            continue
        start = activity.clock()
        cost = cost_of(settings)
        timed[N] = Cost(cost.token / processes, cost.update)
        if activity.clock() - start > MAX_TIMING_SHARE * seconds:
            break
    sizes = sorted(timed)
    shares = np.transpose([np.divide(timed[N], N) for N in sizes])  # of a parameter
    return lambda N: Cost(*(N * float(np.interp(np.log(N), np.log(sizes), x)) for x in shares))


def _timed(choices: Choices) -> list[Fields]:
    """Returns the fields of models to time, from the smallest on: TIMED_SHAPES with what is chosen.

    Without the chosen size where that takes long or makes no model, and of any shape if none does.
    """
    chosen, fields = choices.chosen, resolve(choices).chosen

    def models(chosen: Fields) -> dict[ModelShape, tuple[int, Fields]]:
        shapes = {shape: {"block_size": WINDOW} | _fields(shape, chosen) for shape in SHAPES}
        return {x: (N, own) for x, own in shapes.items() if (N := parameters(fields | own))}

    if not (usable := models(chosen)):  # the error says why
        return [_fields(SHAPES[0], chosen)]
    free = {name: x for name, x in chosen.items() if name not in (*ModelShape._fields, "n_head")}
    pairs = [*models(free).items(), *usable.items()]
    small = {shape: own for shape, (N, own) in pairs if N <= MAX_TIMED_PARAMETERS}
    for shapes in (TIMED_SHAPES, SHAPES):
        if found := [small[shape] for shape in shapes if shape in small]:
            return found
    return [next(own for _, own in usable.values())]


def corrected(costs: Costs, trials: Sequence[Trial]) -> Costs:
    """-> the costs, times the ratio by which the trial of the nearest size was slower.

    Of equal sizes the trial with the most tokens counts.
    """
    if not trials:
        return costs

    def of(parameters: int) -> Cost:
        def distance(trial: Trial) -> tuple[float, float]:
            return abs(math.log(trial.outcome.parameters / parameters)), -trial.outcome.tokens

        (N, tokens, *_), seconds, batch = min(trials, key=distance)
        ratio = seconds / costs(int(N)).seconds(tokens, batch)
        token, update = costs(parameters)
        return Cost(ratio * token, ratio * update)

    return of


def cost_of(settings: Settings) -> Cost:
    """Returns how long this machine trains a model of these settings: a few passes are timed."""
    T, accumulated = settings.model.block_size, settings.training.grad_accum_steps
    settings = settings.replace(batch_size=max(1, MAX_BATCH // T // accumulated))
    run = settings.run
    use_threads(dataclasses.replace(run, threads=choose_threads(run, settings)))
    tokens = np.zeros(4 * run.batch_size * T, np.int32)
    bytes_ = Tokenizer(kind="byte")  # of about as many tokens as any text has
    data = Dataset(tokens, T, run.batch_size, run.seed, bytes_)
    model = TransformerModel(settings.model, seed=run.seed, backend=run.backend)
    timed = pace.rough_pace(Training(model, data=data), settings.training)
    return Cost((timed.step - timed.update) / tokens_per_step(settings.fields), timed.update)

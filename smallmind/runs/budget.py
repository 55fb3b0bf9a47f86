"""The model and the batch that learn most in a given time: what `--minutes` chooses.

In C operations a model of P parameters sees D = C / 6P tokens (Kaplan et al. 2020). A smaller one
has too few parameters, a larger one sees too little text: the loss is lowest at a certain D / P
(Hoffmann et al. 2022). The constants are measured, see `bench/LOG.md`.
"""

import statistics
from typing import NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError
from smallmind.console import activity
from smallmind.console.activity import clock
from smallmind.nn.network import declare_parameters
from smallmind.nn.transformer import TransformerModel, resolve_precision
from smallmind.runs.threads import use_threads
from smallmind.settings.config import ModelConfig, RunConfig
from smallmind.settings.presets import RECIPES, Fields
from smallmind.settings.settings import Settings
from smallmind.settings.sources import MODEL_FIELDS, Choices

OPERATIONS = 6  # per parameter and token of a training pass
PASSES = 5  # that are timed, after one that waits for kernels and memory
LEARNING = 0.85  # share of the time spent in training passes; the rest updates and evaluates
TOKENS_PER_PARAMETER = 5.0  # where the loss is lowest for the time
UPDATES = 1000  # that a batch is made for: fewer of a larger batch learn less from as many tokens
MIN_BATCH, MAX_BATCH = 768, 4096  # tokens
PARAMETERS_PER_CHARACTER = 4.0  # of the text: more of them memorise it
CHARACTERS_PER_TOKEN = 1.9  # of 512 tokens learned from English text
# Passes over the text -> dropout that such a run needs at least.
DROPOUT = ((24, 0.2), (4, 0.1), (0, 0.0))


class Shape(NamedTuple):
    """The size of a model, and how much text it looks at."""

    n_layer: int
    n_embd: int
    block_size: int


CHOSEN = ("n_layer", "n_embd", "n_head", "block_size", "batch_size", "dropout")
HEAD = 32  # channels
TIMED = Shape(4, 128, 64)  # large enough to tell how fast a machine multiplies
# From the smallest to the largest.
SHAPES = [
    Shape(2, 32, 64),
    Shape(2, 64, 64),
    Shape(2, 96, 64),
    Shape(2, 128, 128),
    Shape(3, 128, 128),
    Shape(4, 128, 128),
    Shape(4, 160, 128),
    Shape(4, 192, 128),
    Shape(6, 192, 128),
    Shape(6, 256, 128),
    Shape(6, 320, 256),
    Shape(8, 384, 256),
    Shape(8, 512, 256),
    Shape(12, 512, 256),
]


def fit(choices: Choices, characters: int) -> Choices:
    """The choices with the model and the batch for a run of their `minutes`.

    Chooses the size of the model, its block size, batch and dropout, as far as they are not given,
    for a text of `characters` and for this machine, of which a few passes are timed. Recipes that
    choose nothing, and runs that start from a model, keep their own. InputError for a setting that
    is out of range.
    """
    given, recipe = choices.given, choices.recipe
    fits = recipe and given.get("minutes") and RECIPES[recipe].fits
    if not fits or given.get("init_from") or all(name in given for name in CHOSEN):
        return choices
    _ = choices.fields  # refuses values that are out of range, before anything computes with them
    timed = choices.having(**_fields(TIMED, given) | given).settings()
    seconds = 60 * (timed.run.minutes or 0.0)
    operations = LEARNING * seconds * operations_per_second(timed)
    return choices.having(**choose(given, timed.fields, operations, characters))


def choose(given: Fields, fields: Fields, operations: float, characters: int) -> Fields:
    """given, and what `fields` lacks for this many operations of training passes on a text."""
    kind = fields.get("tokenizer", RunConfig.tokenizer)
    is_learned = kind not in parts.TOKENIZERS or parts.load(parts.TOKENIZERS, kind).is_learned
    text = characters / (CHARACTERS_PER_TOKEN if is_learned else 1)  # its tokens
    # A window fits into the text many times, also into its held-out part.
    longest = max(8, int(text // 40))
    shapes = [shape._replace(block_size=min(shape.block_size, longest)) for shape in SHAPES]
    candidates = [_fields(shape, given) | given for shape in shapes]
    chosen, size = candidates[0], parameters(fields | candidates[0]) or 1
    for candidate in candidates:
        count = parameters(fields | candidate)
        if not count or count > PARAMETERS_PER_CHARACTER * characters:
            continue
        if operations / (OPERATIONS * count) >= TOKENS_PER_PARAMETER * count:
            chosen, size = candidate, count
    tokens = operations / (OPERATIONS * size)
    batch = min(MAX_BATCH, max(MIN_BATCH, tokens / UPDATES))
    passes = tokens / text
    dropout = next(share for least, share in DROPOUT if passes >= least)
    windows = max(1, round(batch / chosen["block_size"]))
    return {"batch_size": windows, "dropout": dropout} | chosen


def _fields(shape: Shape, given: Fields) -> Fields:
    """The fields of a shape, with heads that divide its channels whichever of the two is given."""
    C = given.get("n_embd", shape.n_embd)
    size = given.get("head_size") or HEAD
    n_head = given.get("n_head") or next(h for h in range(max(1, C // size), 0, -1) if C % h == 0)
    return {**shape._asdict(), "n_head": n_head, "n_embd": max(1, round(C / n_head)) * n_head}


def parameters(fields: Fields) -> int | None:
    """The parameters of the model that has these fields; None if there is no such model."""
    try:
        config = ModelConfig(**{name: fields[name] for name in MODEL_FIELDS & fields.keys()})
    except InputError:
        return None
    return declare_parameters(config).count


def operations_per_second(settings: Settings) -> float:
    """How fast this machine trains a model like that of the settings: a few passes are timed."""
    config, run = settings.model, settings.run
    precision = resolve_precision(settings.training.requested_precision, run.backend).of_trained
    with activity.doing("Timing a few passes", usual=True):
        use_threads(run)
        model = TransformerModel(config, backend=run.backend)
        model.use_precision(precision)
        ids = np.zeros((run.batch_size, config.block_size), np.int32)
        seconds = []
        for _ in range(1 + PASSES):
            start = clock()
            model.loss_and_gradients(ids, ids)
            seconds.append(clock() - start)
    model.workspace.pool.trim()  # the run has batches of other sizes
    per_pass = OPERATIONS * model.flat.data.size * ids.size
    return float(per_pass / statistics.median(seconds[1:]))

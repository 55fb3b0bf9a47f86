"""The choices that follow from conversations, their number and length, and from built-in texts."""

import dataclasses
import math

import numpy as np

from smallmind.forecast import pace
from smallmind.nn.position import position_class
from smallmind.runs.assembly import Initial
from smallmind.runs.source import ConversationSource, Source
from smallmind.settings.config import TrainingConfig
from smallmind.settings.presets import CHAT_RECIPE, DEFAULT_RECIPE, SIZES, Fields
from smallmind.settings.settings import Settings
from smallmind.settings.sources import ALTERNATIVES, Choices
from smallmind.text.packing import pack
from smallmind.text.tokenizer import Tokenizer
from smallmind.training.answers import FEWEST_ASKED
from smallmind.training.evaluation import EVALUATING, evaluating_seconds
from smallmind.training.evaluations import SAMPLE_TOKENS
from smallmind.training.training import Training

# Measured, see "Conversations" in bench/LOG.md: fewer of them are read more often, and drop more.
SEEN = 10_000  # conversations, repeated ones included
SEEN_TUNING = 3_000  # likewise, by a model that has learned the language before
FEWEST_EPOCHS, MOST_EPOCHS = 2, 20
FEW, DROPOUT = 10_000, 0.1
PATIENCE = 3  # evaluations without a lower loss on held-out answers
EVALUATIONS = 10  # of a run, if there is time
FEWEST_TOKENS = 4096  # in windows of an evaluation, which is more often rather than on more
ASKING = 0.2  # share of the time for evaluations that questions before the first step may take
# Windows: at least as long as nearly all conversations, in steps, and then until little is empty.
FITTING, STEP, LONGEST, PADDING = 0.95, 64, 1024, 0.015
USUAL = 256  # where lengths are not known
TOKENS, MORE_TOKENS = 1024, 2048  # in an update, with few and with many conversations
# Settings that choose the size of a model for the built-in stories.
SIZING = ("n_layer", "n_embd", "n_head", "n_kv_head", "minutes")


def for_built_in(choices: Choices) -> Choices:
    """The choices with those for the built-in stories or questions, if no other text is named."""
    given = choices.given
    if choices.fields.get("text") or given.get("init_from"):
        return choices
    if choices.fields.get("chat"):
        from smallmind.text.questions import BUILT_IN_FIELDS

        choices = _with_recipe(choices)
        follows = choices.recipe == CHAT_RECIPE
    else:
        from smallmind.text.stories import BUILT_IN_FIELDS

        follows = choices.recipe == DEFAULT_RECIPE and not any(given.get(x) for x in SIZING)
    if not follows:
        return choices
    return choices.having(**_without_alternatives(BUILT_IN_FIELDS, given) | given)


def for_conversations(
    choices: Choices, source: Source, tokenizer: Tokenizer, initial: Initial | None
) -> Choices:
    """The choices with what the recipe for conversations sets, unless another has been named."""
    choices = _with_recipe(choices)
    if choices.recipe != CHAT_RECIPE:
        return choices
    given = choices.given
    if choices.size:  # whose windows are for texts
        of_size = SIZES[choices.size]
        names = [x for x in ("block_size", "batch_size") if given.get(x) == of_size.get(x)]
        given = {name: value for name, value in given.items() if name not in names}
    chosen = _chosen(given, source, tokenizer, initial)
    return choices.having(**chosen | given)


def _with_recipe(choices: Choices) -> Choices:
    """The choices with the recipe for conversations, if none has been named."""
    if not choices.is_default:
        return choices
    return dataclasses.replace(choices, recipe=CHAT_RECIPE, is_default=False)


def _chosen(given: Fields, source: Source, tokenizer: Tokenizer, initial: Initial | None) -> Fields:
    """The fields that nobody has given."""
    count = source.report.conversations if source.report else 0
    fields: Fields = {"early_stopping_patience": PATIENCE, "block_size": USUAL}
    if isinstance(source, ConversationSource):
        count = len(source.conversations)
        lengths = np.array([len(tokens) for tokens in source.marked(tokenizer)])
        fields["block_size"] = window_for(lengths)
    if initial:
        most = initial.config.block_size
        if position_class(initial.config).limits_context:
            del fields["block_size"]
        elif given.get("lora_rank"):
            fields["block_size"] = min(most, fields["block_size"])
    T = given.get("block_size") or fields.get("block_size") or (initial and most)
    tokens = TOKENS if count < FEW else MORE_TOKENS
    fields["batch_size"] = max(1, round(tokens / (T or USUAL)))
    if not any(given.get(name) for name in ALTERNATIVES["length of the run"]):
        epochs = round((SEEN_TUNING if initial else SEEN) / max(1, count))
        fields["epochs"] = min(MOST_EPOCHS, max(FEWEST_EPOCHS, epochs))
    if count < FEW and not initial:
        fields["dropout"] = DROPOUT
    return fields


def window_for(lengths: np.ndarray) -> int:
    """lengths (n,) of conversations, in tokens -> the tokens of windows to pack them into."""
    least = STEP * int(np.ceil(np.quantile(lengths, FITTING) / STEP))
    least = min(LONGEST, max(2 * STEP, least))
    fullest, best = 1.0, least
    for T in range(least, LONGEST + 1, STEP):
        places = np.minimum(lengths - 1, T)
        empty = 1 - places.sum() / (T * len(pack(places, T)[1]))
        if empty < fullest:
            fullest, best = empty, T
        if fullest <= PADDING:
            break
    return best


def _without_alternatives(fields: Fields, given: Fields) -> Fields:
    """The fields without those that something given replaces, such as steps by epochs."""
    replaced = {
        name
        for names in ALTERNATIVES.values()
        if any(given.get(other) for other in names)
        for name in names
    }
    return {name: value for name, value in fields.items() if name not in replaced}


def chooses_evaluations(choices: Choices) -> bool:
    """True if the recipe for conversations says how often a run is evaluated, and on how much."""
    chosen = choices.given.keys() & {"val_every", "val_batches"}
    return choices.recipe == CHAT_RECIPE and not chosen


def evaluated_often(settings: Settings) -> Settings:
    """The settings with evaluations all along a run whose number of steps is known by now."""
    every = max(1, settings.training.steps // EVALUATIONS)
    return settings.replace(val_every=every, save_every=max(every, settings.training.save_every))


def evaluated_in_time(
    training: Training, config: TrainingConfig, seconds: float | None = None
) -> tuple[TrainingConfig, float]:
    """The config with as many evaluations as fit in their share of the time of its steps.

    With seconds, of a run that takes so long. -> the config, and the seconds for questions before
    the first step, perhaps 0. Times a few passes.
    """
    data = training.data
    timed = pace.kept_pace(training, dataclasses.replace(config, val_every=1, val_batches=1))
    steps = config.steps
    if seconds is not None:
        steps = max(1, int((1 - EVALUATING) * seconds / timed.step))
    seconds, batch = evaluating_seconds(steps * timed.step), timed.evaluation / 2
    asking = FEWEST_ASKED * timed.sample * pace.TIMED_TOKENS / SAMPLE_TOKENS
    seconds -= pace.batches_at_the_end(data) * batch + asking
    before = asking if asking < ASKING * seconds else 0.0
    seconds -= before

    def cost(batches: int) -> float:
        return batch * sum(min(batches, data.batches_of(part)) for part in ("train", "held_out"))

    few = math.ceil(FEWEST_TOKENS / (data.batch_size * data.block_size))
    count = max(1, min(EVALUATIONS, int(seconds / max(cost(few), 1e-9))))
    fitting = [n for n in range(1, config.val_batches + 1) if count * cost(n) <= seconds]
    batches, every = max(fitting, default=1), math.ceil(steps / count)
    if not fitting and config.schedule != "plateau" and config.target_loss is None:
        every = 0  # the evaluation at the end takes all the time there is
    return dataclasses.replace(config, val_every=every, val_batches=batches), before

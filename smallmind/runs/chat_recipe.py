"""The choices of the recipe for conversations, which follow from their number and length."""

import dataclasses
import math

import numpy as np

from smallmind import parts
from smallmind.runs.source import ConversationSource, Source
from smallmind.settings.config import RunConfig
from smallmind.settings.presets import CHAT_RECIPE, SIZES, Fields
from smallmind.settings.settings import Settings
from smallmind.settings.sources import ALTERNATIVES, Choices

# Measured, see "Conversations" in bench/LOG.md: fewer of them are read more often, and drop more.
SEEN = 6000  # conversations, repeated ones included
FEWEST_EPOCHS, MOST_EPOCHS = 2, 20
FEW, DROPOUT = 10_000, 0.1
PATIENCE = 3  # evaluations without a lower loss on held-out answers
EVALUATIONS = 10  # of a run
WINDOWS = (64, 512)  # tokens, the shortest and the longest that is chosen
FITTING = 0.95  # share of conversations that a window holds
CHARACTERS_PER_TOKEN = 2.0  # of learned tokens, few for few conversations
HEADERS = 40  # tokens around the turns of a conversation, about, as characters


def for_conversations(choices: Choices, source: Source) -> Choices:
    """The choices with what the recipe for conversations sets, unless another has been named."""
    if choices.is_default:
        choices = dataclasses.replace(choices, recipe=CHAT_RECIPE, is_default=False)
    if choices.recipe != CHAT_RECIPE:
        return choices
    given = choices.given
    if choices.size and given.get("block_size") == SIZES[choices.size]["block_size"]:
        given = {name: value for name, value in given.items() if name != "block_size"}
    return choices.having(**chosen(given, source) | given)


def chosen(given: Fields, source: Source) -> Fields:
    """The fields that nobody has given."""
    if source.is_built_in:
        from smallmind.text.questions import BUILT_IN_FIELDS

        return BUILT_IN_FIELDS
    fields: Fields = {"early_stopping_patience": PATIENCE}
    count = source.report.conversations if source.report else 0
    if isinstance(source, ConversationSource):
        count = len(source.conversations)
        if not given.get("init_from"):  # else the model has its own
            kind = given.get("tokenizer", RunConfig.tokenizer)
            fields["block_size"] = _window(source, kind)
    if not any(given.get(name) for name in ALTERNATIVES["length of the run"]):
        epochs = round(SEEN / max(1, count))
        fields["epochs"] = min(MOST_EPOCHS, max(FEWEST_EPOCHS, epochs))
    if count < FEW:
        fields["dropout"] = DROPOUT
    return fields


def _window(source: ConversationSource, kind: str) -> int:
    """Tokens that hold most of the conversations, a multiple of 64."""
    characters = [
        HEADERS + sum(len(turn.text) for turn in conversation)
        for conversation in source.conversations
    ]
    is_learned = kind not in parts.TOKENIZERS or parts.load(parts.TOKENIZERS, kind).is_learned
    tokens = np.quantile(characters, FITTING) / (CHARACTERS_PER_TOKEN if is_learned else 1)
    return int(min(WINDOWS[1], max(WINDOWS[0], 64 * math.ceil(tokens / 64))))


def evaluated_often(choices: Choices, settings: Settings) -> Settings:
    """The settings with evaluations all along a run whose number of steps is known by now."""
    if choices.recipe != CHAT_RECIPE or "val_every" in choices.given:
        return settings
    every = max(1, settings.training.steps // EVALUATIONS)
    return settings.replace(val_every=every, save_every=max(every, settings.training.save_every))

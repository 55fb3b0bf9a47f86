"""How settings are resolved: a person's choices, what is known, and the RULES, applied in order.

`Facts` become known in two steps, as the choices say how a text is read, and the text says what
else follows. A rule waits until what it asks for is known, so the same rules are applied to the
same choices twice: before the text is read, and after. What they return counts as chosen for the
rules below them; a rule that lets other choices stand leaves those fields out itself.
"""

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from smallmind.checks import InputError, check
from smallmind.settings.config import ModelConfig, Precision, TrainingConfig
from smallmind.settings.presets import (
    ARCHITECTURES,
    CHAT_RECIPE,
    DEFAULT_RECIPE,
    PRESETS,
    RECIPES,
    SIZES,
    Fields,
)
from smallmind.settings.settings import CHOSEN, PLAIN, Origin, Settings
from smallmind.settings.sources import (
    ALTERNATIVES,
    FIELDS,
    MODEL_FIELDS,
    flag_of,
    is_saved,
    read_settings,
)

UNKNOWN: Any = None  # a fact that is not known yet


@dataclass(frozen=True)
class Facts:
    """Facts about a text, a starting model and this machine. They are not all known at once."""

    # Before a text is read.
    characters: int = UNKNOWN  # about, as if each were a byte
    built_in: Fields = UNKNOWN  # settings that were measured for the built-in text, if it is used
    start: ModelConfig = UNKNOWN  # that of the model that the run starts from
    start_tokenizer: str = UNKNOWN  # its kind
    limits_context: bool = UNKNOWN  # to the positions that it has learned
    pairs: int | None = UNKNOWN  # tokens by which its pairs are numbered, if it embeds them
    precision: str = UNKNOWN  # the fastest number type of this machine
    # Afterwards.
    is_chat: bool = UNKNOWN
    conversations: int = UNKNOWN
    window: Callable[[], int] = UNKNOWN  # -> tokens that nearly all conversations fit into
    has_pairs: bool = UNKNOWN  # of a better and a worse answer
    has_questions: bool = UNKNOWN  # whose answers are rewarded
    has_documents: bool = UNKNOWN  # several, between which a learned tokenizer has a token
    vocab_size: int = UNKNOWN
    tokenizer: str = UNKNOWN  # in the words of an error
    separator: int | None = UNKNOWN  # the token between documents
    of_tokens: Fields = UNKNOWN  # settings of tokens on disk
    directory: str = UNKNOWN  # of tokens on disk
    steps_per_epoch: Callable[[Fields], int] = UNKNOWN  # of a run with these fields
    # Times a few passes of models, and says which one learns most in the minutes that are chosen.
    forecast: Callable[["Choices"], Fields] = UNKNOWN


NO_FACTS = Facts()


@dataclass(frozen=True)
class Choices:
    """A person's choices, and the recipe that sets the rest."""

    chosen: Fields
    recipe: str | None = DEFAULT_RECIPE  # None: they are all, like those of a saved run
    size: str | None = None
    in_file: frozenset[str] = frozenset()  # the names of those that a TOML file sets
    is_default: bool = False  # the recipe, which the user has not named
    origins: Mapping[str, Origin] = field(default_factory=dict)  # what has set them

    @classmethod
    def of(
        cls,
        size: str | None = None,
        preset: str | None = None,
        file: Path | None = None,
        flags: Fields | None = None,
        arch: str | None = None,
        recipe: str | None = None,
    ) -> "Choices":
        """Merges what a size, arch, preset, file and flags set; later ones win.

        Without a recipe it is DEFAULT_RECIPE, and for the config.json of a run its own settings.
        InputError for an invalid file, or one that sets everything that a name would.
        """
        named = {
            f"--size {size}": SIZES[size] if size else {},
            f"--arch {arch}": ARCHITECTURES[arch] if arch else {},
            f"--preset {preset}": PRESETS[preset] if preset else {},
        }
        from_file, flags = read_settings(file) if file else {}, flags or {}
        reuses = file is not None and is_saved(file)
        useless = [flag for flag, x in named.items() if x and file and x.keys() <= from_file.keys()]
        if recipe and reuses:
            useless.append(f"--recipe {recipe}")
        if useless:
            raise InputError(
                f"{useless[0]} has no effect: {file} sets everything it does; leave out one of "
                f"the two"
            )
        for what, names in ALTERNATIVES.items():
            both = [flag_of(name) for name in names if flags.get(name)]
            if len(both) > 1:
                raise InputError(f"{both[0]} and {both[1]} both set the {what}; give only one")
        chosen: Fields = {}
        origins: dict[str, Origin] = {}
        for by, source in {**named, str(file): from_file, CHOSEN.by: flags}.items():
            chosen = _override(chosen, source)
            origins |= dict.fromkeys(source, Origin(by))
        return cls(
            chosen,
            None if reuses else recipe or DEFAULT_RECIPE,
            size,
            frozenset() if reuses else frozenset(from_file),
            is_default=not (reuses or recipe),
            origins=origins,
        )

    def having(self, **fields: Any) -> "Choices":
        return dataclasses.replace(self, chosen=self.chosen | fields)

    @functools.cached_property
    def alone(self) -> "Choices":
        """The choices with all that follows from them alone, while no fact is known."""
        return resolve(self)

    @property
    def fields(self) -> Fields:
        """All fields that are set, by choice or by the recipe; any other has its default."""
        return self.alone.chosen

    def settings(self, facts: Facts = NO_FACTS) -> Settings:
        """Returns the settings of a run, as far as they follow from the choices and the facts."""
        settled = self.alone if facts is NO_FACTS else resolve(self, facts)
        return Settings.from_fields(settled.chosen, settled.origins)


class Rule(NamedTuple):
    """Fields that follow from what has been chosen and is known, once `needs` is known."""

    apply: Callable[[Choices, Facts], Fields]
    needs: str = ""  # the name of a fact; empty: nothing but the choices

    @property
    def origin(self) -> Origin:
        """The name of the rule and its sentence."""
        name = self.apply.__name__.replace("_", " ")
        return Origin(f"rule {name}", (self.apply.__doc__ or "").partition("\n")[0])


def resolve(choices: Choices, facts: Facts = NO_FACTS) -> Choices:
    """Applies the RULES whose facts are known, in order -> the choices with the fields they set."""
    chosen, origins = dict(choices.chosen), dict(choices.origins)
    recipe = CHAT_RECIPE if facts.is_chat and choices.is_default else choices.recipe
    if recipe is not None:
        if recipe not in RECIPES:
            raise InputError(f"recipe={recipe!r} must be one of {', '.join(RECIPES)}")
        for name in chosen.keys() & FIELDS.keys():
            check(FIELDS[name][1], chosen[name])
    settled = Choices(chosen, recipe, choices.size, origins=origins)
    for rule in RULES:
        if rule.needs and getattr(facts, rule.needs) is None:
            continue
        origin = rule.origin
        if rule.apply is settings_of_recipe and recipe:
            origin = Origin(f"recipe {recipe}", RECIPES[recipe].about)
        for name, value in rule.apply(settled, facts).items():
            if name not in chosen or chosen[name] != value:
                origins[name] = origin
            chosen[name] = value
    return settled


def _override(fields: Fields, source: Fields) -> Fields:
    """Adds the fields of source, which replace their alternatives too."""
    for names in ALTERNATIVES.values():
        if any(name in source for name in names):
            fields = {name: value for name, value in fields.items() if name not in names}
    return fields | source


def _unless_chosen(fields: Fields, chosen: Fields) -> Fields:
    """Leaves out the fields that have been chosen."""
    return {name: value for name, value in fields.items() if name not in chosen}


DEFAULTS = {name: field.default for name, (_, field) in FIELDS.items()}


def with_defaults(chosen: Fields) -> Mapping[str, Any]:
    """Returns every field by name: as it has been set so far, or its default."""
    return ChainMap(chosen, DEFAULTS)


# Settings that choose the size of a model for the built-in stories.
SIZING_FIELDS = ("n_layer", "n_embd", "n_head", "n_kv_head", "minutes")


def built_in_text(choices: Choices, facts: Facts) -> Fields:
    """Uses the settings measured to be best for the built-in stories or questions."""
    chosen = choices.chosen
    if choices.recipe != (CHAT_RECIPE if facts.is_chat else DEFAULT_RECIPE):
        return {}
    if not facts.is_chat and any(chosen.get(name) for name in SIZING_FIELDS):
        return {}
    replaced = {
        name
        for names in ALTERNATIVES.values()
        if any(chosen.get(other) for other in names)
        for name in names
    }
    return _unless_chosen(facts.built_in, chosen | dict.fromkeys(replaced))


def tokenizer_by_length(choices: Choices, facts: Facts) -> Fields:
    """Learns BPE tokens from a long text, and uses single characters for one that is read often."""
    chosen = choices.chosen
    if choices.recipe is None or "tokenizer" in chosen or chosen.get("init_from"):
        return {}
    recipe, minutes = RECIPES[choices.recipe], chosen.get("minutes")
    return {"tokenizer": recipe.tokenizer_for(facts.characters, minutes)}


def dropout_and_width(choices: Choices, facts: Facts) -> Fields:
    """Keeps the model's width and dropout: dropout that is new to a model makes it far worse."""
    kept = {"dropout": facts.start.dropout, "n_embd": facts.start.n_embd}
    return _unless_chosen(kept, choices.chosen)


WIDE_CHANNELS = 256  # channels from which a model that the run starts from is tuned with AdamW
# Measured, see "Conversations" in bench/LOG.md: fewer of them are read more often, and drop more.
SEEN_CONVERSATIONS = 10_000  # repeated ones included
SEEN_TUNING = 3_000  # likewise, by a model that has learned the language before
FEWEST_EPOCHS, MOST_EPOCHS = 2, 20
# Likewise, by a wide model, which knows them by heart soon: see "Real weights" in bench/LOG.md.
SEEN_ADAPTING, MOST_ADAPTING = 1_000, 3
FEW_CONVERSATIONS, CHAT_DROPOUT = 10_000, 0.1
CHAT_PATIENCE = 3  # evaluations without a lower loss on held-out answers
USUAL_WINDOW = 256  # tokens, where the lengths of conversations are not known
LONGEST_WINDOW = 1024  # tokens, for conversations
UPDATE_TOKENS, LONG_UPDATE_TOKENS = 1024, 2048  # in an update; with many conversations


def conversations(choices: Choices, facts: Facts) -> Fields:
    """Chooses epochs, windows, batch and dropout by the number and length of conversations.

    The windows of a size are for texts.
    """
    if choices.recipe != CHAT_RECIPE:
        return {}
    chosen, start, count = choices.chosen, facts.start, facts.conversations
    of_size = SIZES[choices.size] if choices.size else {}
    for name in ("block_size", "batch_size"):
        if name in of_size and chosen.get(name) == of_size[name]:
            chosen = {other: value for other, value in chosen.items() if other != name}
    window = USUAL_WINDOW if facts.window is None else facts.window()
    fields: Fields = {"early_stopping_patience": CHAT_PATIENCE, "block_size": window}
    if start and facts.limits_context:
        del fields["block_size"]
        window = start.block_size
    elif start and chosen.get("lora_rank"):
        fields["block_size"] = window = min(start.block_size, window)
    tokens = UPDATE_TOKENS if count < FEW_CONVERSATIONS else LONG_UPDATE_TOKENS
    fields["batch_size"] = max(1, round(tokens / (chosen.get("block_size") or window)))
    if not any(chosen.get(name) for name in ALTERNATIVES["length of the run"]):
        seen, fewest, most = SEEN_CONVERSATIONS, FEWEST_EPOCHS, MOST_EPOCHS
        if start:
            is_wide = start.n_embd >= WIDE_CHANNELS
            seen, most = (SEEN_ADAPTING, MOST_ADAPTING) if is_wide else (SEEN_TUNING, most)
            fewest = 1 if is_wide else fewest
        fields["epochs"] = min(most, max(fewest, round(seen / max(1, count))))
    if count < FEW_CONVERSATIONS and not start:
        fields["dropout"] = CHAT_DROPOUT
    return _unless_chosen(fields, chosen)


PREFERENCE_BATCH = 8  # pairs
PREFERENCE_EPOCHS = 3  # at most: the margins of pairs that were seen grow without end


def preferences(choices: Choices, _: Facts) -> Fields:
    """Learns from both answers of pairs, by DPO, in few passes."""
    fields: Fields = {"loss": "dpo", "batch_size": PREFERENCE_BATCH}
    if choices.recipe == CHAT_RECIPE and not any(
        choices.chosen.get(name) for name in ALTERNATIVES["length of the run"]
    ):
        fields["epochs"] = PREFERENCE_EPOCHS
    return _unless_chosen(fields, choices.chosen)


REWARD_BATCH = 32  # questions
REWARD_STEPS = 200
REWARD_BETA = 0.005  # without it a model that is right half of the time may forget all it can


def rewards(choices: Choices, _: Facts) -> Fields:
    """Asks many questions per update, stays near the starting model, and does not stop early."""
    fields: Fields = {
        "batch_size": REWARD_BATCH,
        "early_stopping_patience": 0,
        "reward_beta": REWARD_BETA,
    }
    if not any(choices.chosen.get(name) for name in ALTERNATIVES["length of the run"]):
        fields["steps"] = REWARD_STEPS
    return _unless_chosen(fields, choices.chosen)


def document_masks(choices: Choices, facts: Facts) -> Fields:
    """Keeps attention inside each document where a learned tokenizer has a token between them."""
    chosen, recipe = choices.chosen, choices.recipe
    decided = {"mask_documents", "text_separator"} & chosen.keys()
    if facts.is_chat or not recipe or not RECIPES[recipe].adapts:
        return {}
    if chosen.get("init_from") or decided:
        return {}
    return {"mask_documents": True} if facts.has_documents else {}


SHAPE_FIELDS = ("n_layer", "n_embd", "n_head")
# Fitted to the minutes.
FITTED_FIELDS = (*SHAPE_FIELDS, "block_size", "batch_size", "dropout", "weight_decay")


def model_for_minutes(choices: Choices, facts: Facts) -> Fields:
    """Chooses the model that learns most in the minutes on this machine, by timing a few passes.

    For conversations the rest follows from them.
    """
    chosen, recipe = choices.chosen, choices.recipe
    names = SHAPE_FIELDS if recipe == CHAT_RECIPE else FITTED_FIELDS
    if not chosen.get("minutes") or chosen.get("init_from") or chosen.keys() >= {*names}:
        return {}
    if not recipe or not RECIPES[recipe].adapts:
        return {}
    fields = facts.forecast(choices)
    return {name: fields[name] for name in SHAPE_FIELDS} if recipe == CHAT_RECIPE else fields


def tuned_with_adamw(choices: Choices, _: Facts) -> Fields:
    """Trains adapters, and wide models that the run starts from, with AdamW."""
    chosen = choices.chosen
    is_wide = chosen.get("init_from") and chosen.get("n_embd", 0) >= WIDE_CHANNELS
    if choices.recipe and (chosen.get("lora_rank") or is_wide or chosen.get("loss") not in PLAIN):
        return _unless_chosen({"optimizer": "adamw"}, chosen)
    return {}


def settings_of_recipe(choices: Choices, _: Facts) -> Fields:
    """Takes the rest from the recipe, except for layers if the run starts from a model."""
    if choices.recipe is None:
        return {}
    found, chosen = RECIPES[choices.recipe], choices.chosen
    fields = found.settings
    if chosen.get("init_from"):
        fields = {name: x for name, x in fields.items() if name not in MODEL_FIELDS}
    fields = fields | found.sizes.get(choices.size or "", {})
    return _unless_chosen(_override(fields, chosen), chosen)


# Measured with models of 128 and 576 channels, see "Adapting models of others" in bench/LOG.md.
FINE_TUNING = 0.3  # of the rates from scratch, for a model that is good already
LORA_RATE = 8e-3
SANDWICH_LORA = 0.625  # of it, where branches are normalised at their ends: Gemma 3
# For preferences the share of these rates, which is less for wide models and many steps: a model
# forgets what it answered by the product of rate and steps.
PREFERENCE_TUNING, PREFERENCE_STEPS = 0.08, 128
# Channels up to which that is so, and the powers by which rates fall with more of them.
TUNED_WIDTH, TUNING_POWER, LORA_POWER = 128, 1.5, 1.0


def rates(choices: Choices, facts: Facts) -> Fields:
    """Sets rates by optimizer, batch and width, decays them to zero, and asks for a fast precision.

    beta2 is 0.99 for 768 tokens per update and averages over as many tokens for any other number
    (Marek et al. 2025), but is at least 0.9.
    """
    now = with_defaults(choices.chosen)
    if choices.recipe is None or not RECIPES[choices.recipe].adapts:
        return {}
    # A model that the run starts from brings its own block size.
    tokens = now["batch_size"] * now["grad_accum_steps"] * now["block_size"]
    fields: Fields = {"beta2": max(0.9, 0.99 ** (tokens / 768))}
    is_muon = now["optimizer"] == "muon"
    fields["learning_rate"] = 1e-2 if is_muon else 4e-3
    narrow = min(1.0, TUNED_WIDTH / now["n_embd"])
    if now["lora_rank"]:
        fields["learning_rate"] = LORA_RATE * narrow**LORA_POWER
        if facts.start and facts.start.part("block") == "sandwich":
            fields["learning_rate"] *= SANDWICH_LORA
    elif now["init_from"]:
        tuning = FINE_TUNING * narrow**TUNING_POWER
        fields["learning_rate"] *= tuning
        if is_muon:
            fields["matrix_learning_rate"] = tuning * TrainingConfig.matrix_learning_rate
    if now["loss"] not in (*PLAIN, "orpo"):  # which learns the chosen answers as any training does
        count = now["epochs"] * (facts.conversations or 0) / now["batch_size"] or now["steps"]
        fewer = PREFERENCE_STEPS / max(PREFERENCE_STEPS, count)
        fields["learning_rate"] *= PREFERENCE_TUNING * narrow * fewer
    if now["schedule"] in ("linear", "cosine", "wsd", "one-cycle"):
        fields["min_lr"] = 0.0
    if not now["use_mixed_precision"]:
        fields["precision"] = "auto"
    return _unless_chosen(fields, choices.chosen)


def starting_model(choices: Choices, facts: Facts) -> Fields:
    """Takes the layers, vocabulary and kind of tokenizer of the model that the run starts from.

    Only dropout is a free choice, and without an embedding of positions a shorter context; with
    conversations also a longer one, unless an adapter alone is trained. InputError if another of
    these settings was chosen differently.
    """
    now = with_defaults(choices.chosen)
    config = facts.start
    fixed = {**vars(config), "tokenizer": facts.start_tokenizer}
    fixed["mask_documents"] = config.document_token is not None
    del fixed["dropout"], fixed["vocab_size"]
    T = now["block_size"]
    if not facts.limits_context and "block_size" in choices.chosen:
        longest = LONGEST_WINDOW if facts.is_chat and not now["lora_rank"] else 0
        fixed["block_size"] = min(T, max(config.block_size, longest))
    for name, value in fixed.items():
        if now[name] not in (value, DEFAULTS[name]):
            raise InputError(
                f"{name}={now[name]!r} contradicts {now['init_from']}, whose weights have "
                f"{name}={value!r}; leave it out"
            )
    # The vocabulary too, which the document_token is one of.
    return fixed | {"vocab_size": config.vocab_size}


def kind_of_text(_: Choices, facts: Facts) -> Fields:
    """Records whether the text has conversations."""
    return {"chat": facts.is_chat}


def tokens_on_disk(choices: Choices, facts: Facts) -> Fields:
    """Takes the tokenizer that the tokens on disk were encoded with.

    InputError if another setting of it was chosen.
    """
    now = with_defaults(choices.chosen)
    for name in facts.of_tokens.keys() - {"tokenizer", "text_separator"}:
        value = facts.of_tokens[name]
        if now[name] not in (value, DEFAULTS[name]):
            raise InputError(
                f"{flag_of(name)} {now[name]} contradicts {facts.directory}, whose vocabulary has "
                f"{value}; leave it out"
            )
    return facts.of_tokens


def vocabulary(_: Choices, facts: Facts) -> Fields:
    """Takes the vocabulary of the tokenizer; a starting model keeps its numbers of token pairs."""
    fields: Fields = {"vocab_size": facts.vocab_size}
    if facts.start and facts.vocab_size > facts.start.vocab_size:
        fields["bigram_vocab"] = facts.pairs
    return fields


def token_between_documents(choices: Choices, facts: Facts) -> Fields:
    """Stops attention at the token between documents.

    InputError if there is none.
    """
    now = with_defaults(choices.chosen)
    if not now["mask_documents"] or now["document_token"] is not None:
        return {}
    if facts.separator is None:
        raise InputError(
            f"mask_documents=True needs a token between documents, and {facts.tokenizer} has none: "
            "leave it out, or choose --tokenizer bpe, which has <|endoftext|>"
        )
    return {"document_token": facts.separator}


def fast_precision(choices: Choices, facts: Facts) -> Fields:
    """Replaces the precision auto by the fastest on this machine; others may differ."""
    now = with_defaults(choices.chosen)
    return {"precision": facts.precision} if now["precision"] == Precision.AUTO else {}


def lowest_rate(choices: Choices, _: Facts) -> Fields:
    """Ends the learning rate at a tenth of its peak, unless something else is chosen."""
    now = with_defaults(choices.chosen)
    return {"min_lr": now["learning_rate"] / 10} if now["min_lr"] is None else {}


def steps(choices: Choices, facts: Facts) -> Fields:
    """Counts epochs and the warmup in steps, by the windows of the text.

    Those of a run by minutes are not known yet.
    """
    now = with_defaults(choices.chosen)
    share, in_epochs = now["warmup_share"], now["warmup_epochs"]
    if now["minutes"] and share:
        return {}
    fields: Fields = {}
    count = 0
    if now["epochs"] or in_epochs is not None:
        count = facts.steps_per_epoch(choices.chosen)
    if now["epochs"]:
        fields["steps"] = now["epochs"] * count
    if share is not None:
        fields["warmup_steps"] = round(share * fields.get("steps", now["steps"]))
    elif in_epochs is not None:
        fields["warmup_steps"] = round(in_epochs * count)
    if "warmup_steps" in fields:
        fields |= {"warmup_share": None, "warmup_epochs": None}
    return fields


EVALUATIONS = 10  # of a run on conversations, if there is time


def evaluations_of_answers(choices: Choices, _: Facts) -> Fields:
    """Spreads evaluations of held-out answers over the run, for a share of its time."""
    now = with_defaults(choices.chosen)
    is_chosen = not choices.chosen.keys().isdisjoint({"val_every", "val_batches"})
    if choices.recipe != CHAT_RECIPE or is_chosen:
        return {}
    every = max(1, now["steps"] // EVALUATIONS)
    return {"val_every": every, "save_every": max(every, now["save_every"])}


# In this order: each sees what those above it have set. A new one is a function and a line here,
# with the name of the fact that it waits for.
RULES = (
    Rule(built_in_text, "built_in"),
    Rule(tokenizer_by_length, "characters"),
    Rule(dropout_and_width, "start"),
    Rule(preferences, "has_pairs"),
    Rule(rewards, "has_questions"),
    Rule(conversations, "conversations"),
    Rule(document_masks, "has_documents"),
    Rule(model_for_minutes, "forecast"),
    Rule(tuned_with_adamw),
    Rule(settings_of_recipe),
    Rule(rates),
    Rule(starting_model, "start"),
    Rule(kind_of_text, "is_chat"),
    Rule(tokens_on_disk, "of_tokens"),
    Rule(vocabulary, "vocab_size"),
    Rule(token_between_documents, "vocab_size"),
    Rule(fast_precision, "precision"),
    Rule(lowest_rate, "vocab_size"),
    Rule(steps, "steps_per_epoch"),
    Rule(evaluations_of_answers, "conversations"),
)

"""Models of published architectures: which one a model is of, and its settings in a file."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from smallmind.checks import InputError, count_of, shown_value
from smallmind.settings.architectures import NOT_BUILT, PUBLISHED, Architecture, Keys
from smallmind.settings.config import ModelConfig
from smallmind.settings.sources import flags_of


def known_architecture(saved: Mapping[str, Any], key: str, attribute: str) -> Architecture:
    """-> the architecture whose attribute a file holds at this key. InputError if there is none."""
    known = {getattr(x, attribute): x for x in reversed(PUBLISHED) if getattr(x, attribute)}
    name = saved.get(key)
    if isinstance(name, str) and name in known:
        return known[name]
    absent = (int, float, type(None))  # where they are 0
    words = [str(name), *(word for word, x in saved.items() if not isinstance(x, absent) or x)]
    for what, patterns in NOT_BUILT.items():
        if any(fnmatchcase(word, pattern) for word in words for pattern in patterns):
            raise InputError(f"{shown_value(name)}: {what} are not supported")
    listed = ", ".join(reversed(known))
    raise InputError(f"{key}={shown_value(name)} is not supported; it must be one of {listed}")


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the published architecture that a model is of.

    InputError naming the parts that none has, and the flags that would have avoided them.
    """
    nearest = min(PUBLISHED, key=lambda architecture: len(config.changes_to(architecture)))
    changes = config.changes_to(nearest)
    if changes:
        flags = flags_of({name: x for name, x in changes.items() if name in vars(config)})
        raise InputError(
            f"no published architecture has {_named(config, changes)}; the nearest is "
            f"{nearest.name}" + (f": train with {flags}" if flags else "")
        )
    if nearest.rotates and config.rotary_channels % 2:
        larger = itertools.count(config.head_channels + 1)
        wider = (dataclasses.replace(config, head_size=n) for n in larger)
        even = next(x.head_size for x in wider if x.rotary_channels % 2 == 0)
        raise InputError(
            f"other programs cannot rotate an odd number of channels per head, "
            f"{config.rotary_channels}; train with --head-size {even}"
        )
    return nearest


def _named(config: ModelConfig, names: Iterable[str]) -> str:
    """Returns the settings with these names and their values."""
    values = config.values()
    return ", ".join(f"{name}={values.get(name)}" for name in names)


def settings_of(config: ModelConfig, settings: Keys) -> dict[str, Any]:
    """Returns the settings of a model under the keys of a format.

    InputError for one that the format has no key for, and whose programs take another.
    """
    plain = without_defaults(config)
    assumed = without_defaults(plain.having_parts(**settings.assumed))
    for name in settings.assumed:
        if plain.part_setting(name) != assumed.part_setting(name):
            raise InputError(
                f"this format has no key for {name}={plain.part_setting(name)}, and its programs "
                f"take {assumed.part_setting(name) or 'none'}; export the model to hf"
            )
    values = config.values()
    written = {**{key: allowed[0] for key, allowed in settings.fixed.items()}, **settings.free}
    for name, keys in settings.keys.items():
        value = values[name]
        if words := settings.words.get(name):
            value = [words[value[i % len(value)]] for i in range(config.n_layer)]
        written |= dict.fromkeys(_several(keys), value)
    return written


def config_of(
    architecture: Architecture, settings: Keys, saved: Mapping[str, Any], **known: Any
) -> ModelConfig:
    """A file's description -> the settings of its model.

    `known` are settings that follow from something else. InputError for what is missing, wrong or
    not supported.
    """
    for key, allowed in settings.fixed.items():
        if saved.get(key, allowed[0]) not in allowed:
            raise InputError(
                f"{key}={shown_value(saved[key])} is not supported; {architecture.name} has "
                f"{' or '.join(map(str, allowed))}"
            )
    values = {name: _value(settings, saved, name) for name in settings.keys} | known
    width, values = values.pop("hidden_size"), {**settings.assumed, **values}
    by_layer = {name: values.pop(name) for name in settings.words}
    if not values.pop("has_window", True):
        values["window"] = None
    channels = values.pop("rotary_channels", None)
    config = ModelConfig.with_parts({**architecture.parts, **architecture.filled, **values})
    if channels is not None:
        config = config.having_parts(rotary_share=channels / config.head_channels)
    for name, words in settings.words.items():
        config = config.having_parts(**{name: _by_layer(by_layer[name], words, config)})
    config = without_defaults(config)
    # Without what is the default anyway: as a model made here has it.
    usual: dict[str, Any] = {}
    if width is not None and width != config.hidden_size:
        usual["mlp_width"] = width
    if config.n_kv_head == config.n_head:
        usual["n_kv_head"] = None
    if config.n_embd == config.n_head * config.head_channels:
        usual["head_size"] = None
    config = dataclasses.replace(config, **usual)
    if changes := config.changes_to(architecture):
        raise InputError(f"{architecture.name} with {_named(config, changes)} is not supported")
    if architecture.rotates and config.rotary_channels % 2:
        rotated = count_of(config.rotary_channels, "rotated channel")
        raise InputError(f"heads with {rotated} are not supported: channels rotate in pairs")
    _check_others(architecture, settings, saved, config)
    return config


def _by_layer(values: Any, words: tuple[Any, Any], config: ModelConfig) -> tuple[int, ...] | None:
    """A list with a word for each layer -> numbers, 1 for the second word. None stays None."""
    if values is None:
        return None
    if not isinstance(values, list) or len(values) < config.n_layer:
        raise InputError(
            f"{shown_value(values)} is not a list of {count_of(config.n_layer, 'layer')}"
        )
    for value in values:
        if value not in words or isinstance(value, bool) != isinstance(words[0], bool):
            known = " or ".join(map(str, words))
            raise InputError(f"layers with {shown_value(value)} are not supported, only {known}")
    return tuple(words.index(value) for value in values)


def without_defaults(config: ModelConfig) -> ModelConfig:
    """Returns the config without part settings that change nothing that its model computes."""
    layers = range(config.n_layer)
    windows = [config.window_of(i) for i in layers]
    left: dict[str, Any] = {}
    is_alike = config.part_setting("window_theta") in (None, config.rope_theta)
    if is_alike and not any(window and window < config.block_size for window in windows):
        left = dict.fromkeys(("window", "window_layers", "window_theta"))
    for name in {"window_layers", "rotary_layers"} - left.keys():
        values = [config.of_block(name, i) for i in layers]
        lengths = range(1, len(values) + 1)
        period = next(n for n in lengths if all(values[i] == values[i % n] for i in layers))
        left[name] = None if all(values) else tuple(values[:period])
    usual = {**config.part_defaults, "rope_scaling": ("linear", 1.0), "parallel_residual": True}
    left |= {name: None for name, x in usual.items() if config.part_setting(name) == x}
    return config.having_parts(**left)


def _check_others(
    architecture: Architecture, settings: Keys, saved: Mapping[str, Any], config: ModelConfig
) -> None:
    """Raises InputError naming the first key that may change what the model computes."""
    keys = {key for keys in settings.keys.values() for key in _several(keys)}
    known = (*settings.harmless, *keys, *settings.fixed, *settings.free)
    # The default of Llama and GPT-2, which some files spell out.
    neutral = {**settings.neutral, "attention.scale": (0, np.float32(config.head_channels**-0.5))}
    for key, value in saved.items():
        if value is None or any(fnmatchcase(key, pattern) for pattern in known):
            continue
        pattern = next((pattern for pattern in neutral if fnmatchcase(key, pattern)), None)
        values = value.tolist() if isinstance(value, np.ndarray) else value
        values = values if isinstance(values, list) else [values]
        if pattern is None or any(value not in neutral[pattern] for value in values):
            raise InputError(
                f"{shown_value(key)} is {shown_value(value)}, which may change what the model "
                f"computes and is not supported as a part of {architecture.name}"
            )


def _value(settings: Keys, saved: Mapping[str, Any], name: str) -> Any:
    """Returns a setting from a file, which may say it under several keys."""
    keys = _several(settings.keys[name])
    found = [saved[key] for key in keys if key in saved]
    if any(value != found[0] for value in found):
        shown = ", ".join(f"{key}={shown_value(saved.get(key))}" for key in keys)
        raise InputError(f"{shown}: they must be equal")
    if found and (found[0] is not None or name in settings.defaults):
        return found[0]
    if name not in settings.defaults:
        raise InputError(f"{keys[0]} is missing")
    return settings.defaults[name]


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names

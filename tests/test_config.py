"""Settings: which values are allowed, and how they are saved and loaded."""

import copy
import dataclasses
import pickle
import typing
from os import PathLike
from typing import Literal

import pytest

from smallmind import GenerationConfig, InputError, ModelConfig, RunConfig, Settings, TrainingConfig
from smallmind.checks import setting
from smallmind.cli import main
from smallmind.settings.presets import ARCHITECTURES, PRESETS, RECIPES, SIZES
from smallmind.settings.run_fields import RecipeName, RunFields
from smallmind.settings.settings import LOSS_SETTINGS, SECTIONS, from_saved
from tests.programs import refusal, refuses

CONFIGS = [GenerationConfig, ModelConfig, TrainingConfig, RunConfig]
OWNERS = {field.name: config for config in CONFIGS for field in dataclasses.fields(config)}


@pytest.mark.parametrize("config", CONFIGS)
def test_defaults_are_valid_and_frozen(config):
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(config)[0].name, 1)
    without_flag = {"part_settings"}  # that only an architecture sets
    names = {x.name for x in dataclasses.fields(config) if not x.metadata["help"]}
    assert names <= without_flag


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_head": 0}, "n_head=0 must be at least 1"),
        (
            {"n_embd": 130},
            "n_embd=130 must be a multiple of n_head=4, for example 128, unless head_size is set",
        ),
        (
            {"n_head": 12, "n_embd": 48, "n_kv_head": 5},
            "n_kv_head=5 must be a divisor of n_head=12, for example 4",
        ),
        (
            {"n_head": 12, "n_embd": 48, "n_kv_head": 99},
            "n_kv_head=99 must be a divisor of n_head=12, for example 12",
        ),
        ({"n_embd": 1}, "n_embd=1 must be a multiple of n_head=4, for example 4"),
        ({"dropout": 1.5}, "dropout=1.5 must be at least 0 and below 1"),
        ({"block_size": 2.5}, "block_size=2.5 must be a whole number"),
        ({"head_size": 0}, "head_size=0 must be at least 1"),
        ({"head_size": 65536, "n_head": 8}, "head_size=65536 must be at most 32768 with n_head=8"),
        ({"norm_epsilon": 0}, "norm_epsilon=0 must be at least 1e-12 and at most 0.1"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon=inf must be at least 1e-12"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be finite"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be finite"),
        ({"min_lr": 0.1}, "min_lr=0.1 must be at most learning_rate=0.001"),
        (
            {"learning_rate": 5e-5, "min_lr": 1e-4},
            "min_lr=0.0001 must be at most learning_rate=5e-05; lower it, or leave it out",
        ),
        (
            {"schedule": "exponential", "min_lr": 0},
            "min_lr=0 must be above 0 with schedule='exponential'",
        ),
        (
            {"schedule": "plateau", "val_every": 0},
            "val_every=0 must be at least 1 with schedule='plateau'",
        ),
        ({"schedule": "sine"}, "schedule='sine' must be one of constant, cosine, one-cycle"),
        ({"lr_decay_factor": 1}, "lr_decay_factor=1 must be above 0 and below 1"),
        ({"lr_decay_share": 1.1}, "lr_decay_share=1.1 must be at least 0 and at most 1"),
        ({"lr_decay_every": 0}, "lr_decay_every=0 must be at least 1"),
        ({"plateau_patience": 0}, "plateau_patience=0 must be at least 1"),
        ({"beta1": 1.0}, "beta1=1.0 must be at least 0 and below 1"),
        ({"steps": -1}, "steps=-1 must be at least 0"),
        ({"tokenizer": "word"}, "tokenizer='word' must be one of char, byte"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"n_layer": "4"}, "n_layer='4' must be a number"),
        ({"n_layer": None}, "n_layer=None must be a number"),
        ({"bias": 1}, "bias=1 must be true or false"),
        ({"top_p": 0}, "top_p=0 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"threads": 0}, "threads=0 must be at least 1"),
    ],
)
def test_an_invalid_value_is_named_with_its_allowed_range(settings, message):
    assert refusal(OWNERS[next(iter(settings))], **settings).startswith(message)


@pytest.mark.parametrize("peak", [1e-3, 5e-5, 0.0])
def test_min_lr_is_a_tenth_of_the_peak_unless_given(peak):
    config = TrainingConfig(learning_rate=peak)
    assert config.min_lr is None and config.resolved_min_lr == peak / 10
    assert config.with_min_lr().min_lr == peak / 10
    assert TrainingConfig(learning_rate=peak, min_lr=0).with_min_lr().min_lr == 0
    lower = dataclasses.replace(config, learning_rate=peak / 2)
    assert lower.with_min_lr().min_lr == peak / 20


def test_settings_survive_saving():
    settings = Settings().replace(n_layer=3, min_lr=1e-5, seed=7, teacher="t", alpha=0.25)
    assert settings.model.n_layer == 3 and settings.distillation.alpha == 0.25
    saved = settings.to_dict()
    assert saved["format"] == 1 and Settings.from_dict(saved) == settings
    assert Settings.from_fields({"n_layer": 3, "seed": 7}).run.seed == 7


def test_settings_of_earlier_versions_get_defaults_for_missing_fields():
    saved = {"model": {"n_layer": 3}, "training": {"windows_at_once": 5}, "run": {}}
    settings = Settings.from_dict(saved)
    earlier = {"chat": False, "gitignore": False}
    assert settings == Settings().replace(n_layer=3, micro_batch_size=5, **earlier)


@pytest.mark.parametrize("number", [2, 99, "two"])
def test_settings_of_a_newer_version_are_refused(number):
    with pytest.raises(InputError, match=r"a newer smallmind wrote it, in format .*: upgrade"):
        Settings.from_dict({**Settings().to_dict(), "format": number})


@pytest.mark.parametrize(
    "make", [Settings().replace, lambda **fields: Settings.from_fields(fields)]
)
def test_an_unknown_setting_names_the_most_similar_one(make):
    refuses(r"unknown setting 'n_layers'; did you mean n_layer\?", make, n_layers=3)


def test_a_field_that_a_file_lacks_has_the_value_it_had_before():
    @dataclasses.dataclass(frozen=True)
    class Changed:
        size: int = setting(2, "a default that was changed", before=1)
        rate: int = setting(3, "a default that never was")

    assert from_saved(Changed, {}) == Changed(size=1, rate=3)
    assert from_saved(Changed, {"size": 5}) == Changed(size=5, rate=3)
    assert Changed() == Changed(size=2, rate=3)


def test_every_part_has_a_flag_that_lists_its_choices(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "--norm {layernorm,rmsnorm}" in shown and "--arch {gpt2,llama,modern}" in shown
    assert "--optimizer {adamw,muon}" in shown and "--matrix-learning-rate X" in shown


def test_settings_are_values():
    """Equal ones have equal hashes; copies and pickles are equal, with the settings of a loss."""
    settings = Settings().replace(steps=7, teacher="runs/large")
    assert hash(Settings()) == hash(Settings()) and {Settings(), settings, Settings()} == {
        Settings(),
        settings,
    }
    for same in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert same == settings and hash(same) == hash(settings)
        assert same.distillation.teacher == "runs/large"


def test_the_keywords_of_create_are_the_settings_and_the_names_of_several():
    known = {"size": SIZES, "arch": ARCHITECTURES, "preset": PRESETS}
    wanted = {name: Literal[tuple(names)] | None for name, names in known.items()}
    for kind in SECTIONS.values():
        hints = typing.get_type_hints(kind)
        wanted |= {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    files = {x for kind in LOSS_SETTINGS.values() for x in (*kind.paths, *kind.creates)}
    for name in ("init_from", "tokenizer", *files):  # a program may give a Path
        wanted[name] = wanted[name] | PathLike[str]
    del wanted["text"], wanted["out"]  # arguments of their own
    assert typing.get_type_hints(RunFields) == wanted
    assert set(typing.get_args(RecipeName)) == set(RECIPES)

import dataclasses

import pytest

from smallmind import GenerationConfig, InputError, ModelConfig, RunConfig, TrainingConfig


@pytest.mark.parametrize("config", [ModelConfig, TrainingConfig, RunConfig, GenerationConfig])
def test_defaults_are_allowed_and_frozen(config):
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(config)[0].name, 1)
    assert all(field.metadata["help"] for field in dataclasses.fields(config))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (ModelConfig, {"n_head": 0}, "n_head=0 must be at least 1"),
        (
            ModelConfig,
            {"n_embd": 130},
            "n_embd=130 must be a multiple of n_head=4, for example 128",
        ),
        (ModelConfig, {"n_embd": 1}, "n_embd=1 must be a multiple of n_head=4, for example 4"),
        (ModelConfig, {"dropout": 1.5}, "dropout=1.5 must be at least 0.0 and below 1.0"),
        (ModelConfig, {"block_size": 2.5}, "block_size=2.5 must be a whole number"),
        (
            TrainingConfig,
            {"learning_rate": float("nan")},
            "learning_rate=nan must be finite",
        ),
        (
            TrainingConfig,
            {"learning_rate": float("inf")},
            "learning_rate=inf must be finite",
        ),
        (TrainingConfig, {"min_lr": 0.1}, "min_lr=0.1 must be at most learning_rate=0.001"),
        (
            TrainingConfig,
            {"learning_rate": 5e-5, "min_lr": 1e-4},
            "min_lr=0.0001 must be at most learning_rate=5e-05; lower it, or leave it out",
        ),
        (
            TrainingConfig,
            {"schedule": "exponential", "min_lr": 0},
            "min_lr=0 must be above 0 with schedule='exponential'",
        ),
        (
            TrainingConfig,
            {"schedule": "plateau", "val_every": 0},
            "val_every=0 must be at least 1 with schedule='plateau'",
        ),
        (
            TrainingConfig,
            {"schedule": "sine"},
            "schedule='sine' must be one of constant, cosine, one-cycle",
        ),
        (
            TrainingConfig,
            {"lr_decay_factor": 1},
            "lr_decay_factor=1 must be above 0.0 and below 1.0",
        ),
        (
            TrainingConfig,
            {"lr_decay_share": 1.1},
            "lr_decay_share=1.1 must be at least 0.0 and at most 1.0",
        ),
        (TrainingConfig, {"lr_decay_every": 0}, "lr_decay_every=0 must be at least 1"),
        (TrainingConfig, {"plateau_patience": 0}, "plateau_patience=0 must be at least 1"),
        (TrainingConfig, {"beta1": 1.0}, "beta1=1.0 must be at least 0.0 and below 1.0"),
        (TrainingConfig, {"steps": -1}, "steps=-1 must be at least 0"),
        (RunConfig, {"tokenizer": "word"}, "tokenizer='word' must be one of char, byte"),
        (RunConfig, {"seed": -1}, "seed=-1 must be at least 0"),
        (ModelConfig, {"n_layer": "4"}, "n_layer='4' must be a number"),
        (ModelConfig, {"n_layer": None}, "n_layer=None must be a number"),
        (ModelConfig, {"bias": 1}, "bias=1 must be true or false"),
        (GenerationConfig, {"top_p": 0}, "top_p=0 must be at most 1.0 and above 0.0"),
        (GenerationConfig, {"top_p": 1.1}, "top_p=1.1 must be at most 1.0 and above 0.0"),
        (RunConfig, {"threads": 0}, "threads=0 must be at least 1"),
    ],
)
def test_what_is_out_of_range_is_named_with_its_value_and_range(config, settings, message):
    with pytest.raises(InputError) as error:
        config(**settings)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("peak", [1e-3, 5e-5, 0.0])
def test_min_lr_is_a_tenth_of_the_peak_unless_given(peak):
    assert TrainingConfig(learning_rate=peak).min_lr == peak / 10
    assert TrainingConfig(learning_rate=peak, min_lr=0).min_lr == 0
    assert dataclasses.asdict(TrainingConfig(learning_rate=peak))["min_lr"] == peak / 10

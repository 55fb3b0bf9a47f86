"""Which models are of a published architecture, and what the others hear."""

import argparse
import ast
import itertools

import numpy as np
import pytest

from smallmind import ModelConfig
from smallmind.cli.flags import add_training_flags
from smallmind.exchange.architectures import architecture_of, config_of, settings_of
from smallmind.exchange.gguf import _llama3_scaling
from smallmind.exchange.tensors import tensors_of
from smallmind.settings.architectures import PUBLISHED
from smallmind.settings.presets import ARCHITECTURES as PRESETS
from smallmind.settings.sources import MODEL_FIELDS
from tests.exchange.models import MODELS, ONLY_TRANSFORMERS, SHAPE
from tests.programs import refusal, refuses


def config_named(name, **fields):
    return ModelConfig(**{**SHAPE, **{**MODELS, **ONLY_TRANSFORMERS}[name], **fields})


@pytest.mark.parametrize("name", [*MODELS, *ONLY_TRANSFORMERS])
def test_models_are_of_the_architecture_that_they_are_named_after(name):
    assert architecture_of(config_named(name)).name == name.split(" with")[0]


def test_what_the_config_calls_published_can_be_exported():
    """ModelConfig has a table of its own: it is below everything, and imported by --help."""
    choices = itertools.product(
        ("layernorm", "rmsnorm"),
        ("learned", "rope", "none"),
        ("gelu", "relu2", "swiglu"),
        (True, False),
        (True, False),
        (None, 2),
        (None, 6, 10),
    )
    names = "norm", "position", "mlp", "bias", "qk_norm", "n_kv_head", "head_size"
    for chosen in choices:
        config = ModelConfig(**SHAPE, **dict(zip(names, chosen, strict=True)))
        if config.architecture:
            assert architecture_of(config).name == config.architecture


@pytest.mark.parametrize(
    ("fields", "parts", "flags"),
    [
        (
            PRESETS["modern"],
            "value_residual=True, bigram_rows=16384; the nearest is Qwen3",
            "--no-value-residual --bigram-rows 0",
        ),
        ({**PRESETS["gpt2"], "n_kv_head": 2}, "n_kv_head=2; the nearest is GPT-2", "--n-kv-head 4"),
        ({**PRESETS["llama"], "logit_softcap": 15.0}, "logit_softcap=15.0", "logit_softcap=0.0"),
        ({**PRESETS["llama"], "x0_scalars": True}, "x0_scalars=True", "x0_scalars=False"),
        ({**PRESETS["llama"], "position": "none"}, "position=none", "--position rope"),
        ({**PRESETS["llama"], "qk_norm": True, "bias": True}, "qk_norm=True", "--no-qk-norm"),
        (
            {**PRESETS["llama"], "n_embd": 28},
            "an odd number of channels per head, 7",
            "--head-size 8",
        ),
        ({**PRESETS["gpt2"], "head_size": 8}, "head_size=8; the nearest is GPT-2", "--head-size 6"),
        ({**PRESETS["llama"], "head_size": 8, "n_embd": 26}, "n_embd=26", "--n-embd 24"),
        (
            {**PRESETS["gpt2"], "head_size": 8, "n_embd": 26},
            "n_embd=26, head_size=8",
            "--n-embd 24 --head-size 6",
        ),
    ],
)
def test_parts_that_nobody_else_has_are_named_with_the_flags_that_avoid_them(fields, parts, flags):
    message = refusal(architecture_of, ModelConfig(**{**SHAPE, **fields}))
    assert parts in message and message.endswith(f"train with {flags}")
    if not flags.startswith("--"):  # only a program or a file sets it
        name, _, value = flags.partition("=")
        assert architecture_of(ModelConfig(**{**SHAPE, **fields, name: ast.literal_eval(value)}))
        return
    parser = argparse.ArgumentParser()
    add_training_flags(parser)
    advised = vars(parser.parse_args(flags.split()))
    advised = {name: value for name, value in advised.items() if name in MODEL_FIELDS}
    assert architecture_of(ModelConfig(**{**SHAPE, **fields, **advised}))


@pytest.mark.parametrize("name", [*MODELS, *ONLY_TRANSFORMERS])
@pytest.mark.parametrize("tied", [True, False])
def test_settings_that_were_written_are_read_back(name, tied):
    config = config_named(name, tie_weights=tied)
    architecture = architecture_of(config)
    written = settings_of(config, architecture.config)
    found = config_of(architecture, architecture.config, written)
    if config.bias or "bias" not in architecture.filled:
        assert found == config
    if not architecture.gguf:
        assert name == "GPT-Neo" and not architecture.metadata.keys
        return
    if name in ONLY_TRANSFORMERS:
        refuses("has no key for window=.* take none;", settings_of, config, architecture.metadata)
        return
    known = {"vocab_size": config.vocab_size, "tie_weights": tied, "bias": config.bias}
    known["rope_scaling"] = config.part_setting("rope_scaling")
    written = settings_of(config, architecture.metadata)
    assert config_of(architecture, architecture.metadata, written, **known) == config


@pytest.mark.parametrize(("factor", "D"), [(32.0, 64), (8.0, 128)])
def test_the_divisors_in_files_of_llama_3_tell_its_settings(factor, D):
    """Llama 3.2 1B and 3.1 8B, with arithmetic in float32."""
    config = ModelConfig(n_head=2, n_embd=2 * D, position="rope", rope_theta=5e5)
    wavelengths = 2 * np.pi * np.float32(5e5) ** (np.arange(D // 2, dtype=np.float32) / (D // 2))
    kept = np.clip((8192 / wavelengths - 1) / 3, 0, 1).astype(np.float32)
    divisors = 1 / ((1 - kept) / np.float32(factor) + kept)
    assert _llama3_scaling(divisors, config) == ("llama3", factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize("name", MODELS)
def test_every_element_of_every_parameter_is_in_one_tensor(name):
    config = config_named(name, tie_weights=False)
    architecture = architecture_of(config)
    for layout in (architecture.tensors, architecture.gguf_tensors):
        tensors = list(tensors_of(config, layout))
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        columns: dict[str, list[int]] = {}
        for tensor in tensors:
            part = range(tensor.parameter_shape[-1])[tensor.columns]
            columns.setdefault(tensor.parameter, []).extend(part)
        for tensor in tensors:
            assert columns[tensor.parameter] == list(range(tensor.parameter_shape[-1]))


@pytest.mark.parametrize("architecture", PUBLISHED, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("epsilon", [0, -1e-5, 1, 1e400, True, "small", None, [1e-5]])
def test_an_epsilon_that_cannot_be_is_refused(architecture, epsilon):
    config = ModelConfig.with_parts({**SHAPE, **architecture.parts, **architecture.filled})
    saved = settings_of(config, architecture.config)
    saved[architecture.config.keys["norm_epsilon"]] = epsilon
    refuses(r"norm_epsilon=.* must be", config_of, architecture, architecture.config, saved)

"""Tiny models of every published architecture, and tokenizers of every kind."""

import functools
import json

import numpy as np

from smallmind import Tokenizer, TransformerModel
from smallmind.files import safetensors
from smallmind.settings.presets import ARCHITECTURES

TEXT = "The cat sat on the mat, isn't it? A dog's 12 logs: über Äpfel!\n" * 30
LLAMA = ARCHITECTURES["llama"]
NEOX = {**ARCHITECTURES["gpt2"], "position": "rope", "mlp": "gelu-erf"}
MODELS = {
    "GPT-2": ARCHITECTURES["gpt2"],
    "GPT-2 without biases": {**ARCHITECTURES["gpt2"], "bias": False, "norm_epsilon": 1e-4},
    "Llama": {**LLAMA, "n_kv_head": 2, "head_size": 10, "mlp_width": 44, "rope_theta": 5e4},
    "Llama with biases": {**LLAMA, "bias": True},
    "Qwen3": {**LLAMA, "qk_norm": True, "n_kv_head": 2, "head_size": 10, "norm_epsilon": 1e-6},
    "Arcee": {**LLAMA, "mlp": "relu2", "n_kv_head": 1, "norm_epsilon": 1e-3},
    "Llama with scaled rotations": {
        **LLAMA,
        "n_embd": 64,
        "part_settings": {"rope_scaling": ("llama3", 8.0, 1.0, 4.0, 48)},
    },
    "Qwen2": {**LLAMA, "n_kv_head": 2, "rope_theta": 1e6, "part_settings": {"qkv_bias": True}},
    "Qwen2 with slower rotations": {
        **LLAMA,
        "part_settings": {"qkv_bias": True, "rope_scaling": ("linear", 4.0)},
    },
    "SmolLM3": {
        **LLAMA,
        "n_layer": 4,
        "n_kv_head": 2,
        "part_settings": {"rotary_layers": (1, 1, 1, 0)},
    },
    "Gemma 3": {
        **{**LLAMA, "qk_norm": True, "mlp": "geglu", "norm_epsilon": 1e-6, "rope_theta": 1e6},
        **{"n_layer": 7, "n_kv_head": 2, "head_size": 10},
        "part_settings": {
            **{"block": "sandwich", "embedding": "scaled"},
            **{"window": 9, "window_layers": (1, 1, 1, 1, 1, 0), "window_theta": 1e4},
        },
    },
    "GPT-NeoX": {**NEOX, "part_settings": {"block": "parallel", "rotary_share": 2 / 3}},
    "GPT-NeoX with a branch after the other": {
        **{**NEOX, "rope_theta": 3e4, "norm_epsilon": 1e-4, "mlp_width": 44},
        "part_settings": {"block": "parallel", "parallel_residual": False},
    },
}
ONLY_TRANSFORMERS = {  # llama.cpp has none of them
    "Mistral": {**LLAMA, "n_kv_head": 2, "part_settings": {"window": 20}},
    "Qwen2 with windows": {
        **LLAMA,
        "part_settings": {"qkv_bias": True, "window": 17, "window_layers": (0, 1)},
    },
    "Qwen3 with windows": {**LLAMA, "qk_norm": True, "part_settings": {"window": 9}},
    "SmolLM3 with windows": {
        **LLAMA,
        "n_layer": 4,
        "part_settings": {
            "window": 30,
            "window_layers": (0, 0, 0, 1),
            "rotary_layers": (1, 1, 0, 0),
        },
    },
    "GPT-Neo": {
        **{**ARCHITECTURES["gpt2"], "n_layer": 3, "mlp_width": 44},
        "part_settings": {
            **{"qkv_bias": False, "score_divisor": 1, "window": 9, "window_layers": (0, 1)},
        },
    },
}
SHAPE = {"block_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 4}


@functools.cache
def tokenizer_of(kind):
    if kind == "bpe":
        return Tokenizer(TEXT, "bpe", vocab_size=300)
    return Tokenizer(TEXT, kind)


def varied(model, deviation=0.3, seed=1):
    """The model with other weights, which make each of its parts matter."""
    random = np.random.default_rng(seed)
    for values in model.parameters.values():
        values += random.normal(0, deviation, values.shape).astype(values.dtype)
    model.flat.refresh()
    return model


def model_of(name, tokenizer, tie_weights=True, **fields):
    made = {**MODELS, **ONLY_TRANSFORMERS}[name]
    fields = {**SHAPE, **made, "tie_weights": tie_weights, **fields}
    return varied(TransformerModel(vocab_size=tokenizer.vocab_size, backend="numpy", **fields))


def shard(directory):
    """Divides the weights of a directory into two files and an index -> the index."""
    tensors, _ = safetensors.read(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    table = {}
    for i, part in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        name = f"{i}.safetensors"
        safetensors.write(directory / name, {name: tensors[name] for name in part}, {})
        table |= dict.fromkeys(part, name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return index


def assert_same_logits(found, model):
    ids = ids_for(model)
    np.testing.assert_array_equal(found.forward(ids), model.forward(ids))


def ids_for(model):
    shape = 2, model.config.block_size
    return np.random.default_rng(2).integers(0, model.config.vocab_size, shape).astype(np.int32)

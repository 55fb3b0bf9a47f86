"""The published architectures: their parts, and what files call their settings and tensors.

One description per architecture serves all formats, and both directions.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.settings.config import ModelConfig


@dataclass(frozen=True)
class Keys:
    """The keys by which a format calls the settings of a model.

    `keys` are its names for what `values_of` returns; of several, each has the same value.
    `fixed` are other keys and the values that they may have, of which the first is written, and
    `free` those that may have any value, with the one that is written. `defaults` are what a file
    means that lacks a key. `harmless` are patterns of keys that change nothing that is computed
    here, `neutral` those that change nothing with one of these values. Any other key is refused.
    """

    keys: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A format's names for our parameters, and where it stores them.

    `names` are without ".weight" and ".bias", with {} for the number of a block; several where
    ours is a matrix of several side by side. Matrices are (out, in) with `outputs_first`, and the
    output matrix always. Where the channels are `interleaved`, the two that rope rotates together
    are neighbours; ours are half a head apart.
    """

    names: Mapping[str, str | tuple[str, ...]]
    outputs_first: bool = True
    interleaved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A published architecture.

    `parts` are the fields of ModelConfig that make it. `filled` are those whose parameters its
    files need: they hold zeros if the model lacks them.
    """

    name: str
    parts: Mapping[str, Any]
    model_type: str  # in config.json of Hugging Face
    model_class: str  # of transformers
    config: Keys
    tensors: Layout  # in safetensors of Hugging Face
    gguf: str  # its name in GGUF, which its keys begin with
    metadata: Keys
    gguf_tensors: Layout
    filled: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rotates(self) -> bool:
        """True if pairs of channels of its heads are rotated by positions."""
        return "rope_theta" in self.config.keys

    def changes(self, config: ModelConfig) -> dict[str, Any]:
        """The changes to config that would make it fit this architecture."""
        # Transformers refuses any other width of a Llama, whatever the size of its heads.
        needed = {**COMMON, **self.parts, "n_embd": config.divisible_n_embd}
        whole = {"n_kv_head": config.n_head, "head_size": config.divisible_n_embd // config.n_head}
        needed |= {name: whole[name] for name in whole.keys() - self.config.keys.keys()}
        values = values_of(config)
        return {name: value for name, value in needed.items() if values[name] != value}


COMMON = {"value_residual": False, "x0_scalars": False, "bigram_rows": 0, "logit_softcap": 0.0}


def values_of(config: ModelConfig) -> dict[str, Any]:
    """The settings of a model by name, with what follows from them, as files say it."""
    return {
        **dataclasses.asdict(config),
        "n_kv_head": config.kv_heads,
        "head_size": config.head_channels,
        "hidden_size": config.hidden_size,
    }


# config.json also holds what transformers notes about a model, how it was trained (dropout) and how
# texts are generated with it.
HARMLESS_CONFIG = (
    *("_*", "architectures", "model_type", "dtype", "torch_dtype", "torchscript", "name_or_path"),
    *("transformers*", "unsloth_*", "use_cache", "return_dict*", "output_*", "tf_legacy_loss"),
    *("use_bfloat16", "is_decoder", "is_llama_config", "initializer_*", "gradient_checkpointing"),
    *("attn_implementation", "reorder_and_upcast_attn", "pretraining_tp", "neftune_noise_alpha"),
    *("*dropout", "*pdrop", "summary_*", "id2label", "label2id", "problem_type", "finetuning_task"),
    *("task_specific_params", "tokenizer_*", "prefix", "*_token_id", "model_max_length", "n_ctx"),
    *("max_sequence_length", "original_max_position_embeddings", "max_window_layers", "*_to_keep"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beam*", "temperature"),
    *("top_k", "top_p", "typical_p", "*_penalty", "*_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "remove_invalid_values", "*suppress_tokens"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"),  # read apart
)
NEUTRAL_CONFIG: dict[str, tuple[Any, ...]] = {
    "auto_map": ({}, ""),
    "quantization_config": ({},),
    "pruned_heads": ({},),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_sliding_window": (False,),
    "sliding_window": (0,),
    "rope_interleaved": (False,),
    "chunk_size_feed_forward": (0,),
    "mlp_bias": (False,),
    "*_softcapping": (0,),
    "*num_*experts*": (0,),
    "logit*_scal*": (1,),
    "residual_*": (1,),
    "embedding_*": (1,),
}
# GGUF: what llama.cpp takes for nothing. It scales by 0 as little as by 1.
HARMLESS_METADATA = (
    *("vocab_size", "tensor_data_layout", "pooling_type", "decoder_start_token_id"),
    *("attention.*_epsilon", "attention.*_length_swa", "rope.*_swa"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),  # read apart
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_beta_*"),
)
NEUTRAL_METADATA: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.output_scale": (0, 1),
    "*_softcapping": (0,),
    "*_scale": (0, 1),
    "*expert*": (0,),
    "rope.scaling.*attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.alpha": (0,),
    "rope.dimension_sections": (0,),
    "use_parallel_residual": (False,),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
}

# GPT-2 (Radford et al. 2019)

GPT2 = Architecture(
    name="GPT-2",
    parts={"norm": "layernorm", "position": "learned", "mlp": "gelu", "qk_norm": False},
    filled={"bias": True},
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    config=Keys(
        keys={
            "vocab_size": "vocab_size",
            "block_size": "n_positions",
            "n_embd": "n_embd",
            "n_layer": "n_layer",
            "n_head": "n_head",
            "hidden_size": "n_inner",
            "tie_weights": "tie_word_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
        },
        fixed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        free={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        defaults={"hidden_size": None, "tie_weights": True, "norm_epsilon": 1e-5},
        harmless=HARMLESS_CONFIG,
        neutral=NEUTRAL_CONFIG,
    ),
    tensors=Layout(
        {
            "token_embedding": "transformer.wte",
            "position_embedding": "transformer.wpe",
            "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
            "blocks.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
            "blocks.{}.attention.projection": "transformer.h.{}.attn.c_proj",
            "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
            "blocks.{}.mlp.expansion": "transformer.h.{}.mlp.c_fc",
            "blocks.{}.mlp.projection": "transformer.h.{}.mlp.c_proj",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        outputs_first=False,
    ),
    gguf="gpt2",
    metadata=Keys(
        keys={
            "block_size": "context_length",
            "n_embd": "embedding_length",
            "n_layer": "block_count",
            "hidden_size": "feed_forward_length",
            "n_head": "attention.head_count",
            "norm_epsilon": "attention.layer_norm_epsilon",
        },
        harmless=HARMLESS_METADATA,
        neutral=NEUTRAL_METADATA,
    ),
    gguf_tensors=Layout(
        {
            "token_embedding": "token_embd",
            "position_embedding": "position_embd",
            "blocks.{}.attention_norm": "blk.{}.attn_norm",
            "blocks.{}.attention.qkv": "blk.{}.attn_qkv",
            "blocks.{}.attention.projection": "blk.{}.attn_output",
            "blocks.{}.mlp_norm": "blk.{}.ffn_norm",
            "blocks.{}.mlp.expansion": "blk.{}.ffn_up",
            "blocks.{}.mlp.projection": "blk.{}.ffn_down",
            "final_norm": "output_norm",
            "head": "output",
        }
    ),
)

# Llama (Touvron et al. 2023)

LLAMA = Architecture(
    name="Llama",
    parts={"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "qk_norm": False},
    model_type="llama",
    model_class="LlamaForCausalLM",
    config=Keys(
        keys={
            "vocab_size": "vocab_size",
            "block_size": "max_position_embeddings",
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_kv_head": "num_key_value_heads",
            "head_size": "head_dim",
            "hidden_size": "intermediate_size",
            "tie_weights": "tie_word_embeddings",
            "rope_theta": "rope_theta",
            "bias": ("attention_bias", "mlp_bias"),
            "norm_epsilon": "rms_norm_eps",
        },
        fixed={"hidden_act": ("silu", "swish")},
        defaults={
            "n_kv_head": None,
            "head_size": None,
            "tie_weights": False,
            "rope_theta": 1e4,
            "bias": False,
            "norm_epsilon": 1e-6,
        },
        harmless=HARMLESS_CONFIG,
        neutral=NEUTRAL_CONFIG,
    ),
    tensors=Layout(
        {
            "token_embedding": "model.embed_tokens",
            "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
            "blocks.{}.attention.qkv": (
                "model.layers.{}.self_attn.q_proj",
                "model.layers.{}.self_attn.k_proj",
                "model.layers.{}.self_attn.v_proj",
            ),
            "blocks.{}.attention.projection": "model.layers.{}.self_attn.o_proj",
            "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
            "blocks.{}.mlp.expansion": (
                "model.layers.{}.mlp.gate_proj",
                "model.layers.{}.mlp.up_proj",
            ),
            "blocks.{}.mlp.projection": "model.layers.{}.mlp.down_proj",
            "final_norm": "model.norm",
            "head": "lm_head",
        }
    ),
    gguf="llama",
    metadata=Keys(
        keys={
            **GPT2.metadata.keys,
            "vocab_size": "vocab_size",
            "n_kv_head": "attention.head_count_kv",
            "head_size": (
                "attention.key_length",
                "attention.value_length",
                "rope.dimension_count",
            ),
            "rope_theta": "rope.freq_base",
            "norm_epsilon": "attention.layer_norm_rms_epsilon",
        },
        defaults={"vocab_size": None, "n_kv_head": None, "head_size": None, "rope_theta": 1e4},
        harmless=HARMLESS_METADATA,
        neutral=NEUTRAL_METADATA,
    ),
    gguf_tensors=Layout(
        {
            **GPT2.gguf_tensors.names,
            "blocks.{}.attention.qkv": ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"),
            "blocks.{}.mlp.expansion": ("blk.{}.ffn_gate", "blk.{}.ffn_up"),
        },
        interleaved=("blk.{}.attn_q", "blk.{}.attn_k"),
    ),
)

# Qwen3 (Yang et al. 2025): Llama with normalised queries and keys

QWEN3 = Architecture(
    name="Qwen3",
    parts={**LLAMA.parts, "qk_norm": True, "bias": False},
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    config=dataclasses.replace(
        LLAMA.config,
        keys={**LLAMA.config.keys, "bias": "attention_bias"},
        fixed={**LLAMA.config.fixed, "use_sliding_window": (False,)},
        harmless=(*HARMLESS_CONFIG, "sliding_window"),  # without use_sliding_window
        # transformers has 32 and 128 in place of None: what its files leave out.
        defaults={**LLAMA.config.defaults, "n_kv_head": 32, "head_size": 128},
    ),
    tensors=Layout(
        {
            **LLAMA.tensors.names,
            "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
            "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
        }
    ),
    gguf="qwen3",
    metadata=LLAMA.metadata,
    gguf_tensors=Layout(
        {
            **LLAMA.gguf_tensors.names,
            "blocks.{}.attention.query_norm": "blk.{}.attn_q_norm",
            "blocks.{}.attention.key_norm": "blk.{}.attn_k_norm",
        }
    ),
)

# Arcee (2025): Llama with a squared ReLU

ARCEE = Architecture(
    name="Arcee",
    parts={**LLAMA.parts, "mlp": "relu2"},
    model_type="arcee",
    model_class="ArceeForCausalLM",
    config=dataclasses.replace(
        LLAMA.config,
        fixed={"hidden_act": ("relu2",)},
        defaults={**LLAMA.config.defaults, "norm_epsilon": 1e-5},
    ),
    tensors=Layout(
        {**LLAMA.tensors.names, "blocks.{}.mlp.expansion": "model.layers.{}.mlp.up_proj"}
    ),
    gguf="arcee",
    metadata=LLAMA.metadata,
    gguf_tensors=Layout(
        {**LLAMA.gguf_tensors.names, "blocks.{}.mlp.expansion": "blk.{}.ffn_up"},
        interleaved=LLAMA.gguf_tensors.interleaved,
    ),
)

ARCHITECTURES = (GPT2, LLAMA, QWEN3, ARCEE)


def known_architecture(
    saved: Mapping[str, Any], key: str, known: Mapping[str, Architecture]
) -> Architecture:
    """The architecture that a file names at this key. InputError if it is not among the known."""
    name = saved.get(key)
    if not isinstance(name, str) or name not in known:
        raise InputError(
            f"{key}={shown_value(name)} is not known here; it must be one of {', '.join(known)}"
        )
    return known[name]


def architecture_of(config: ModelConfig) -> Architecture:
    """The published architecture that a model is of.

    InputError naming the parts that none has, and the flags that would have avoided them.
    """
    ranked = sorted(ARCHITECTURES, key=lambda architecture: len(architecture.changes(config)))
    nearest, changes = ranked[0], ranked[0].changes(config)
    if changes:
        flags = " ".join(_flag(name, value) for name, value in changes.items())
        raise InputError(
            f"no published architecture has {_named(config, changes)}; nearest is {nearest.name}: "
            f"train with {flags}"
        )
    if nearest.rotates and config.head_channels % 2:
        raise InputError(
            f"other programs cannot rotate heads of {config.head_channels} channels, an odd "
            f"number; train with --head-size {config.head_channels + 1}"
        )
    return nearest


def _named(config: ModelConfig, names: Iterable[str]) -> str:
    """The settings with these names and their values."""
    values = values_of(config)
    return ", ".join(f"{name}={values[name]}" for name in names)


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value:g}" if isinstance(value, float) else f"--{flag} {value}"


def settings_of(config: ModelConfig, settings: Keys) -> dict[str, Any]:
    """The settings of a model under the keys of a format."""
    values = values_of(config)
    written = {**{key: allowed[0] for key, allowed in settings.fixed.items()}, **settings.free}
    for name, keys in settings.keys.items():
        written |= dict.fromkeys(_several(keys), values[name])
    return written


def config_of(
    architecture: Architecture, settings: Keys, saved: Mapping[str, Any], **known: Any
) -> ModelConfig:
    """A file's description -> the settings of its model.

    `known` are settings that follow from something else. InputError for what is missing, wrong or
    not known here.
    """
    for key, allowed in settings.fixed.items():
        if saved.get(key, allowed[0]) not in allowed:
            raise InputError(
                f"{key}={shown_value(saved[key])} is not known here; {architecture.name} has "
                f"{' or '.join(map(str, allowed))}"
            )
    values = {name: _value(settings, saved, name) for name in settings.keys} | known
    width = values.pop("hidden_size")
    config = ModelConfig(**{**architecture.parts, **architecture.filled, **values})
    # Without what is the default anyway: as a model made here has it.
    if width is not None and width != config.hidden_size:
        config = dataclasses.replace(config, mlp_width=width)
    if config.n_kv_head == config.n_head:
        config = dataclasses.replace(config, n_kv_head=None)
    if config.n_embd == config.n_head * config.head_channels:
        config = dataclasses.replace(config, head_size=None)
    if changes := architecture.changes(config):
        raise InputError(f"{architecture.name} with {_named(config, changes)} is not known here")
    _check_others(architecture, settings, saved, config)
    return config


def _check_others(
    architecture: Architecture, settings: Keys, saved: Mapping[str, Any], config: ModelConfig
) -> None:
    """InputError naming the first key that may change what the model computes."""
    keys = {key for keys in settings.keys.values() for key in _several(keys)}
    known = (*settings.harmless, *keys, *settings.fixed, *settings.free)
    # The default of Llama and GPT-2, which some files spell out.
    neutral = {**settings.neutral, "attention.scale": (0, np.float32(config.head_channels**-0.5))}
    for key, value in saved.items():
        if value is None or any(fnmatchcase(key, pattern) for pattern in known):
            continue
        pattern = next((pattern for pattern in neutral if fnmatchcase(key, pattern)), None)
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        if pattern is None or any(value not in neutral[pattern] for value in values):
            raise InputError(
                f"{key[:80]!a} is {_short(value)}, which may change what the model computes and is "
                f"not known here as a part of {architecture.name}"
            )


def _short(value: Any) -> str:
    return shown_value(value[:80] if isinstance(value, str) else value)


def _value(settings: Keys, saved: Mapping[str, Any], name: str) -> Any:
    """A setting from a file, which may say it under several keys."""
    keys = _several(settings.keys[name])
    found = [saved[key] for key in keys if key in saved]
    if any(value != found[0] for value in found):
        shown = ", ".join(f"{key}={shown_value(saved.get(key))}" for key in keys)
        raise InputError(f"{shown}: they must be equal here")
    if found and (found[0] is not None or name in settings.defaults):
        return found[0]
    if name not in settings.defaults:
        raise InputError(f"{keys[0]} is missing")
    return settings.defaults[name]


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names

"""The published architectures: their parts, and what files call their settings and tensors.

One description per architecture serves `--arch`, all formats, and both directions. Needs no NumPy.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Keys:
    """The keys by which a format calls the settings of a model.

    `keys` are its names for `ModelConfig.values`; of several, each has the same value.
    Of settings that differ by layer `words` are what a list under the key has for a layer without
    and with it. `assumed` are settings that no key says, which every program takes so.
    `fixed` are other keys and the values that they may have, of which the first is written, and
    `free` those that may have any value, with the one that is written. `defaults` are what a file
    means that lacks a key. `harmless` are patterns of keys that change nothing that is computed
    here, `neutral` those that change nothing with one of these values. Any other key is refused.
    """

    keys: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A format's names for our parameters, and where it stores them.

    `names` are without ".weight" and ".bias", with {} for the number of a block; several where
    ours is a matrix of several side by side. Matrices are (out, in) with `outputs_first`, and the
    output matrix always. Where the channels are `interleaved`, the two that rope rotates together
    are neighbours; ours are half a head apart. `by_head` are matrices in which the query, key and
    value of a head stand side by side; in ours all queries come first. The gains of norms may be
    stored less one. `divisors` is what the frequencies of rope are divided by, if it is a tensor.
    """

    names: Mapping[str, str | tuple[str, ...]]
    outputs_first: bool = True
    interleaved: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    gains_less_one: bool = False
    divisors: str = ""


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
    gguf: str = ""  # its name in GGUF, which its keys begin with; "": llama.cpp has no such model
    metadata: Keys = field(default_factory=lambda: Keys({}))
    gguf_tensors: Layout = field(default_factory=lambda: Layout({}))
    filled: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rotates(self) -> bool:
        """True if pairs of channels of its heads are rotated by positions."""
        return "rope_theta" in self.config.keys

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of ModelConfig that a new model of this architecture has."""
        return {**UNPUBLISHED, "zero_init": False, "bias": False, **self.parts, **self.filled}


# Parts that are not supported, by words in the names of architectures or of their settings.
NOT_BUILT = {
    "mixtures of experts": ("*moe*", "*expert*", "mixtral", "dbrx", "deepseek*", "grok*"),
    "recurrent layers": ("*mamba*", "*ssm*", "rwkv*", "jamba", "lfm2*", "*linear_attention*"),
    "image models": ("*vision*", "*image*", "*vl", "*_vl_*", "llava*", "clip*", "vit*"),
    "audio models": ("*audio*", "whisper*", "wav2vec*"),
    "encoder-decoder models": ("t5*", "mt5*", "bart", "mbart", "pegasus*", "is_encoder_decoder"),
    "encoders": ("*bert*", "xlm*", "electra", "*encoder_only*"),
}

# Parts that no published architecture has.
UNPUBLISHED = {"value_residual": False, "x0_scalars": False, "bigram_rows": 0, "logit_softcap": 0.0}

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
    "rope_parameters",  # read apart
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
    "layer_types": ("full_attention",),
    "partial_rotary_factor": (1,),
    "attention_bias": (False,),
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


def _without_bias(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {name: key for name, key in keys.items() if name != "bias"}


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

# Llama (Touvron et al. 2023), since 3.1 with scaled rotations

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
            "rope_scaling": "rope_scaling",
            "bias": ("attention_bias", "mlp_bias"),
            "norm_epsilon": "rms_norm_eps",
        },
        fixed={"hidden_act": ("silu", "swish")},
        defaults={
            "n_kv_head": None,
            "head_size": None,
            "tie_weights": False,
            "rope_theta": 1e4,
            "rope_scaling": None,
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
            "head_size": ("attention.key_length", "attention.value_length", "rope.dimension_count"),
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
        divisors="rope_freqs",
        interleaved=("blk.{}.attn_q", "blk.{}.attn_k"),
    ),
)

# Mistral (Jiang et al. 2023): Llama with windows of attention, which later versions lack

MISTRAL = dataclasses.replace(
    LLAMA,
    name="Mistral",
    parts={**LLAMA.parts, "bias": False},
    model_type="mistral",
    model_class="MistralForCausalLM",
    config=dataclasses.replace(
        LLAMA.config,
        keys=_without_bias(LLAMA.config.keys) | {"window": "sliding_window"},
        defaults={**LLAMA.config.defaults, "n_kv_head": 8, "window": 4096},
    ),
    metadata=dataclasses.replace(LLAMA.metadata, assumed={"window": None}),
)

# Qwen2 (Yang et al. 2024): Llama with biases of queries, keys and values

WINDOWS = {"window": "sliding_window", "window_layers": "layer_types"}
QWEN2 = Architecture(
    name="Qwen2",
    parts={**LLAMA.parts, "bias": False, "qkv_bias": True},
    model_type="qwen2",
    model_class="Qwen2ForCausalLM",
    config=dataclasses.replace(
        LLAMA.config,
        keys=_without_bias(LLAMA.config.keys) | WINDOWS | {"has_window": "use_sliding_window"},
        words={"window_layers": ("full_attention", "sliding_attention")},
        harmless=(*HARMLESS_CONFIG, "attention_bias"),  # it has those biases in any case
        # transformers has 32 in place of None: what its files leave out.
        defaults={
            **LLAMA.config.defaults,
            "n_kv_head": 32,
            "window": 4096,
            "window_layers": None,
            "has_window": False,
        },
    ),
    tensors=LLAMA.tensors,
    gguf="qwen2",
    metadata=dataclasses.replace(LLAMA.metadata, assumed={"window": None}),
    gguf_tensors=Layout(LLAMA.gguf_tensors.names),
)

# Qwen3 (Yang et al. 2025): Llama with normalised queries and keys

QWEN3 = Architecture(
    name="Qwen3",
    parts={**LLAMA.parts, "qk_norm": True, "bias": False},
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    config=dataclasses.replace(
        QWEN2.config,
        keys={**QWEN2.config.keys, "bias": "attention_bias"},
        harmless=HARMLESS_CONFIG,
        defaults={**QWEN2.config.defaults, "head_size": 128},
    ),
    tensors=Layout(
        {
            **LLAMA.tensors.names,
            "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
            "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
        }
    ),
    gguf="qwen3",
    metadata=QWEN2.metadata,
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

# SmolLM3 (Bakouch et al. 2025): Llama whose every fourth layer does not rotate (Yang et al. 2025)

SMOLLM3 = Architecture(
    name="SmolLM3",
    parts=LLAMA.parts,
    model_type="smollm3",
    model_class="SmolLM3ForCausalLM",
    config=dataclasses.replace(
        QWEN2.config,
        keys={
            **LLAMA.config.keys,
            **QWEN2.config.keys,
            "bias": LLAMA.config.keys["bias"],
            "rotary_layers": "no_rope_layers",
        },
        words={**QWEN2.config.words, "rotary_layers": (0, 1)},
        free={"pad_token_id": None},  # transformers' default is a token of SmolLM3-3B
        harmless=(*HARMLESS_CONFIG, "no_rope_layer_interval"),  # without a list, read apart
        defaults={
            **QWEN2.config.defaults,
            "n_kv_head": 4,
            "tie_weights": True,
            "rope_theta": 2e6,
            "window": None,
            "rotary_layers": None,
        },
    ),
    tensors=LLAMA.tensors,
    gguf="smollm3",
    metadata=dataclasses.replace(
        LLAMA.metadata, assumed={"window": None, "rotary_layers": (1, 1, 1, 0)}
    ),
    gguf_tensors=Layout(LLAMA.gguf_tensors.names, interleaved=LLAMA.gguf_tensors.interleaved),
)

# Gemma 3 (Gemma Team 2025), the models of text

GEMMA3 = Architecture(
    name="Gemma 3",
    parts={
        **LLAMA.parts,
        "mlp": "geglu",
        "qk_norm": True,
        "bias": False,
        "block": "sandwich",
        "embedding": "scaled",
    },
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    config=dataclasses.replace(
        LLAMA.config,
        keys={
            **LLAMA.config.keys,
            **WINDOWS,
            "bias": "attention_bias",
            "window_theta": "rope_local_base_freq",
            "score_divisor": "query_pre_attn_scalar",
        },
        words=QWEN2.config.words,
        harmless=(*HARMLESS_CONFIG, "sliding_window_pattern", "cache_implementation"),
        fixed={
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (False, None),
        },
        defaults={
            **LLAMA.config.defaults,
            "n_kv_head": 4,
            "head_size": 256,
            "tie_weights": True,
            "rope_theta": 1e6,
            "window": 4096,
            "window_theta": 1e4,
            "score_divisor": 256,
        },
    ),
    tensors=Layout(
        {
            **QWEN3.tensors.names,
            "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
            "blocks.{}.mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
            "blocks.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
        },
        gains_less_one=True,
    ),
    gguf="gemma3",
    metadata=dataclasses.replace(
        LLAMA.metadata,
        keys={
            **LLAMA.metadata.keys,
            "window": "attention.sliding_window",
            "window_theta": "rope.freq_base_swa",
        },
        defaults={**LLAMA.metadata.defaults, "window": None, "window_theta": 1e4},
        assumed={"window_layers": (1, 1, 1, 1, 1, 0), "score_divisor": None},
        neutral={**NEUTRAL_METADATA, "attention.sliding_window_pattern": (0, 6)},
    ),
    gguf_tensors=Layout(
        {
            **QWEN3.gguf_tensors.names,
            "blocks.{}.attention_post_norm": "blk.{}.post_attention_norm",
            "blocks.{}.mlp_post_norm": "blk.{}.post_ffw_norm",
        }
    ),
)

# GPT-NeoX (Black et al. 2022), and Pythia

GPT_NEOX = Architecture(
    name="GPT-NeoX",
    parts={
        **GPT2.parts,
        "position": "rope",
        "mlp": "gelu-erf",
        "block": "parallel",
    },
    filled={"bias": True, "tie_weights": False},  # llama.cpp needs a head
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    config=Keys(
        keys={
            "vocab_size": "vocab_size",
            "block_size": "max_position_embeddings",
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "hidden_size": "intermediate_size",
            "tie_weights": "tie_word_embeddings",
            "rope_theta": "rotary_emb_base",
            "rope_scaling": "rope_scaling",
            "rotary_share": "rotary_pct",
            "parallel_residual": "use_parallel_residual",
            "norm_epsilon": "layer_norm_eps",
        },
        fixed={"hidden_act": ("gelu",), "attention_bias": (True,)},
        free={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        defaults={
            "tie_weights": False,
            "rope_theta": 1e4,
            "rope_scaling": None,
            "rotary_share": 0.25,
            "parallel_residual": True,
            "norm_epsilon": 1e-5,
        },
        harmless=HARMLESS_CONFIG,
        neutral=NEUTRAL_CONFIG,
    ),
    tensors=Layout(
        {
            "token_embedding": "gpt_neox.embed_in",
            "blocks.{}.attention_norm": "gpt_neox.layers.{}.input_layernorm",
            "blocks.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
            "blocks.{}.attention.projection": "gpt_neox.layers.{}.attention.dense",
            "blocks.{}.mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
            "blocks.{}.mlp.expansion": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
            "blocks.{}.mlp.projection": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        by_head=("gpt_neox.layers.{}.attention.query_key_value",),
    ),
    gguf="gptneox",
    metadata=Keys(
        keys={
            **GPT2.metadata.keys,
            "parallel_residual": "use_parallel_residual",
            "rope_theta": "rope.freq_base",
            "rotary_channels": "rope.dimension_count",
        },
        defaults={"rope_theta": 1e4, "parallel_residual": True, "rotary_channels": None},
        harmless=HARMLESS_METADATA,
        neutral=NEUTRAL_METADATA,
    ),
    gguf_tensors=Layout(GPT2.gguf_tensors.names),
)

# GPT-Neo (Black et al. 2021), and TinyStories; llama.cpp does not have it

GPT_NEO = Architecture(
    name="GPT-Neo",
    parts={**GPT2.parts, "qkv_bias": False, "score_divisor": 1},
    filled={"bias": True},
    model_type="gpt_neo",
    model_class="GPTNeoForCausalLM",
    config=Keys(
        keys={
            "vocab_size": "vocab_size",
            "block_size": "max_position_embeddings",
            "n_embd": "hidden_size",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "hidden_size": "intermediate_size",
            "tie_weights": "tie_word_embeddings",
            "window": "window_size",
            "window_layers": "attention_types",
            "norm_epsilon": "layer_norm_epsilon",
        },
        words={"window_layers": ("global", "local")},
        fixed={"activation_function": GPT2.config.fixed["activation_function"]},
        free={"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
        defaults={**GPT2.config.defaults, "window": 256},
        harmless=(*HARMLESS_CONFIG, "attention_layers"),  # attention_types once more
        neutral=NEUTRAL_CONFIG,
    ),
    tensors=Layout(
        {
            **GPT2.tensors.names,
            "blocks.{}.attention.qkv": (
                "transformer.h.{}.attn.attention.q_proj",
                "transformer.h.{}.attn.attention.k_proj",
                "transformer.h.{}.attn.attention.v_proj",
            ),
            "blocks.{}.attention.projection": "transformer.h.{}.attn.attention.out_proj",
        }
    ),
)

# A name that several have in a format means the first of them.
PUBLISHED = (
    *(GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, SMOLLM3, ARCEE),
    *(GEMMA3, GPT_NEOX, GPT_NEO),
)

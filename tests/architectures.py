"""Parts of models that no flag chooses, by the architecture with them; models of each kind."""

from smallmind.settings.presets import ARCHITECTURES

BROUGHT = {
    "Qwen2 and SmolLM3": {
        **{**ARCHITECTURES["llama"], "n_kv_head": 2},
        "part_settings": {
            **{"qkv_bias": True, "window": 4, "window_layers": (1, 0), "rotary_layers": (0, 1)},
        },
    },
    "Gemma 3": {
        **{**ARCHITECTURES["llama"], "mlp": "geglu", "qk_norm": True, "n_kv_head": 2},
        "part_settings": {
            **{"block": "sandwich", "embedding": "scaled", "score_divisor": 7},
            **{"window": 5, "window_layers": (1, 0), "window_theta": 50.0},
        },
    },
    "GPT-NeoX": {
        **{**ARCHITECTURES["gpt2"], "position": "rope", "mlp": "gelu-erf", "tie_weights": False},
        "part_settings": {"block": "parallel", "rotary_share": 0.5},
    },
    "GPT-Neo": {
        **ARCHITECTURES["gpt2"],
        "part_settings": {
            **{"qkv_bias": False, "score_divisor": 4, "window": 5, "window_layers": (0, 1)},
        },
    },
}

_GPT2, _LLAMA, _MODERN = (ARCHITECTURES[name] for name in ("gpt2", "llama", "modern"))
MODELS = {
    "GPT-2": _GPT2,
    "GPT-2, untied": {**_GPT2, "tie_weights": False},
    "Llama": {**_LLAMA, "n_kv_head": 1},
    "Qwen3, untied": {**_LLAMA, "n_kv_head": 1, "qk_norm": True, "tie_weights": False},
    "Arcee": {**_LLAMA, "mlp": "relu2"},
    "modern": {**_MODERN, "x0_scalars": True, "logit_softcap": 15.0, "bigram_rows": 90},
    **BROUGHT,
}

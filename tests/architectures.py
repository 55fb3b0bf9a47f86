"""Small models whose parts no flag chooses, by the architecture that brings them."""

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

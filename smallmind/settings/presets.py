"""Settings that belong together, by name: recipes, sizes, architectures, kinds of run."""

import math
from typing import Any, NamedTuple

from smallmind.settings.architectures import GPT2, LLAMA, QWEN3
from smallmind.settings.config import RunConfig

Fields = dict[str, Any]

# Each has about six times the parameters of the one before.
SIZES: dict[str, Fields] = {
    "nano": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 12},
    "tiny": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12},
    "small": {"n_layer": 6, "n_head": 4, "n_embd": 256, "block_size": 128, "batch_size": 12},
    "medium": {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 256, "batch_size": 8},
    "large": {"n_layer": 12, "n_head": 16, "n_embd": 1024, "block_size": 512, "batch_size": 8},
}

# Published ones, and what learns fastest at these sizes: `bench recipe` measures it.
ARCHITECTURES: dict[str, Fields] = {
    "gpt2": GPT2.fields,
    "llama": LLAMA.fields,
    "modern": {**LLAMA.fields, "qk_norm": True, "value_residual": True, "bigram_rows": 2**14},
}


# Minutes after which characters are as good as learned tokens of a text of `learns_tokens`, and the
# power by which that size grows with the time: see "Characters or learned tokens" in bench/LOG.md.
LEARNING_MINUTES, LEARNING_POWER = 3.0, 0.4


class Recipe(NamedTuple):
    """The settings of training unless something else is chosen."""

    about: str
    settings: Fields
    sizes: dict[str, Fields]  # name of a size -> what is different for it
    learns_tokens: float  # of a text with so many bytes and more; below, characters are tokens
    adapts: bool  # sets rates, document masks and, with `minutes`, the model by what is known

    def tokenizer_for(self, size: int, minutes: float | None = None) -> str:
        """Returns the kind of tokenizer for a text of so many bytes, and for so many minutes.

        In more time a text is read more often, and characters are known by heart later.
        """
        growth = (minutes / LEARNING_MINUTES) ** LEARNING_POWER if minutes else 1.0
        return "bpe" if size >= self.learns_tokens * growth else RunConfig.tokenizer


RECIPES = {
    "gpt2": Recipe(
        "GPT-2's and nanoGPT's: AdamW and a cosine schedule",
        {},
        # The larger the model, the lower the rate (Brown et al. 2020, table 2.1).
        {"medium": {"learning_rate": 6e-4}, "large": {"learning_rate": 6e-4}},
        learns_tokens=math.inf,
        adapts=False,
    ),
    "modern": Recipe(
        "Qwen3's parts, Muon, and a learning rate that falls to zero",
        {
            **SIZES["tiny"],
            "steps": 1500,
            "sampling": "shuffled",
            **QWEN3.fields,
            "tie_weights": False,
            "optimizer": "muon",
            "schedule": "linear",
            "warmup_steps": 10,
            "max_grad_norm": 0.0,
        },
        {},
        learns_tokens=1e6,  # measured, see "Characters or learned tokens" in bench/LOG.md
        adapts=True,  # likewise, see "Document masks"
    ),
}
RECIPES["chat"] = RECIPES["modern"]._replace(
    about="modern, with epochs, dropout and windows chosen for conversations",
    settings={name: value for name, value in RECIPES["modern"].settings.items() if name != "steps"},
)
DEFAULT_RECIPE = "modern"
CHAT_RECIPE = "chat"  # the default for conversations

PRESETS: dict[str, Fields] = {
    # Exercises every part of a run (warmup, accumulation, evaluation) in seconds.
    "test": {
        "steps": 100,
        "warmup_steps": 10,
        "batch_size": 2,
        "grad_accum_steps": 2,
        "val_every": 50,
        "val_batches": 5,
    },
    # Long, with 32 to 64 windows per update at every size, and evaluations with little noise.
    "production": {
        "steps": 5000,
        "warmup_steps": 100,
        "min_lr": 1e-6,
        "grad_accum_steps": 4,
        "max_grad_norm": 1.0,
        "val_every": 500,
        "val_batches": 50,
    },
    # Windows of 32k tokens, one at a time: rope's longest wavelength, 63k tokens, covers them. The
    # activations of a block would take more memory than all else.
    "long": {
        "steps": 200,
        "warmup_steps": 10,
        "batch_size": 1,
        "block_size": 2**15,
        "use_gradient_checkpointing": True,
        "val_every": 50,
        "val_batches": 1,
    },
}

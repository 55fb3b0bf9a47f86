"""The exchangeable parts, by the names that settings give them.

A new part is one new file and one line here. A part is named, not imported, so that `--help` can
list the choices without loading any of them.
"""

import importlib
from collections.abc import Mapping
from typing import Any

NORMS = {"layernorm": "smallmind.nn.layernorm:LayerNorm"}

MLPS = {"gelu": "smallmind.nn.mlp:MLP"}

POSITIONS = {"learned": "smallmind.nn.embedding:Embedding"}

OPTIMIZERS = {"adamw": "smallmind.optim.adamw:AdamW"}

SCHEDULES = {
    "constant": "smallmind.optim.schedule:Constant",
    "cosine": "smallmind.optim.schedule:Cosine",
    "one-cycle": "smallmind.optim.schedule:OneCycle",
    "linear": "smallmind.optim.schedule:Linear",
    "step": "smallmind.optim.schedule:Step",
    "exponential": "smallmind.optim.schedule:Exponential",
    "wsd": "smallmind.optim.schedule:WarmupStableDecay",
    "plateau": "smallmind.optim.schedule:ReduceOnPlateau",
}

TOKENIZERS = {
    "char": "smallmind.text.char_tokenizer:CharTokenizer",
    "byte": "smallmind.text.byte_tokenizer:ByteTokenizer",
}


def load(table: Mapping[str, str], name: str) -> Any:
    """One of the tables above and a name in it -> the class or function of that name."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

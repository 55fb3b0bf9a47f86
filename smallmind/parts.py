"""The pluggable parts, by the names that settings use for them.

A new part is one new file and one line here. Parts are named rather than imported, so that `--help`
can list them without loading any. A program adds a part of its own with a line too, before it
builds a model: `parts.NORMS["mine"] = "my_module:MyNorm"`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

NORMS = {
    "layernorm": "smallmind.nn.layernorm:LayerNorm",
    "rmsnorm": "smallmind.nn.rmsnorm:RMSNorm",
}

MLPS = {
    "gelu": "smallmind.nn.mlp:MLP",
    "relu2": "smallmind.nn.mlp:SquaredReLU",
    "swiglu": "smallmind.nn.mlp:SwiGLU",
}

POSITIONS = {
    "learned": "smallmind.nn.learned_position:LearnedPosition",
    "rope": "smallmind.nn.rope:RotaryPosition",
    "none": "smallmind.nn.position:Position",
}

OPTIMIZERS = {
    "adamw": "smallmind.optim.adamw:AdamW",
    "muon": "smallmind.optim.muon:Muon",
}

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

LOSSES = {
    "cross-entropy": "smallmind.losses.cross_entropy:CrossEntropy",
    "distillation": "smallmind.losses.distillation:Distillation",
    "preferences": "smallmind.losses.preferences:Preferences",
}

LOSS_SETTINGS = {  # of losses with flags; also the names of their sections in files of settings
    "distillation": "smallmind.losses.teacher_settings:DistillationConfig",
}

TOKENIZERS = {
    "char": "smallmind.text.char_tokenizer:CharTokenizer",
    "byte": "smallmind.text.byte_tokenizer:ByteTokenizer",
    "bpe": "smallmind.text.bpe_tokenizer:BPETokenizer",
}

READERS = {  # by the suffix of a file; one with any other suffix is read like .txt
    ".txt": "smallmind.corpus.decoding:read_text",
    ".jsonl": "smallmind.corpus.json_records:read_json_lines",
    ".ndjson": "smallmind.corpus.json_records:read_json_lines",
    ".json": "smallmind.corpus.json_records:read_json",
    ".csv": "smallmind.corpus.tables:read_csv",
    ".tsv": "smallmind.corpus.tables:read_tsv",
    ".html": "smallmind.corpus.html_text:read_html",
    ".htm": "smallmind.corpus.html_text:read_html",
    ".xhtml": "smallmind.corpus.html_text:read_html",
    ".xht": "smallmind.corpus.html_text:read_html",
    ".ipynb": "smallmind.corpus.notebooks:read_notebook",
    ".xml": "smallmind.corpus.xml_text:read_xml",
    ".gz": "smallmind.corpus.compressed:read_packed",
    ".bz2": "smallmind.corpus.compressed:read_packed",
    ".xz": "smallmind.corpus.compressed:read_packed",
    ".zip": "smallmind.corpus.compressed:read_zip",
    ".parquet": "smallmind.corpus.parquet:read_parquet",
}

TASKS = {  # on which a model is evaluated
    "pairs": "smallmind.tasks.pairs:Pairs",
    "choices": "smallmind.tasks.choices:Choices",
    "exact": "smallmind.tasks.exact:Exact",
}

FORMATS = {  # of models of other programs
    "hf": "smallmind.exchange.huggingface:HuggingFace",
    "gguf": "smallmind.exchange.gguf:GGUF",
    "html": "smallmind.exchange.html:HTML",
}

ADAPTER_FORMATS = {
    "peft": "smallmind.exchange.peft:Peft",
    "gguf-adapter": "smallmind.exchange.gguf:GGUFAdapter",
}


def load(table: Mapping[str, str], name: str) -> Any:
    """One of the tables above, a name in it -> the class or function that the name refers to."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

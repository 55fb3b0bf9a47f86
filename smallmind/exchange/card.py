"""The model card: what a model is, how it was trained, how to run it."""

import json
from collections.abc import Mapping

from smallmind.exchange.format import Exported
from smallmind.settings.config import __version__


def model_card(exported: Exported, architecture: str, model_class: str) -> str:
    """Returns README.md of an exported directory: Markdown with the header that hubs read."""
    model, tokenizer = exported.model, exported.tokenizer
    config = model.config
    opening = json.dumps(tokenizer.opening)
    facts = {
        "architecture": f"{architecture} (`{model_class}`)",
        "parameters": f"{model.flat.count:,}",
        "layers x channels": f"{config.n_layer} x {config.n_embd}",
        "heads": f"{config.n_head}, {config.kv_heads} for keys and values",
        "channels per head": f"{config.head_channels}",
        "context": f"{config.block_size:,} tokens",
        "vocabulary": f"{tokenizer.vocab_size:,} {tokenizer.unit}",
    }
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- smallmind
---

# {_cell(exported.name)}

A small language model, made on a CPU with smallmind {__version__}.

{_table(facts)}
## Training

{_table(exported.history)}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")  # this directory
model = AutoModelForCausalLM.from_pretrained(".")
ids = tokenizer({opening}, return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=200, do_sample=True)[0]))
```

Expect text like its training data, and little knowledge of the world. The context is
{config.block_size:,} tokens.
"""


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return "How this model was trained is unknown.\n"
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _cell(text: str) -> str:
    """Returns text from anywhere, on one line of a table."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable.replace("|", "\\|").replace("<", "&lt;")

"""The pluggable parts, by the names that settings use for them.

A new part is one new file and one line here. Parts are named rather than imported, so that `--help`
can list them without loading any.
"""

import importlib
from collections.abc import Mapping
from typing import Any

TOKENIZERS = {
    "char": "smallmind.text.char_tokenizer:CharTokenizer",
    "byte": "smallmind.text.byte_tokenizer:ByteTokenizer",
}


def load(table: Mapping[str, str], name: str) -> Any:
    """One of the tables above, a name in it -> the class or function that the name refers to."""
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)

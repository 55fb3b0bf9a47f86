"""One token per byte of UTF-8."""

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from smallmind.config import check_type
from smallmind.text.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """The vocabulary is the 256 bytes, whatever the text."""

    kind = "byte"
    unit = "bytes"
    vocab_size = 256
    opening = "\n"

    def __init__(self, text: str = "", kind: str = "byte") -> None:
        check_type("text", text, str)

    def encode(self, text: str) -> np.ndarray:
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        encoded = check_type("text", text, str).encode("utf-8", "surrogateescape")
        return np.frombuffer(encoded, np.uint8).astype(np.int32)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            yield decoder.decode(bytes([i]))
        yield decoder.decode(b"", final=True)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": ""}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ByteTokenizer":
        return cls()

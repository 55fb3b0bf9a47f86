"""Text to token ids and back: one token per character, or one per byte of UTF-8."""

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from smallmind.config import InputError

CHUNK = 1 << 20  # characters encoded together


class Tokenizer:
    """`Tokenizer(text)`: the vocabulary is the sorted characters of text.

    `Tokenizer(kind="byte")`: the vocabulary is the 256 bytes; any text can be encoded.
    """

    def __init__(self, text: str = "", kind: str = "char") -> None:
        if kind not in ("char", "byte"):
            raise InputError(f"tokenizer={kind!r} must be one of char, byte")
        self.kind = kind
        self.characters = "".join(sorted(set(text))) if kind == "char" else ""
        codes = _code_points(self.characters)
        # A table from code point to id, -1 for characters outside the vocabulary.
        self._ids = np.full(int(codes.max(initial=0)) + 1, -1, np.int32)
        self._ids[codes] = np.arange(len(codes), dtype=np.int32)

    @property
    def vocab_size(self) -> int:
        return len(self.characters) if self.kind == "char" else 256

    @property
    def opening(self) -> str:
        """The default prompt: a newline, if the vocabulary has one."""
        known = self.kind == "byte" or "\n" in self.characters
        return "\n" if known else self.characters[:1]

    def encode(self, text: str) -> np.ndarray:
        """text -> int32 ids (n,). InputError naming the first character outside the vocabulary."""
        if self.kind == "byte":
            # Command-line bytes that are not UTF-8 arrive as lone surrogates.
            encoded = text.encode("utf-8", "surrogateescape")
            return np.frombuffer(encoded, np.uint8).astype(np.int32)
        ids = np.full(len(text), -1, np.int32)
        # In chunks: for a long text, memory for temporaries of its size may be missing.
        for start in range(0, len(text), CHUNK):
            codes = _code_points(text[start : start + CHUNK])
            part, inside = ids[start : start + CHUNK], codes < len(self._ids)
            part[inside] = self._ids[codes[inside]]
            unknown = np.flatnonzero(part < 0)
            if len(unknown):
                place = start + int(unknown[0])
                raise InputError(
                    f"the model has never seen the character {text[place]!r} "
                    f"(at position {place}); it knows {_shorten(self.characters)!r}"
                )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """ids -> text; bytes that are not UTF-8 become the replacement character."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """ids -> pieces of text, each as soon as its characters are complete."""
        if self.kind == "char":
            for i in ids:
                if not 0 <= i < len(self.characters):
                    raise InputError(f"token {i} is outside the vocabulary of {self.vocab_size}")
                yield self.characters[i]
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            yield decoder.decode(bytes([i]))
        yield decoder.decode(b"", final=True)

    def state(self) -> dict[str, Any]:
        """What `from_state` needs, as JSON-able values."""
        return {"kind": self.kind, "characters": self.characters}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        """The tokenizer whose `state` this is."""
        return cls(state["characters"], state["kind"])


def _shorten(text: str, max_length: int = 80) -> str:
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)

"""Text to token ids and back: one token a character, or one a byte of UTF-8."""

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from smallmind.config import InputError

CHUNK = 1 << 20  # characters encoded at a time


class Tokenizer:
    """`Tokenizer(text)`: the sorted characters of text are the vocabulary.

    `Tokenizer(kind="byte")`: the 256 bytes are, and every text can be encoded.
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
        """What to go on from where nothing is given: a new line, if the vocabulary has one."""
        known = self.kind == "byte" or "\n" in self.characters
        return "\n" if known else self.characters[:1]

    def encode(self, text: str) -> np.ndarray:
        """text -> int32 ids (n,). InputError naming the first character that is not known."""
        if self.kind == "byte":
            # Bytes of a command line that are no UTF-8 reach us as lone surrogates.
            encoded = text.encode("utf-8", "surrogateescape")
            return np.frombuffer(encoded, np.uint8).astype(np.int32)
        ids = np.full(len(text), -1, np.int32)
        # A part at a time: a long text has room for its ids, hardly for more.
        for start in range(0, len(text), CHUNK):
            codes = _code_points(text[start : start + CHUNK])
            part, inside = ids[start : start + CHUNK], codes < len(self._ids)
            part[inside] = self._ids[codes[inside]]
            unknown = np.flatnonzero(part < 0)
            if len(unknown):
                place = start + int(unknown[0])
                raise InputError(
                    f"the model has never seen the character {text[place]!r} "
                    f"(at position {place}); it knows {_shortened(self.characters)!r}"
                )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """ids -> text; bytes that are not UTF-8 become the replacement character."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """ids -> pieces of text as soon as they are whole characters."""
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
        """What `from_state` needs, ready for JSON."""
        return {"kind": self.kind, "characters": self.characters}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        return cls(state["characters"], state["kind"])


def _shortened(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)

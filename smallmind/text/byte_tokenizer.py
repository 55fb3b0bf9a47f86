"""One token per byte of UTF-8."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console import activity
from smallmind.files.encoding import encoded
from smallmind.text import tokenizer_json
from smallmind.text.byte_alphabet import CHARACTER_OF
from smallmind.text.ids import total
from smallmind.text.tokenizer import CHUNK, Spelled, Tokenizer

BYTE_TOKENS = 256


@suggesting()
class ByteTokenizer(Tokenizer):
    """The vocabulary is the 256 bytes, whatever the text."""

    kind = "byte"
    unit = "bytes"
    vocab_size = 256
    opening = "\n"

    def __init__(self, text: str = "", kind: str = "byte") -> None:
        check_type("text", text, str)

    def _encode(self, text: str) -> np.ndarray:
        ids = np.empty(sum(map(len, _encoded(text))), np.int32)
        end = 0
        for chunk in _encoded(text):
            start, end = end, end + len(chunk)
            ids[start:end] = np.frombuffer(chunk, np.uint8)
        return ids

    def _add(self, special: Any) -> "ByteTokenizer":
        """Adds special tokens -> itself. TypeError or ValueError if they are wrong."""
        if special:
            self.special = self._check_special(special, BYTE_TOKENS)
            self._names = [name.encode() for name in self.special]
            self.vocab_size = BYTE_TOKENS + len(self._names)
            begin = (np.arange(BYTE_TOKENS) & 0xC0) != 0x80  # as in `spelled`
            self._characters = np.append(begin, list(map(len, self.special)))
            self._lengths = np.append(np.ones(BYTE_TOKENS, int), list(map(len, self._names)))
        return self

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTE_TOKENS else self._names[token - BYTE_TOKENS]

    def _text(self, ids: np.ndarray) -> str:
        if self.special and ids.max() >= BYTE_TOKENS:
            return super()._text(ids)
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def spelled(self, ids: np.ndarray) -> Spelled:
        if self.special:
            return Spelled(total(self._characters, ids), total(self._lengths, ids))
        # UTF-8: 0b10xxxxxx continues a character.
        return Spelled(int(np.count_nonzero((ids & 0xC0) != 0x80)), ids.size)

    def state(self) -> dict[str, Any]:
        special = {"special": dict(self.special)} if self.special else {}
        return {"kind": self.kind, "characters": "", **special}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "ByteTokenizer":
        return cls()._add(state.get("special"))

    def as_json(self) -> dict[str, Any]:
        return tokenizer_json.contents(
            {CHARACTER_OF[byte]: byte for byte in range(256)},
            [],
            tokenizer_json.byte_level(None),
            tokenizer_json.byte_level(None),
            self.special,
        )

    @classmethod
    def claims(cls, data: dict[str, Any]) -> bool:
        if not tokenizer_json.never_merges(data):
            return False
        is_bytes, split = len(data["model"]["vocab"]) == 256, data.get("pre_tokenizer")
        return is_bytes and split is not None and tokenizer_json.split_of(split) is None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ByteTokenizer":
        tokenizer_json.check_model(data)
        if data["model"]["vocab"] != {CHARACTER_OF[byte]: byte for byte in range(256)}:
            raise InputError("its 256 tokens are not the bytes in their order")
        return cls.from_state({"special": tokenizer_json.special_tokens(data)})


def _encoded(text: str) -> Iterator[bytes]:
    """Yields the bytes of a text, in chunks, so that a long one is not copied as a whole."""
    for start in activity.parts(range(0, len(text), CHUNK)):
        # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
        yield encoded(text, start, start + CHUNK, "surrogateescape")

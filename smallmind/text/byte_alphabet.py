"""Bytes as characters that can be seen, as tokenizers of the field write their tokens (GPT-2)."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

Joined = TypeVar("Joined", str, bytes)

VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
# All bytes in the order of their characters: the visible ones are themselves.
BYTES = [*VISIBLE, *(byte for byte in range(256) if byte not in VISIBLE)]
CHARACTER_OF = {
    byte: chr(byte if i < len(VISIBLE) else 0x100 + i - len(VISIBLE))
    for i, byte in enumerate(BYTES)
}
MISSING = 0x100  # what a character that stands for no byte becomes
TO_BYTE = np.full(1 + max(map(ord, CHARACTER_OF.values())) + 1, MISSING, np.uint16)
TO_BYTE[[ord(CHARACTER_OF[byte]) for byte in range(256)]] = range(256)
TO_CHARACTER = np.array([ord(CHARACTER_OF[byte]) for byte in range(256)], "<u4")


def as_characters(tokens: Sequence[bytes]) -> list[str]:
    """Bytes -> a character for each. All tokens at once: there are 150,000 of them."""
    codes = TO_CHARACTER[np.frombuffer(b"".join(tokens), np.uint8)]
    return _divided(codes.tobytes().decode("utf-32-le"), tokens)


def as_bytes(tokens: Sequence[str]) -> list[bytes]:
    """Returns the reverse. ValueError for a character that does not stand for a byte."""
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), "<u4")
    values = TO_BYTE[np.minimum(codes, len(TO_BYTE) - 1)]
    if (values == MISSING).any():
        token = tokens[int(np.searchsorted(_ends(tokens), np.argmax(values), "right"))]
        raise ValueError(f"its token {token[:80]!a} has characters without a byte")
    return _divided(values.astype(np.uint8).tobytes(), tokens)


def _divided(joined: Joined, tokens: Sequence[Any]) -> list[Joined]:
    """Splits into parts as long as the tokens."""
    ends = _ends(tokens)
    return [joined[end - len(token) : end] for token, end in zip(tokens, ends, strict=True)]


def _ends(tokens: Sequence[Any]) -> list[int]:
    return list(itertools.accumulate(map(len, tokens)))

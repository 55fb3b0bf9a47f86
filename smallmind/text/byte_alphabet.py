"""Bytes as characters that can be seen, as tokenizers of the field write their tokens (GPT-2)."""

VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
# All bytes in the order of their characters: the visible ones are themselves.
BYTES = [*VISIBLE, *(byte for byte in range(256) if byte not in VISIBLE)]
CHARACTER_OF = {
    byte: chr(byte if i < len(VISIBLE) else 0x100 + i - len(VISIBLE))
    for i, byte in enumerate(BYTES)
}
# As `translate` takes it. Characters that stand for no byte become one that Latin-1 lacks.
TO_BYTES = dict.fromkeys(range(256), 0x100) | {ord(c): byte for byte, c in CHARACTER_OF.items()}


def as_characters(token: bytes) -> str:
    """Bytes -> a character for each."""
    return token.decode("latin-1").translate(CHARACTER_OF)


def as_bytes(characters: str) -> bytes:
    """The reverse. ValueError for a character that does not stand for a byte."""
    try:
        return str.translate(characters, TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"its token {characters[:80]!a} has characters without a byte") from None

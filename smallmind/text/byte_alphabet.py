"""Bytes as characters that can be seen, as tokenizers of the field write their tokens (GPT-2)."""

VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
# All bytes in the order of their characters: the visible ones are themselves.
BYTES = [*VISIBLE, *(byte for byte in range(256) if byte not in VISIBLE)]
CHARACTER_OF = {
    byte: chr(byte if i < len(VISIBLE) else 0x100 + i - len(VISIBLE))
    for i, byte in enumerate(BYTES)
}
BYTE_OF = {character: byte for byte, character in CHARACTER_OF.items()}


def as_characters(token: bytes) -> str:
    """Bytes -> a character for each."""
    return "".join(CHARACTER_OF[byte] for byte in token)


def as_bytes(characters: str) -> bytes:
    """The reverse. KeyError for a character that stands for no byte."""
    return bytes(BYTE_OF[character] for character in characters)

"""Tokenizers in the metadata of GGUF, as llama.cpp understands them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.text.bpe_tokenizer import BPETokenizer
from smallmind.text.byte_tokenizer import ByteTokenizer
from smallmind.text.char_tokenizer import CharTokenizer
from smallmind.text.tokenizer import Tokenizer
from smallmind.text.tokenizer_json import pair_of

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
SPECIAL = (CONTROL, USER_DEFINED, UNUSED)
# llama.cpp's names of our patterns, and whether merges are ignored; the first is written.
SPLITS = {
    "gpt-2": ("gpt2", False),
    "smollm": ("gpt2-digits", False),
    "starcoder": ("gpt2-digits", False),
    "dbrx": ("gpt4", False),
    "smaug-bpe": ("gpt4", False),
    "llama-bpe": ("gpt4", True),
    "qwen2": ("gpt4-digits", False),
}


def metadata_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the keys that say how llama.cpp makes the same tokens."""
    keys = _of_bpe(tokenizer) if isinstance(tokenizer, BPETokenizer) else _of_single(tokenizer)
    return {f"{PREFIX}{key}": value for key, value in keys.items()}


def _of_bpe(tokenizer: BPETokenizer) -> dict[str, Any]:
    """Describes byte-level BPE. llama.cpp never joins accents: no key is for `normalizer`."""
    rules = tokenizer.rules
    wanted = tokenizer.split, rules.ignore_merges
    patterns = [name for name, meant in SPLITS.items() if meant == wanted]
    if not patterns:
        raise InputError(
            f"llama.cpp cannot ignore merges of words split by the pattern of {tokenizer.split}; "
            "export the model with --to hf"
        )
    names = tokenizer.names()
    unused = {i for i, name in enumerate(names) if not name or name == f"[PAD{i}]"}
    names = [f"[PAD{i}]" if i in unused else name for i, name in enumerate(names)]
    types = np.full(len(names), NORMAL, np.int32)
    for content, i in tokenizer.special.items():
        types[i] = USER_DEFINED if content in rules.shown else CONTROL
    types[list(unused)] = UNUSED
    # Unless told, llama.cpp takes token 11. A text without an end never has the byte 0.
    end = tokenizer.end_of_text
    if end is None:
        bytes_ = (token for token in tokenizer.vocabulary if len(token) == 1)
        end = tokenizer.vocabulary.index(min(bytes_))
    return {
        "model": "gpt2",
        "pre": patterns[0],
        "tokens": names,
        "token_type": types,
        "merges": [f"{names[left]} {names[right]}" for left, right in tokenizer.merges.tolist()],
        "bos_token_id": np.uint32(end),
        "eos_token_id": np.uint32(end),
        "add_bos_token": False,
        "add_eos_token": False,
    }


def _of_single(tokenizer: Tokenizer) -> dict[str, Any]:
    """Characters or bytes, each a token.

    In the words of RWKV's tokenizer, which takes the longest token that matches: none of the
    others has tokens without merges or scores, and none can do without tokens for the beginning
    and the end of a text, which these vocabularies lack. It finds special tokens by their names,
    also where a program asks llama.cpp to take them as ordinary text.
    """
    special = {i: name for name, i in tokenizer.special.items()}
    tokens: list[bytes | str]  # bytes are escaped
    if isinstance(tokenizer, CharTokenizer):
        tokens = [special.get(i, piece.encode()) for i, piece in enumerate(tokenizer.pieces)]
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        tokens = [*(bytes([byte]) for byte in range(256)), *special.values()]
    if escaped := [name for name in special.values() if "\\" in name]:
        raise InputError(
            f"llama.cpp cannot find the special token {escaped[0]!r} among single {tokenizer.unit}:"
            " train with --tokenizer bpe, or export the model with --to hf"
        )
    types = np.full(len(tokens), NORMAL, np.int32)
    for i, name in special.items():
        types[i] = UNUSED if name == f"[PAD{i}]" else CONTROL
    return {
        "model": "rwkv",
        "tokens": [token if isinstance(token, str) else _escaped(token) for token in tokens],
        "token_type": types,
    }


def _escaped(token: bytes) -> str:
    """Bytes -> printable ASCII, the others as \\xHH."""
    is_plain = token != b"\\" and len(token) == 1 and 0x20 <= token[0] < 0x7F
    return token.decode() if is_plain else "".join(f"\\x{byte:02x}" for byte in token)


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that these keys describe. InputError if it is not known here."""
    try:
        model, tokens = _text(metadata, "model"), metadata[f"{PREFIX}tokens"]
        if not isinstance(tokens, list):
            raise TypeError("its tokens are not strings")
        if model == "gpt2":
            return _bpe(metadata, tokens)
        if model == "rwkv":
            return _single(metadata, tokens)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"its tokenizer is damaged: {error}") from None
    kind = "'llama' (SentencePiece)" if model == "llama" else shown_value(model)
    raise InputError(
        f"its tokenizer is of the kind {kind}; only byte-level BPE ('gpt2') and single characters "
        "or bytes ('rwkv') are known here"
    )


def _bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pattern = _text(metadata, "pre")
    if pattern not in SPLITS:
        raise InputError(
            f"its tokenizer splits texts by the pattern {shown_value(pattern)}; known here are "
            f"{', '.join(SPLITS)}"
        )
    types = _types(metadata, tokens)
    split, ignore_merges = SPLITS[pattern]
    special = {tokens[i]: i for i in np.flatnonzero(np.isin(types, SPECIAL)).tolist()}
    shown = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED).tolist()]
    numbers = {token: i for i, token in enumerate(tokens) if token not in special}
    if len(numbers) + len(special) != len(tokens):
        raise ValueError("two of its tokens are the same")
    pairs = map(pair_of, metadata[f"{PREFIX}merges"])
    return Tokenizer.from_state(
        {
            "kind": "bpe",
            "split": split,
            "ignore_merges": ignore_merges,
            "shown": shown,
            "merges": [numbers[token] for pair in pairs for token in pair],
            "special": special,
            "vocabulary": ["" if token in special else token for token in tokens],
        }
    )


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> np.ndarray:
    """Returns the type of each token (n,)."""
    types = np.asarray(metadata.get(f"{PREFIX}token_type", np.full(len(tokens), NORMAL)))
    if types.shape != (len(tokens),):
        raise ValueError("it has other numbers of tokens and of their types")
    return types


def _single(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    is_special = np.isin(_types(metadata, tokens), SPECIAL)
    special = {tokens[i]: i for i in np.flatnonzero(is_special).tolist()}
    ordinary = [_unescaped(token) for token in tokens if token not in special]
    if ordinary == [bytes([byte]) for byte in range(256)]:
        return Tokenizer.from_state({"kind": "byte", "special": special})
    pieces = [x if x in special else _unescaped(x).decode() for x in tokens]
    return CharTokenizer.of_pieces(pieces, special)


def _unescaped(token: str) -> bytes:
    """A token that this or another program has escaped -> its bytes."""
    simple = {"t": b"\t", "n": b"\n", "r": b"\r"}
    found, rest = bytearray(), token
    while rest:
        if rest[0] != "\\":
            found, rest = found + rest[0].encode(), rest[1:]
        elif rest[1:2] == "x":
            found, rest = found + bytes.fromhex(rest[2:4]), rest[4:]
        else:
            found, rest = found + simple.get(rest[1:2], rest[1:2].encode()), rest[2:]
    return bytes(found)


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(f"{PREFIX}{key}", "")
    if not isinstance(value, str):
        raise TypeError(f"{PREFIX}{key} is not text")
    return value

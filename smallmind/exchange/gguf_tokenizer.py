"""Tokenizers in the metadata of GGUF, as llama.cpp understands them."""

import base64
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.text import tokenizer_json
from smallmind.text.bpe_tokenizer import BPETokenizer
from smallmind.text.byte_tokenizer import ByteTokenizer
from smallmind.text.char_tokenizer import CharTokenizer
from smallmind.text.hf_tokenizer import BYTE, HFTokenizer, model_type
from smallmind.text.sentencepiece import SPACE, Pieces, contents_of, pairs
from smallmind.text.tokenizer import Tokenizer
from smallmind.text.tokenizer_json import added_token, byte_level, sides_of

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, OF_BYTE = range(1, 7)  # types of tokens
SPECIAL = (CONTROL, USER_DEFINED, UNUSED)
READING = ("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap")
# llama.cpp's names of our patterns, and whether merges are ignored; the first is written.
SPLITS = {
    name: meaning
    for names, meaning in {
        "gpt-2 phi-2 mpt olmo jais trillion gigachat exaone4 granite-docling": ("gpt2", False),
        "smollm starcoder refact command-r codeshell exaone minerva-7b": ("gpt2-digits", False),
        "dbrx smaug-bpe glm4 chatglm-bpe": ("gpt4", False),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0": ("gpt4", True),
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo": ("gpt4-digits", False),
    }.items()
    for name in names.split()
}
# And of those that only the package `tokenizers` knows here: expressions that divide texts one
# after another. Source: https://github.com/ggml-org/llama.cpp, "src/llama-vocab.cpp".
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{x}" for x in (rf"{UPPER}*{LOWER}+", rf"{UPPER}+{LOWER}*")]
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = rf"{CASED[0]}{SUFFIX}|{CASED[1]}{SUFFIX}|\p{{N}}{{1,3}}|{REST}"
GPT2_WORDS = tokenizer_json.GPT2.removesuffix(r"|\s+")
EXPRESSIONS = {
    "default": ([r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"], False),
    "falcon": ([r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, "[0-9][0-9][0-9]"], False),
    "deepseek-coder": (
        [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"],
        False,
    ),
    "deepseek-v3": (
        [
            r"\p{N}{1,3}",
            "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        False,
    ),
    "gpt-4o": ([O200K], False),
    "llama4": ([O200K], False),
    "tekken": ([rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{REST}"], True),
}


def metadata_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the keys that say how llama.cpp makes the same tokens."""
    if isinstance(tokenizer, BPETokenizer):
        keys = _of_bpe(tokenizer)
    elif isinstance(tokenizer, HFTokenizer):
        keys = _of_pieces(tokenizer)
    else:
        keys = _of_single(tokenizer)
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


def _of_pieces(tokenizer: HFTokenizer) -> dict[str, Any]:
    """Describes SentencePiece's BPE and Unigram, and byte-level BPE. InputError for all others.

    llama.cpp knows BERT's tokens too, but it ends each text with [SEP].
    """
    if (pattern := _pattern_of(tokenizer)) is not None:
        return _of_expressions(tokenizer, pattern)
    model, pieces = tokenizer.contents["model"], list(tokenizer.pieces)
    kind = {"BPE": "llama", "Unigram": "t5"}.get(model_type(model), "")
    reading = _reading(tokenizer, kind)
    if reading is None:
        raise InputError(
            "llama.cpp has no tokenizer that divides texts as this one does; export the model "
            "with --to hf"
        )
    unknown = model.get("unk_id")
    if kind != "t5":
        unknown = model["vocab"].get(model.get("unk_token") or "<unk>")
    types = np.full(len(pieces), NORMAL, np.int32)
    for content, i in tokenizer.special.items():
        types[i] = USER_DEFINED if content in tokenizer.shown else CONTROL
    types[_isolated(tokenizer)] = USER_DEFINED
    for i, piece in enumerate(pieces):
        if not piece or piece == f"[PAD{i}]":
            pieces[i], types[i] = f"[PAD{i}]", UNUSED
        elif kind == "llama" and BYTE.fullmatch(piece):
            types[i] = OF_BYTE
        elif types[i] == USER_DEFINED:
            pieces[i] = piece.replace(SPACE, " ")  # found before spaces are replaced
    keys = {"model": kind, "pre": "default", "tokens": pieces, "token_type": types, **reading}
    if unknown is not None:
        keys["unknown_token_id"] = np.uint32(unknown)
        types[unknown] = UNKNOWN
    if kind == "llama":
        keys["scores"] = _scores(tokenizer, types)
    else:
        scores = [score for _, score in model["vocab"]]
        keys["scores"] = np.array(scores + [0.0] * (len(pieces) - len(scores)), np.float32)
    if tokenizer.end_of_text is not None:
        keys |= dict.fromkeys(("bos_token_id", "eos_token_id"), np.uint32(tokenizer.end_of_text))
    return {**keys, "add_bos_token": False, "add_eos_token": False}


def _pattern_of(tokenizer: HFTokenizer) -> str | None:
    """Returns llama.cpp's name of how byte-level BPE divides texts; None if it has none."""
    contents, model = tokenizer.contents, tokenizer.contents["model"]
    normalizer = contents.get("normalizer") or {}
    if normalizer.get("normalizers", normalizer) or tokenizer.strips or model_type(model) != "BPE":
        return None
    wanted = tokenizer_json.patterns_of(contents.get("pre_tokenizer"))
    meaning = wanted, bool(model.get("ignore_merges"))
    return next((name for name, meant in EXPRESSIONS.items() if meant == meaning), None)


def _of_expressions(tokenizer: HFTokenizer, pattern: str) -> dict[str, Any]:
    """Describes byte-level BPE that divides texts by one of EXPRESSIONS."""
    pieces, sides = list(tokenizer.pieces), iter(sides_of(tokenizer.contents["model"]["merges"]))
    types = np.full(len(pieces), NORMAL, np.int32)
    for content, i in tokenizer.special.items():
        types[i] = USER_DEFINED if content in tokenizer.shown else CONTROL
    for i, piece in enumerate(pieces):
        if not piece or piece == f"[PAD{i}]":
            pieces[i], types[i] = f"[PAD{i}]", UNUSED
    keys = {"model": "gpt2", "pre": pattern, "tokens": pieces, "token_type": types}
    keys["merges"] = list(map(" ".join, zip(sides, sides, strict=True)))
    end = np.uint32(tokenizer.end_of_text or 0)
    ends = {"bos_token_id": end, "eos_token_id": end}
    return {**keys, **ends, "add_bos_token": False, "add_eos_token": False}


def _isolated(tokenizer: HFTokenizer) -> list[int]:
    """Returns the tokens that are found in texts before others, without being added to them."""
    split = tokenizer.contents.get("pre_tokenizer") or {}
    steps = [x for x in split.get("pretokenizers", []) if x["type"] == "Split"]
    patterns = [x["pattern"].get("Regex", "") for x in steps if x["behavior"] == "Isolated"]
    with suppress(re.error):  # a pattern of words
        return [
            i
            for pattern in map(re.compile, patterns)
            for i, piece in enumerate(tokenizer.pieces)
            if piece and pattern.fullmatch(piece)
        ]
    return []


def _reading(tokenizer: HFTokenizer, kind: str) -> dict[str, Any] | None:
    """Returns the keys for what happens to a text before its tokens are looked for.

    None if llama.cpp does something else.
    """
    model, normalizer = tokenizer.contents["model"], tokenizer.contents.get("normalizer") or {}
    if not kind or bool(model.get("byte_fallback")) != (kind == "llama"):
        return None
    steps = [normalizer, *normalizer.get("normalizers", [])]
    charsmap = next((x["precompiled_charsmap"] for x in steps if "precompiled_charsmap" in x), "")
    texts = ["a", "A b,c", "1 2 "] + ([] if charsmap else ["\u00e9 \ufb01\n\u00bd"])
    if not _isolated(tokenizer):  # among which two spaces may be
        texts.append("A  b  ")
    for prefix in (SPACE, ""):
        for squeezes in (False, True):
            if all(_joined(tokenizer, x) == _read(x, prefix, squeezes) for x in texts):
                keys: dict[str, Any] = {"add_space_prefix": bool(prefix)}
                if kind == "t5":
                    keys["remove_extra_whitespaces"] = squeezes
                    if charsmap:
                        compiled = np.frombuffer(base64.b64decode(charsmap), np.uint8)
                        keys["precompiled_charsmap"] = compiled
                return keys if kind == "t5" or not squeezes else None
    return None


def _joined(tokenizer: HFTokenizer, text: str) -> str | None:
    """-> what a model looks for tokens in; None if it is divided where a token could be."""
    parts = tokenizer.divided(text)
    is_free = len(parts) == 1 or not any(SPACE in piece[1:] for piece in tokenizer.pieces)
    return "".join(parts) if is_free and all(x.startswith(SPACE) for x in parts[1:]) else None


def _read(text: str, prefix: str, squeezes: bool) -> str:
    text = " ".join(filter(None, text.split(" "))) if squeezes else text
    return prefix + text.replace(" ", SPACE)


def _scores(tokenizer: HFTokenizer, types: np.ndarray) -> np.ndarray:
    """Returns the score of each token (V,): the higher, the earlier pairs of it are merged.

    InputError if some are not: llama.cpp merges every pair that makes a token.
    """
    model = tokenizer.contents["model"]
    vocabulary, sides = model["vocab"], iter(sides_of(model["merges"]))
    merges = list(zip(sides, sides, strict=True))
    merged, pieces = set(merges), tokenizer.pieces
    _, lefts, rights = pairs(pieces, types == NORMAL)
    for left, right in zip(lefts.tolist(), rights.tolist(), strict=True):
        if (pieces[left], pieces[right]) not in merged:
            raise InputError(
                f"llama.cpp would merge {pieces[left]!r} and {pieces[right]!r}, which this "
                "tokenizer does not; export the model with --to hf"
            )
    made = dict.fromkeys(left + right for left, right in merges)
    scores = np.full(len(pieces), -len(made), np.float32)
    for rank, piece in enumerate(made):
        scores[vocabulary[piece]] = -rank
    return scores


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
    """Returns the tokenizer that these keys describe. InputError if it is not supported."""
    try:
        model, tokens = _text(metadata, "model"), metadata[f"{PREFIX}tokens"]
        if not isinstance(tokens, list):
            raise TypeError("its tokens are not strings")
        if model == "gpt2":
            return _bpe(metadata, tokens)
        if model == "rwkv":
            return _single(metadata, tokens)
        if model in ("llama", "t5"):
            return HFTokenizer.from_json(
                contents_of(_sentencepiece(metadata, tokens, model == "t5"))
            )
        if model == "bert":
            return HFTokenizer.from_json(_word_pieces(metadata, tokens))
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"its tokenizer is damaged: {error}") from None
    raise InputError(
        f"its tokenizer is of the kind {shown_value(model)}; supported are 'gpt2', 'llama', "
        f"'t5', 'bert' and 'rwkv'"
    )


def _bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pattern = metadata.get(f"{PREFIX}pre", "default")
    types = _types(metadata, tokens)
    if pattern in EXPRESSIONS:
        return _by_expressions(tokens, types, metadata[f"{PREFIX}merges"], *EXPRESSIONS[pattern])
    if pattern not in SPLITS:
        raise InputError(
            f"its tokenizer splits texts by the pattern {shown_value(pattern)}, which is not "
            "supported; use the model's Hugging Face folder, whose tokenizer.json describes it"
        )
    split, ignore_merges = SPLITS[pattern]
    special = {tokens[i]: i for i in np.flatnonzero(np.isin(types, SPECIAL)).tolist()}
    shown = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED).tolist()]
    numbers = {token: i for i, token in enumerate(tokens) if token not in special}
    if len(numbers) + len(special) != len(tokens):
        raise ValueError("two of its tokens are the same")
    return Tokenizer.from_state(
        {
            "kind": "bpe",
            "split": split,
            "ignore_merges": ignore_merges,
            "shown": shown,
            "merges": list(map(numbers.__getitem__, sides_of(metadata[f"{PREFIX}merges"]))),
            "special": special,
            "vocabulary": ["" if token in special else token for token in tokens],
        }
    )


def _by_expressions(
    tokens: list[str],
    types: np.ndarray,
    merges: list[str],
    expressions: list[str],
    ignore_merges: bool,
) -> HFTokenizer:
    special = {tokens[i]: i for i in np.flatnonzero(np.isin(types, SPECIAL)).tolist()}
    shown = frozenset(tokens[i] for i in np.flatnonzero(types == USER_DEFINED).tolist())
    numbers = {token: i for i, token in enumerate(tokens)}
    if len(numbers) < len(tokens):
        raise ValueError("two of its tokens are the same")
    rules = tokenizer_json.Rules(ignore_merges=ignore_merges, shown=shown)
    divided = tokenizer_json.split_by(expressions)
    return HFTokenizer.from_json(
        tokenizer_json.contents(numbers, merges, divided, byte_level(None), special, rules)
    )


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> np.ndarray:
    """Returns the type of each token (n,)."""
    types = np.asarray(metadata.get(f"{PREFIX}token_type", np.full(len(tokens), NORMAL)))
    if types.shape != (len(tokens),):
        raise ValueError("it has different numbers of tokens and token types")
    return types


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], is_unigram: bool) -> Pieces:
    """Returns the tables of a SentencePiece model; BPE as transformers reads it."""
    types, scores = _types(metadata, tokens).copy(), np.asarray(metadata[f"{PREFIX}scores"])
    if scores.dtype.kind != "f" or scores.shape != types.shape:
        raise ValueError("it has different numbers of tokens and scores")
    has_prefix, squeezes, charsmap = (metadata.get(f"{PREFIX}{name}") for name in READING)
    tokens = [*tokens]
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if is_gemma:  # several spaces are a token that is merged, which these files write with spaces
        for i, token in enumerate(tokens):
            if token and not token.strip(" "):
                tokens[i], types[i] = SPACE * len(token), NORMAL
    unknown = metadata.get(f"{PREFIX}unknown_token_id")
    return Pieces(
        tokens,
        scores,
        types,
        is_unigram=is_unigram,
        byte_fallback=not is_unigram,
        unknown=unknown if type(unknown) is int and 0 <= unknown < len(tokens) else None,
        add_prefix=has_prefix is not False,
        squeezes=is_unigram and squeezes is True,
        charsmap=b"" if charsmap is None else np.asarray(charsmap).astype(np.uint8).tobytes(),
        by_place=is_gemma,
        longest_first=True,
        style="sentencepiece" if is_unigram else "gemma" if is_gemma else "llama",
    )


def _word_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """-> the tokenizer.json of BERT's tokens, of which those that begin a word have a mark."""
    types = _types(metadata, tokens)
    special = {i for i, x in enumerate(tokens) if types[i] in SPECIAL or x[:1] + x[-1:] == "[]"}
    pieces = [
        x if i in special else x[1:] if x.startswith(SPACE) else f"##{x}"
        for i, x in enumerate(tokens)
    ]
    unknown = metadata.get(f"{PREFIX}unknown_token_id")
    normalizer = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    return {
        "version": "1.0",
        "added_tokens": [added_token(pieces[i], i) for i in sorted(special)],
        "normalizer": {"type": "BertNormalizer", **normalizer, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]" if unknown is None else pieces[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
        },
    }


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

"""SentencePiece's models as a tokenizer.json: from a tokenizer.model, or from the tables of GGUF.

SentencePiece writes no merges: two pieces are merged if a token is what they make together, first
where the score of that token is highest. In a tokenizer.json all these pairs are listed.
Format: https://github.com/google/sentencepiece, "src/sentencepiece_model.proto".
"""

import base64
import re
import struct
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, shown_value
from smallmind.files import durable
from smallmind.text.tokenizer_json import added_token, without_collector

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
UNIGRAM, BPE = 1, 2
MAX_BYTES = 100_000_000
BASE = 0x9E3779B97F4A7C15  # of hashes of texts: odd, so that it has an inverse
MIXED = np.uint64(0xD6E8FEB86659FD93)  # times a hash whose first bits say where to look for it


class Pieces(NamedTuple):
    """The tokens of a SentencePiece model, and how it reads texts."""

    tokens: list[str]
    scores: np.ndarray  # float32 (V,)
    types: np.ndarray  # int (V,)
    is_unigram: bool = False
    byte_fallback: bool = True
    unknown: int | None = None
    add_prefix: bool = True  # a space before the text
    squeezes: bool = False  # leading, trailing and double spaces are removed
    charsmap: bytes = b""  # how characters are normalised, compiled
    # Pairs are merged in the order of what they make, by score or by place; of those that make the
    # same, first the one that begins with the longest token or with the shortest.
    by_place: bool = False
    longest_first: bool = False
    # Programs differ in what spaces are put where: "sentencepiece" itself, or, as transformers
    # reads such files, "llama" or "gemma".
    style: str = "sentencepiece"


def contents_of(pieces: Pieces) -> dict[str, Any]:
    """Returns the contents of the tokenizer.json. InputError if the tokens are damaged."""
    tokens, types = pieces.tokens, pieces.types
    if not len(tokens) == len(pieces.scores) == len(types):
        raise InputError("it has different numbers of tokens, scores and types")
    if not np.isfinite(pieces.scores).all():
        first = tokens[int(np.argmin(np.isfinite(pieces.scores)))]
        raise InputError(f"the score of its token {shown_value(first)} is not a number")
    if len(vocabulary := {token: i for i, token in enumerate(tokens)}) < len(tokens):
        raise InputError("two of its tokens are the same")
    unknown = None if pieces.unknown is None else tokens[pieces.unknown]
    model: dict[str, Any]
    if pieces.is_unigram:
        vocab = [*map(list, zip(tokens, pieces.scores.tolist(), strict=True))]
        fallback = {"byte_fallback": pieces.byte_fallback}
        model = {"type": "Unigram", "unk_id": pieces.unknown, "vocab": vocab, **fallback}
    else:
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if pieces.style == "llama" else unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": pieces.byte_fallback,
            "ignore_merges": pieces.style == "sentencepiece" and USER_DEFINED in types,
            "vocab": vocabulary,
            "merges": merges_of(pieces),
        }
    is_added = np.isin(types, (UNKNOWN, CONTROL))
    if pieces.style != "sentencepiece":
        is_added |= types == USER_DEFINED
    added = [
        added_token(tokens[i], i, bool(types[i] != USER_DEFINED))
        for i in np.flatnonzero(is_added).tolist()
        if tokens[i]
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **_steps(pieces),
        "post_processor": None,
        "model": model,
    }


def _steps(pieces: Pieces) -> dict[str, Any]:
    """Returns what is done to texts before and after the model."""
    escapes = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    metaspace = {"type": "Metaspace", "replacement": SPACE, "split": False}
    normalizers, pre_tokenizers = list[dict[str, Any]](), list[dict[str, Any]]()
    if pieces.style == "llama":
        scheme = "first" if pieces.add_prefix else "never"
        pre_tokenizers.append({**metaspace, "prepend_scheme": scheme})
    elif pieces.style == "gemma":
        normalizers.append(escapes)
    else:
        if pieces.charsmap:
            charsmap = base64.b64encode(pieces.charsmap).decode()
            normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if pieces.squeezes:
            normalizers += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
        normalizers.append(escapes)
        if pieces.add_prefix:  # Metaspace puts no space before one
            normalizers.append(_replace(rf"\A{SPACE}", 2 * SPACE))
            pre_tokenizers.append({**metaspace, "prepend_scheme": "always"})
        names = [pieces.tokens[i] for i in np.flatnonzero(pieces.types == USER_DEFINED).tolist()]
        if names:
            pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
            isolated = {"behavior": "Isolated", "invert": False}
            pre_tokenizers.append({"type": "Split", "pattern": {"Regex": pattern}, **isolated})
    decoders: list[dict[str, Any]]
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] * pieces.byte_fallback + [{"type": "Fuse"}]
    if pieces.add_prefix and pieces.style != "gemma":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": (
            {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None
        ),
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


@without_collector()
def merges_of(pieces: Pieces) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a token, in the order in which they are merged."""
    tokens, scores = pieces.tokens, pieces.scores.astype(np.float64)
    # Some programs write pairs with a space between them.
    allowed = np.array([" " not in token for token in tokens], np.bool_)
    if pieces.style == "sentencepiece":
        allowed &= pieces.types == NORMAL
    token, left, right = pairs(tokens, allowed)
    lengths = np.array(list(map(len, tokens)), np.int64)
    rank = token if pieces.by_place else -scores[token]
    if pieces.longest_first:
        order = np.lexsort((token, -lengths[right], -lengths[left], rank))
    else:
        order = np.lexsort((lengths[left], token, rank))
    texts = np.array(tokens, object)  # from which many are taken at once
    lefts, rights = (texts[side[order]].tolist() for side in (left, right))
    return list(zip(lefts, rights, strict=True))


def pairs(tokens: list[str], allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, which of them count (V,) -> every (token, left, right) with left + right = token.

    Texts are compared by hashes of 64 bits: the tokens of Gemma can be divided at 1,400,000 places.
    """
    lengths = np.array(list(map(len, tokens)), np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    codes = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), "<u4")
    powers, inverses = _powers(BASE, len(codes)), _powers(pow(BASE, -1, 1 << 64), len(codes) + 1)
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + 1) * powers, out=sums[1:])

    def hashes(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """-> those of the texts between two places."""
        return (sums[last] - sums[first]) * inverses[first]

    numbers = np.flatnonzero(allowed & (lengths > 0))
    known = hashes(starts[numbers], ends[numbers])
    # Sorted by their first bits, once these are mixed: equal ones are neighbours.
    shift = np.uint64(64 - 2 - len(numbers).bit_length())
    parts = known * MIXED >> shift
    order = np.argsort(parts, kind="stable")
    numbers, known = numbers[order], known[order]
    counts = np.bincount(parts.astype(np.int64), minlength=4 << len(numbers).bit_length())
    firsts = np.cumsum(counts) - counts

    def find(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        wanted = hashes(first, last)
        parts = (wanted * MIXED >> shift).astype(np.int64)
        found, waiting = np.full(len(wanted), -1), np.flatnonzero(counts[parts])
        for skipped in range(counts.max()):
            part = parts[waiting]
            place = firsts[part] + skipped
            is_equal = known[place] == wanted[waiting]
            found[waiting[is_equal]] = numbers[place[is_equal]]
            waiting = waiting[~is_equal & (counts[part] > skipped + 1)]
        return found

    longer = np.flatnonzero(allowed & (lengths > 1))
    token = np.repeat(longer, lengths[longer] - 1)
    count = np.cumsum(lengths[longer] - 1)
    within = np.arange(len(token)) - np.repeat(count - (lengths[longer] - 1), lengths[longer] - 1)
    place = starts[token] + 1 + within
    if not len(numbers):
        return token, token, token
    left = find(starts[token], place)
    token, place, left = (x[left >= 0] for x in (token, place, left))
    right = find(place, ends[token])
    is_pair = right >= 0
    return token[is_pair], left[is_pair], right[is_pair]


def _powers(base: int, count: int) -> np.ndarray:
    """Returns base^0 ... base^(count - 1), modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors)


def read_model(path: str | PathLike[str], said: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A tokenizer.model -> the contents of the same as a tokenizer.json. InputError if it is none.

    `said` is the tokenizer_config.json beside it, whose class of tokenizer transformers builds.
    """
    kind = str((said or {}).get("tokenizer_class", "")).removesuffix("Fast")
    style = {"LlamaTokenizer": "llama", "GemmaTokenizer": "gemma"}.get(kind, "sentencepiece")
    with durable.explained(path, "SentencePiece model"):
        return contents_of(_pieces(durable.read(path, MAX_BYTES), style))


def _pieces(data: bytes, style: str) -> Pieces:
    tokens, scores, types = list[str](), list[float](), list[int]()
    trainer, normalizer = dict[int, Any](), dict[int, Any]()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode())
            scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            types.append(piece.get(3, NORMAL))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(value))
    if not tokens:
        raise ValueError("it has no tokens")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise InputError("it is a model of words or characters, which is not supported")
    if trainer.get(24) or not normalizer.get(5, 1):
        raise InputError("it does not put spaces before words, which is not supported")
    unknown = trainer.get(40, 0)
    return Pieces(
        tokens,
        np.array(scores, np.float32),
        np.array(types),
        is_unigram=kind == UNIGRAM,
        byte_fallback=bool(trainer.get(35, 0)) or style != "sentencepiece",
        unknown=unknown if 0 <= unknown < len(tokens) else None,
        add_prefix=bool(normalizer.get(3, 1)),
        squeezes=bool(normalizer.get(4, 1)),
        charsmap=normalizer.get(2, b""),
        by_place=style != "sentencepiece",
        style=style,
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the numbers and values of a message of Protocol Buffers: whole numbers, or bytes."""
    place, end = 0, len(data)
    while place < end:
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("a field of it is of an unknown type")
        if size > end - place:
            raise ValueError("it is truncated")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """-> the whole number at a place, where the next value begins."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("it is truncated")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, place

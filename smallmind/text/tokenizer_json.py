"""tokenizer.json, the file of tokenizers of the field: what all kinds of ours write and read of it.

Format: https://github.com/huggingface/tokenizers, "tokenizers/src/tokenizer/serialization.rs".
"""

import json
import os
from os import PathLike
from typing import Any

from smallmind import durable
from smallmind.checks import InputError, shown_value

MAX_BYTES = 100_000_000
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
# Patterns by which texts are split, and their names here. ByteLevel's own is that of GPT-2.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SIMILAR = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {GPT2: "gpt2", GPT4: "gpt4", _SIMILAR % "{1,3}": "gpt4", _SIMILAR % "": "gpt4-digits"}
PATTERNS = {"gpt2": GPT2, "gpt4": GPT4, "gpt4-digits": _SIMILAR % ""}


def kind_of(data: dict[str, Any]) -> str:
    """The kind of tokenizer that a file describes: its name in `parts.TOKENIZERS`.

    InputError if it is none of them.
    """
    model = data["model"]
    if model.get("type") != "BPE":
        raise InputError(f"its model is of type {model.get('type')!r}, not BPE")
    for setting in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise InputError(f"its model has {setting}={model[setting]!r}, which is not known here")
    if model.get("ignore_merges") or model.get("byte_fallback"):
        raise InputError("its model has ignore_merges or byte_fallback, which are not known here")
    if normalizer_of(data):
        return "bpe"
    if data.get("pre_tokenizer") is None and not model["merges"]:
        return "char"
    is_bytes = not model["merges"] and not data.get("added_tokens") and len(model["vocab"]) == 256
    return "byte" if is_bytes and split_of(data["pre_tokenizer"]) is None else "bpe"


def normalizer_of(data: dict[str, Any]) -> str | None:
    """What is done to a text first: "NFC", which joins letters and their accents, or nothing.

    InputError if it is something else.
    """
    normalizer = data.get("normalizer")
    if normalizer is None:
        return None
    if normalizer != {"type": "NFC"}:
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        raise InputError(f"its normalizer is {shown_value(kind)}; only NFC is known here")
    return "NFC"


def contents(
    vocabulary: dict[str, int],
    merges: list[list[str]],
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    special: dict[str, int] | None = None,
    normalizer: str | None = None,
) -> dict[str, Any]:
    """What a tokenizer.json holds; the arguments are what kinds differ in."""
    added = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": content, **added}
            for content, token in sorted((special or {}).items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def byte_level(split: str | None) -> dict[str, Any]:
    """The pre-tokenizer that splits texts by one of PATTERNS, or not at all."""
    if split == "gpt2":
        return {**BYTE_LEVEL, "use_regex": True}
    unsplit = {**BYTE_LEVEL, "use_regex": False}
    if split is None:
        return unsplit
    isolated = {"pattern": {"Regex": PATTERNS[split]}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", **isolated}, unsplit]}


def split_of(pre_tokenizer: Any) -> str | None:
    """The name of the pattern of a pre-tokenizer; None if it splits nothing.

    InputError if it is none that byte-level tokenizers here know.
    """
    unknown = InputError(
        "its pre_tokenizer is not known to this version: it must be ByteLevel, alone or after a "
        "Split by the pattern of GPT-2, GPT-4, Llama 3 or Qwen 2"
    )
    if not isinstance(pre_tokenizer, dict):
        raise unknown
    steps = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else None
    steps = steps if isinstance(steps, list) else [pre_tokenizer]
    if not steps or not all(isinstance(step, dict) for step in steps):
        raise unknown
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        raise unknown
    if not splits:
        return "gpt2" if last.get("use_regex", True) else None
    pattern = splits[0].get("pattern")
    name = SPLITS.get(pattern.get("Regex", "")) if isinstance(pattern, dict) else None
    is_isolated = splits[0].get("behavior") == "Isolated" and not splits[0].get("invert")
    if len(splits) > 1 or last.get("use_regex", True) or not name or not is_isolated:
        raise unknown
    return name


def special_tokens(data: dict[str, Any]) -> dict[str, int]:
    """The added tokens of a file -> their numbers. InputError if one is matched in other ways."""
    special = {}
    for token in data.get("added_tokens") or []:
        content, number = token["content"], token["id"]
        if not isinstance(content, str) or not content or type(number) is not int or number < 0:
            raise InputError(f"its added token {content!r} is damaged")
        if any(token.get(how) for how in ("single_word", "lstrip", "rstrip")):
            raise InputError(f"its added token {content!r} strips spaces, which is not known here")
        special[content] = number
    return special


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The contents of a tokenizer.json. InputError if it is none."""
    try:
        with durable.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(min(size, MAX_BYTES))
        if size > MAX_BYTES:
            raise InputError(f"{path} has more than {MAX_BYTES:,} bytes: it is no tokenizer.json")
        data = json.loads(content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except InputError:
        raise
    except (RecursionError, ValueError) as error:
        raise InputError(
            f"{path} is not a tokenizer.json: {error or 'nested too deeply'}"
        ) from None
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise InputError(f"{path} is not a tokenizer.json: it has no 'model'")
    return data


def write(path: str | PathLike[str], data: dict[str, Any]) -> None:
    """Writes a tokenizer.json, all of it or nothing."""
    durable.write(path, [json.dumps(data, ensure_ascii=False, indent=1).encode()])

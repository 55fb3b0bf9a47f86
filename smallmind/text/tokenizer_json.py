"""Reads and writes tokenizer.json, the field's common file of tokenizers, for all our kinds.

Format: https://github.com/huggingface/tokenizers, "tokenizers/src/tokenizer/serialization.rs".
"""

import gc
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

from smallmind.checks import InputError, from_json, shown_value
from smallmind.files import durable

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
PATTERNS = {"gpt2": GPT2, "gpt4": GPT4, "gpt2-digits": GPT2, "gpt4-digits": _SIMILAR % ""}
DIGITS = {"type": "Digits", "individual_digits": True}
STRIPPING = ("single_word", "lstrip", "rstrip")  # how added tokens may differ from their names


class Rules(NamedTuple):
    """Rules of other programs' byte-level tokenizers that those made here lack."""

    normalizer: str | None = None  # "NFC": letters and their accents are joined first
    ignore_merges: bool = False  # a word that is in the vocabulary is that token
    late: frozenset[str] = frozenset()  # special tokens that are looked for in the joined text
    shown: frozenset[str] = frozenset()  # special tokens that belong to the text

    def state(self) -> dict[str, Any]:
        """-> the rules as JSON-able values, without what is as in tokenizers made here."""
        sets = {"late": sorted(self.late), "shown": sorted(self.shown)}
        return {name: value for name, value in (self._asdict() | sets).items() if value}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Rules":
        """-> the rules in a state. TypeError or ValueError if they are damaged."""
        rules = cls(
            state.get("normalizer"),
            state.get("ignore_merges", False),
            frozenset(state.get("late", ())),
            frozenset(state.get("shown", ())),
        )
        if rules.normalizer not in (None, "NFC"):
            raise ValueError(f"its normalizer is {shown_value(rules.normalizer)}")
        are_special = rules.late | rules.shown <= set(state["special"])
        if not isinstance(rules.ignore_merges, bool) or not are_special:
            raise ValueError("its rules are damaged")
        return rules


PLAIN_RULES = Rules()


def check_model(data: dict[str, Any]) -> None:
    """Raises InputError for a file that is not of byte-level BPE, saying why."""
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise InputError(f"its model is of type {model['type']!r}, not BPE")
    for setting in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(setting):
            raise InputError(f"its model has {setting}={model[setting]!r}, which is not supported")


def is_plain(data: dict[str, Any]) -> bool:
    """Returns True if a file of byte-level BPE has only what BPETokenizer computes itself."""
    if any(token.get(how) for token in data.get("added_tokens") or [] for how in STRIPPING):
        return False
    try:
        check_model(data)
        rules_of(data)
        return split_of(data["pre_tokenizer"]) is not None
    except InputError:
        return False


def never_merges(data: dict[str, Any]) -> bool:
    """Returns True if a file of BPE has neither merges nor a normalizer."""
    model = data["model"]
    is_bpe = model.get("type", "BPE") == "BPE"  # the file of GPT-2 does not name it
    return is_bpe and not model["merges"] and data.get("normalizer") is None


def rules_of(data: dict[str, Any]) -> Rules:
    """Returns a file's rules besides its vocabulary and merges. InputError for unknown ones."""
    added, normalizer = data.get("added_tokens") or [], data.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):  # NFC joins letters and their accents
        kind = normalizer.get("type") if isinstance(normalizer, dict) else normalizer
        raise InputError(f"its normalizer is {shown_value(kind)}; only NFC is supported")
    late = {token["content"] for token in added if token.get("normalized")}
    if normalizer is None and len(late) == len(added):
        late = set()  # all are looked for together
    shown = {token["content"] for token in added if not token.get("special", True)}
    ignore_merges = bool(data["model"].get("ignore_merges"))
    return Rules(normalizer and "NFC", ignore_merges, frozenset(late), frozenset(shown))


def contents(
    vocabulary: dict[str, int],
    merges: list[list[str]] | list[str],
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    special: Mapping[str, int] | None = None,
    rules: Rules = PLAIN_RULES,
) -> dict[str, Any]:
    """Returns the contents of a tokenizer.json; the arguments are what kinds differ in."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(content, token, content not in rules.shown, content in rules.late)
            for content, token in sorted((special or {}).items(), key=lambda item: item[1])
        ],
        "normalizer": {"type": rules.normalizer} if rules.normalizer else None,
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
            "ignore_merges": rules.ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def added_token(
    content: str, token: int, special: bool = True, normalized: bool = False
) -> dict[str, Any]:
    """Describes an added token, which is found wherever its name is."""
    how = dict.fromkeys(STRIPPING, False)
    return {
        "id": token,
        "content": content,
        **how,
        "normalized": normalized,
        "special": special,
    }


def byte_level(split: str | None) -> dict[str, Any]:
    """Returns the pre-tokenizer that splits texts by one of PATTERNS, or not at all."""
    whole = {**BYTE_LEVEL, "use_regex": True}
    if split == "gpt2":
        return whole
    if split == "gpt2-digits":
        return {"type": "Sequence", "pretokenizers": [DIGITS, whole]}
    return {**BYTE_LEVEL, "use_regex": False} if split is None else split_by([PATTERNS[split]])


def split_by(patterns: Iterable[str]) -> dict[str, Any]:
    """Returns the pre-tokenizer that splits texts by one pattern, its parts by the next, ..."""
    how = {"behavior": "Isolated", "invert": False}
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, **how} for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*steps, byte_level(None)]}


def patterns_of(pre_tokenizer: Any) -> list[str] | None:
    """Returns the patterns of which `split_by` makes such a pre-tokenizer; None if of none."""
    *splits, last = (pre_tokenizer or {}).get("pretokenizers") or [{}]
    if {**last, "trim_offsets": True} != byte_level(None):
        return None
    patterns = [r"\p{N}" if step == DIGITS else _isolating(step) for step in splits]
    if None in patterns:
        return None
    # Some files have line breaks themselves where others have their names.
    return [str(pattern).replace("\r", r"\r").replace("\n", r"\n") for pattern in patterns]


def _isolating(step: Mapping[str, Any]) -> str | None:
    pattern = step.get("pattern") or {}
    regex = pattern.get("Regex", re.escape(pattern.get("String", "")))
    return str(regex) if step == split_by([regex])["pretokenizers"][0] else None


def split_of(pre_tokenizer: Any) -> str | None:
    """Returns the pattern of a pre-tokenizer; None if it splits nothing. InputError if unknown."""
    unknown = InputError(
        "its pre_tokenizer is not supported: it must be ByteLevel, alone, after Digits "
        "or after a Split by the pattern of GPT-2, GPT-4, Llama 3 or Qwen 2"
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
    if splits == [DIGITS] and last.get("use_regex", True):
        return "gpt2-digits"
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
        if any(token.get(how) for how in STRIPPING):
            raise InputError(f"its added token {content!r} strips spaces, which is not supported")
        special[content] = number
    return special


def added_around(post_processor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens that a post_processor puts before and after each text; most put none.

    AttributeError, KeyError, TypeError or ValueError if it is damaged.
    """
    before, after = list[int](), list[int]()
    kind = post_processor["type"] if post_processor else None
    if kind == "Sequence":
        for first, last in map(added_around, post_processor["processors"]):
            before[:0], after[len(after) :] = first, last
    elif kind in ("BertProcessing", "RobertaProcessing"):
        before, after = ([post_processor[name][1]] for name in ("cls", "sep"))
    elif kind == "TemplateProcessing":
        side = before
        for piece in post_processor["single"]:
            if "SpecialToken" in piece:
                side += post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            else:
                side = after
    if any(type(i) is not int or i < 0 for i in (*before, *after)):
        raise ValueError("its post_processor adds something that is not a token")
    return tuple(before), tuple(after)


def sides_of(merges: Sequence[Any]) -> list[str]:
    """Returns the tokens of merges, one after another. ValueError if a merge is not of two.

    All are lists or, as earlier versions write them, texts. All at once: there are 500,000 of them.
    """
    kinds = set(map(type, merges))
    are_texts = kinds == {str}
    sizes = map(str.count, merges, itertools.repeat(" ")) if are_texts else map(len, merges)
    if not (are_texts or kinds <= {list, tuple}) or set(sizes) - {1 if are_texts else 2}:
        raise ValueError("a merge is not of two tokens")
    return " ".join(merges).split(" ") if are_texts else [*itertools.chain.from_iterable(merges)]


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Returns the contents of a tokenizer.json. InputError if it is none."""
    with durable.explained(path, "tokenizer.json"), without_collector():
        data = from_json(durable.read(path, MAX_BYTES), strict=False)
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise ValueError("it has no 'model'")
        return data


@contextmanager
def without_collector() -> Iterator[None]:
    """Collects no garbage within the block: 150,000 merges, each a list, take a third longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def encoded(data: dict[str, Any]) -> bytes:
    """Returns the bytes of a tokenizer.json: a line for each part, which is fast."""
    parts = {json.dumps(key): json.dumps(part, ensure_ascii=False) for key, part in data.items()}
    lines = [f"{key}: {part}" for key, part in parts.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def write(path: str | PathLike[str], data: dict[str, Any]) -> None:
    """Writes a tokenizer.json, all of it or nothing."""
    durable.write(path, [encoded(data)])

"""The interface of tokenizers: text to token ids and back."""

import codecs
import copy
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from smallmind import parts
from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.files import safetensors
from smallmind.files.encoding import encoded
from smallmind.text.ids import check_ids
from smallmind.text.sentencepiece import read_model
from smallmind.text.tokenizer_json import added_around, read, write

CHUNK = 1 << 20  # characters encoded together
FILE = "tokenizer.json"


class Spelled(NamedTuple):
    """The length of the text that some tokens spell."""

    characters: int  # that begin in them
    bytes: int  # of UTF-8

    @classmethod
    def as_bytes(cls, ids: np.ndarray) -> "Spelled":
        """Counts each of them as a character of one byte."""
        return cls(ids.size, ids.size)


class Tokenizer:
    """`Tokenizer(text)`: one token per character that occurs in text.

    `Tokenizer(text, kind)` is the tokenizer of that kind in `parts.TOKENIZERS`, fitted to text:
    "char"; "byte", whose vocabulary is the 256 bytes, so that it can encode any text; or "bpe",
    with tokens of several bytes, which takes `vocab_size` and `split` too. InputError for an
    unknown kind. A kind names such settings of its own in `settings`, and has them as attributes.

    Each subclass is one kind: it defines everything below, and is built from text or from `state`.

    `published` is what the files of a model of another program say about its tokens besides, such
    as its chat template, by the names of these files; see `exchange.published`.
    """

    kind: ClassVar[str]
    # Keywords of the constructor, besides text and kind -> the fields of RunConfig that set them.
    settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    is_learned: ClassVar[bool] = False  # from texts, by `learn`, rather than from their characters
    unit: ClassVar[str]  # what tokens are: "characters"
    vocab_size: int
    separator: str = "\n"  # of documents
    end_of_text: int | None = None  # a token that only ends texts
    opening: str  # the default prompt: a newline, if the vocabulary has one
    special: Mapping[str, int] = MappingProxyType({})  # tokens that are never split
    shown: frozenset[str] = frozenset()  # of these, those that belong to the text, whoever wrote it
    # Special tokens that take the white space before or after them -> which of both they take.
    strips: Mapping[str, tuple[bool, bool]] = MappingProxyType({})
    published: Mapping[str, Any] = MappingProxyType({})
    beginning: tuple[int, ...] = ()  # the tokens before each text, as a published file says

    def __new__(cls, *arguments: Any, **settings: Any) -> "Tokenizer":
        if cls is not Tokenizer:
            return super().__new__(cls)
        kind = settings.get("kind", arguments[1] if len(arguments) > 1 else "char")
        if check_type("kind", kind, str) not in parts.TOKENIZERS:
            raise InputError(
                f"tokenizer={kind!r} must be one of {', '.join(parts.LEARNED_TOKENIZERS)}"
            )
        return super().__new__(parts.load(parts.TOKENIZERS, kind))

    def __init__(self, text: str = "", kind: str = "char", **settings: Any) -> None:
        raise NotImplementedError

    @classmethod
    def learn(cls, texts: Iterable[str], **settings: Any) -> "Tokenizer":
        """Learns the tokenizer of texts, one after another; only a little of them is in memory."""
        raise NotImplementedError

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end what a model writes: that of texts, and those of turns."""
        files = (self.published.get(f"{name}.json", {}) for name in ("generation_config", "config"))
        said = next((file["eos_token_id"] for file in files if "eos_token_id" in file), None)
        published = said if isinstance(said, list) else [said]
        known = {i for i in published if type(i) is int and 0 <= i < self.vocab_size}
        return frozenset(known if self.end_of_text is None else known | {self.end_of_text})

    @property
    def separator_token(self) -> int | None:
        """The token that separates documents; None if the vocabulary has none."""
        return self.token_of(self.separator)

    def token_of(self, text: str) -> int | None:
        """Returns the token that spells a text; None if it takes several or is unknown."""
        if self.unknown(text):
            return None
        ids = self.encode(text)
        return int(ids[0]) if len(ids) == 1 else None

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """text -> int32 ids (n,). InputError naming the first character outside the vocabulary.

        Names of special tokens in it become these tokens; without `special` they are ordinary text.
        """
        check_type("text", text, str)
        if not (special and self.special):
            return self._encode(text)
        pieces = [
            np.array([self.special[piece]], np.int32)
            if piece in self.special
            else self._encode(piece)
            for piece in special_names(tuple(self.special)).split(text)
            if piece
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def begun(self, ids: np.ndarray) -> np.ndarray:
        """ids of a text -> the same after the tokens of `beginning`, unless it has them itself."""
        first = self.beginning
        if not first or tuple(ids[: len(first)].tolist()) == first:
            return ids
        return np.concatenate([np.array(first, np.int32), ids])

    def prompt(self, text: str) -> np.ndarray:
        """text -> ids (n,) that a model continues: `encode`, `begun`."""
        return self.begun(self.encode(text))

    def begin_documents(
        self, chunks: Iterable[np.ndarray], before: int | None = None
    ) -> Iterator[np.ndarray]:
        """ids of documents, in chunks -> the same with each document `begun`.

        One begins after each `separator_token`, and at the start, unless `before` is a token that
        comes before the chunks.
        """
        first, end = self.beginning, self.separator_token
        for ids in chunks:
            if first and len(ids):
                is_first = np.append(before is None, (ids[:-1] == end) & (first != (end,)))
                if before is not None:
                    is_first[0] = before == end and first != (end,)
                before = int(ids[-1])
                places = [
                    i
                    for i in np.flatnonzero(is_first).tolist()
                    if tuple(ids[i : i + len(first)].tolist()) != first
                ]
                repeated = np.repeat(np.array(places, np.int64), len(first))
                ids = np.insert(ids, repeated, first * len(places))
            yield ids

    def encode_documents(self, text: str) -> np.ndarray:
        """A text of one or more documents -> its ids (n,), each document `begun`."""
        return next(self.begin_documents([self.encode(text)]))

    def encode_each(self, texts: Sequence[str], continued: bool = False) -> list[np.ndarray]:
        """Many short texts -> the ids of each, without special tokens: faster than one by one.

        Some tokenizers encode texts differently if they are `continued`, after other tokens.
        """
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        """text -> ids (n,), none of which is that of a special token."""
        raise NotImplementedError

    def with_special(self, names: Sequence[str]) -> "Tokenizer":
        """-> the tokenizer with these special tokens: those that it lacks, after its vocabulary.

        InputError for a name that is an ordinary token, or too short to be told from one.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self.special]
        if not missing:
            return self
        self._check_names(missing)
        numbers = range(self.vocab_size, self.vocab_size + len(missing))
        return self._added({**self.special, **dict(zip(missing, numbers, strict=True))})

    def _added(self, special: dict[str, int]) -> "Tokenizer":
        """Returns the tokenizer with these special tokens, its own and others."""
        made = Tokenizer.from_state({**self.state(), "special": special})
        return made.with_published(self.published) if self.published else made

    def _check_names(self, names: Sequence[str]) -> None:
        """Raises InputError unless new special tokens can have these names."""
        for name in names:
            if len(check_type("a special token", name, str)) < 2:
                raise InputError(
                    f"a special token cannot be named {name!r}: use two characters or more"
                )
            encoded(name, 0, len(name))  # InputError for an unpaired surrogate

    def chunks(self, texts: Iterable[str]) -> Iterator[str]:
        """Texts, one after another -> the same text in chunks that can be encoded by themselves."""
        return _between(batched(texts), tuple(self.special)) if self.special else batched(texts)

    def encode_chunks(
        self, chunks: Iterable[str], before: int | None = None
    ) -> Iterator[np.ndarray]:
        """Chunks of `chunks` -> the ids of each, int32; only a few chunks are held in memory.

        `before` is the token before them, None at the start.
        """
        return map(self.encode, chunks)

    def spelled(self, ids: np.ndarray) -> Spelled:
        """ids, an array of any shape -> what they spell."""
        raise NotImplementedError

    def unknown(self, text: str) -> str:
        """Returns the characters that `encode` refuses, sorted: those outside the vocabulary."""
        if self.special:
            text = special_names(tuple(self.special)).sub("", text)
        return self._unknown(text)

    def _unknown(self, text: str) -> str:
        """-> the characters of a text without special tokens that are outside the vocabulary."""
        return ""

    def _check_special(self, special: Any, first: int, end: int | None = None) -> dict[str, int]:
        """Checks special tokens: after `first` others, or below `end`. ValueError if not so."""
        if not isinstance(special, Mapping):
            raise TypeError("its special tokens are not an object")
        numbers = list(special.values())
        if not all(isinstance(name, str) and len(name) > 1 for name in special):
            raise ValueError("its special tokens have no names of two characters or more")
        allowed = set(range(first, first + len(special) if end is None else end))
        if any(type(i) is not int for i in numbers) or len(allowed & set(numbers)) < len(numbers):
            raise ValueError("its special tokens do not follow the others")
        "".join(special).encode()  # ValueError for lone surrogates
        return dict(sorted(special.items(), key=lambda item: item[1]))

    def token_bytes(self, token: int) -> bytes:
        """-> the UTF-8 of a token, which may be a part of a character."""
        raise NotImplementedError

    def stream(self, ids: Iterable[int], begins: bool = True) -> Iterator[str]:
        """ids -> pieces of text, each as soon as its characters are complete.

        Unless it `begins` a sequence, the space before its first word is part of the text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"token {i} is outside the vocabulary of {self.vocab_size}")
            yield decoder.decode(self.token_bytes(i))
        yield decoder.decode(b"", final=True)

    def decode(self, ids: Iterable[int]) -> str:
        """ids -> text; bytes that are not UTF-8 become the replacement character."""
        check_type("ids", ids, Iterable)
        ids = ids if isinstance(ids, np.ndarray) else list(ids)
        return self._text(check_ids("ids", ids, self.vocab_size)) if len(ids) else ""

    def _text(self, ids: np.ndarray) -> str:
        """ids (n,), all in the vocabulary -> text."""
        return b"".join(map(self.token_bytes, ids.tolist())).decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """-> the arguments of `from_state` as JSON-able values; "kind" is one of them."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Tokenizer":
        """Returns the tokenizer, of any kind, whose `state()` this is.

        KeyError, TypeError or ValueError (InputError included) if it is anything else.
        """
        check_type("state", state, Mapping)
        if "kind" not in state:
            raise InputError("state has no 'kind'; give what Tokenizer.state() returned")
        if state["kind"] not in parts.TOKENIZERS:
            raise InputError(f"tokenizer={state['kind']!r} is not known to this version")
        return parts.load(parts.TOKENIZERS, state["kind"]).from_state(state)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of `state()`: tokenizers with the same one make the same tokens of a text."""
        return hashlib.sha256(safetensors.to_json(self.state()).encode()).hexdigest()

    @functools.cached_property
    def saved(self) -> str:
        """`state()` and what is `published`, as the text that files hold; see `from_saved`."""
        published = {"published": dict(self.published)} if self.published else {}
        return safetensors.to_json({**self.state(), **published})

    @classmethod
    def from_saved(cls, saved: str) -> "Tokenizer":
        """Returns the tokenizer that was `saved`. Errors as for `from_state`."""
        state = safetensors.from_json(check_type("saved", saved, str))
        tokenizer = cls.from_state(state)
        return tokenizer.with_published(state.get("published", {}))

    def with_published(self, published: Mapping[str, Any]) -> "Tokenizer":
        """Copies the tokenizer with this as `published`, which says what its `beginning` is.

        TypeError unless it is tables by name, ValueError if it has halves of characters or begins
        texts with what is not a token.
        """
        for name, part in check_type("published", published, Mapping).items():
            check_type(name, part, Mapping)
        safetensors.to_json(dict(published)).encode()
        made = copy.copy(self)
        made.published = published
        try:
            made.beginning, _ = added_around(published.get(FILE, {}).get("post_processor"))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"its post_processor is damaged: {error}") from None
        if max(made.beginning, default=0) >= self.vocab_size:
            raise ValueError("its post_processor adds a token that does not exist")
        made.__dict__.pop("saved", None)
        return made

    def as_json(self) -> dict[str, Any]:
        """-> the contents of a tokenizer.json that gives the same ids in other programs."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tokenizer":
        """Returns the tokenizer whose `as_json()` this is, or that of another program.

        InputError, KeyError, TypeError or ValueError if it is not a supported one.
        """
        kinds = (parts.load(parts.TOKENIZERS, kind) for kind in parts.TOKENIZERS)
        found = next((kind for kind in kinds if kind.claims(data)), None)
        tokenizer = (found or parts.load(parts.TOKENIZERS, "bpe")).from_json(data)
        processor = data.get("post_processor")
        if not any(added_around(processor)):
            return tokenizer
        return tokenizer.with_published({FILE: {"post_processor": processor}})

    @classmethod
    def claims(cls, data: dict[str, Any]) -> bool:
        """Returns True if a tokenizer.json is of this kind. Without a claim it is read as "bpe"."""
        return False

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a tokenizer.json."""
        write(path, {**self.as_json(), **self.published.get(FILE, {})})

    @classmethod
    def load(cls, path: str | PathLike[str], contents: dict[str, Any] | None = None) -> "Tokenizer":
        """Reads a tokenizer.json, or `contents` that have been read. InputError if it is none.

        Also a tokenizer.model of SentencePiece.
        """
        try:
            if contents is None:
                contents = (read_model if str(path).endswith(".model") else read)(path)
            return Tokenizer.from_json(contents)
        except InputError as error:
            raise InputError(f"cannot use the tokenizer {path}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is not a supported tokenizer.json: {error}") from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.vocab_size} {self.unit}>"


@functools.lru_cache(64)
def special_names(names: tuple[str, ...]) -> "re.Pattern[str]":
    """Matches names of special tokens, the longest first; splitting by it keeps them."""
    return re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")


def _between(texts: Iterable[str], names: tuple[str, ...]) -> Iterator[str]:
    """Texts, one after another -> the same text in pieces, none of which ends within a name."""
    pattern, longest = special_names(names), max(map(len, names))
    waiting = ""
    for text in texts:
        waiting += text
        end = max(0, len(waiting) - longest + 1)  # a name that begins later may not be whole yet
        for found in pattern.finditer(waiting):
            if found.start() < end < found.end():
                end = found.end()
        yield waiting[:end]
        waiting = waiting[end:]
    yield waiting


def batched(texts: Iterable[str]) -> Iterator[str]:
    """Texts, one after another -> the same text in pieces of at least CHUNK characters."""
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text)
        if size >= CHUNK:
            yield "".join(waiting)
            waiting, size = [], 0
    if size:
        yield "".join(waiting)


def sliced(text: str) -> Iterator[str]:
    """Yields a text in pieces of CHUNK characters, each an equal part of what is being done."""
    for start in activity.parts(range(0, len(text), CHUNK)):
        yield text[start : start + CHUNK]


def distinct(text: str) -> set[str]:
    """Returns the characters that occur in a text."""
    found: set[str] = set()
    with activity.doing("Listing the characters of the text", usual=len(text) < activity.LARGE):
        for piece in sliced(text):
            found.update(piece)
    return found

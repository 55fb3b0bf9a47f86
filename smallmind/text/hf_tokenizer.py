"""Tokenizers of other programs, run by the package `tokenizers`.

SentencePiece's BPE and Unigram, WordPiece, a vocabulary of words, or byte-level BPE that divides
texts in a way that BPETokenizer does not know: a tokenizer.json says everything about them. Files
of SentencePiece and GGUF are brought into this form by `text.sentencepiece`.
"""

import codecs
import contextlib
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError, check_type, shown_value, suggesting
from smallmind.files import safetensors
from smallmind.files.encoding import encoded
from smallmind.text import tokenizer_json
from smallmind.text.byte_alphabet import as_bytes
from smallmind.text.tokenizer import CHUNK, Spelled, Tokenizer, batched, special_names
from smallmind.text.tokenizer_json import added_token, sides_of, without_collector

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Models of the package `tokenizers`, and what each is built from.
OF_BPE = "unk_token continuing_subword_prefix end_of_word_suffix"
MODELS = {
    "BPE": f"vocab merges {OF_BPE} fuse_unk byte_fallback ignore_merges",
    "Unigram": "vocab unk_id byte_fallback",
    "WordPiece": "vocab unk_token max_input_chars_per_word continuing_subword_prefix",
    "WordLevel": "vocab unk_token",
}
MAX_TOKENS = 2**20
PIECE = 1 << 16  # characters of a long text that a thread encodes
CONTINUED = bytes(range(0x80, 0xC0))  # in UTF-8, the bytes within a character
BORDER = re.compile(r"(?<=[0-9A-Za-z])[ \n]")
BYTE = re.compile("<0x([0-9A-F]{2})>")
# These parts of a file do not change the tokens of a text; `published` has what is put around it.
NOT_OURS: Mapping[str, None] = dict.fromkeys(("truncation", "padding", "post_processor"))
NOT_LEARNED = (
    "tokens of the kind hf are read, not learned: give the path of a tokenizer.json or of a "
    "tokenizer.model of SentencePiece"
)


class _Encoders(NamedTuple):
    """Objects of the package `tokenizers` with the same model."""

    whole: Any  # special tokens are found by their names
    plain: Any  # names of special tokens are ordinary text
    continued: Any  # the same for a text after other tokens, which no space is put before
    model: Any


@suggesting()
class HFTokenizer(Tokenizer):
    """A tokenizer as a tokenizer.json describes it, which `contents` are.

    It is read by `Tokenizer.load` or with a model, never learned. `special` are its added tokens.
    """

    kind = "hf"
    is_learned = True
    unit = "tokens"
    contents: dict[str, Any]
    pieces: list[str]  # as its files write tokens, "" for ids that have none
    _spelled: dict[int, bytes]

    def __init__(self, text: str = "", kind: str = "hf") -> None:
        raise InputError(NOT_LEARNED)

    @classmethod
    def learn(cls, texts: Iterable[str], **settings: Any) -> "HFTokenizer":
        raise InputError(NOT_LEARNED)

    @classmethod
    def _of(cls, contents: Mapping[str, Any]) -> "HFTokenizer":
        """-> the tokenizer of a tokenizer.json. InputError if its vocabulary is damaged."""
        made = object.__new__(cls)
        made.contents = {**contents, **NOT_OURS}
        made.pieces = pieces_of(made.contents)
        made.vocab_size = len(made.pieces)
        added = made.contents.get("added_tokens") or []
        made.special = {token["content"]: token["id"] for token in added}
        made.shown = frozenset(x["content"] for x in added if not x.get("special", True))
        made.strips = {
            x["content"]: (bool(x.get("lstrip")), bool(x.get("rstrip")))
            for x in added
            if x.get("lstrip") or x.get("rstrip")
        }
        ends = made.special.keys() - made.shown  # in Gemma, </s> is a tag of HTML
        made.separator = next((end for end in ENDS if end in ends), "\n")
        made.end_of_text = made.special[made.separator] if made.separator in ends else None
        made._spelled = {}
        return made

    @property
    def opening(self) -> str:  # type: ignore[override]
        if self.beginning:
            return ""
        return "\n" if len(self.encode("\n")) else self.separator

    @property
    def separator_token(self) -> int | None:
        return self.end_of_text

    @functools.cached_property
    def _encoders(self) -> _Encoders:
        return _encoders(self.contents)

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        check_type("text", text, str)
        return _ids(self._encoders.whole, [text])[0] if special else self.encode_each([text])[0]

    def encode_each(self, texts: Sequence[str], continued: bool = False) -> list[np.ndarray]:
        encoders = self._encoders
        encoder = encoders.continued if continued else encoders.plain
        found = _ids(encoder, texts)
        for i, ids in enumerate(found):
            if self._is_hidden[ids].any():  # some models spell these names with their tokens
                first, *rest = self._divided_names(texts[i])
                found[i] = np.concatenate(
                    [*_ids(encoder, [first]), *_ids(encoders.continued, rest)]
                )
        return found

    def _divided_names(self, text: str) -> list[str]:
        """Divides a text within all names of hidden tokens."""
        names = [name for name, i in self.special.items() if self._is_hidden[i]]
        cuts = [found.start() + 1 for found in special_names(tuple(names)).finditer(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    @functools.cached_property
    def _is_hidden(self) -> np.ndarray:
        """True (V,) for tokens that no text has, unless it is a program's."""
        hidden = np.zeros(self.vocab_size, np.bool_)
        hidden[[i for name, i in self.special.items() if name not in self.shown]] = True
        model = self.contents["model"]
        unknown = model.get("unk_id"), self.special.get(model.get("unk_token"))
        hidden[[i for i in unknown if i is not None]] = False
        return hidden

    def encode_documents(self, text: str) -> np.ndarray:
        pieces = [*self.begin_documents(self.encode_chunks(self.chunks([text])))]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def chunks(self, texts: Iterable[str]) -> Iterator[str]:
        waiting = ""
        for text in batched(texts):
            *whole, waiting = self._cut(waiting + text, CHUNK)
            yield from whole
        if waiting:
            yield waiting

    def encode_chunks(
        self, chunks: Iterable[str], before: int | None = None
    ) -> Iterator[np.ndarray]:
        end = None if self.end_of_text is None else self.separator
        begins = before in (None, self.end_of_text)
        for chunk in chunks:
            documents = chunk.split(end) if end else [chunk]
            parts: list[str] = []
            continued: list[bool] = []  # in the middle of a document
            ends: list[int] = []  # the parts before which a document ends
            for document in documents:
                pieces = self._cut(document, PIECE)
                parts += pieces
                continued += [not begins, *[True] * (len(pieces) - 1)]
                ends.append(len(parts))
                begins = True
            # The character before a part that continues a document makes no token with it.
            ids = _ids(
                self._encoders.whole,
                [
                    self._anchor + part if after else part
                    for part, after in zip(parts, continued, strict=True)
                ],
            )
            skipped = len(self.encode(self._anchor)) if any(continued) else 0
            ids = [x[skipped:] if after else x for x, after in zip(ids, continued, strict=True)]
            for place in reversed(ends[:-1]):
                ids.insert(place, np.array([self.end_of_text], np.int32))
            begins = not documents[-1] and len(documents) > 1
            yield np.concatenate(ids)

    def _cut(self, text: str, size: int) -> list[str]:
        """Cuts a text into parts of about this size that can be encoded by themselves.

        Each ends with a letter or digit that is never in a token with the space or line break after
        it: then the tokens on either side do not depend on the other.
        """
        parts, start = [], 0
        while self._anchor and len(text) - start > size:
            borders = BORDER.finditer(text, start + size)
            end = next((f.start() for f in borders if self._is_border(text, f.start())), None)
            if end is None:
                break
            parts.append(text[start:end])
            start = end
        return [*parts, text[start:]]

    def _is_border(self, text: str, place: int) -> bool:
        return text[place - 1 : place + 1] not in self._joined and not any(
            name in text[max(0, place - len(name) + 1) : place + len(name) - 1]
            for name in self._divisible
        )

    @functools.cached_property
    def _joined(self) -> frozenset[str]:
        """The letters and digits that are before a space or line break within a token."""
        tokens = "\0".join(self.pieces).replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")
        return frozenset(re.findall("[0-9A-Za-z][ \n]", tokens))

    @functools.cached_property
    def _divisible(self) -> list[str]:
        """The added tokens in which a border would be found."""
        return [name for name in self.special if BORDER.search(name)]

    @functools.cached_property
    def _anchor(self) -> str:
        """A letter after which a text may be cut; "" if there is none."""
        found = (x for x in "aeinost" if not {f"{x} ", f"{x}\n"} & self._joined)
        return next(found, "")

    def divided(self, text: str) -> list[str]:
        """Returns the parts of a text that the model finds tokens in."""
        encoder = self._encoders.whole
        normal = encoder.normalizer.normalize_str(text) if encoder.normalizer else text
        split = encoder.pre_tokenizer
        return [part for part, _ in split.pre_tokenize_str(normal)] if split else [normal]

    def unknown(self, text: str) -> str:
        return ""  # encoded as bytes or as one token for all that is unknown, or left out

    def _check_names(self, names: Sequence[str]) -> None:
        super()._check_names(names)
        for name in set(names) & set(self.pieces):
            raise InputError(f"a special token cannot be named {name!r}: it is an ordinary one")

    def _added(self, special: Mapping[str, int]) -> "HFTokenizer":
        added = [added_token(x, i) for x, i in special.items() if x not in self.special]
        tokens = [*(self.contents.get("added_tokens") or []), *added]
        return self._with_added(tokens)

    def _with_added(self, tokens: Sequence[Mapping[str, Any]]) -> "HFTokenizer":
        made = self._of({**self.contents, "added_tokens": tokens})
        if "_encoders" in self.__dict__:  # the model is large, and the same
            made.__dict__["_encoders"] = _encoders(made.contents, self._encoders.model)
        return made.with_published(self.published) if self.published else made  # type: ignore

    def within(self, vocab_size: int) -> "HFTokenizer":
        """-> the tokenizer without added tokens beyond a model's vocabulary, as of images.

        InputError if it has other tokens there.
        """
        beyond = [x for x, i in self.special.items() if i >= vocab_size]
        if self.vocab_size - len(beyond) > vocab_size or not beyond:
            return self
        tokens = [x for x in self.contents["added_tokens"] if x["content"] not in beyond]
        return self._with_added(tokens)

    def spelled(self, ids: np.ndarray) -> Spelled:
        found, counts = np.unique(ids, return_counts=True)
        spelled = [self.token_bytes(i) for i in found.tolist()]
        begun = [len(token.translate(None, CONTINUED)) for token in spelled]
        nbytes = [len(token) for token in spelled]
        return Spelled(int(np.dot(counts, begun)), int(np.dot(counts, nbytes)))

    def token_bytes(self, token: int) -> bytes:
        if token not in self._spelled:
            self._spelled[token] = self._as_bytes(token, is_first=False)
        return self._spelled[token]

    def _as_bytes(self, token: int, is_first: bool) -> bytes:
        """Returns the UTF-8 of a token between others, or before others."""
        # Some added tokens are written as they are found, after texts have been normalised.
        piece = self._encoders.whole.id_to_token(token) or ""
        decoder = self.contents.get("decoder") or {}
        kinds = [decoder.get("type"), *(x.get("type") for x in decoder.get("decoders") or [])]
        if "ByteFallback" in kinds and (byte := BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if "ByteLevel" in kinds and token not in self.special.values():
            return as_bytes([piece])[0]
        if not piece:
            return b""

        def decoded(*pieces: str) -> str:
            rust = self._encoders.whole.decoder
            return rust.decode(list(pieces)) if rust else " ".join(pieces)

        alone, twice = decoded("a"), decoded("a", "a")
        around = decoded(piece, "a") if is_first else decoded("a", piece, "a")[len(alone) :]
        return around[: len(around) - (len(twice) - len(alone))].encode()

    def stream(self, ids: Iterable[int], begins: bool = True) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"token {i} is outside the vocabulary of {self.vocab_size}")
            yield decoder.decode(self._as_bytes(i, True) if begins else self.token_bytes(i))
            begins = False
        yield decoder.decode(b"", final=True)

    def _text(self, ids: np.ndarray) -> str:
        return "".join(self.stream(ids.tolist()))

    @functools.cached_property
    def digest(self) -> str:
        # As JSON, a vocabulary of 262,144 would take a second.
        model = dict(self.contents["model"])
        merges = model.pop("merges", [])
        if set(map(type, merges)) - {str}:
            merges = map(" ".join, merges)
        names = self.pieces if isinstance(model["vocab"], dict) else []
        model |= {} if not names else {"vocab": None}
        rest = {"kind": self.kind, "contents": {**self.contents, "model": model}}
        sha = hashlib.sha256(safetensors.to_json(rest).encode())
        sha.update("\0".join([*names, "", *merges]).encode())
        return sha.hexdigest()

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "contents": self.contents}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "HFTokenizer":
        return cls._of(check_type("contents", state["contents"], Mapping))

    def as_json(self) -> dict[str, Any]:
        return self.contents

    @classmethod
    def claims(cls, data: dict[str, Any]) -> bool:
        model, decoder = data["model"], data.get("decoder") or {}
        if model_type(model) not in MODELS:
            return False
        is_bytes = model_type(model) == "BPE" and not model.get("byte_fallback")
        if not is_bytes or decoder.get("type") in ("BPEDecoder", "Metaspace", "Sequence"):
            return True
        return not tokenizer_json.is_plain(data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "HFTokenizer":
        made = cls._of(data)
        made.encode("a")  # what the package does not accept is said now
        return made


def pieces_of(contents: Mapping[str, Any]) -> list[str]:
    """A tokenizer.json -> its tokens as it writes them, "" for missing ids.

    InputError, KeyError, TypeError or ValueError if it is damaged.
    """
    model, added = contents["model"], contents.get("added_tokens") or []
    kind = model_type(model)
    if kind not in MODELS:
        raise InputError(
            f"its model is of type {shown_value(kind)}; supported are {', '.join(MODELS)}"
        )
    vocabulary = model["vocab"]
    if kind == "Unigram":
        for piece, score in vocabulary:
            if not isinstance(score, int | float) or not math.isfinite(score):
                raise InputError(f"the score of its token {shown_value(piece)} is not a number")
        vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        if len(vocabulary) < len(model["vocab"]):
            raise InputError("two of its tokens are the same")
    if not vocabulary:
        raise InputError("its vocabulary is empty")
    if kind in ("WordPiece", "WordLevel") and model.get("unk_token") not in vocabulary:
        raise InputError(f"it has no token {shown_value(model.get('unk_token'))} for unknown words")
    if model.get("dropout"):
        raise InputError("it splits a text differently each time (dropout), which is not supported")
    beyond = [x for x in added if vocabulary.get(x["content"]) != x["id"]]
    names = [*vocabulary, *(x["content"] for x in beyond)]
    numbers = [*vocabulary.values(), *(x["id"] for x in beyond)]
    if set(map(type, names)) - {str} or not all(token["content"] for token in added):
        raise InputError("a token of it is not text")
    if set(map(type, numbers)) - {int} or min(numbers, default=0) < 0:
        raise InputError("an id of its vocabulary is not a whole number")
    if max(numbers, default=0) >= MAX_TOKENS:
        raise InputError(f"its vocabulary contains ids outside 0..{MAX_TOKENS - 1:,}")
    if len(set(numbers)) < len(numbers) or len(set(names)) < len(names):
        raise InputError("two of its tokens are the same or have the same id")
    "".join(names).encode()  # ValueError for lone surrogates
    pieces = [""] * (1 + max(numbers, default=-1))
    for name, number in zip(names, numbers, strict=True):
        pieces[number] = name
    return pieces


def model_type(model: Mapping[str, Any]) -> str:
    """Returns the type of a model, which early files do not name."""
    if "type" in model:
        return str(model["type"])
    if "merges" in model:
        return "BPE"
    return "Unigram" if isinstance(model.get("vocab"), list) else "WordPiece"


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raises InputError for whatever the package `tokenizers` raises."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of Rust is not an Exception
        said = str(error).partition("\n")[0][:200]
        raise InputError(f"the package tokenizers refuses it: {said}") from None


def _encoders(contents: Mapping[str, Any], model: Any = None) -> _Encoders:
    """Builds the objects of a tokenizer.json. Of the model alone, as JSON takes twice as long."""
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            'its tokenizer is run by the package tokenizers: pip install "smallmind[hf]"'
        ) from None
    with _explained(), without_collector():
        model = model or _model(contents["model"], tokenizers.models)
        added = sorted(contents.get("added_tokens") or [], key=lambda token: token["id"])
        tokens = [
            tokenizers.AddedToken(
                token["content"],
                **{
                    name: bool(token.get(name))
                    for name in ("single_word", "lstrip", "rstrip", "normalized")
                },
                special=token.get("special", True),
            )
            for token in added
        ]
        rest = {**contents, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        made = []
        for steps in (rest, rest, {**rest, "pre_tokenizer": _inner(rest.get("pre_tokenizer"))}):
            encoder = tokenizers.Tokenizer.from_str(json.dumps(steps))
            encoder.model = model
            encoder.add_tokens(tokens)
            made.append(encoder)
        for encoder in made[1:]:
            encoder.encode_special_tokens = True
        for token in added:
            found = made[0].token_to_id(token["content"])
            if found != token["id"]:
                raise InputError(
                    f"its added token {shown_value(token['content'])} has the id {token['id']}, "
                    f"but follows the vocabulary as {found}"
                )
    return _Encoders(made[0], made[1], made[2], model)


def _model(described: Mapping[str, Any], models: Any) -> Any:
    kind = model_type(described)
    if described.get("dropout"):
        raise InputError("its model has dropout, with which the tokens of a text are random")
    known = {name: described.get(name) for name in MODELS[kind].split()}
    fields = {name: x for name, x in known.items() if x is not None}
    if kind == "BPE":
        merges = fields["merges"]
        if set(map(type, merges)) != {tuple}:  # they come from JSON
            sides = iter(sides_of(merges))
            fields["merges"] = list(zip(sides, sides, strict=True))
    if kind == "Unigram":
        fields["vocab"] = [tuple(pair) for pair in fields["vocab"]]
    return getattr(models, kind)(**fields)


def _inner(step: Any) -> Any:
    """A pre-tokenizer -> the same for a text that does not begin a sequence."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence":
        return {**step, "pretokenizers": [*map(_inner, step["pretokenizers"])]}
    return {**step, "prepend_scheme": "never"} if step.get("prepend_scheme") == "first" else step


def _ids(encoder: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """texts -> ids (n,) of each."""
    for text in texts:
        encoded(text, 0, len(text))  # InputError for an unpaired surrogate
    with _explained():
        found = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in found]

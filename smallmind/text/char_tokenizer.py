"""One token per character."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type, shown_value, suggesting
from smallmind.console import activity
from smallmind.files.encoding import encoded
from smallmind.text import tokenizer_json
from smallmind.text.ids import total
from smallmind.text.tokenizer import CHUNK, Spelled, Tokenizer, distinct


@suggesting()
class CharTokenizer(Tokenizer):
    """The vocabulary is the characters that occur in a text, sorted.

    Characters that it gets later follow all other tokens: see `with_characters`.
    """

    kind = "char"
    unit = "characters"

    def __init__(self, text: str = "", kind: str = "char") -> None:
        characters = "".join(sorted(distinct(check_type("text", text, str))))
        self._set(characters, {}, len(characters))

    def _set(self, characters: str, special: dict[str, int], first: int) -> None:
        """Sets the vocabulary: `first` characters, then special tokens and other characters."""
        self.characters, self.special, self._first = characters, special, first
        taken = set(special.values())
        self.vocab_size = len(characters) + len(special)
        numbers = [i for i in range(self.vocab_size) if i not in taken]
        codes = _code_points(characters)
        # A table from code point to id, -1 for characters outside the vocabulary.
        self._ids = np.full(int(codes.max(initial=0)) + 1, -1, np.int32)
        self._ids[codes] = numbers
        by_number = dict(zip(numbers, characters, strict=True)) | {i: x for x, i in special.items()}
        self.pieces = [by_number[i] for i in range(self.vocab_size)]  # the text of each token
        self._bytes = np.array([len(x.encode("utf-8", "surrogatepass")) for x in self.pieces])
        self._characters = np.array(list(map(len, self.pieces)))
        self.opening = "\n" if "\n" in characters else characters[:1]

    def _encode(self, text: str) -> np.ndarray:
        ids = np.full(len(text), -1, np.int32)
        # In chunks, so that temporary arrays stay small even for a long text.
        for start in activity.parts(range(0, len(text), CHUNK)):
            codes, chunk = _code_points(text[start : start + CHUNK]), ids[start : start + CHUNK]
            if codes.max() < len(self._ids):
                np.take(self._ids, codes, out=chunk, mode="clip")  # in other modes it makes a copy
            else:
                inside = codes < len(self._ids)
                chunk[inside] = self._ids[codes[inside]]
            if chunk.min() < 0:
                position = start + int(np.argmax(chunk < 0))
                raise InputError(
                    f"the model has never seen the character {text[position]!r} "
                    f"(at position {position}): remove it, or retrain with --tokenizer bpe, which "
                    f"handles any text. Known characters: {shown_value(self.characters)}"
                )
        return ids

    def with_characters(self, characters: str) -> "Tokenizer":
        """-> the tokenizer with these characters, which it lacks, after its vocabulary, sorted."""
        encoded(characters, 0, len(characters))  # InputError for an unpaired surrogate
        added = "".join(sorted(set(characters) - set(self.characters)))
        state = {**self.state(), "characters": self.characters + added, "first": self._first}
        made = self.from_state(state)
        return made.with_published(self.published) if self.published else made

    def spelled(self, ids: np.ndarray) -> Spelled:
        characters = total(self._characters, ids) if self.special else ids.size
        return Spelled(characters, total(self._bytes, ids))

    def _text(self, ids: np.ndarray) -> str:
        if self.special and ids.max() >= min(self.special.values()):
            return "".join(self.pieces[i] for i in ids.tolist())
        codes = _code_points(self.characters)
        chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        return "".join(
            codes[chunk].tobytes().decode("utf-32-le", "surrogatepass") for chunk in chunks
        )

    def _unknown(self, text: str) -> str:
        return "".join(sorted(distinct(text) - set(self.characters)))

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()

    def stream(self, ids: Iterable[int], begins: bool = True) -> Iterator[str]:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"token {i} is outside the vocabulary of {self.vocab_size}")
            yield self.pieces[i]

    def state(self) -> dict[str, Any]:
        special = {"special": dict(self.special)} if self.special else {}
        first = {"first": self._first} if self._first < len(self.characters) else {}
        return {"kind": self.kind, "characters": self.characters, **special, **first}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "CharTokenizer":
        characters = state["characters"]
        if not isinstance(characters, str):
            raise TypeError("its characters are not text")
        characters.encode()  # ValueError for lone surrogates
        first, special = state.get("first", len(characters)), state.get("special") or {}
        if type(first) is not int or not 0 <= first <= len(characters):
            raise ValueError("its first characters are not among them")
        if len(set(characters)) < len(characters):
            raise ValueError("it has a character twice")
        ordered = "".join(sorted(characters[:first])) + characters[first:]
        made = cls()
        checked = made._check_special(special, first, len(characters) + len(special))
        made._set(ordered, checked, first)
        return made

    @classmethod
    def of_pieces(cls, pieces: Sequence[str], special: Mapping[str, int]) -> "CharTokenizer":
        """-> the tokenizer of tokens in the order of their ids. InputError if they are others."""
        characters = [piece for piece in pieces if piece not in special]
        if any(len(x) != 1 for x in characters) or len(set(characters)) < len(characters):
            raise InputError("its tokens are not single characters, each once")
        # As many as are sorted, and before the special tokens.
        ends = (i for i in range(1, len(characters)) if characters[i - 1] > characters[i])
        first = min([next(ends, len(characters)), *special.values()])
        state = {"characters": "".join(characters), "special": dict(special)}
        found = cls.from_state(state if first == len(characters) else {**state, "first": first})
        if found.pieces != list(pieces):
            raise InputError("its tokens are not in the order of their ids")
        return found

    def as_json(self) -> dict[str, Any]:
        last = max(map(self.pieces.index, self.characters[-1:]), default=0)
        # Other programs number special tokens after the vocabulary, unless they are part of it.
        vocabulary = {
            piece: i for i, piece in enumerate(self.pieces) if piece not in self.special or i < last
        }
        return tokenizer_json.contents(vocabulary, [], None, {"type": "Fuse"}, self.special)

    @classmethod
    def claims(cls, data: dict[str, Any]) -> bool:
        return data.get("pre_tokenizer") is None and tokenizer_json.never_merges(data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CharTokenizer":
        tokenizer_json.check_model(data)
        vocabulary = data["model"]["vocab"]
        special = tokenizer_json.special_tokens(data)
        numbers = {**vocabulary, **special}
        found = cls.of_pieces(sorted(numbers, key=numbers.__getitem__), special)
        if {piece: i for i, piece in enumerate(found.pieces)} != numbers:
            raise InputError("its tokens are not single characters in their order")
        return found


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)

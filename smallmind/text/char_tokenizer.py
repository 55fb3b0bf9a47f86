"""One token per character."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type, shown_value, suggesting
from smallmind.console import activity
from smallmind.text import tokenizer_json
from smallmind.text.ids import total
from smallmind.text.tokenizer import CHUNK, Spelled, Tokenizer, distinct


@suggesting()
class CharTokenizer(Tokenizer):
    """The vocabulary is the characters that occur in a text, sorted."""

    kind = "char"
    unit = "characters"

    def __init__(self, text: str = "", kind: str = "char") -> None:
        self.characters = "".join(sorted(distinct(check_type("text", text, str))))
        codes = _code_points(self.characters)
        # A table from code point to id, -1 for characters outside the vocabulary.
        self._ids = np.full(int(codes.max(initial=0)) + 1, -1, np.int32)
        self._ids[codes] = np.arange(len(codes), dtype=np.int32)
        self._pieces = list(self.characters)  # the text of each token
        self._bytes = np.array([len(c.encode("utf-8", "surrogatepass")) for c in self.characters])
        self.vocab_size = len(self.characters)
        self.opening = "\n" if "\n" in self.characters else self.characters[:1]

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
                    f"(at position {position}): leave it out, or train with --tokenizer bpe or "
                    f"byte, which encode any text; it knows {shown_value(self.characters)}"
                )
        return ids

    def _add(self, special: Any) -> "CharTokenizer":
        """Itself, with these special tokens from now on. TypeError or ValueError if wrong."""
        if special:
            self.special = self._check_special(special, len(self.characters))
            self._pieces += self.special
            self._bytes = np.append(self._bytes, [len(name.encode()) for name in self.special])
            self._characters = np.array(list(map(len, self._pieces)))
            self.vocab_size = len(self._pieces)
        return self

    def spelled(self, ids: np.ndarray) -> Spelled:
        characters = total(self._characters, ids) if self.special else ids.size
        return Spelled(characters, total(self._bytes, ids))

    def _text(self, ids: np.ndarray) -> str:
        if self.special and ids.max() >= len(self.characters):
            return "".join(self._pieces[i] for i in ids.tolist())
        codes = _code_points(self.characters)
        chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
        return "".join(
            codes[chunk].tobytes().decode("utf-32-le", "surrogatepass") for chunk in chunks
        )

    def _unknown(self, text: str) -> str:
        return "".join(sorted(distinct(text) - set(self.characters)))

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token].encode()

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"token {i} is outside the vocabulary of {self.vocab_size}")
            yield self._pieces[i]

    def state(self) -> dict[str, Any]:
        special = {"special": dict(self.special)} if self.special else {}
        return {"kind": self.kind, "characters": self.characters, **special}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "CharTokenizer":
        characters = state["characters"]
        if not isinstance(characters, str):
            raise TypeError("its characters are not text")
        characters.encode()  # ValueError for lone surrogates
        return cls(characters)._add(state.get("special"))

    def as_json(self) -> dict[str, Any]:
        vocabulary = {character: i for i, character in enumerate(self.characters)}
        return tokenizer_json.contents(vocabulary, [], None, {"type": "Fuse"}, self.special)

    @classmethod
    def claims(cls, data: dict[str, Any]) -> bool:
        return data.get("pre_tokenizer") is None and tokenizer_json.never_merges(data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CharTokenizer":
        tokenizer_json.check_model(data)
        vocabulary = data["model"]["vocab"]
        characters = "".join(sorted(vocabulary))
        if {character: i for i, character in enumerate(characters)} != vocabulary:
            raise InputError("its tokens are not single characters in their order")
        special = tokenizer_json.special_tokens(data)
        return cls.from_state({"characters": characters, "special": special})


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)

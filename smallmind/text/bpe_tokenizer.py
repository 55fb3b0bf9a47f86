"""Tokens of several bytes, learned from a text: byte-pair encoding."""

import copy
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from smallmind.checks import InputError, check_type, suggesting
from smallmind.console import activity
from smallmind.settings.config import RunConfig
from smallmind.text import tokenizer_json
from smallmind.text.byte_alphabet import BYTES, as_bytes, as_characters
from smallmind.text.ids import total
from smallmind.text.tokenizer import Spelled, Tokenizer, distinct, sliced
from smallmind.text.tokenizer_json import PLAIN_RULES, Rules

END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>")  # the second is Llama 3's
LONG_TEXT = 10**6  # characters that may take more than a second to learn from
MAX_TOKENS = 2**20
CONTINUED = bytes(range(0x80, 0xC0))  # in UTF-8, the bytes within a character
MAX_BYTES = 2**26  # of all tokens together: merges of merges could be longer than any memory


@suggesting()
class BPETokenizer(Tokenizer):
    """`BPETokenizer(text, vocab_size=512)`: the 256 bytes, merges of the text, `<|endoftext|>`.

    It has fewer tokens where no pair of them occurs twice any more. `split` is the pattern that
    cuts texts into words: "gpt2" or "gpt4", or with "-digits" after it the same with a word for
    each digit. Any text can be encoded; `<|endoftext|>` in it is one token.

    `vocabulary` are the bytes of each token, `merges` (M, 2) the pairs of tokens in the order in
    which they are merged, `special` the numbers of tokens that are never split, `rules` what else
    tokenizers of other programs do. Some of those lack tokens for bytes that are rare in texts.
    """

    kind = "bpe"
    settings = MappingProxyType({"vocab_size": "bpe_vocab_size", "split": "bpe_split"})
    is_learned = True
    unit = "tokens"
    opening = "\n"
    separator = END_OF_TEXT
    split: str
    vocabulary: list[bytes]
    merges: np.ndarray
    special: dict[str, int]
    rules: Rules

    def __init__(
        self,
        text: str = "",
        kind: str = "bpe",
        vocab_size: int = RunConfig.bpe_vocab_size,
        split: str = RunConfig.bpe_split,
    ) -> None:
        check_type("text", text, str)
        with activity.doing("Learning the tokens of the text", usual=len(text) < LONG_TEXT):
            self._learn(sliced(text), vocab_size, split)

    @classmethod
    def learn(cls, texts: Iterable[str], **settings: Any) -> "BPETokenizer":
        made = object.__new__(cls)
        made._learn(texts, **settings)
        return made

    def _learn(
        self,
        texts: Iterable[str],
        vocab_size: int = RunConfig.bpe_vocab_size,
        split: str = RunConfig.bpe_split,
    ) -> None:
        # Numba takes half a second to import.
        from smallmind.kernels.bpe.split import PATTERNS
        from smallmind.text.bpe import Special, learn_merges

        _check_split(split)
        if check_type("vocab_size", vocab_size, int) < 257:
            raise InputError(f"vocab_size={vocab_size} must be at least 257: bytes and end of text")
        if vocab_size > MAX_TOKENS:
            raise InputError(f"vocab_size={vocab_size} must be at most {MAX_TOKENS}")
        tokens = np.empty(256, np.int32)
        tokens[BYTES] = np.arange(256)
        none, most = Special.of({END_OF_TEXT: -1}), vocab_size - 257
        merges = learn_merges(texts, none, PATTERNS[split], tokens, most)
        vocabulary = _in_order(merges)
        self._set(split, vocabulary, merges, {END_OF_TEXT: len(vocabulary)}, PLAIN_RULES)

    def _set(
        self,
        split: str,
        vocabulary: list[bytes],
        merges: np.ndarray,
        special: dict[str, int],
        rules: Rules,
    ) -> None:
        """Sets vocabulary, the bytes of each token: none for special tokens and missing ids."""
        ids = {token: i for i, token in enumerate(vocabulary) if token}
        of_bytes = np.array([ids.get(bytes([byte]), -1) for byte in range(256)], np.int32)
        self._results, self._of_bytes = _results(vocabulary, merges, ids), of_bytes
        self._ids = ids if rules.ignore_merges else {}
        self._lacking = frozenset(np.flatnonzero(of_bytes < 0).tolist())
        self.split, self.merges, self.rules = split, merges, rules
        self._set_special(vocabulary, special)

    def _set_special(self, vocabulary: list[bytes], special: dict[str, int]) -> None:
        """Sets the vocabulary, and special tokens in it or after it."""
        self.special, self.shown = special, self.rules.shown
        self.separator = next((end for end in ENDS if end in special), "\n")
        self.end_of_text = special.get(self.separator)
        self.vocab_size = 1 + max(len(vocabulary) - 1, *special.values(), -1)
        self.vocabulary = vocabulary + [b""] * (self.vocab_size - len(vocabulary))
        for content, token in special.items():
            self.vocabulary[token] = content.encode()

    # Made when a text is encoded: importing the kernels takes half a second.

    @functools.cached_property
    def _tables(self) -> tuple[Any, Any, Any]:
        """The pattern of words, their merges and what is known whole, as kernels take them."""
        from smallmind.kernels.bpe.encode import Merges, Whole
        from smallmind.kernels.bpe.split import PATTERNS

        lefts, rights = (np.array(self.merges[:, side], np.int32) for side in (0, 1))
        merges = Merges.of(lefts, rights, self._results, self._of_bytes)
        return PATTERNS[self.split], merges, Whole.of(self._ids)

    @functools.cached_property
    def _special(self) -> Any:
        from smallmind.text.bpe import Special

        return Special.of(self.special, self.rules.late, self.rules.normalizer is not None)

    @functools.cached_property
    def _lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The characters and bytes of each token."""
        # A character begins in the token that has its first byte.
        begun = [token.translate(None, CONTINUED) for token in self.vocabulary]
        characters = np.array(list(map(len, begun)))
        return characters, np.array([len(token) for token in self.vocabulary])

    @property
    def separator_token(self) -> int | None:
        # A line break that separates documents may be merged with others around it.
        return self.end_of_text

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        check_type("text", text, str)
        if not special:
            return self.encode_each([text])[0]
        ids = list(self.encode_chunks(self.chunks(sliced(text))))
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    def encode_each(self, texts: Sequence[str], continued: bool = False) -> list[np.ndarray]:
        from smallmind.text.bpe import encode_each

        return encode_each(texts, *self._tables, self._special)

    def _check_names(self, names: Sequence[str]) -> None:
        super()._check_names(names)
        written, spelled = set(self.names()), set(self.vocabulary)
        for name in names:
            if name in written or name.encode() in spelled:
                raise InputError(f"a special token cannot be named {name!r}: it is an ordinary one")

    def _added(self, special: dict[str, int]) -> "BPETokenizer":
        made = copy.copy(self)
        for name in ("digest", "saved", "_lengths", "_special"):
            made.__dict__.pop(name, None)
        _numbers(special.values(), f"it would have more than {MAX_TOKENS:,} tokens")
        made._set_special(self.vocabulary, special)
        return made

    def chunks(self, texts: Iterable[str]) -> Iterator[str]:
        from smallmind.text.bpe import cut

        return cut(texts, self._special)

    def encode_chunks(
        self, chunks: Iterable[str], before: int | None = None
    ) -> Iterator[np.ndarray]:
        from smallmind.text.bpe import encode_chunks

        return encode_chunks(chunks, *self._tables, self._special)

    def unknown(self, text: str) -> str:
        return super().unknown(text) if self._lacking else ""

    def _unknown(self, text: str) -> str:
        return "".join(
            character
            for character in sorted(distinct(text))
            if not self._lacking.isdisjoint(character.encode("utf-8", "surrogatepass"))
        )

    def spelled(self, ids: np.ndarray) -> Spelled:
        characters, bytes_ = self._lengths
        return Spelled(total(characters, ids), total(bytes_, ids))

    def token_bytes(self, token: int) -> bytes:
        return self.vocabulary[token]

    def state(self) -> dict[str, Any]:
        special = set(self.special.values())
        ordinary = [b"" if i in special else token for i, token in enumerate(self.vocabulary)]
        return {
            **self.rules.state(),
            "kind": self.kind,
            "split": self.split,
            "merges": self.merges.ravel().tolist(),
            "special": self.special,
            # Follows from the merges, unless it comes from a file of others.
            "vocabulary": None if _follows(ordinary, self.merges) else as_characters(ordinary),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "BPETokenizer":
        merges = _pairs(state["merges"])
        special = state["special"]
        if not isinstance(special, Mapping):
            raise TypeError("its special tokens are not an object")
        if state["vocabulary"] is not None:
            vocabulary = as_bytes(state["vocabulary"])
        elif _is_in_order(merges):
            vocabulary = _in_order(merges)
        else:
            raise ValueError("its merges name tokens that do not exist")
        return cls._of(state["split"], vocabulary, merges, dict(special), Rules.from_state(state))

    def names(self) -> list[str]:
        """Returns the tokens as other programs write them: bytes as visible characters."""
        special = {token: content for content, token in self.special.items()}
        return [special.get(i) or token for i, token in enumerate(as_characters(self.vocabulary))]

    def as_json(self) -> dict[str, Any]:
        names = self.names()
        return tokenizer_json.contents(
            {name: i for i, name in enumerate(names) if name},
            [[names[left], names[right]] for left, right in _each(self.merges)],
            tokenizer_json.byte_level(self.split),
            {**tokenizer_json.BYTE_LEVEL, "use_regex": True},
            self.special,
            self.rules,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "BPETokenizer":
        tokenizer_json.check_model(data)
        split = tokenizer_json.split_of(data["pre_tokenizer"])
        if split is None:
            raise InputError("it does not split texts into words")
        special = tokenizer_json.special_tokens(data)
        numbers = {x: i for x, i in data["model"]["vocab"].items() if x not in special}
        _numbers(numbers.values(), f"its vocabulary contains ids outside 0..{MAX_TOKENS - 1:,}")
        vocabulary = [b""] * (1 + max(numbers.values(), default=-1))
        for token, number in zip(as_bytes(list(numbers)), numbers.values(), strict=True):
            vocabulary[number] = token
        if sum(map(bool, vocabulary)) < len(numbers):
            raise InputError("two of its tokens have the same id")
        sides = tokenizer_json.sides_of(data["model"]["merges"])
        merges = list(map(numbers.__getitem__, sides))
        rules = tokenizer_json.rules_of(data)
        return cls._of(split, vocabulary, _pairs(merges), special, rules)

    @classmethod
    def _of(
        cls,
        split: str,
        vocabulary: list[bytes],
        merges: np.ndarray,
        special: dict[str, int],
        rules: Rules,
    ) -> "BPETokenizer":
        """-> the tokenizer of arguments of `_set`. InputError if they contradict each other."""
        _check_split(split)
        _check_vocabulary(vocabulary, merges, special)
        made = object.__new__(cls)
        made._set(split, vocabulary, merges, special, rules)
        return made


def _check_split(split: str) -> None:
    patterns = tokenizer_json.PATTERNS
    if not isinstance(split, str) or split not in patterns:
        raise InputError(f"split={split!r} must be one of {', '.join(patterns)}")


def _check_vocabulary(vocabulary: list[bytes], merges: np.ndarray, special: dict[str, int]) -> None:
    tokens = set(vocabulary) - {b""}
    if len(tokens) != sum(map(bool, vocabulary)):
        raise InputError("two of its tokens are equal")
    if b"\n" not in tokens:
        raise InputError("it has no token for a line break")
    if merges.size and not (merges.min() >= 0 and merges.max() < len(vocabulary)):
        raise InputError("its merges name tokens that do not exist")
    numbers = _numbers(
        special.values(), f"its special tokens have ids outside 0..{MAX_TOKENS - 1:,}"
    )
    if not all(isinstance(content, str) for content in special):
        raise InputError("its special tokens are not strings")
    taken = [number for number in numbers if number < len(vocabulary) and vocabulary[number]]
    if taken or len(set(numbers)) < len(numbers) or not all(special):
        raise InputError("its special tokens have the ids of other tokens, or no text")


def _numbers(values: Iterable[Any], otherwise: str) -> list[int]:
    """-> the values, if all are numbers that a token may have. InputError, saying so, otherwise."""
    numbers = list(values)
    # The exact type: True is an int too, and NumPy makes integers of texts and fractions.
    if numbers and not (
        set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < MAX_TOKENS
    ):
        raise InputError(otherwise)
    return numbers


def _pairs(numbers: Iterable[Any]) -> np.ndarray:
    """The tokens of merges, one after another, from anywhere -> (M, 2) int64."""
    checked = _numbers(numbers, "its merges name tokens that do not exist")
    return np.array(checked, np.int64).reshape(-1, 2)


def _each(merges: np.ndarray) -> Iterator[tuple[int, int]]:
    """Returns the pairs one by one: 150,000 lists at once keep the garbage collector busy."""
    return zip(merges[:, 0].tolist(), merges[:, 1].tolist(), strict=True)


def _results(vocabulary: list[bytes], merges: np.ndarray, ids: dict[bytes, int]) -> np.ndarray:
    """Returns the token that each merge makes, int32. InputError if one makes none."""
    lefts, rights = (map(vocabulary.__getitem__, side.tolist()) for side in merges.T)
    results = list(map(ids.get, map(operator.add, lefts, rights), itertools.repeat(-1)))
    if -1 in results:
        left, right = merges[results.index(-1)]
        raise InputError(
            f"its merge ({left}, {right}) yields a string that is not in the vocabulary"
        )
    return np.array(results, np.int32)


def _is_in_order(merges: np.ndarray) -> bool:
    """-> True if the i-th merge is of tokens before 256 + i, so that it can make that token."""
    before = np.arange(256, 256 + len(merges))
    return bool((merges >= 0).all() and (merges < before[:, None]).all())


def _follows(vocabulary: list[bytes], merges: np.ndarray) -> bool:
    """Returns True if the tokens of a vocabulary that are not empty are `_in_order(merges)`."""
    n = 256 + len(merges)
    if len(vocabulary) < n or not _is_in_order(merges) or any(vocabulary[n:]):
        return False
    return vocabulary[:256] == [bytes([byte]) for byte in BYTES] and all(
        vocabulary[256 + i] == vocabulary[left] + vocabulary[right]
        for i, (left, right) in enumerate(_each(merges))
    )


def _in_order(merges: np.ndarray) -> list[bytes]:
    """Merges in order -> the bytes of each token: single ones first, then what the merges make."""
    vocabulary = [bytes([byte]) for byte in BYTES]
    size = 0
    for left, right in _each(merges):
        token = vocabulary[left] + vocabulary[right]
        size += len(token)
        if size > MAX_BYTES:
            raise InputError(f"its tokens have more than {MAX_BYTES:,} bytes together")
        vocabulary.append(token)
    return vocabulary

"""A form that texts must have: JSON, a schema, a regular expression or a grammar.

Which tokens may come next is said by the package `llguidance`; see its docs/json_schema.md for the
keywords of schemas that it knows. What is added here is an end within the tokens that a text may
have: a `FormState` always knows a way to complete the text, and refuses a token after which the
way would be too long.
"""

import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.text.tokenizer import Tokenizer

KINDS = ("json", "schema", "regex", "grammar")
MISSING = 'answers in a format need the package llguidance: pip install "smallmind[format]"'
# Without a limit, small models write line breaks until the end.
WHITESPACE = r"\n?[ \t]{0,20}"
NO_TOKEN = -1  # in the place of a byte that no token is
TOKEN = re.compile(r"<\[(\d+)\]>")  # a special token in a grammar, by its number
MARK, MARKED = b"\xff", re.compile(b"(\xff[^\xff]+\xff)")  # which no text has
MAX_ENDING = 512  # tokens of a way to complete a text that is looked for
MAX_SPELLED = 2048  # its bytes
MAX_TRIED = 16000  # tokens that are tried to find one: a tenth of a second
MAX_SMALL = 1024  # tokens of a vocabulary that is searched as it is
MAX_CHOICES = 48  # tokens that are compared at a place
MAX_SKIPPED = 8  # tokens of the known way that a single token may have taken
MAX_WAIT = 64  # tokens between two searches that find nothing
MAX_EXPLAINED = 1 << 16  # characters of a schema in which the keyword at fault is looked for
MAX_REFUSED = 4  # tokens at a place, before the known way is taken
# Characters that are tried to complete a text, in this order.
COMPLETING = "".join(dict.fromkeys(f"\"}}])>'0a1{string.punctuation}{string.printable}"))
# Letters that begin nothing in JSON but texts: where one may follow, brackets are text too.
FREE = "".join(sorted({*string.ascii_letters} - {*"tfneE"}))


class Form:
    """`Form(tokenizer, "json")`: a form for what a model with this tokenizer writes.

    kind is "json" for an object, "schema" with a JSON schema as `value` (an object or its text),
    "regex" with an expression that matches the whole text (without look-around and references), or
    "grammar" with one in the notation of llama.cpp (GBNF) or Lark. InputError if it cannot be
    compiled, naming the keyword at fault, if the vocabulary lacks what it takes, or without the
    package llguidance.
    """

    def __init__(self, tokenizer: Tokenizer, kind: str, value: Any = None) -> None:
        check_type("tokenizer", tokenizer, Tokenizer)
        if kind not in KINDS:
            raise InputError(f"form={kind!r} must be one of {', '.join(KINDS)}")
        self.kind, self._vocabulary = kind, _vocabulary_of(tokenizer)
        if kind == "schema":
            value = _schema(value)
        elif kind != "json":
            check_type(kind, value, str)
        if problem := self._problem(value):
            if kind == "schema" and (keyword := self._culprit(value)):
                is_unknown = problem.startswith("Unimplemented")
                says = " is not supported" if is_unknown else f": {problem}"
                problem = f"the keyword {keyword!r}{says}"
            raise InputError(f"the {kind} cannot be compiled: {problem}")
        vocabulary = self._vocabulary
        small = vocabulary.small(map(int, TOKEN.findall(value)) if kind == "grammar" else ())
        matchers = self._compiled(value, vocabulary), self._compiled(value, small)
        # Once for all texts: from the beginning the search takes longest.
        self._state = FormState(matchers[0], _Search(matchers[1], small), vocabulary)
        if not self._state.find_ending():
            raise InputError(f"the tokens of the model cannot spell what the {kind} asks for")

    def begin(self, begun: Sequence[int] = ()) -> "FormState":
        """Returns the state of a text that begins with these tokens. InputError if none does."""
        return self._state.copied(begun)

    def _compiled(self, value: Any, vocabulary: "_Vocabulary") -> Any:
        if self.kind == "grammar":  # the same tokens by their numbers in this vocabulary
            numbers = vocabulary.special
            value = TOKEN.sub(lambda x: f"<[{numbers.get(int(x[1]), x[1])}]>", value)
        return _llguidance().LLMatcher(vocabulary.rust, self._grammar(value), log_level=0)

    def _grammar(self, value: Any) -> str:
        """Returns the form as llguidance has it. Exception, of any type, for a damaged grammar."""
        matcher = _llguidance().LLMatcher
        if self.kind == "regex":
            return matcher.grammar_from_regex(value)
        if self.kind == "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            return matcher.grammar_from_lark(any_to_lark(value))
        schema = {"type": "object"} if self.kind == "json" else value
        return matcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE}
        )

    def _problem(self, value: Any) -> str:
        """Returns why a form cannot be compiled, in one line; "" if it can be."""
        try:
            grammar = self._grammar(value)
        except Exception as error:  # of a converter that raises plain ones
            return _line(str(error))
        validate = _llguidance().LLMatcher.validate_grammar_with_warnings
        is_wrong, found = validate(grammar, self._vocabulary.rust)
        return _line(found[0]) if is_wrong else ""

    def _culprit(self, schema: Any) -> str:
        """Returns the path of the one keyword without which a schema can be compiled, or ""."""
        path: list[Any] = []
        inner = schema if len(json.dumps(schema)) < MAX_EXPLAINED else None
        while isinstance(inner, dict | list):
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            keys = [key for key in keys if not self._problem(_without(schema, path, key))]
            if len(keys) != 1:
                break
            path.append(keys[0])
            inner = inner[keys[0]]
        return ".".join(map(str, path))


class FormState:
    """Knows what may follow in one text of a form.

    `hurried` says that a token was refused because the text could not have been completed after it.
    """

    def __init__(self, matcher: Any, search: "_Search", vocabulary: "_Vocabulary") -> None:
        self._matcher, self._search, self._vocabulary = matcher, search, vocabulary
        self._bits = np.zeros(vocabulary.words, np.uint32)
        self.hurried = False
        self._ending: list[int] | None = None  # tokens that complete the text; None: not known
        self._refused: list[int] = []  # in the place of the next token
        self._wait, self._waited = 1, 1
        self._has_ended = False

    def copied(self, begun: Sequence[int]) -> "FormState":
        """Returns the state of another text, with more tokens. InputError if they cannot follow."""
        made = FormState(self._matcher.deep_copy(), self._search.copied(), self._vocabulary)
        made._ending = self._ending
        if len(begun):
            if made._matcher.try_consume_tokens(list(begun)) < len(begun):
                raise InputError("no text in this format starts with the given tokens")
            for token in begun:
                made._search.follow(self._vocabulary.tokens[token])
            made.find_ending()
        return made

    def find_ending(self) -> bool:
        """Looks for an ending of the text -> False if there certainly is none."""
        self._ending = self._searched()
        return self._ending is not None or not self._search.is_impossible

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow."""
        return self._has_ended or self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Returns True for each token that may follow, bool (V,); for none if nothing may."""
        if len(self._refused) < MAX_REFUSED:
            found = self._vocabulary.marked(_mask(self._matcher, self._bits))
            if not self._matcher.is_error():  # it may become too complex
                found[self._refused] = False
                return found
        # Only what is known is safe.
        known = [] if self._ending is None else self._ending[:1] or sorted(self._vocabulary.ends)
        found = np.zeros(self._vocabulary.size, np.bool_)
        found[known] = True
        return found

    def take(self, token: int, left: int) -> bool:
        """Appends a token, one of `left` that may follow -> False if it is refused.

        It is if the text could not be completed after it, although it could be before.
        """
        if token in self._vocabulary.ends:
            self._has_ended = True
            return True
        matcher, ending = self._matcher, self._ending
        if matcher.is_error():  # see `allowed`: the token is the next one of the ending
            self._ending = (ending or [])[1:]
            self._has_ended = self.hurried = not self._ending
            return True
        matcher.consume_token(token)
        spelled = self._vocabulary.tokens[token]
        self._search.follow(spelled)
        if ending and token == ending[0]:
            found: list[int] | None = ending[1:]
        else:
            has_way = ending is not None and len(ending) <= left
            found = self._found(left - 1, has_way)
            if has_way and left <= MAX_ENDING and (found is None or len(found) > left - 1):
                matcher.rollback(1)
                self._search.go_back(spelled)
                self._refused.append(token)
                self.hurried = True
                return False
        if found == [] and not self._vocabulary.ends and not matcher.is_stopped():
            # No token can end the text here: it goes on as long as more can be completed.
            found = self._searched(extends=True)
            found = found and (found if len(found) < left else None)
            self._has_ended = found is None
        self._ending, self._refused = found, []
        if found is None and not self.is_complete:
            self._has_ended = not self.allowed().any()
        self.hurried |= self._has_ended
        return True

    def _found(self, most: int, has_way: bool) -> list[int] | None:
        """Returns tokens that complete the text, at most so many if it `has_way`; None if unknown.

        One that is too long is looked for again only if there was a shorter one before; where there
        was none that is short enough, less and less often.
        """
        known = self._rest()
        if known is not None and (len(known) <= most or not has_way):
            return known
        self._waited += 1
        if (most > MAX_ENDING or not has_way) and self._waited < self._wait:
            return known
        found = self._searched([] if known else self._ending or [])
        fits = found is not None and (has_way or len(found) <= most)
        self._wait, self._waited = (1 if fits else min(MAX_WAIT, 2 * self._wait)), 0
        return min((x for x in (known, found) if x is not None), key=len, default=None)

    def _rest(self) -> list[int] | None:
        """Returns what of the known ending completes the text, after a token that took a part."""
        if self._matcher.is_accepting():
            return []
        ending = self._ending or []
        for skipped in range(min(len(ending), MAX_SKIPPED)):
            rest = [*ending[skipped:], self._vocabulary.end]
            if self._matcher.validate_tokens(rest) == len(rest):
                return rest[:-1]
        return None

    def _searched(self, known: Sequence[int] = (), extends: bool = False) -> list[int] | None:
        """Returns an ending as tokens, the longest that spell it; None if none is found.

        It may end as the known one. One that `extends` the text is not empty.
        """
        pieces = [self._vocabulary.tokens[token] for token in known]
        rests = [b"".join(pieces[i:]) for i in range(min(len(pieces), MAX_SKIPPED))]
        found = self._search.ending(rests, extends)
        if found is None:
            return None
        for tokens in (self._vocabulary.longest(found), self._vocabulary.single(found)):
            checked = [*tokens, self._vocabulary.end]
            if self._matcher.validate_tokens(checked) == len(checked):
                return tokens
        return None


class _Search:
    """Looks for a short ending of a text: at each place first where the least may follow.

    Its vocabulary has few tokens, as the mask of each place costs as much as the vocabulary is
    large: if that of the model is large, only its single bytes.
    """

    def __init__(self, matcher: Any, vocabulary: "_Vocabulary") -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = np.zeros(vocabulary.words, np.uint32)
        self._tried = 0
        self.is_impossible = False  # nothing was left out in a search that has found nothing

    def copied(self) -> "_Search":
        return _Search(self._matcher.deep_copy(), self._vocabulary)

    def follow(self, spelled: bytes) -> None:
        """Appends a token of the model."""
        self._matcher.consume_tokens(self._vocabulary.single(spelled))

    def go_back(self, spelled: bytes) -> None:
        """Takes back the last token of the model."""
        self._matcher.rollback(len(self._vocabulary.single(spelled)))

    def ending(self, rests: Sequence[bytes], extends: bool) -> bytes | None:
        """Returns an ending, which may end with one of those that are known; None without any."""
        vocabulary, kept = self._vocabulary, self._matcher
        self._matcher, self._tried, self.is_impossible = kept.deep_copy(), 0, True
        known = [[*vocabulary.single(rest), vocabulary.end] for rest in rests]
        path: list[int] = []
        places = [self._choices()]
        try:
            if not extends and (rest := self._rest(known)) is not None:
                return self._spelled(rest)
            while self._tried < MAX_TRIED:
                token = next(places[-1], None)
                if token is None:
                    places.pop()
                    if not places:
                        return None
                    path.pop()
                    self._matcher.rollback(1)
                    continue
                path.append(token)
                self._matcher.consume_token(token)
                self._tried += 1
                if (rest := self._rest(known)) is not None:
                    return self._spelled(path + rest)
                self.is_impossible &= len(path) < MAX_SPELLED
                places.append(self._choices() if len(path) < MAX_SPELLED else iter(()))
            self.is_impossible = False
            return None
        finally:
            self._matcher = kept

    def _rest(self, known: Sequence[Sequence[int]]) -> list[int] | None:
        if self._matcher.is_accepting():
            return []
        fits = (x for x in known if self._matcher.validate_tokens([*x]) == len(x))
        return next(([*rest[:-1]] for rest in fits), None)

    def _spelled(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary.tokens[token] for token in tokens)

    def _choices(self) -> Iterator[int]:
        """Yields tokens that may follow, the most promising ones first."""
        vocabulary, mask = self._vocabulary, _mask(self._matcher, self._bits) & self._usable
        if np.bitwise_count(mask).sum() <= MAX_CHOICES:
            tokens = vocabulary.tokens_in(mask).tolist()
        else:
            self.is_impossible = False
            tokens = [token for token in vocabulary.completing if _has(mask, token)][:MAX_CHOICES]
            tokens = tokens or vocabulary.tokens_in(mask)[:MAX_CHOICES].tolist()
        is_free = vocabulary.is_free(mask)
        groups: dict[int, list[int]] = {}
        for token in tokens:
            if token not in vocabulary.ends:
                rank = self._rank(token, is_free)
                groups.setdefault(rank, []).append(token)
        for rank in sorted(groups):
            yield from self._ordered(groups[rank])

    @property
    def _usable(self) -> np.ndarray:
        return self._vocabulary.usable

    def _ordered(self, tokens: list[int]) -> list[int]:
        """Returns tokens by how many may follow each."""
        if len(tokens) < 2:
            return tokens
        self._tried += len(tokens)
        ranked = []
        for number, token in enumerate(tokens):
            self._matcher.consume_token(token)
            is_end = self._matcher.is_accepting()
            follow = 0 if is_end else int(np.bitwise_count(_mask(self._matcher, self._bits)).sum())
            ranked.append((follow, number, token))
            self._matcher.rollback(1)
        return [token for *_, token in sorted(ranked)]

    def _rank(self, token: int, is_free: bool) -> int:
        """Returns how late a token is tried: first what closes something, last what opens more.

        In free text brackets close nothing, and a quotation mark does if it is not free after it.
        """
        text = self._vocabulary.tokens[token].strip()
        if not text or text.startswith(b"\\"):
            return 5
        if text.endswith((b"{", b"[", b"(", b"<")):
            return 4
        if is_free and text == b'"':
            self._tried += 1
            self._matcher.consume_token(token)
            closes = not self._vocabulary.is_free(_mask(self._matcher, self._bits))
            self._matcher.rollback(1)
            return 1 if closes else 3
        if is_free:
            return 3
        if b"," in text:
            return 2
        return 0 if text.endswith((b"}", b"]", b")", b">")) else 1 if text[:1] in b"\"'" else 3


def _mask(matcher: Any, bits: np.ndarray) -> np.ndarray:
    """Writes the tokens that may follow to bits, which are overwritten by the next call -> bits."""
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


class _Vocabulary:
    """The tokens of a tokenizer as llguidance has them."""

    def __init__(
        self,
        tokens: list[bytes],
        ends: frozenset[int],
        special: Collection[int] = (),
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.size, self.ends = len(tokens), ends
        # A form can end a text although no token can: then one more stands for that.
        self.end = min(ends, default=self.size)
        names = [*tokens, *([] if ends else [b"<end>"])]
        self._small: dict[tuple[int, ...], _Vocabulary] = {}
        self.special = {token: token for token in special}  # by their numbers in the whole one
        # In texts that are looked for, special tokens are their names between marks.
        self.tokens = [
            MARK + name + MARK if i in self.special else name for i, name in enumerate(names)
        ]
        count = len(self.tokens)
        self.words = -(-count // 32)
        self.usable = np.full(self.words, 2**32 - 1, np.uint32)  # for endings
        described = _Described(names, self.tokens, self.end, {*special, self.end}, encode)
        library = _llguidance()
        self.rust = library.LLTokenizer(
            library.TokenizerWrapper(described), n_vocab=count, eos_token=sorted(ends) or [self.end]
        )
        self.longest, self.of_bytes = described.longest, described.of_bytes
        self._of_byte = [self.of_bytes.get(bytes([i]), NO_TOKEN) for i in range(256)]
        self.completing, self._free = (
            [token for c in characters if (token := self.of_bytes.get(c.encode())) is not None]
            for characters in (COMPLETING, FREE)
        )

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Vocabulary":
        """Reads the vocabulary of a tokenizer."""

        def encode(text: str) -> list[int]:
            if tokenizer.unknown(text):
                return []
            (ids,) = tokenizer.encode_each([text], continued=True)
            return ids.tolist()

        with activity.doing("Reading the vocabulary for the format", usual=True):
            numbers = activity.parts(range(tokenizer.vocab_size))
            tokens = [tokenizer.token_bytes(i) for i in numbers]
            return cls(tokens, tokenizer.ends, tokenizer.special.values(), encode)

    def small(self, named: Iterable[int] = ()) -> "_Vocabulary":
        """Returns one in which endings are looked for, with those of its special tokens."""
        special = tuple(token for token in dict.fromkeys(named) if token in self.special)
        if self.size <= MAX_SMALL or special in self._small:
            return self._small.get(special, self)
        names = [self.tokens[token].strip(MARK) for token in special]
        numbers = range(256, 256 + len(names))
        made = _Vocabulary([*(bytes([i]) for i in range(256)), *names], frozenset(), numbers)
        made.special = dict(zip(special, numbers, strict=True))
        bits = [bytes([i]) in self.of_bytes for i in range(256)] + [True] * len(names)
        made.usable = np.zeros(made.words, np.uint32)
        packed = np.packbits(bits, bitorder="little")
        made.usable.view(np.uint8)[: len(packed)] = packed
        self._small[special] = made
        return made

    def marked(self, mask: np.ndarray) -> np.ndarray:
        """Returns True for each token of a mask, bool (V,)."""
        bits = np.unpackbits(mask.view(np.uint8), count=self.size, bitorder="little")
        return bits.view(np.bool_)

    def tokens_in(self, mask: np.ndarray) -> np.ndarray:
        """Returns the tokens of a mask, int64 (n,), sorted."""
        return np.flatnonzero(self.marked(mask))

    def is_free(self, mask: np.ndarray) -> bool:
        """Returns True where almost any text may follow."""
        return any(_has(mask, token) for token in self._free)

    def single(self, spelled: bytes) -> list[int]:
        """Returns tokens of one byte that spell something, of longer ones where there are none."""
        found: list[int] = []
        for piece in MARKED.split(spelled):
            tokens = [] if MARK in piece else [self._of_byte[byte] for byte in piece]
            found += self.longest(piece) if MARK in piece or NO_TOKEN in tokens else tokens
        return found


class _Described:
    """A vocabulary with the names that llguidance asks for."""

    bos_token_id = None

    def __init__(
        self,
        names: list[bytes],
        marked: list[bytes],
        end: int,
        special: Collection[int],
        encode: Callable[[str], list[int]] | None,
    ) -> None:
        self.tokens, self._encode = names, encode
        self.eos_token_id, self.special_token_ids = end, sorted(special)
        known = [(x, i) for i, x in enumerate(marked) if i not in special or MARK in x]
        self.of_bytes = dict(reversed(known))
        lengths: dict[int, set[int]] = {}
        for spelled in self.of_bytes:
            if spelled:
                lengths.setdefault(spelled[0], set()).add(len(spelled))
        self._lengths = {byte: sorted(x, reverse=True) for byte, x in lengths.items()}

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens of a text that the form asks for word for word."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if self._encode and b"".join(self.tokens[i] for i in self._encode(text)) == text.encode():
            return self._encode(text)
        return self.longest(text.encode())  # some tokenizers put a space before any text

    def longest(self, spelled: bytes) -> list[int]:
        """Returns tokens that spell something, each as long as can be; as far as there are any."""
        found: list[int] = []
        while spelled:
            lengths = self._lengths.get(spelled[0], ())
            length = next((n for n in lengths if spelled[:n] in self.of_bytes), 0)
            if not length:
                break
            found.append(self.of_bytes[spelled[:length]])
            spelled = spelled[length:]
        return found


_VOCABULARIES: "WeakKeyDictionary[Tokenizer, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(tokenizer: Tokenizer) -> _Vocabulary:
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        found = _VOCABULARIES[tokenizer] = _Vocabulary.of(tokenizer)
    return found


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InputError(MISSING) from None
    return llguidance


def _schema(value: Any) -> Any:
    """Returns a schema as JSON has it. InputError if it is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"the schema is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise InputError('the schema is not a JSON object, as in {"type": "object"}')
    return value


def _without(value: Any, path: Sequence[Any], key: Any) -> Any:
    """Returns a copy of nested objects and lists without the value of a key at a path."""
    if path:
        inner = _without(value[path[0]], path[1:], key)
        if isinstance(value, dict):
            return {**value, path[0]: inner}
        return [*value[: path[0]], inner, *value[path[0] + 1 :]]
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if name != key}
    return [one for i, one in enumerate(value) if i != key]


def _line(problem: str) -> str:
    """Returns what llguidance says in one line, without where it has been found."""
    return " ".join(problem.split())[:300]

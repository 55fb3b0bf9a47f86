"""A form that texts must have: JSON, a schema, a regular expression or a grammar.

Which tokens may come next is said by the package `llguidance`; see its docs/json_schema.md for the
keywords of schemas that it knows. What is added here is an end within the tokens that a text may
have: a `FormState` always knows a way to complete the text, and refuses a token after which the
way would be too long.
"""

import json
import string
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from smallmind.checks import InputError, check_type
from smallmind.console import activity
from smallmind.text.tokenizer import Tokenizer

KINDS = ("json", "schema", "regex", "grammar")
MISSING = 'answers in a form need the package llguidance: pip install "smallmind[format]"'
# Without a limit, small models write line breaks until the end.
WHITESPACE = r"\n?[ \t]{0,20}"
MAX_ENDING = 512  # tokens of a way to complete a text that is looked for
MAX_TRIED = 1024  # tokens that are tried to find one
MAX_CHOICES = 48  # tokens that are compared at a place
MAX_SKIPPED = 8  # tokens of the known way that a single token may have taken
MAX_WAIT = 64  # tokens between two searches that find nothing
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
                problem = f"the keyword {keyword!r}: {problem}"
            raise InputError(f"the {kind} cannot be compiled: {problem}")
        self._matcher = self._compiled(value)
        # Once for all texts: from the beginning the search takes longest.
        self._state = FormState(self._matcher, self._vocabulary)
        if not self._state.find_ending():
            raise InputError(f"the tokens of the model cannot spell what the {kind} asks for")

    def begin(self, begun: Sequence[int] = ()) -> "FormState":
        """Returns the state of a text that begins with these tokens. InputError if none does."""
        return self._state.copied(begun)

    def _compiled(self, value: Any) -> Any:
        return _llguidance().LLMatcher(self._vocabulary.rust, self._grammar(value), log_level=0)

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
        inner, whole = schema, schema
        while isinstance(inner, dict | list):
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            keys = [key for key in keys if not self._problem(_without(whole, path, key))]
            if len(keys) != 1:
                break
            path.append(keys[0])
            inner = inner[keys[0]]
        return ".".join(map(str, path))


class FormState:
    """Knows what may follow in one text of a form.

    `hurried` says that a token was
    refused because the text could not have been completed after it.
    """

    def __init__(self, matcher: Any, vocabulary: "_Vocabulary") -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = np.zeros(-(-vocabulary.count // 32), np.int32)
        self.hurried = False
        self._ending: list[int] | None = None  # tokens that complete the text; None: not known
        self._refused: list[int] = []  # in the place of the next token
        self._wait, self._waited = 1, 1
        self._has_ended = False

    def copied(self, begun: Sequence[int]) -> "FormState":
        """Returns the state of another text, with more tokens. InputError if they cannot follow."""
        made = FormState(self._matcher.deep_copy(), self._vocabulary)
        made._ending = self._ending
        if len(begun):
            if made._matcher.try_consume_tokens(list(begun)) < len(begun):
                raise InputError("no text of the form begins with the tokens that are given")
            made.find_ending()
        return made

    def find_ending(self) -> bool:
        """Looks for an ending of the text -> False if there certainly is none."""
        self._ending, is_impossible = self._search()
        return not is_impossible

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow."""
        return self._has_ended or self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """Returns the tokens that may follow, int64 (n,), sorted; none if nothing may."""
        known = [] if self._ending is None else self._ending[:1] or sorted(self._vocabulary.ends)
        if len(self._refused) >= MAX_REFUSED:
            return np.array(known, np.int64)
        found = self._vocabulary.tokens_in(self._mask(self._matcher))
        if self._matcher.is_error():  # it has become too complex: only what is known is safe
            return np.array(known, np.int64)
        return np.setdiff1d(found, self._refused) if self._refused else found

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
        if ending and token == ending[0]:
            found: list[int] | None = ending[1:]
        else:
            found = self._found(left - 1)
            has_way = ending is not None and len(ending) <= left <= MAX_ENDING
            if has_way and (found is None or len(found) > left - 1):
                matcher.rollback(1)
                self._refused.append(token)
                self.hurried = True
                return False
        if found == [] and not self._vocabulary.ends and not matcher.is_stopped():
            # No token can end the text here: it goes on as long as more can be completed.
            found, _ = self._search(extends=True)
            found = found and (found if len(found) < left else None)
            self._has_ended = found is None
        self._ending, self._refused = found, []
        if found is None and not self.is_complete:
            self._has_ended = not len(self.allowed())
        self.hurried |= self._has_ended
        return True

    def _mask(self, matcher: Any) -> np.ndarray:
        mask = self._bits
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def _found(self, most: int) -> list[int] | None:
        """Returns tokens that complete the text, if one was found at most `most`; or None."""
        known = self._rest(self._matcher, self._ending or [])
        if known is not None and len(known) <= most:
            return known
        self._waited += 1
        if most > MAX_ENDING and self._waited < self._wait:
            return known
        found, _ = self._search([] if known else self._ending or [])
        self._wait, self._waited = (1 if found is not None else min(MAX_WAIT, 2 * self._wait)), 0
        return min((x for x in (known, found) if x is not None), key=len, default=None)

    def _rest(self, matcher: Any, ending: Sequence[int]) -> list[int] | None:
        """Returns what of a known ending completes the text, after a token that took a part."""
        if matcher.is_accepting():
            return []
        for skipped in range(min(len(ending), MAX_SKIPPED)):
            rest = [*ending[skipped:], self._vocabulary.end]
            if matcher.validate_tokens(rest) == len(rest):
                return rest[:-1]
        return None

    def _search(
        self, known: Sequence[int] = (), extends: bool = False
    ) -> tuple[list[int] | None, bool]:
        """Looks for an ending: at each place first where the fewest tokens may follow.

        It may end as the `known` one. The second is True if there certainly is none. One that
        `extends` the text is not empty.
        """
        matcher = self._matcher.deep_copy()
        if not extends and (rest := self._rest(matcher, known)) is not None:
            return rest, False
        path: list[int] = []
        choices, is_whole = self._choices(matcher)
        places = [choices]
        for _ in range(MAX_TRIED):
            while places and not places[-1]:
                places.pop()
                if path:
                    path.pop()
                    matcher.rollback(1)
            if not places:
                return None, is_whole
            path.append(places[-1].pop())
            matcher.consume_token(path[-1])
            if (rest := self._rest(matcher, known)) is not None:
                return self._joined(path + rest), False
            choices, is_all = self._choices(matcher) if len(path) < MAX_ENDING else ([], False)
            is_whole &= is_all
            places.append(choices)
        return None, False

    def _joined(self, path: list[int]) -> list[int]:
        """Returns the longest tokens that spell the same as these, if they may follow as well."""
        try:
            text = self._vocabulary.rust.decode_bytes(path).decode()
        except UnicodeError:
            return path
        joined = self._vocabulary.rust.greedy_tokenize(text)
        checked = [*joined, self._vocabulary.end]
        is_shorter = len(joined) < len(path)
        if is_shorter and self._matcher.validate_tokens(checked) == len(checked):
            return joined
        return path

    def _choices(self, matcher: Any) -> tuple[list[int], bool]:
        """Returns tokens that may follow, the most promising one last; True if these are all."""
        vocabulary, mask = self._vocabulary, self._mask(matcher).copy()
        if is_all := bool(np.bitwise_count(mask).sum() <= MAX_CHOICES):
            tokens = vocabulary.tokens_in(mask).tolist()
        else:
            tokens = [token for token in vocabulary.completing if _has(mask, token)][:MAX_CHOICES]
            tokens = tokens or vocabulary.tokens_in(mask)[:MAX_CHOICES].tolist()
        tokens = [token for token in tokens if token not in vocabulary.ends]
        is_free = any(_has(mask, token) for token in vocabulary.free)
        ranked = []
        for number, token in enumerate(tokens if len(tokens) > 1 else ()):
            matcher.consume_token(token)
            is_end = matcher.is_accepting()
            rank = -1 if is_end else _rank(vocabulary.rust.decode_bytes([token]), is_free)
            follow = 0 if is_end else int(np.bitwise_count(self._mask(matcher)).sum())
            ranked.append((rank, follow, number, token))
            matcher.rollback(1)
        return [token for *_, token in sorted(ranked, reverse=True)] or tokens, is_all


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _rank(spelled: bytes, is_free: bool) -> int:
    """Returns how late a token is tried: first what closes something, last what opens more.

    In free text brackets close nothing.
    """
    text = spelled.strip()
    if not text or text.startswith(b"\\"):
        return 5
    if text.endswith((b"{", b"[", b"(", b"<")):
        return 4
    if is_free:
        return 3
    if b"," in text:
        return 2
    return 0 if text.endswith((b"}", b"]", b")", b">")) else 1 if text[:1] in b"\"'" else 3


class _Vocabulary:
    """The tokens of a tokenizer as llguidance has them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size, self.ends = tokenizer.vocab_size, tokenizer.ends
        # A form can end a text although no token can: then one more stands for that.
        self.end = min(self.ends, default=self.size)
        self.count = self.size + (not self.ends)
        with activity.doing("Reading the vocabulary for the form", usual=True):
            tokens = [tokenizer.token_bytes(i) for i in activity.parts(range(self.size))]
            tokens += [b"<end>"] * (self.count - self.size)
            special = [*tokenizer.special.values(), self.end]
            described = _Described(tokenizer, tokens, self.end, sorted({*special}))
            library = _llguidance()
            self.rust = library.LLTokenizer(
                library.TokenizerWrapper(described),
                n_vocab=self.count,
                eos_token=sorted(self.ends) or [self.end],
            )
        self.completing = described.spelling(COMPLETING)
        self.free = described.spelling(FREE)

    def tokens_in(self, mask: np.ndarray) -> np.ndarray:
        bits = np.unpackbits(mask.view(np.uint8), count=self.size, bitorder="little")
        return np.flatnonzero(bits)


class _Described:
    """A tokenizer with the names that llguidance asks for."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], end: int, special: list[int]
    ) -> None:
        self._tokenizer, self.tokens = tokenizer, tokens
        self.eos_token_id, self.special_token_ids = end, special
        plain = [*enumerate(tokens)]
        for i in sorted(special, reverse=True):
            del plain[i]
        self._of_bytes = {spelled: i for i, spelled in reversed(plain)}
        self._most = max(map(len, self._of_bytes), default=0)

    def spelling(self, characters: str) -> list[int]:
        """Returns the tokens that are single characters, of those that there are."""
        found = (self._of_bytes.get(character.encode()) for character in characters)
        return [token for token in found if token is not None]

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the tokens of a text that the form asks for word for word."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if not self._tokenizer.unknown(text):
            (ids,) = self._tokenizer.encode_each([text], continued=True)
            if b"".join(self.tokens[i] for i in ids.tolist()) == text.encode():
                return ids.tolist()
        # Some tokenizers put a space before any text, or change it.
        return self._longest(text.encode())

    def _longest(self, text: bytes) -> list[int]:
        """Returns tokens that spell a text, each as long as can be; as far as there are any."""
        found: list[int] = []
        while text:
            lengths = range(min(self._most, len(text)), 0, -1)
            length = next((n for n in lengths if text[:n] in self._of_bytes), 0)
            if not length:
                break
            found.append(self._of_bytes[text[:length]])
            text = text[length:]
        return found


_VOCABULARIES: "WeakKeyDictionary[Tokenizer, _Vocabulary]" = WeakKeyDictionary()


def _vocabulary_of(tokenizer: Tokenizer) -> _Vocabulary:
    found = _VOCABULARIES.get(tokenizer)
    if found is None:
        found = _VOCABULARIES[tokenizer] = _Vocabulary(tokenizer)
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

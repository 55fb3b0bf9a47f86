"""Conversations as tokens: turns of roles, and the templates that put tokens around them.

ChatML: https://github.com/openai/openai-python/blob/v0.28.1/chatml.md; Llama 3's format is in its
model card. Templates of other programs are in the language of Jinja.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from smallmind.text.tokenizer import Tokenizer, special_names

SYSTEM, USER, ASSISTANT = ROLES = "system", "user", "assistant"
TEXT = "text"  # the role of a plain document
# The lowest bits of marked tokens: what a token is in its conversation.
PLAIN, LEARNED, CUT, START = range(4)
KINDS = 4
TOGETHER, LONGEST = 1000, 1 << 20  # conversations that are encoded at once; their characters
# The first of the characters that Unicode keeps for the inside of programs, and one that no file
# can hold.
NONCHARACTER, HALF = 0xFDD0, "\ud800"
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CONFIG, SPECIAL_TOKENS_MAP = "config.json", "special_tokens_map.json"


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES; TEXT is that of the only turn of a plain document
    text: str
    learned: bool = True  # False: a turn of the assistant that is context only
    thought: str = ""  # what the assistant thinks before its text, for templates that write it


Conversation = Sequence[Turn]


class Rendered(NamedTuple):
    """A conversation as a template writes it, with its special tokens by their names."""

    text: str
    learned: tuple[tuple[int, int], ...]  # where the assistant's turns begin and end, in characters
    cuts: tuple[int, ...]  # where the first turn after an answer begins
    guard: str  # a character that is not of the text, and keeps names in it from being tokens


class Format:
    """Turns conversations into tokens. A subclass says how it writes them."""

    name: str
    special: tuple[str, ...]  # tokens that its tokenizer has to have
    end: str  # the token that ends a turn of the assistant
    lead: str = ""  # begins the text of an answer: the model writes it

    def render(
        self, conversation: Conversation, answers: bool = False, **variables: Any
    ) -> Rendered:
        """Writes a conversation; with `answers`, up to where the assistant begins to answer."""
        raise NotImplementedError

    def last_said(self, text: str) -> str:
        """The text of the last user's turn in what was rendered, with special tokens by name."""
        return special_names(self.special).sub("", text).strip()

    @property
    def jinja(self) -> str:
        """The template in the words of other programs."""
        raise NotImplementedError

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return (tokenizer.special[self.end],)

    def encode(self, tokenizer: Tokenizer, conversation: Conversation) -> np.ndarray:
        """conversation -> marked tokens (n,), int32: KINDS * id + kind.

        The kind is LEARNED for the assistant's tokens and the one that ends its turn, START for the
        first token, CUT for the first one after an answer, and else PLAIN. A plain document is
        LEARNED but for its first token. Names of special tokens in a turn are ordinary text.
        """
        return self.encode_all(tokenizer, [conversation])[0]

    def encode_all(
        self, tokenizer: Tokenizer, conversations: Sequence[Conversation]
    ) -> list[np.ndarray]:
        """The marked tokens of several conversations; see `encode`."""
        rendered = [
            Rendered(conversation[0].text, (), (), "")
            if is_document(conversation)
            else self.render(conversation)
            for conversation in conversations
        ]
        marked = _encoded(tokenizer, self.special, rendered)
        for i, conversation in enumerate(conversations):
            if is_document(conversation):
                marked[i] = tokenizer.begun(marked[i] // KINDS) * KINDS + LEARNED
                marked[i][:1] += START - LEARNED
        return marked

    def prompt(
        self, tokenizer: Tokenizer, conversation: Conversation, **variables: Any
    ) -> np.ndarray:
        """conversation -> ids (n,) up to where the assistant begins to answer.

        variables are more of those that a template in Jinja may read.
        """
        rendered = self.render(conversation, answers=True, **variables)
        return _encoded(tokenizer, self.special, [rendered])[0] // KINDS

    def published(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """`tokenizer.published`, with what other programs have to know about the template."""
        found = {name: dict(part) for name, part in tokenizer.published.items()}
        end = tokenizer.special[self.end]
        ends = [end, *{tokenizer.end_of_text} - {None, end}]
        settings = found.setdefault(TOKENIZER_CONFIG, {})
        settings |= {"chat_template": self.jinja, "eos_token": self.end}
        if SPECIAL_TOKENS_MAP in found:  # that of an imported model, which names its own end
            found[SPECIAL_TOKENS_MAP]["eos_token"] = self.end
        found[CONFIG] = {**found.get(CONFIG, {}), "eos_token_id": end}
        generation = {**found.get(GENERATION_CONFIG, {})}
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        found[GENERATION_CONFIG] = generation
        return found


def is_document(conversation: Conversation) -> bool:
    """True for plain text, which has no turns."""
    return len(conversation) == 1 and conversation[0].role == TEXT


def free_character(conversation: Conversation) -> str:
    """A character that no turn has: a guard for names in them."""
    if not any(chr(NONCHARACTER) in turn.text for turn in conversation):
        return chr(NONCHARACTER)
    taken = set().union(*(turn.text for turn in conversation))
    return next((c for c in map(chr, range(NONCHARACTER, 0x110000)) if c not in taken), HALF)


def guarded(text: str, special: Iterable[str], guard: str) -> str:
    """Returns the text with the guard between the characters of each name of a special token."""
    if not any(name in text for name in special):
        return text
    return special_names(tuple(special)).sub(lambda found: guard.join(found[0]) + guard, text)


def tokens_in(text: str, special: tuple[str, ...]) -> list[str]:
    """The names of special tokens in a text, in order."""
    return special_names(special).findall(text) if special else []


def _encoded(
    tokenizer: Tokenizer, names: Sequence[str], rendered: Sequence[Rendered]
) -> list[np.ndarray]:
    """Each of what a template has written -> marked tokens (n,).

    Its texts are encoded together: most are short, and many the same.
    """
    # Other special tokens of the tokenizer come from no template: their names are a person's text.
    special = {name: tokenizer.special[name] for name in names if name in tokenizer.special}
    divided = [_segments(special if one.guard else {}, one) for one in rendered]
    texts = {
        text: None
        for segments in divided
        for one in segments
        if not one.is_special
        for text in (one.text, one.begin, one.end)
        if text is not None
    }
    ids_of = dict(zip(texts, tokenizer.encode_each(list(texts)), strict=True))
    return [_marked(special, ids_of, segments) for segments in divided]


class _Segment(NamedTuple):
    """A special token, or the text between two, which is encoded whole as other programs do."""

    text: str
    is_special: bool
    is_cut: bool  # a turn begins with it, the first one after an answer
    # Texts that end where learned ones begin and end: headers may share a token with what follows.
    begin: str | None  # None: nothing in it is learned
    end: str | None  # None: all that follows is


def _segments(special: Mapping[str, int], rendered: Rendered) -> list[_Segment]:
    """Divides what a template has written at its special tokens."""
    segments, place, guard = [], 0, rendered.guard
    learned, cuts = deque(rendered.learned), set(rendered.cuts)
    for text in special_names(tuple(special)).split(rendered.text) if special else [rendered.text]:
        if not text:
            continue
        last = place + len(text)
        begin = end = None
        while learned and learned[0][1] <= place:
            learned.popleft()
        for first, after in learned:
            if first >= last:
                break
            begin = text[: max(0, first - place)].replace(guard, "")
            end = text[: after - place].replace(guard, "") if after < last else None
        whole = text.replace(guard, "")
        segments.append(_Segment(whole, text in special, place in cuts, begin, end))
        place = last
    return segments


def _marked(
    special: Mapping[str, int], ids_of: Mapping[str, np.ndarray], segments: Sequence[_Segment]
) -> np.ndarray:
    """Segments, and the ids of every text in them -> marked tokens (n,)."""
    pieces = []
    for text, is_special, is_cut, begin, end in segments:
        if is_special:
            kind = PLAIN if begin is None else LEARNED
            marked = np.array([special[text] * KINDS + kind], np.int32)
        else:
            ids = ids_of[text]
            marked = ids * KINDS
            if begin is not None:
                first = _tokens_before(ids_of[begin], ids)
                last = len(ids) if end is None else _tokens_before(ids_of[end], ids)
                marked[first:last] += LEARNED
        if is_cut and len(marked):
            marked[0] = marked[0] // KINDS * KINDS + CUT
        pieces.append(marked)
    if not pieces:
        return np.empty(0, np.int32)
    whole = np.concatenate(pieces)
    whole[:1] = whole[:1] // KINDS * KINDS + START
    return whole


def _tokens_before(beginning: np.ndarray, ids: np.ndarray) -> int:
    """How many of the tokens of a text are those of its beginning."""
    count = min(len(beginning), len(ids))
    if (beginning[:count] == ids[:count]).all():
        return count
    return int(np.argmin(beginning[:count] == ids[:count]))


def encode_each(
    tokenizer: Tokenizer, template: Format, conversations: Iterable[Conversation]
) -> Iterator[np.ndarray]:
    """The marked tokens of each conversation; many are encoded together."""
    batch: list[Conversation] = []
    length = 0
    for conversation in conversations:
        batch.append(conversation)
        length += sum(len(turn.text) for turn in conversation)
        if len(batch) == TOGETHER or length > LONGEST:
            yield from template.encode_all(tokenizer, batch)
            batch, length = [], 0
    if batch:
        yield from template.encode_all(tokenizer, batch)

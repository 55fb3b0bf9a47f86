"""Conversations as tokens: turns of roles, and the templates that put tokens around them.

ChatML: https://github.com/openai/openai-python/blob/v0.28.1/chatml.md; Llama 3's format is in its
model card. Templates of other programs are in the language of Jinja.
"""

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.text.tokenizer import Tokenizer, special_names
from smallmind.text.tools import CallForm

SYSTEM, USER, ASSISTANT = ROLES = "system", "user", "assistant"
TOOL = "tool"  # the role of what a tool has returned, for templates that know it
TEXT = "text"  # the role of a plain document
REJECTED = "rejected"  # that of an answer that is worse than the one before it, or to be avoided
ANSWERS = ASSISTANT, REJECTED
# Names of roles, as files and clients have them.
ROLE_NAMES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    **dict.fromkeys(("user", "human", "prompter"), USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "ai", "model", "bot", "chatbot"), ASSISTANT),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), TOOL),
}
# Types of the parts of a turn: text, and what is thought before it.
TEXT_PARTS = ("text", "input_text", "output_text", None)
THOUGHT_PARTS = ("thinking", "reasoning")
# The lowest bits of marked tokens: what a token is in its conversation.
PLAIN, LEARNED, CUT, START = range(4)
MARK_KINDS = 4
CONVERSATIONS_AT_ONCE, CHARACTERS_AT_ONCE = 1000, 1 << 20  # that are encoded
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
TEMPLATE_ARGS = "chat_template_kwargs"  # variables for the template, in what a tokenizer publishes
CONFIG, SPECIAL_TOKENS_MAP = "config.json", "special_tokens_map.json"


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES, TOOL, or REJECTED; TEXT is that of the only turn of a plain document
    text: str
    learned: bool = True  # False: a turn of the assistant that is context only
    thought: str = ""  # what the assistant thinks before its text, for templates that write it
    # More fields of its message as JSON: tool_calls of the assistant, name and tool_call_id of a
    # tool; in a first turn also the tools of the conversation.
    more: str = ""

    @property
    def says(self) -> bool:
        """True for a turn with a text or calls."""
        return bool(self.text.strip()) or (self.role in ANSWERS and CALLS in self.more)


CALLS = '"tool_calls"'
Conversation = Sequence[Turn]


def said_in(parts: Sequence[Any]) -> tuple[str, str, int]:
    """Parts of a turn -> its text, what is thought before it, and the number of one that is else.

    Parts are counted from 1; the number is 0 if all are texts or thoughts.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) else ""
        into, field = texts, "text"
        if kind in THOUGHT_PARTS:
            into, field = thoughts, kind if kind in part else "text"
        text = part.get(field) if isinstance(part, dict) else None
        is_known = kind in (*TEXT_PARTS, *THOUGHT_PARTS) and isinstance(part, dict)
        if not is_known or not (isinstance(text, str) or (kind and text is None)):
            return "", "", number
        into.append(text or "")
    return "".join(texts), "".join(thoughts), 0


def with_tools(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Returns turns with the tools that the assistant may call, which the first one has."""
    if not (turns and tools):
        return [*turns]
    more = json.loads(turns[0].more or "{}") | {"tools": tools}
    return [turns[0]._replace(more=json.dumps(more, ensure_ascii=False)), *turns[1:]]


class Located(tuple[Turn, ...]):
    """A conversation that was read from a file, and in words where it is there."""

    where = ""


class Rendered(NamedTuple):
    """A conversation as a template writes it, with its special tokens by their names."""

    text: str
    learned: tuple[tuple[int, int], ...]  # where the assistant's turns begin and end, in characters
    cuts: tuple[int, ...]  # where the first turn after an answer begins
    said: tuple[tuple[int, int], ...]  # where the texts of turns begin and end


class ChatFormat:
    """Turns conversations into tokens. A subclass says how it writes them."""

    name: str
    special: tuple[str, ...]  # tokens that its tokenizer has to have
    end: str  # the token that ends a turn of the assistant
    lead: str = ""  # begins the text of an answer: the model writes it
    thinks: bool = False  # it writes the thoughts of turns
    tools: bool = False  # it writes calls of tools, and what they return
    # The text before the object of a call, the text after it, and the object's name for arguments.
    calling: tuple[str, str, str] | None = None
    calls: CallForm | None = None  # how the model writes calls; None: unknown
    marks: tuple[str, str] | None = None  # what the model writes before and after a thought

    def render(
        self,
        conversation: Conversation,
        answers: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        """Writes a conversation, with `answers` up to an answer; variables are more for Jinja."""
        raise NotImplementedError

    def render_all(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """Writes several conversations; see `render`."""
        return [self.render(conversation) for conversation in conversations]

    def at(self, now: datetime | None) -> "ChatFormat":
        """Returns the template at a time, which some write; None: at any time, the current one."""
        del now
        return self

    def last_said(self, text: str) -> str:
        """-> the text of the last user's turn in what was rendered, with special tokens by name."""
        return special_names(self.special).sub("", text).strip()

    @property
    def jinja(self) -> str:
        """The template in the words of other programs."""
        raise NotImplementedError

    def encode(self, tokenizer: Tokenizer, conversation: Conversation) -> np.ndarray:
        """conversation -> marked tokens (n,), int32: MARK_KINDS * id + kind.

        The kind is LEARNED for the tokens of the assistant's learned turns and the one that ends
        each, START for the first token, CUT for the first one after an answer, and else PLAIN. A
        plain document is LEARNED but for its first token. Names of special tokens in a turn are
        ordinary text, unless these belong to the text for the tokenizer: they are always tokens.
        """
        return self.encode_all(tokenizer, [conversation])[0]

    def encode_all(
        self, tokenizer: Tokenizer, conversations: Sequence[Conversation]
    ) -> list[np.ndarray]:
        """Returns the marked tokens of several conversations; see `encode`."""
        for conversation in conversations:
            self._check_tools(conversation)
        written = iter(self.render_all([one for one in conversations if not is_document(one)]))
        rendered = [
            Rendered(one[0].text, (), (), ((0, len(one[0].text)),))
            if is_document(one)
            else next(written)
            for one in conversations
        ]
        marked = _encoded(tokenizer, rendered)
        for i, conversation in enumerate(conversations):
            if is_document(conversation):
                marked[i] = tokenizer.begun(marked[i] // MARK_KINDS) * MARK_KINDS + LEARNED
                marked[i][:1] += START - LEARNED
        return marked

    def prompt(
        self,
        tokenizer: Tokenizer,
        conversation: Conversation,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> np.ndarray:
        """conversation, more variables for Jinja -> ids (n,) up to where the assistant answers."""
        self._check_tools(conversation)
        rendered = self.render(conversation, True, variables)
        return _encoded(tokenizer, [rendered])[0] // MARK_KINDS

    def _check_tools(self, conversation: Conversation) -> None:
        """Raises InputError for tools in a conversation, unless the template writes them."""
        if self.tools or not any(turn.more or turn.role == TOOL for turn in conversation):
            return
        where = getattr(conversation, "where", "")
        raise InputError(
            f"{where}: the conversation has tools"[0 if where else 2 :]
            + ", which the chat template does not support: use --chat-template hermes, start "
            "from a model whose template does, or remove them"
        )

    def published(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """-> `tokenizer.published` with what other programs have to know about the template."""
        found = {name: dict(part) for name, part in tokenizer.published.items()}
        end = tokenizer.special[self.end]
        ends = [end, *{tokenizer.end_of_text} - {None, end}]
        settings = found.setdefault(TOKENIZER_CONFIG, {})
        settings |= {"chat_template": self.jinja, "eos_token": self.end}
        if SPECIAL_TOKENS_MAP in found:  # that of an imported model, which names its own end
            found[SPECIAL_TOKENS_MAP]["eos_token"] = self.end
        found.setdefault(CONFIG, {})["eos_token_id"] = end
        generation = found.setdefault(GENERATION_CONFIG, {})
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        return found


def is_document(conversation: Conversation) -> bool:
    """Returns True for plain text, which has no turns."""
    return len(conversation) == 1 and conversation[0].role == TEXT


def is_learned(turn: Turn) -> bool:
    """Returns True for an answer that a model learns: nothing learns to say nothing."""
    return turn.role == ASSISTANT and turn.learned and turn.says


def _encoded(tokenizer: Tokenizer, rendered: Sequence[Rendered]) -> list[np.ndarray]:
    """Rendered conversations -> marked tokens (n,) of each. Equal texts are encoded once."""
    divided = [list(_segments(tokenizer, one)) for one in rendered]
    ids_of: dict[tuple[str, bool], np.ndarray] = {}
    for is_first in (True, False):
        texts = {
            text: None
            for segments in divided
            for one in (segments[:1] if is_first else segments[1:])
            if not one.is_special
            for text in (one.text, one.begin, one.end)
            if text is not None
        }
        ids = tokenizer.encode_each(list(texts), continued=not is_first)
        ids_of |= {(text, is_first): x for text, x in zip(texts, ids, strict=True)}
    return [_marked(tokenizer.special, ids_of, segments) for segments in divided]


class _Segment(NamedTuple):
    """A special token, or the text between two, which is encoded whole as other programs do."""

    text: str
    is_special: bool
    is_cut: bool  # a turn begins with it, the first one after an answer
    # Texts that end where learned ones begin and end: headers may share a token with what follows.
    begin: str | None  # None: nothing in it is learned
    end: str | None  # None: all that follows is


def _segments(tokenizer: Tokenizer, rendered: Rendered) -> Iterator[_Segment]:
    """Divides what a template has written at its special tokens."""
    learned, cuts, whole = deque(rendered.learned), set(rendered.cuts), rendered.text
    position = 0
    for start, last in [*_special_tokens(tokenizer, rendered), (len(whole),) * 2]:
        strips = tokenizer.strips.get(whole[start:last], (False, False))
        text = whole[position:start].rstrip() if strips[0] else whole[position:start]
        if text:
            yield _segment(text, position, False, learned, cuts)
        if start < last:
            yield _segment(whole[start:last], start, True, learned, cuts)
        position = last
        if strips[1]:
            position += len(whole) - last - len(whole[last:].lstrip())


def _segment(
    text: str,
    start: int,
    is_special: bool,
    learned: deque[tuple[int, int]],
    cuts: Container[int],
) -> _Segment:
    """Returns the segment at a place; takes what ends before it out of `learned`."""
    last = start + len(text)
    begin = end = None
    while learned and learned[0][1] <= start:
        learned.popleft()
    for first, after in learned:
        if first >= last:
            break
        begin = text[: max(0, first - start)]
        end = text[: after - start] if after < last else None
    return _Segment(text, is_special, start in cuts, begin, end)


def _special_tokens(tokenizer: Tokenizer, rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yields where special tokens begin and end in what a template has written.

    A name that is said, even in part, is none, unless the token belongs to the text.
    """
    if not tokenizer.special:
        return
    text, said = rendered.text, rendered.said
    begins = [begin for begin, _ in said]
    names, shown = special_names(tuple(tokenizer.special)), special_names(tuple(tokenizer.shown))
    position = 0
    while found := names.search(text, position):
        before = bisect_left(begins, found.end()) - 1
        if before >= 0 and said[before][1] > found.start():
            position = found.start() + 1
            found = shown.match(text, found.start()) if tokenizer.shown else None
        if found:
            yield found.span()
            position = found.end()


def _marked(
    special: Mapping[str, int],
    ids_of: Mapping[tuple[str, bool], np.ndarray],
    segments: Sequence[_Segment],
) -> np.ndarray:
    """Segments, and the ids of every text in them, first or not -> marked tokens (n,)."""
    pieces: list[np.ndarray] = []
    for i, (text, is_special, is_cut, begin, end) in enumerate(segments):
        if is_special:
            kind = PLAIN if begin is None else LEARNED
            marked = np.array([special[text] * MARK_KINDS + kind], np.int32)
        else:
            ids = ids_of[text, i == 0]
            marked = ids * MARK_KINDS
            if begin is not None:
                first = _tokens_before(ids_of[begin, i == 0], ids)
                last = len(ids) if end is None else _tokens_before(ids_of[end, i == 0], ids)
                marked[first:last] += LEARNED
        if is_cut and len(marked):
            marked[0] = marked[0] // MARK_KINDS * MARK_KINDS + CUT
        pieces.append(marked)
    if not pieces:
        return np.empty(0, np.int32)
    whole = np.concatenate(pieces)
    whole[:1] = whole[:1] // MARK_KINDS * MARK_KINDS + START
    return whole


def _tokens_before(beginning: np.ndarray, ids: np.ndarray) -> int:
    """Returns how many of the tokens of a text are those of its beginning."""
    count = min(len(beginning), len(ids))
    if (beginning[:count] == ids[:count]).all():
        return count
    return int(np.argmin(beginning[:count] == ids[:count]))


def encode_each(
    tokenizer: Tokenizer, template: ChatFormat, conversations: Iterable[Conversation]
) -> Iterator[np.ndarray]:
    """Yields the marked tokens of each conversation; many are encoded together."""
    batch: list[Conversation] = []
    length = 0
    for conversation in conversations:
        batch.append(conversation)
        length += sum(len(turn.text) + len(turn.more) for turn in conversation)
        if len(batch) == CONVERSATIONS_AT_ONCE or length > CHARACTERS_AT_ONCE:
            yield from template.encode_all(tokenizer, batch)
            batch, length = [], 0
    if batch:
        yield from template.encode_all(tokenizer, batch)

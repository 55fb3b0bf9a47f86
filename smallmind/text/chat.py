"""Conversations as tokens: turns of roles, and the templates that put tokens around them.

ChatML: https://github.com/openai/openai-python/blob/v0.28.1/chatml.md; Llama 3's format is in its
model card. Templates of other programs are in the language of Jinja.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from smallmind.checks import InputError
from smallmind.text.tokenizer import Tokenizer, special_names

SYSTEM, USER, ASSISTANT = ROLES = "system", "user", "assistant"
TEXT = "text"  # the role of a plain document
# The lowest bits of marked tokens: what a token is in its conversation.
PLAIN, LEARNED, CUT, START = range(4)
KINDS = 4
TOGETHER = 1000  # conversations that are encoded at once
# Characters that no text has: Unicode keeps them for the inside of programs.
NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
CONFIG = "config.json"


class Turn(NamedTuple):
    """One turn of a conversation."""

    role: str  # one of ROLES; TEXT is that of the only turn of a plain document
    text: str


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
    lead: str = ""  # before the text of an answer: the model writes it

    def render(self, conversation: Conversation, answers: bool = False) -> Rendered:
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
        marked = _encoded(tokenizer, rendered)
        for conversation, tokens in zip(conversations, marked, strict=True):
            if is_document(conversation):
                tokens[1:] += LEARNED - PLAIN
        return marked

    def prompt(self, tokenizer: Tokenizer, conversation: Conversation) -> np.ndarray:
        """conversation -> ids (n,) up to where the assistant begins to answer."""
        return _encoded(tokenizer, [self.render(conversation, answers=True)])[0] // KINDS

    def published(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """`tokenizer.published`, with what other programs have to know about the template."""
        found = {name: dict(part) for name, part in tokenizer.published.items()}
        end = tokenizer.special[self.end]
        ends = [end, *{tokenizer.end_of_text} - {None, end}]
        settings = found.setdefault(TOKENIZER_CONFIG, {})
        settings |= {"chat_template": self.jinja, "eos_token": self.end}
        found[CONFIG] = {**found.get(CONFIG, {}), "eos_token_id": end}
        generation = {**found.get(GENERATION_CONFIG, {})}
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        found[GENERATION_CONFIG] = generation
        return found


@dataclass(frozen=True)
class Template(Format):
    """A template that is data: what stands before and after the text of each role."""

    name: str
    before: Mapping[str, str]  # role -> the header of its turns
    after: Mapping[str, str]  # role -> what ends them
    end: str
    special: tuple[str, ...]
    begin: str = ""  # before the first turn
    system: str = ""  # the first turn, unless the conversation has one
    strips: bool = False  # spaces around the text of a turn
    lead: str = ""

    def render(self, conversation: Conversation, answers: bool = False) -> Rendered:
        texts = [turn.text for turn in conversation]
        guard = next(c for c in NONCHARACTERS if not any(c in text for text in texts))
        turns = list(conversation)
        if self.system and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, self.system))
        parts, length, learned, cuts = [self.begin], len(self.begin), [], []
        previous = ""
        for role, text in turns:
            if previous == ASSISTANT and role != ASSISTANT:
                cuts.append(length)
            text = guarded(text.strip() if self.strips else text, self.special, guard)
            header, after = self.before[role], self.after[role]
            if role == ASSISTANT:
                text = self.lead + text
                begins = length + len(header)
                learned.append((begins, begins + len(text) + len(self.end)))
            written = header + text + after
            parts.append(written)
            length, previous = length + len(written), role
        if answers:
            parts.append(self.before[ASSISTANT])
        return Rendered("".join(parts), tuple(learned), tuple(cuts), guard)

    def last_said(self, text: str) -> str:
        _, _, said = text.rpartition(self.before[USER])
        return said.partition(self.after[USER])[0]

    @property
    def jinja(self) -> str:
        return _JINJA[self.name].replace(_SYSTEM, self.system)


def _chatml(name: str = "chatml", system: str = "") -> Template:
    before = {role: f"<|im_start|>{role}\n" for role in ROLES}
    special = "<|im_start|>", "<|im_end|>"
    return Template(
        name, before, dict.fromkeys(ROLES, "<|im_end|>\n"), "<|im_end|>", special, system=system
    )


_LLAMA3_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEMPLATES = {
    "chatml": _chatml(),
    "llama3": Template(
        "llama3",
        {role: _LLAMA3_HEADER.format(role) for role in ROLES},
        dict.fromkeys(ROLES, "<|eot_id|>"),
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        begin="<|begin_of_text|>",
        strips=True,
    ),
    "qa": Template(
        "qa",
        {SYSTEM: "", USER: "Q: ", ASSISTANT: "A:"},
        {SYSTEM: "\n", USER: "\n", ASSISTANT: "<|endoftext|>"},
        "<|endoftext|>",
        ("<|endoftext|>",),
        lead=" ",
    ),
}
_SYSTEM = "%(system)s"  # in place of the system turn that is added
# What other programs read: each writes what the template of its name does.
_CHATML_TURNS = (
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_JINJA = {
    "chatml": "{% for message in messages %}" + _CHATML_TURNS,
    "chatml with a system turn": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\n" + _SYSTEM + "<|im_end|>\\n' }}{% endif %}" + _CHATML_TURNS
    ),
    "llama3": (
        "{% for message in messages %}{% if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "qa": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ 'Q: ' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}"
        "{{ 'A: ' + message['content'] + '<|endoftext|>' }}{% else %}"
        "{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    ),
}
# The characters of all headers, which a vocabulary of characters has to have.
HEADERS = "".join(
    sorted({c for t in TEMPLATES.values() for part in t.before.values() for c in part})
)
_WITH_SYSTEM = "chatml with a system turn"
_SYSTEM_OF = re.compile(
    re.escape(_JINJA[_WITH_SYSTEM]).replace(re.escape(_SYSTEM), r"([^'\\{}%<|>]*)")
)


def format_of(tokenizer: Tokenizer) -> Format | None:
    """The template that a tokenizer carries; None if it has none.

    Known ones need no other package. InputError if it is damaged, or the package for templates in
    Jinja is missing.
    """
    said = tokenizer.published.get(TOKENIZER_CONFIG, {}).get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in said if isinstance(one, Mapping)}
        said = named.get("default")
    if not isinstance(said, str):
        return None
    for name, known in TEMPLATES.items():
        if said == _JINJA[name]:
            return known
    if found := _SYSTEM_OF.fullmatch(said):
        return _chatml(_WITH_SYSTEM, found[1])
    from smallmind.text.jinja_template import JinjaTemplate

    return JinjaTemplate.of(said, tokenizer)


def is_document(conversation: Conversation) -> bool:
    """True for plain text, which has no turns."""
    return len(conversation) == 1 and conversation[0].role == TEXT


def guarded(text: str, special: Iterable[str], guard: str) -> str:
    """Returns the text with the guard between the characters of each name of a special token."""
    if not any(name in text for name in special):
        return text
    return special_names(tuple(special)).sub(lambda found: guard.join(found[0]) + guard, text)


def tokens_in(text: str, special: tuple[str, ...]) -> list[str]:
    """The names of special tokens in a text, in order."""
    return special_names(special).findall(text) if special else []


def _encoded(tokenizer: Tokenizer, rendered: Sequence[Rendered]) -> list[np.ndarray]:
    """Each of what a template has written -> marked tokens (n,).

    Its texts are encoded together: most are short, and many the same.
    """
    special = tokenizer.special
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
    """What a template has written, divided at its special tokens."""
    segments, place, guard = [], 0, rendered.guard
    for text in special_names(tuple(special)).split(rendered.text) if special else [rendered.text]:
        if not text:
            continue
        last = place + len(text)
        begin = end = None
        for first, after in rendered.learned:
            if first < last and place < after:
                begin = text[: max(0, first - place)].replace(guard, "")
                end = text[: after - place].replace(guard, "") if after < last else None
        segments.append(
            _Segment(text.replace(guard, ""), text in special, place in rendered.cuts, begin, end)
        )
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


def fit_template(tokenizer: Tokenizer, name: str | None) -> tuple[Tokenizer, Format]:
    """The tokenizer with the special tokens of its own template, or of the one named, and that.

    Without a name, a tokenizer without a template gets ChatML. InputError for an unknown name.
    """
    found = format_of(tokenizer) if name is None else None
    if found:
        return tokenizer, found
    if (name := name or "chatml") not in TEMPLATES:
        raise InputError(f"chat_template={name!r} must be one of {', '.join(TEMPLATES)}")
    template = TEMPLATES[name]
    grown = tokenizer.with_special(template.special)
    return grown.with_published(template.published(grown)), template


def encode_each(
    tokenizer: Tokenizer, template: Format, conversations: Iterable[Conversation]
) -> Iterator[np.ndarray]:
    """The marked tokens of each conversation; many are encoded together."""
    remaining = iter(conversations)
    while batch := list(itertools.islice(remaining, TOGETHER)):
        yield from template.encode_all(tokenizer, batch)

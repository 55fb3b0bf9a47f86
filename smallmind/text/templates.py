"""The chat templates that need no other package, and the one that a tokenizer carries."""

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from smallmind import parts
from smallmind.checks import InputError
from smallmind.text.chat import (
    ASSISTANT,
    GENERATION_CONFIG,
    ROLES,
    SYSTEM,
    TEMPLATE_ARGS,
    TOKENIZER_CONFIG,
    USER,
    ChatFormat,
    Conversation,
    Rendered,
    Turn,
    is_learned,
)
from smallmind.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class KnownTemplate(ChatFormat):
    """A template that is data, as in `parts.CHAT_TEMPLATES`."""

    name: str
    turns: str | Mapping[str, str]  # how a turn is written, of any role or by role
    special: tuple[str, ...]
    begin: str = ""
    system: str = ""
    strips: bool = False
    lead: str = ""
    names: Mapping[str, str] = field(default_factory=dict, hash=False)  # role -> its name
    joins: str = ""  # between the system's text and the first user's, if these are one turn
    digests: tuple[str, ...] = ()
    before: Mapping[str, str] = field(init=False)  # role -> the header of its turns
    after: Mapping[str, str] = field(init=False)  # role -> what ends them
    end: str = field(init=False)

    def __post_init__(self) -> None:
        named = {role: self._turn(role).replace("{role}", self._name(role)) for role in ROLES}
        divided = {role: turn.split("{text}") for role, turn in named.items()}
        object.__setattr__(self, "before", {role: before for role, (before, _) in divided.items()})
        object.__setattr__(self, "after", {role: after for role, (_, after) in divided.items()})
        object.__setattr__(self, "end", self.special[-1])

    def _name(self, role: str) -> str:
        return self.names.get(role, role)

    def _turn(self, role: str) -> str:
        return self.turns if isinstance(self.turns, str) else self.turns[role]

    def render(
        self,
        conversation: Conversation,
        answers: bool = False,
        _variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        turns = list(conversation)
        if self.system and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, self.system))
        instruction = ""
        if self.joins:
            if turns and turns[0].role == SYSTEM:
                instruction = turns.pop(0).text + self.joins
            if [turn.role for turn in turns] != ([USER, ASSISTANT] * len(turns))[: len(turns)]:
                where = getattr(conversation, "where", "")
                raise InputError(
                    (f"{where}: " if where else "")
                    + "the chat template refuses the conversation: its roles must alternate, user "
                    "and assistant" + ("; correct or remove it" if where else "")
                )
        parts, length, learned, cuts, said = [self.begin], len(self.begin), [], [], []
        previous, ended = "", 0
        for turn in turns:
            role, text = turn.role, turn.text.strip() if self.strips else turn.text
            instruction, text = "", instruction + text
            header, after = self.before[role], self.after[role]
            if previous == ASSISTANT and role != ASSISTANT:  # texts are divided at special tokens
                cuts.append(length if header.startswith(self.special) else ended)
            if role == ASSISTANT:
                text = text if text.startswith(self.lead) else self.lead + text
            begins = length + len(header)
            said.append((begins, begins + len(text)))
            ended = begins + len(text) + len(self.end)
            if is_learned(turn):
                learned.append((begins, ended))
            written = header + text + after
            parts.append(written)
            length, previous = length + len(written), role
        if answers:
            parts.append(self.before[ASSISTANT])
        return Rendered("".join(parts), tuple(learned), tuple(cuts), tuple(said))

    def last_said(self, text: str) -> str:
        _, _, said = text.rpartition(self.before[USER])
        return said.partition(self.after[USER])[0]

    @property
    def jinja(self) -> str:
        if self.joins:
            return self._joining()
        written = "{% for message in messages %}"
        if self.begin:
            written += _if("loop.first", self.begin)
        if self.system:
            turn = self.before[SYSTEM] + self.system + self.after[SYSTEM]
            written += _if("loop.first and messages[0]['role'] != 'system'", turn)
        if isinstance(self.turns, str) and not self.lead:
            space = " " if self.begin else ""  # as in ChatML: runs are resumed with the same text
            written += "{{" + space + self._value(USER) + space + "}}"
        else:
            for word, role in (("if", USER), ("elif", ASSISTANT)):
                written += f"{{% {word} message['role'] == '{role}' %}}"
                written += "{{ " + self._value(role) + " }}"
            written += "{% else %}{{ " + self._value(SYSTEM) + " }}{% endif %}"
        return written + "{% endfor %}" + _if("add_generation_prompt", self.before[ASSISTANT])

    def _joining(self) -> str:
        """Returns a template whose first turn has the text of the system."""
        named = [
            f"{_quoted(x)} if message['role'] == '{role}' else " for role, x in self.names.items()
        ]
        fields = {
            "{role}": f"({''.join(named)}message['role'])",
            "{text}": "(first if loop.first else '') + message['content'] | trim",
        }
        pieces = filter(None, re.split(r"(\{role\}|\{text\})", self._turn(USER)))
        turn = " + ".join(fields.get(piece) or _quoted(piece) for piece in pieces)
        return (
            "{{ " + _quoted(self.begin) + " }}{% set first = '' %}{% set turns = messages %}"
            "{% if messages[0]['role'] == 'system' %}"
            "{% set first = messages[0]['content'] + " + _quoted(self.joins) + " %}"
            "{% set turns = messages[1:] %}{% endif %}"
            "{% for message in turns %}{{ "
            + turn
            + " }}{% endfor %}"
            + _if("add_generation_prompt", self.before[ASSISTANT])
        )

    def _value(self, role: str) -> str:
        """Returns the turn of a message with this role as an expression of Jinja."""
        content = "message['content']" + (" | trim" if self.strips else "")
        if role == ASSISTANT and self.lead:
            lead = _quoted(self.lead)
            content = f"('' if {content}[:{len(self.lead)}] == {lead} else {lead}) + {content}"
        fields = {"{role}": "message['role']", "{text}": content}
        parts_of_turn = rf"(\{{role\}}|\{{text\}}|{re.escape(self.end)})"
        pieces = filter(None, re.split(parts_of_turn, self._turn(role)))
        return " + ".join(fields.get(piece) or _quoted(piece) for piece in pieces)


def _if(condition: str, text: str) -> str:
    """Returns what writes a text in Jinja if a condition holds."""
    return "{% if " + condition + " %}{{ " + _quoted(text) + " }}{% endif %}"


def _quoted(text: str) -> str:
    """Returns a text as Jinja has it, always in single quotes."""
    return "'" + repr('"' + text)[2:]


TEMPLATES = {
    name: KnownTemplate(name, **fields)
    for name, fields in parts.CHAT_TEMPLATES.items()
    if "jinja" not in fields
}
_SYSTEM = "%(system)s"  # in place of the system turn that is added
# The characters of all headers, which a vocabulary of characters has to have.
HEADERS = "".join(
    sorted({c for t in TEMPLATES.values() for part in t.before.values() for c in part})
)


def headers_of(name: str | None) -> str:
    """Returns the characters that a vocabulary of characters needs for the template of a name."""
    return HEADERS + str(parts.CHAT_TEMPLATES.get(name or "", {}).get("jinja", ""))


# Enough of Jinja for known templates: tags, and tokens in them.
_TAG = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\})", re.DOTALL)
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\.\s*[A-Za-z_]\w*|\w+|\S""", re.DOTALL)
_DEFAULT = ("if not add_generation_prompt is defined", "set add_generation_prompt = false", "endif")


def _steps(jinja: str) -> list[tuple[str, str]]:
    """Lists the steps of a template: a "text" or "value" that it writes, or a "block".

    Templates have the same steps if they differ only in quotes, in how they join texts, in white
    space that `trim_blocks` and `lstrip_blocks` remove, and in the name of a message.
    """
    steps: list[tuple[str, str]] = []

    def add(kind: str, what: str) -> None:
        if kind == "text" and steps and steps[-1][0] == kind:
            what = steps.pop()[1] + what
        if what:
            steps.append((kind, what))

    pieces = ["", *_TAG.split(jinja.removesuffix("\n")), ""]  # tags and the texts between them
    begins_line = True
    for before, text, after in zip(pieces[:-1:2], pieces[1::2], pieces[2::2], strict=True):
        if before.endswith(("-%}", "-}}", "-#}")):
            text = text.lstrip()
        elif before.endswith(("%}", "#}")):
            begins_line = text.startswith("\n")
            text = text.removeprefix("\n")
        if after.startswith(("{%-", "{{-", "{#-")):
            text = text.rstrip()
        elif after.startswith(("{%", "{#")) and (begins_line or "\n" in text):
            text = text.rstrip(" \t") if text.rpartition("\n")[2].isspace() else text
        begins_line = False
        add("text", text)
        tokens = [_token(token) for token in _TOKEN.findall(after[2:-2].strip("-"))]
        if after.startswith("{{"):
            for part in " ".join("+" if token == "~" else token for token in tokens).split(" + "):
                is_text = part.startswith("'") and part.endswith("'") and _TOKEN.fullmatch(part)
                add(*(("text", ast.literal_eval(part)) if is_text else ("value", part)))
        elif after.startswith("{%"):
            add("block", " ".join(tokens))
    if tuple(what for _, what in steps[:3]) == _DEFAULT:
        del steps[:3]  # what is not defined is false anyway
    loops = (
        re.fullmatch(r"for (\w+) in messages", what) for kind, what in steps if kind == "block"
    )
    if named := next(filter(None, loops), None):
        name = re.compile(rf"\b{named[1]}\b(?=$| \[| in )")
        steps = [(k, what if k == "text" else name.sub("message", what)) for k, what in steps]
    return steps


def _token(token: str) -> str:
    """Returns a token of Jinja in the one way to write it that is compared."""
    if token[0] in "'\"":
        text = token[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
        return _quoted(text)
    return f"[ {token[1:].strip()!r} ]" if token[0] == "." and len(token) > 1 else token


def _known(jinja: str) -> ChatFormat | None:
    """Returns the known template that does the same as one in Jinja; None if there is none."""
    steps = _steps(jinja)
    digest = hashlib.sha256(repr(steps).encode()).hexdigest()
    for known in TEMPLATES.values():
        if steps == _steps(known.jinja) or digest in known.digests:
            return known
        if known.joins:
            continue
        wanted = _steps(replace(known, system=_SYSTEM).jinja)
        index = next(i for i, (_, what) in enumerate(wanted) if _SYSTEM in what)
        if [*steps[:index], *steps[index + 1 :]] == [*wanted[:index], *wanted[index + 1 :]]:
            kind, said = steps[index]
            begin, end = wanted[index][1].split(_SYSTEM)
            system = said[len(begin) : len(said) - len(end)]
            is_plain = not any(mark in system for mark in ("<|", *known.special))
            if kind == "text" and said == begin + system + end and is_plain:
                return replace(known, name=f"{known.name} with a system turn", system=system)
    return None


RESERVED_ARGS = {"messages", "add_generation_prompt", "continue_final_message"}
ANOTHER = (
    "give the model another one: smallmind train CHATS --init-from MODEL --chat-template chatml"
)


def format_of(tokenizer: Tokenizer) -> ChatFormat | None:
    """Returns the template that a tokenizer carries, or None. InputError if it cannot be used."""
    try:
        return find_template(tokenizer)
    except InputError as error:
        raise InputError(f"{error}; or {ANOTHER}") from None


def with_template_args(
    tokenizer: Tokenizer, args: Mapping[str, Any], checks: bool = True
) -> Tokenizer:
    """Returns the tokenizer with variables for its template besides the conversation, kept with it.

    With `checks`, InputError for one that the template does not read.
    """
    if not args:
        return tokenizer
    template = format_of(tokenizer)
    text = template.jinja if template else ""
    for name in args if checks else ():
        if name in RESERVED_ARGS or not re.search(rf"\b{re.escape(name)}\b", text):
            reason = "is always given" if name in RESERVED_ARGS else "is not in the chat template"
            raise InputError(f"template_args: {name} {reason}; leave it out")
    files = {name: dict(part) for name, part in tokenizer.published.items()}
    settings = files.setdefault(TOKENIZER_CONFIG, {})
    settings[TEMPLATE_ARGS] = {**settings.get(TEMPLATE_ARGS, {}), **args}
    return tokenizer.with_published(files)


def asked(tokenizer: Tokenizer, question: str) -> np.ndarray:
    """question -> ids (n,) up to where its answer begins. InputError without a template."""
    template = format_of(tokenizer)
    if template is None:
        raise InputError("the model has no chat template; leave out --template-args")
    return template.prompt(tokenizer, [Turn(USER, question)])


def template_args(text: str | None) -> dict[str, Any]:
    """Returns the variables in a JSON object; none of None. InputError if it is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InputError(
            f"template_args={text!r} must be a JSON object, as in '{{\"enable_thinking\": false}}'"
        )
    return found


def find_template(tokenizer: Tokenizer) -> ChatFormat | None:
    """-> the same as `format_of`, but an error only says what is wrong."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _find(tokenizer)
    return _FOUND[tokenizer]


# A template in Jinja is rendered to study it: once for a tokenizer.
_FOUND: "WeakKeyDictionary[Tokenizer, ChatFormat | None]" = WeakKeyDictionary()


def _find(tokenizer: Tokenizer) -> ChatFormat | None:
    said = tokenizer.published.get(TOKENIZER_CONFIG, {}).get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in said if isinstance(one, Mapping)}
        said = named.get("default")
    if not isinstance(said, str):
        return None
    known = _known(said)
    if known and set(known.special) <= set(tokenizer.special):
        return known
    from smallmind.text.jinja_template import JinjaTemplate

    return JinjaTemplate.of(said, tokenizer)


def _ending(tokenizer: Tokenizer, end: int) -> Tokenizer:
    """Returns the tokenizer with a token among those that end what a model writes."""
    if end in tokenizer.ends:
        return tokenizer
    files = {name: dict(part) for name, part in tokenizer.published.items()}
    files.setdefault(GENERATION_CONFIG, {})["eos_token_id"] = sorted({end, *tokenizer.ends})
    return tokenizer.with_published(files)


def stopping(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer with the end of a turn among the tokens that end what a model writes.

    The files of some models only name the end of a text.
    """
    found = format_of(tokenizer)
    return _ending(tokenizer, tokenizer.special[found.end]) if found else tokenizer


def fit_template(tokenizer: Tokenizer, name: str | None) -> tuple[Tokenizer, ChatFormat]:
    """-> the tokenizer with the special tokens of its own template, or of the one named, and that.

    Without a name, a tokenizer without a template gets one whose tokens it has, else ChatML.
    InputError for an unknown name.
    """
    found = format_of(tokenizer) if name is None else None
    if found:
        return _ending(tokenizer, tokenizer.special[found.end]), found
    names = set(tokenizer.special)
    has = (x for x, t in TEMPLATES.items() if len(t.special) > 1 and names >= set(t.special))
    if (name := name or next(has, "chatml")) not in parts.CHAT_TEMPLATES:
        raise InputError(f"chat_template={name!r} must be one of {', '.join(parts.CHAT_TEMPLATES)}")
    grown = tokenizer.with_special(parts.CHAT_TEMPLATES[name]["special"])
    template: ChatFormat
    if name in TEMPLATES:
        template = TEMPLATES[name]
    else:
        from smallmind.text.jinja_template import JinjaTemplate

        template = JinjaTemplate.of(parts.CHAT_TEMPLATES[name]["jinja"], grown)
    return grown.with_published(template.published(grown)), template

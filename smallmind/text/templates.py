"""The chat templates that need no other package, and the one that a tokenizer carries."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from smallmind.checks import InputError
from smallmind.text.chat import (
    ASSISTANT,
    GENERATION_CONFIG,
    ROLES,
    SYSTEM,
    TOKENIZER_CONFIG,
    USER,
    Conversation,
    Format,
    Rendered,
    Turn,
    is_learned,
)
from smallmind.text.tokenizer import Tokenizer


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

    def render(
        self, conversation: Conversation, answers: bool = False, **_variables: Any
    ) -> Rendered:
        turns = list(conversation)
        if self.system and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, self.system))
        parts, length, learned, cuts, said = [self.begin], len(self.begin), [], [], []
        previous = ""
        for turn in turns:
            role, text = turn.role, turn.text.strip() if self.strips else turn.text
            if previous == ASSISTANT and role != ASSISTANT:
                cuts.append(length)
            header, after = self.before[role], self.after[role]
            if role == ASSISTANT:
                text = text if text.startswith(self.lead) else self.lead + text
            begins = length + len(header)
            said.append((begins, begins + len(text)))
            if is_learned(turn):
                learned.append((begins, begins + len(text) + len(self.end)))
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
        return _JINJA[self.name].replace(_SYSTEM, repr('"' + self.system)[2:-1])


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
# For other programs: each writes what the template of its name does.
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
        "{{ 'A:' + ('' if message['content'][:1] == ' ' else ' ') + message['content']"
        " + '<|endoftext|>' }}{% else %}"
        "{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    ),
}
# The characters of all headers, which a vocabulary of characters has to have.
HEADERS = "".join(
    sorted({c for t in TEMPLATES.values() for part in t.before.values() for c in part})
)
_WITH_SYSTEM = "chatml with a system turn"
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
        return "'" + repr('"' + text)[2:]  # always in single quotes
    return f"[ {token[1:].strip()!r} ]" if token[0] == "." and len(token) > 1 else token


def _known(jinja: str) -> Format | None:
    """Returns the known template that does the same as one in Jinja; None if there is none."""
    steps = _steps(jinja)
    for name, known in TEMPLATES.items():
        if steps == _steps(_JINJA[name]):
            return known
    wanted = _steps(_JINJA[_WITH_SYSTEM])
    place = next(i for i, (_, what) in enumerate(wanted) if _SYSTEM in what)
    begin, end = wanted[place][1].split(_SYSTEM)
    if [*steps[:place], *steps[place + 1 :]] != [*wanted[:place], *wanted[place + 1 :]]:
        return None
    kind, said = steps[place]
    system = said[len(begin) : -len(end)]
    if kind != "text" or said != begin + system + end or "<|" in system:
        return None
    return _chatml(_WITH_SYSTEM, system)


ANOTHER = (
    "give the model another one: smallmind train CHATS --init-from MODEL --chat-template chatml"
)


def format_of(tokenizer: Tokenizer) -> Format | None:
    """The template that a tokenizer carries; None if it has none.

    Known ones need no other package. InputError if it is damaged, or the package for templates in
    Jinja is missing.
    """
    try:
        return find_template(tokenizer)
    except InputError as error:
        raise InputError(f"{error}; or {ANOTHER}") from None


def find_template(tokenizer: Tokenizer) -> Format | None:
    """Like `format_of`, but an error only says what is wrong."""
    if tokenizer not in _FOUND:
        _FOUND[tokenizer] = _find(tokenizer)
    return _FOUND[tokenizer]


# A template in Jinja is rendered to study it: once for a tokenizer.
_FOUND: "WeakKeyDictionary[Tokenizer, Format | None]" = WeakKeyDictionary()


def _find(tokenizer: Tokenizer) -> Format | None:
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
    """The tokenizer with a token among those that end what a model writes."""
    if end in tokenizer.ends:
        return tokenizer
    files = {name: dict(part) for name, part in tokenizer.published.items()}
    files.setdefault(GENERATION_CONFIG, {})["eos_token_id"] = sorted({end, *tokenizer.ends})
    return tokenizer.with_published(files)


def fit_template(tokenizer: Tokenizer, name: str | None) -> tuple[Tokenizer, Format]:
    """The tokenizer with the special tokens of its own template, or of the one named, and that.

    Without a name, a tokenizer without a template gets ChatML. InputError for an unknown name.
    """
    found = format_of(tokenizer) if name is None else None
    if found:
        return _ending(tokenizer, tokenizer.special[found.end]), found
    if (name := name or "chatml") not in TEMPLATES:
        raise InputError(f"chat_template={name!r} must be one of {', '.join(TEMPLATES)}")
    template = TEMPLATES[name]
    grown = tokenizer.with_special(template.special)
    return grown.with_published(template.published(grown)), template

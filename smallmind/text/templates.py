"""The chat templates that need no other package, and the one that a tokenizer carries."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smallmind.checks import InputError
from smallmind.text.chat import (
    ASSISTANT,
    ROLES,
    SYSTEM,
    USER,
    Conversation,
    Format,
    Rendered,
    Turn,
    free_character,
    guarded,
)
from smallmind.text.tokenizer import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"


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
        guard = free_character(conversation)
        turns = list(conversation)
        if self.system and not (turns and turns[0].role == SYSTEM):
            turns.insert(0, Turn(SYSTEM, self.system))
        parts, length, learned, cuts = [self.begin], len(self.begin), [], []
        previous = ""
        for role, text, *_ in turns:
            if previous == ASSISTANT and role != ASSISTANT:
                cuts.append(length)
            text = guarded(text.strip() if self.strips else text, self.special, guard)
            header, after = self.before[role], self.after[role]
            if role == ASSISTANT:
                text = text if text.startswith(self.lead) else self.lead + text
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

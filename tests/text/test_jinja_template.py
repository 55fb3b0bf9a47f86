"""Templates of other programs: rendered as transformers does, and harmless whatever they try."""

import numpy as np
import pytest

from smallmind import InputError, Tokenizer
from smallmind.text import jinja_template
from smallmind.text.chat import KINDS, LEARNED, Turn
from smallmind.text.jinja_template import JinjaTemplate
from smallmind.text.templates import TEMPLATES, fit_template, format_of

pytest.importorskip("jinja2")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]
# A template that only Jinja can render: it counts, trims, and has macros.
ODD = (
    "{% macro head(role, i) %}<|im_start|>{{ role }} {{ i }}\n{% endmacro %}"
    "{{ bos_token }}\n"
    "{% for message in messages %}\n"
    "    {{- head(message.role, loop.index) }}{{ message.content | trim }}<|im_end|>\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ head('assistant', messages | length + 1) }}{% endif %}"
)
CONVERSATION = [
    Turn("user", " Who? "),
    Turn("assistant", "I <|im_end|> am."),
    Turn("user", "<s>Why?"),
    Turn("assistant", "So."),
]


def carrying(template):
    tokenizer = Tokenizer(kind="byte").with_special(SPECIAL)
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    return tokenizer.with_published({"tokenizer_config.json": config})


def test_a_template_of_another_program():
    tokenizer = carrying(ODD)
    found = format_of(tokenizer)
    assert isinstance(found, JinjaTemplate) and found.end == "<|im_end|>"
    marked = found.encode(tokenizer, CONVERSATION)
    assert tokenizer.decode(marked // KINDS) == (
        "<s>\n<|im_start|>user 1\nWho?<|im_end|><|im_start|>assistant 2\nI <|im_end|> am.<|im_end|>"
        "<|im_start|>user 3\n<s>Why?<|im_end|><|im_start|>assistant 4\nSo.<|im_end|>"
    )
    learned = marked[marked % KINDS == LEARNED] // KINDS
    assert tokenizer.decode(learned) == "I <|im_end|> am.<|im_end|>So.<|im_end|>"
    ends = (learned == tokenizer.special["<|im_end|>"]).sum()
    assert ends == 2 and (marked // KINDS == tokenizer.special["<s>"]).sum() == 1
    prompt = found.prompt(tokenizer, CONVERSATION[:3])
    np.testing.assert_array_equal(prompt, marked[: len(prompt)] // KINDS)
    assert fit_template(tokenizer, None) == (tokenizer, found) or found.jinja == ODD


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_published_writes_what_the_known_template_writes(name):
    grown, known = fit_template(Tokenizer(kind="byte"), name)
    found = JinjaTemplate.of(known.jinja, grown)
    for turns in (CONVERSATION, [Turn("system", "Be."), *CONVERSATION]):
        np.testing.assert_array_equal(found.encode(grown, turns), known.encode(grown, turns))
        np.testing.assert_array_equal(
            found.prompt(grown, turns[:-1]), known.prompt(grown, turns[:-1])
        )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "cannot be rendered: OverflowError"),
        ("{{ 'a' * 10**11 }}", "too much memory"),
        (
            "{% set x = namespace(s='a' * 2**20) %}" + "{% set x.s = x.s + x.s %}" * 20,
            "too much memory",
        ),
        ("{{ '%99999999999d' | format(1) }}", "cannot be rendered"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered: SecurityError"),
        ("{{ messages.append(1) }}", "cannot be rendered: SecurityError"),
        ("{% import 'os' as os %}", "cannot be rendered"),
        ("{% include '/etc/passwd' %}", "cannot be rendered"),
        ("{{ cycler.__init__.__globals__.os.system('false') }}", "cannot be rendered"),
        ("{{ raise_exception('no') }}", "cannot be rendered: TemplateError: no"),
        ("{% if", "cannot be rendered: TemplateSyntaxError"),
        ("{{ messages[0].content }}", "no special token at the end of an answer"),
        ("x" * 100, "no special token at the end of an answer"),
    ],
)
def test_hostile_templates_are_refused(template, words):
    with pytest.raises(InputError, match=words) as error:
        format_of(carrying(template))
    assert len(str(error.value).splitlines()) == 1


def test_a_template_without_an_end_is_stopped(monkeypatch):
    monkeypatch.setattr(jinja_template, "STARTING", 3.0)
    endless = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    with pytest.raises(InputError, match="takes more than 3 seconds or 1 GB"):
        format_of(carrying(endless))


def test_an_answer_that_is_written_in_another_way_later_is_refused():
    last_only = (
        "{% for message in messages %}<|im_start|>"
        "{{ '...' if message.role == 'assistant' and not loop.last else message.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tokenizer = carrying(last_only)
    with pytest.raises(InputError, match="in another way once it goes on"):
        format_of(tokenizer).encode(tokenizer, CONVERSATION)


def test_without_the_package_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(jinja_template.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="needs jinja2: pip install"):
        format_of(carrying(ODD))
    assert format_of(fit_template(Tokenizer(kind="byte"), "llama3")[0]) is TEMPLATES["llama3"]

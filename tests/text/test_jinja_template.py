"""Templates of other programs: rendered as transformers does, and harmless whatever they try."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import InputError, Tokenizer
from smallmind.corpus import preparation
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import PLAN, Encoding, prepare
from smallmind.corpus.reading import Report
from smallmind.corpus.tokens import TokensOnDisk
from smallmind.runs.source import ConversationSource, read_source
from smallmind.text import jinja_template
from smallmind.text.chat import CUT, LEARNED, MARK_KINDS, Located, Turn, with_tools
from smallmind.text.chat import TEXT as TEXT_ROLE
from smallmind.text.jinja_process import Traced, of_template
from smallmind.text.jinja_template import JinjaTemplate
from smallmind.text.templates import TEMPLATES, KnownTemplate, fit_template, format_of
from tests.programs import PATIENCE, output_of, started

pytest.importorskip("jinja2")
START, END, BEGIN, THINK, THOUGHT = SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>"),
    *("<think>", "</think>"),
)
SHOWN = [THINK, THOUGHT]  # tokens that belong to the text
TEXT = "".join(map(chr, range(32, 127))) + "\n"
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
    """A tokenizer with a template, and with tokens of both kinds."""
    data = Tokenizer(TEXT, "bpe", vocab_size=257).with_special(SPECIAL).as_json()
    for token in data["added_tokens"]:
        token["special"] = token["content"] not in SHOWN
    tokenizer = Tokenizer.from_json(data)
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    return tokenizer.with_published({"tokenizer_config.json": config})


def test_a_template_of_another_program():
    tokenizer = carrying(ODD)
    found = format_of(tokenizer)
    assert isinstance(found, JinjaTemplate) and found.end == "<|im_end|>"
    marked = found.encode(tokenizer, CONVERSATION)
    assert tokenizer.decode(marked // MARK_KINDS) == (
        "<s>\n<|im_start|>user 1\nWho?<|im_end|><|im_start|>assistant 2\nI <|im_end|> am.<|im_end|>"
        "<|im_start|>user 3\n<s>Why?<|im_end|><|im_start|>assistant 4\nSo.<|im_end|>"
    )
    learned = marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS
    assert tokenizer.decode(learned) == "I <|im_end|> am.<|im_end|>So.<|im_end|>"
    ends = (learned == tokenizer.special["<|im_end|>"]).sum()
    assert ends == 2 and (marked // MARK_KINDS == tokenizer.special["<s>"]).sum() == 1
    prompt = found.prompt(tokenizer, CONVERSATION[:3])
    np.testing.assert_array_equal(prompt, marked[: len(prompt)] // MARK_KINDS)
    fitted, again = fit_template(tokenizer, None)
    assert again is found and tokenizer.special[END] in fitted.ends - tokenizer.ends
    assert fit_template(fitted, None)[0] is fitted and format_of(fitted).jinja == ODD


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
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no special token at the end of an"),
        ("{{ messages[0].content }}", "does not write what is said"),
        ("x" * 100, "does not write what is said"),
        ("{{ messages[0].content.encode().decode() }}<|im_end|>", "does not write what is said"),
    ],
)
def test_hostile_templates_are_refused(template, words):
    with pytest.raises(InputError, match=words) as error:
        format_of(carrying(template))
    assert len(str(error.value).splitlines()) == 1


ENDLESS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


def test_a_template_without_an_end_is_stopped(monkeypatch):
    monkeypatch.setattr(jinja_template, "MAX_SECONDS", 1.0)
    with pytest.raises(InputError, match="takes more than 1 seconds of computing or 1 GB"):
        format_of(carrying(ENDLESS))
    assert format_of(carrying(ODD)).end == "<|im_end|>"  # in a new process


def test_a_template_that_leaves_out_answers_is_refused():
    last_only = (
        "{% for message in messages %}<|im_start|>"
        "{{ '...' if message.role == 'assistant' and not loop.last else message.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    with pytest.raises(InputError, match="does not write what is said"):
        format_of(carrying(last_only))


def test_without_the_package_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(jinja_template.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="needs jinja2: pip install"):
        format_of(carrying(ODD))
    assert format_of(fit_template(Tokenizer(kind="byte"), "llama3")[0]) is TEMPLATES["llama3"]


def chatml(content="message.content", before="", after=""):
    """ChatML that writes an answer in some way."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
        + f"{{% if message.role == 'assistant' %}}{before}{{{{ {content} }}}}{after}{{% else %}}"
        + "{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def learned_by(template, turns):
    tokenizer = carrying(template)
    marked = format_of(tokenizer).encode(tokenizer, turns)
    return tokenizer.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)


def counted(tokenizer, ids, name):
    return int((ids == tokenizer.special[name]).sum())


WAYS = [
    *("message.content", "message['content']", "message.content | trim", "(message.content)[:]"),
    *("message.content | string", "message.content.strip()", "message.content.lstrip('\\n')"),
    *(
        "message.content ~ ''",
        "'' ~ message.content",
        "message.content * 1",
        "'' + message.content",
    ),
    *("message.content.split('zz') | join('zz')", "'zz'.join(message.content.split('zz'))"),
    *("message.content.splitlines(true) | join", "message.content | list | join"),
    *("message.content | replace('zz', 'y')", "message.content.replace('zz', 'y')"),
    *("'X' | replace('X', message.content)", "'X'.replace('X', message.content)"),
    *("message.content.partition('zz') | join", "message.content.rpartition('zz') | join"),
    *("'%s' % message.content", "'%s%s' % (message.content, '')", "'%s' | format(message.content)"),
    *("'{}'.format(message.content)", "'{x}'.format(x=message.content)"),
    *("'{x}'.format_map({'x': message.content})", "'%(x)s' | format(x=message.content)"),
    *("message.content.ljust(3)", "message.content | indent(0)", "message.content | safe"),
    *("message.content | wordwrap(999)", "message.content | truncate(999)"),
    *(
        "message.content | reverse | reverse",
        "message.content[::-1][::-1]",
        "message['content'][0:]",
    ),
    *(
        "message.content.lower()",
        "message.content | lower",
        "message.content.swapcase().swapcase()",
    ),
    *("[message.content] | first", "[message.content] | map('trim') | list | last"),
    *("dict(x=message.content).x", "namespace(x=message.content).x", "message.get('content')"),
    *("messages[loop.index0:] | map(attribute='content') | first", "[message][0].content"),
    *("message.content | tojson", "message | tojson", "message.content | pprint"),
    *("message.content | escape | string | replace('&lt;', '<') | replace('&gt;', '>')",),
    *("message.content | title", "message.content.title().lower()", "message.content | center(3)"),
    *("message.content.removeprefix('zz').removesuffix('zz')", "message.content.expandtabs()"),
]


def test_what_is_said_never_becomes_a_special_token():
    """Whatever a template does with it; and it is learned, up to the token of the template."""
    hostile = "a<|im_end|>b<|IM_END|><|im_<|im_end|>end|>"
    turns = [Turn("user", "c"), Turn("assistant", hostile)]
    templates = []  # while there is one, the process that renders it serves the next
    for way in WAYS:
        tokenizer = carrying(chatml(way))
        template = format_of(tokenizer)
        templates.append(template)
        marked = template.encode(tokenizer, turns)
        assert counted(tokenizer, marked // MARK_KINDS, END) == 2, way
        learned = marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS
        text = tokenizer.decode(learned)
        assert text.lower().count("im_end") == 4 and text.endswith(END), way
        assert counted(tokenizer, learned, END) == 1, way
        assert learned[-1] == tokenizer.special[END], way


@pytest.mark.parametrize(
    ("before", "content", "after"),
    [
        ("{% macro m(x) %}{{ x }}{% endmacro %}", "m(message.content)", ""),
        (
            "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}",
            "message.content",
            "{% endcall %}",
        ),
        ("{% set x %}", "message.content", "{% endset %}{{ x }}"),
        ("{% filter trim %}", "message.content", "{% endfilter %}"),
        ("{% generation %}", "message.content", "{% endgeneration %}"),
        ("{% for c in message.content %}", "c", "{% endfor %}"),
        ("{% for c in [message.content] recursive %}", "c", "{% endfor %}"),
    ],
)
def test_blocks_write_what_is_said_as_it_is(before, content, after):
    said = "a<|im_end|>b"
    turns = [Turn("user", said), Turn("assistant", said), Turn("user", "c"), Turn("assistant", "d")]
    tokenizer, plain = carrying(chatml(content, before, after)), carrying(chatml() + " ")
    expected = format_of(plain).encode(plain, turns)[:-1]
    np.testing.assert_array_equal(format_of(tokenizer).encode(tokenizer, turns), expected)
    assert learned_by(chatml(content, before, after), turns) == f"{said}{END}d{END}"


def test_tokens_that_belong_to_the_text_are_tokens_wherever_they_are():
    tokenizer = carrying(ODD)
    template, said = format_of(tokenizer), "<think>\nso\n</think>\n\nI am<s>."
    for turns in ([Turn("user", said)], [Turn("user", "a"), Turn("assistant", said)]):
        ids = template.encode(tokenizer, turns) // MARK_KINDS
        assert [counted(tokenizer, ids, name) for name in SPECIAL] == [len(turns)] * 2 + [1] * 3
        prompt = template.prompt(tokenizer, turns)
        assert [counted(tokenizer, prompt, name) for name in SHOWN] == [1, 1]
    # So they are for a template that is known, and in a plain document.
    known = TEMPLATES["chatml"]
    ids = known.encode(tokenizer, [Turn("user", said)]) // MARK_KINDS
    assert [counted(tokenizer, ids, name) for name in SPECIAL] == [1, 1, 0, 1, 1]
    ids = known.encode(tokenizer, [Turn(TEXT_ROLE, said)]) // MARK_KINDS
    assert [counted(tokenizer, ids, name) for name in SPECIAL] == [0, 0, 0, 1, 1]


def test_a_template_may_divide_what_a_model_has_written():
    """As it is, with the names of tokens in it."""
    template = chatml("message.content.split('</think>')[-1].lstrip('\\n')")
    tokenizer = carrying(template)
    turns = [Turn("user", "a"), Turn("assistant", "<think>\nx\n</think>\n\nb"), Turn("user", "c")]
    prompt = format_of(tokenizer).prompt(tokenizer, turns)
    assert "x" not in tokenizer.decode(prompt) and counted(tokenizer, prompt, THINK) == 0
    assert tokenizer.decode(prompt).startswith(f"{START}user\na{END}\n{START}assistant\nb{END}\n")


def test_tags_of_generation_do_nothing():
    template = (
        "{% for m in messages %}{{'<|im_start|>'+m.role+'\\n'}}{% if m.role=='assistant' %}"
        "{% generation %}{{m.content+'<|im_end|>'}}{% endgeneration %}{% else %}"
        "{{m.content+'<|im_end|>'}}{% endif %}{{'\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
    )
    tokenizer = carrying(template)
    for turns in (CONVERSATION, CONVERSATION[:2], [Turn("system", "Be."), *CONVERSATION]):
        expected = TEMPLATES["chatml"].encode(tokenizer, turns)
        np.testing.assert_array_equal(format_of(tokenizer).encode(tokenizer, turns), expected)


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content | default('') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_thoughts_go_to_a_template_that_writes_them():
    template = format_of(carrying(THINKING))
    assert template.thinks and template.lead == "<think>\n\n</think>\n\n"
    turns = [Turn("user", "a"), Turn("assistant", "b", thought="h"), Turn("user", "c")]
    turns += [Turn("assistant", "d", thought="hm")]
    assert learned_by(THINKING, turns) == f"b{END}<think>\nhm\n</think>\n\nd{END}"
    turns[-1] = Turn("assistant", "d")
    assert learned_by(THINKING, turns) == f"b{END}<think>\n\n</think>\n\nd{END}"
    assert not format_of(carrying(ODD)).thinks and not TEMPLATES["chatml"].thinks


def test_thoughts_that_a_template_cannot_write_are_counted():
    thinking = (Turn("user", "a"), Turn("assistant", "b", thought="h"))
    report = Report(1, 3, 4, 0, (), ("Read: 2 thoughts",))
    for template, notes in ((ODD, 2), (THINKING, 1)):
        source = ConversationSource([thinking, CONVERSATION, thinking], "a", report=report)
        source.marked(carrying(template))
        source.marked(carrying(template))
        assert len(source.report.notes) == notes
        assert notes == 1 or source.report.notes[1] == (
            "Left out: 2 thoughts, which the chat template cannot render"
        )


OPENING = (  # as that of GLM-4: an answer ends where the next turn begins
    "{% for m in messages %}{{ ('<s>' if m.role == 'user' else '<|im_start|>') + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
TWO_ENDS = (  # as that of gpt-oss: only the last answer has the end that a model writes
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{{ '<s>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "single", "several"),
    [(OPENING, "b<s>", "b<s>d<s>"), (TWO_ENDS, "b<s>", "bd<s>")],
)
def test_the_last_answer_ends_with_a_token_at_which_the_model_stops(template, single, several):
    """Nothing is learned after which it would go on."""
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    assert learned_by(template, turns[:2]) == single
    assert learned_by(template, turns) == several
    tokenizer, found = fit_template(carrying(template), None)
    assert found.end == "<s>" and tokenizer.special["<s>"] in tokenizer.ends
    # A prompt and an answer that is only context are as the template writes them.
    for count in (2, 4):
        context = [*turns[: count - 1], turns[count - 1]._replace(learned=False)]
        assert found.render(context).text == found.render(turns[:count]).text.removesuffix(
            "<s>" if template == OPENING else ""
        )


@pytest.mark.parametrize("name", ["<s>", "<|im_end|>"])
def test_an_earlier_answer_keeps_an_end_at_which_the_model_stops(name):
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    tokenizer = carrying(TWO_ENDS)
    end = {"generation_config.json": {"eos_token_id": tokenizer.special[name]}}
    tokenizer = tokenizer.with_published({**tokenizer.published, **end})
    marked = format_of(tokenizer).encode(tokenizer, turns)
    learned = tokenizer.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)
    assert learned == ("b<|im_end|>d<s>" if name == END else "bd<s>")


@pytest.mark.parametrize(("template", "count"), [(ODD, 1), (THINKING, 0)])
def test_thoughts_left_out_are_counted_in_prepared_conversations(
    tmp_path, monkeypatch, template, count
):
    """In the report of a preparation, also of one that was killed and resumed."""
    rows = [{"question": "a", "answer": "b", "reasoning_content": x} for x in ("h", "", "hm")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    killed_while_encoding(tmp_path, monkeypatch, template)
    shards = prepare(Corpus([tmp_path / "a.jsonl"]), tmp_path / "tokens", encoding(template))
    report = TokensOnDisk.of_shards(shards).report
    note = "Left out: 6 thoughts, which the chat template cannot render"
    assert report.notes.count(note) == count
    assert "Read: 6 thoughts before an answer" in report.notes
    in_memory = read_source(tmp_path / "a.jsonl")
    in_memory.marked(carrying(template))
    assert in_memory.report == report


@pytest.mark.parametrize("is_old", [False, True])
def test_prepared_conversations_have_one_time_whenever_they_are_resumed(
    tmp_path, monkeypatch, is_old
):
    """The plan says when; of one without it, the file does."""
    template = "{{ strftime_now('%d %b %Y') }}" + chatml()
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 5)
    before = datetime.now().replace(microsecond=0)
    killed_while_encoding(tmp_path, monkeypatch, template)
    path, then = tmp_path / "tokens" / PLAN, datetime(2020, 2, 29, 12)
    plan = json.loads(path.read_text())
    assert before <= datetime.fromisoformat(plan.pop("template_time")) <= datetime.now()
    if not is_old:
        plan["template_time"] = then.isoformat()
    path.write_text(json.dumps(plan))
    if is_old:
        os.utime(path, (then.timestamp(),) * 2)
    corpus = Corpus([tmp_path / "a.jsonl"])
    tokens = TokensOnDisk.of_shards(prepare(corpus, tmp_path / "tokens", encoding(template)))
    text = tokens.tokenizer.decode(tokens.tokens[:] // MARK_KINDS)
    assert text.count("29 Feb 2020<|im_start|>user") == 5


def encoding(template):
    return Encoding(carrying(template))


def killed_while_encoding(folder, monkeypatch, template):
    """Begins to prepare a.jsonl in tokens/, up to the plan."""
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "encode_each", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(Corpus([folder / "a.jsonl"]), folder / "tokens", encoding(template))


@pytest.mark.parametrize("template", [ODD, THINKING, chatml()])
def test_context_and_empty_answers_are_not_learned(template):
    turns = [Turn("user", "a"), Turn("assistant", "b", learned=False), Turn("user", "c")]
    turns += [Turn("assistant", ""), Turn("user", "d"), Turn("assistant", " \n", thought="hm")]
    assert learned_by(template, turns) == ""
    learned = learned_by(template, [*turns, Turn("user", "e"), Turn("assistant", "f")])
    assert learned.endswith(f"f{END}") and learned.count(END) == 1


def test_an_answer_that_the_template_refuses_as_it_was_written_is_divided():
    refusing = THINKING.replace(
        "{% for m in messages %}",
        "{% for m in messages %}"
        "{% if '<think>' in m.content %}{{ raise_exception('no') }}{% endif %}",
    )
    tokenizer = carrying(refusing)
    template = format_of(tokenizer)
    for written, said in (
        ("<think>\nhm\n</think>\n\nb", Turn("assistant", "b", thought="hm")),
        ("<think>\n\n</think>\n\nb", Turn("assistant", "b")),
    ):
        turns = [Turn("user", "a"), Turn("assistant", written), Turn("user", "c")]
        expected = template.prompt(tokenizer, [turns[0], said, turns[2]])
        np.testing.assert_array_equal(template.prompt(tokenizer, turns), expected)
    with pytest.raises(InputError, match="refuses the conversation: TemplateError: no"):
        template.prompt(tokenizer, [Turn("user", "<think>")])


def test_the_error_of_a_template_names_the_file_and_the_line(tmp_path):
    alternating = "{% for m in messages %}{% if (m.role == 'user') != loop.index0 is even %}"
    alternating += (
        "{{ raise_exception('roles do not alternate') }}{% endif %}{% endfor %}" + chatml()
    )
    tokenizer = carrying(alternating)
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": pair}] * 56 + [{"messages": [pair[0], *pair]}] + [{"messages": pair}] * 43
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        InputError, match=r"chats.jsonl: line 57: .*roles do not alternate.*correct"
    ):
        read_source(file).marked(tokenizer)
    with pytest.raises(InputError, match=r"chats.jsonl: line 57: "):
        prepare(Corpus([file]), tmp_path / "tokens", Encoding(tokenizer))


def test_the_time_is_that_of_the_conversations_or_now():
    tokenizer = carrying("{{ strftime_now('%d %b %Y') }}" + chatml())
    template = format_of(tokenizer)
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    then = template.at(datetime(2020, 2, 29)).encode(tokenizer, turns) // MARK_KINDS
    assert tokenizer.decode(then).startswith("29 Feb 2020<|im_start|>")
    days = [datetime.now()]
    text = tokenizer.decode(template.prompt(tokenizer, turns))
    days.append(datetime.now())
    assert any(text.startswith(f"{day:%d %b %Y}<|im_start|>") for day in days)


def test_variables_reach_the_template():
    tokenizer = carrying(chatml() + "{% if enable_thinking is false %}<think>{% endif %}")
    prompt = format_of(tokenizer).prompt(tokenizer, CONVERSATION[:1], {"enable_thinking": False})
    assert prompt[-1] == tokenizer.special[THINK]
    assert format_of(tokenizer).prompt(tokenizer, CONVERSATION[:1])[-1] != prompt[-1]


def test_one_process_renders_for_all_templates_and_ends_with_the_last():
    program = (
        "import copy, gc, json, psutil, sys\nfrom smallmind import Tokenizer\n"
        "from smallmind.text.chat import Turn\nfrom smallmind.text.templates import format_of\n"
        "def count(): return len(psutil.Process().children(recursive=True))\n"
        "tokenizers = [Tokenizer.from_saved(saved) for saved in json.loads(sys.argv[1])]\n"
        "for _ in range(100):\n    for tokenizer in tokenizers:\n"
        "        format_of(tokenizer).prompt(tokenizer, [Turn('user', 'a')])\n"
        "        format_of(copy.copy(tokenizer))\n"
        "print(count())\ndel tokenizers, tokenizer\ngc.collect()\nprint(count())"
    )
    saved = [carrying(chatml() + "x").saved, carrying(chatml() + "y").saved]
    assert output_of(program, json.dumps(saved)).split() == ["1", "0"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a process cannot be killed so")
@pytest.mark.parametrize("template", [chatml(), ENDLESS])
def test_no_process_remains_when_the_one_that_asks_is_killed(template):
    program = (
        "import sys\nfrom smallmind.text.jinja_template import _shared_process as shared\n"
        "process = shared()\nrequest = dict(template=sys.argv[1], thoughts=[], parts=False, "
        "now=None, variables={})\nprocess._started()\nprint(process._running.pid, flush=True)\n"
        "process.render(request, [()])\nprint('done', flush=True)\nsys.stdin.read()"
    )
    words = [sys.executable, "-c", program, template]
    with started(words, stdin=subprocess.PIPE) as parent:
        renderer = psutil.Process(int(parent.stdout.readline()))
        if template != ENDLESS:
            assert parent.stdout.readline() == "done\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone, alive = psutil.wait_procs([renderer], timeout=PATIENCE)
    assert gone and not alive


def test_no_file_of_the_working_directory_is_executed(tmp_path):
    for name in ("json", "typing", "re", "signal", "functools", "contextlib", "jinja2", "datetime"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()\n")
    program = (
        "import os, sys\nfrom smallmind.text import jinja_template\n"
        "os.chdir(sys.argv[1])\nprocess = jinja_template._shared_process()\n"
        "request = dict(template='{{ 2 }}', thoughts=[], parts=False, now=None, variables={})\n"
        "print(process.render(request, [()]))"
    )
    assert "text='2'" in output_of(program, str(tmp_path))
    assert not (tmp_path / "executed").exists()


CHATML_VARIANTS = {
    "as it is written here": TEMPLATES["chatml"].jinja,
    "real line breaks": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "lines": (
        "{% for message in messages %}\n{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\n"
        "{{ '<|im_start|>assistant\n' }}{% endif %}\n"
    ),
    "another name, attributes, a default": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}{% for m in messages %}{{'<|im_start|>' + m.role + '\\n' + m.content + "
        "'<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "white space control, other quotes": (
        '{#- ChatML -#}\n{%- for message in messages -%}\n  {{- "<|im_start|>" ~ message.role ~ '
        '"\\n" -}}\n  {{- message.content -}}\n  {{- "<|im_end|>\\n" }}\n{%- endfor %}\n'
        '{%- if add_generation_prompt %}\n  {{- "<|im_start|>assistant\\n" }}\n{%- endif %}\n'
    ),
    "text": (
        "  {% for message in messages %}\n<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n  {% endfor %}\n"
        "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
    ),
}
OTHERS = {
    "two line breaks": CHATML_VARIANTS["text"].replace("<|im_end|>\n", "<|im_end|>\n\n"),
    "stripped": TEMPLATES["chatml"].jinja.replace("['content']", "['content'] | trim"),
    "spaces": CHATML_VARIANTS["text"].replace("{{ message['content'] }}", " {{ message.content }}"),
    "another condition": TEMPLATES["chatml"].jinja.replace("if add_", "if not add_"),
    "another role": TEMPLATES["chatml"].jinja.replace("assistant\\n", "model\\n"),
}


@pytest.mark.parametrize("name", CHATML_VARIANTS)
def test_chatml_is_known_however_it_is_written(name):
    tokenizer = carrying(CHATML_VARIANTS[name])
    assert format_of(tokenizer) is TEMPLATES["chatml"]
    in_jinja = JinjaTemplate.of(CHATML_VARIANTS[name], tokenizer)
    for turns in (CONVERSATION, CONVERSATION[:2], [Turn("system", "Be."), *CONVERSATION]):
        expected = in_jinja.encode(tokenizer, turns)
        np.testing.assert_array_equal(format_of(tokenizer).encode(tokenizer, turns), expected)
        expected = in_jinja.prompt(tokenizer, turns[:-1])
        np.testing.assert_array_equal(format_of(tokenizer).prompt(tokenizer, turns[:-1]), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_almost_chatml_is_something_else(name):
    assert OTHERS[name] not in CHATML_VARIANTS.values()
    assert isinstance(format_of(carrying(OTHERS[name])), JinjaTemplate)


def test_chatml_with_a_system_turn_is_known_too():
    """As in published models, with real line breaks; a text may have quotes."""
    said = "You are kind,\nit's 5\\6."
    written = said.replace("\\", "\\\\").replace("'", "\\'")
    template = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\n" + written + "<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = carrying(template)
    found = format_of(tokenizer)
    assert isinstance(found, KnownTemplate) and found.system == said
    assert format_of(tokenizer.with_published(found.published(tokenizer))) == found
    for turns in (CONVERSATION, [Turn("system", "Be."), *CONVERSATION]):
        expected = JinjaTemplate.of(template, tokenizer).encode(tokenizer, turns)
        np.testing.assert_array_equal(found.encode(tokenizer, turns), expected)
        expected = JinjaTemplate.of(found.jinja, tokenizer).encode(tokenizer, turns)
        np.testing.assert_array_equal(found.encode(tokenizer, turns), expected)


def test_an_answer_that_nobody_waited_for_is_never_that_of_another(monkeypatch):
    tokenizer = carrying(chatml() + "x")
    template = format_of(tokenizer)
    expected = [template.render([Turn("user", text)]) for text in "ab"]
    with monkeypatch.context() as patched:
        patched.setattr(jinja_template, "_written", lambda _: 1 / 0)  # as Ctrl-C would
        with pytest.raises(ZeroDivisionError):
            template.render_all([[Turn("user", text)] for text in "abc"])
    assert [template.render([Turn("user", text)]) for text in "ab"] == expected


def test_thousands_of_turns_are_rendered_like_few():
    tokenizer = carrying(ODD)
    template, few = format_of(tokenizer), CONVERSATION[:2]
    marked = template.encode(tokenizer, few * 3_000)
    assert (marked % MARK_KINDS == LEARNED).sum() == 3_000 * len("I <|im_end|> am.") + 3_000
    assert counted(tokenizer, marked // MARK_KINDS, END) == 6_000


# Templates do this with texts. Here the template wrote digits, one turn capitals and another one
# the rest, so that each character tells where it comes from.
OPERATIONS = [
    *(lambda a, b: a + b, lambda a, b: b + a, lambda a, _: "1" + a, lambda a, _: a + "1"),
    *(lambda a, b: a.strip(b), lambda a, _: a.lstrip("1a"), lambda a, _: a.rstrip("A1")),
    *(lambda a, _: a.strip(), lambda a, _: a * 2, lambda a, _: 2 * a, lambda a, _: a[1:-1]),
    *(lambda a, _: a[::-1], lambda a, _: a[:1], lambda a, b: a.removeprefix(b[:1])),
    *(lambda a, b: a.removesuffix(b[:1]), lambda a, b: b.join([a, "2", a])),
    *(lambda a, _: a.join(a.split()), lambda a, b: b.join(a.split("1"))),
    *(lambda a, b: b.join(a.split("1", 1)), lambda a, b: b.join(a.rsplit("a", 1))),
    *(lambda a, b: b.join(a.rsplit(None, 1)), lambda a, b: b.join(a.split(None, 1))),
    *(lambda a, b: b.join(a.splitlines()), lambda a, _: "".join(a.splitlines(True)) and a),
    *(lambda a, _: a.partition("1")[2], lambda a, _: a.rpartition("1")[0]),
    *(
        lambda a, _: a.partition("A")[0],
        lambda a, b: a.replace("1", b),
        lambda a, _: a.replace("a", "2"),
    ),
    *(lambda a, b: a.replace("A", b, 1), lambda a, b: b.join(list(a))),
]
CHARACTERS = st.lists(st.sampled_from("11aaAA \n"), max_size=12).map("".join)


def origin_of(character):
    return 0 if character.isdigit() else 2 + character.isupper()


@settings(deadline=None)
@given(CHARACTERS, CHARACTERS, st.lists(st.sampled_from(OPERATIONS), max_size=4))
def test_texts_are_followed_character_by_character(first, second, operations):
    def traced(text):
        return Traced(text, "".join(chr(origin_of(character)) for character in text))

    plain, followed = first, traced(first)
    for operation in operations:
        plain, followed = operation(plain, second), operation(followed, traced(second))
    assert followed == plain
    assert list(map(ord, of_template(followed)._origin)) == list(map(origin_of, plain))


# As those of Qwen and of Llama, without their instructions.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{%- for tool in tools %}"
    "{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response>' }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    '{{- \'<think>{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments | tojson }}{{- '}</think>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA = (
    "{%- if tools %}{{- '<|im_start|>system ' + (tools | tojson) + '<|im_end|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    '{{- \'<|im_start|>assistant {"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson }}{{- '}<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) }}"
    "{{- ' ' + message.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}"
)
WEATHER = {"type": "function", "function": {"name": "w", "description": "Says <|im_end|>."}}
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "<|im_end|>", "n": 3}}}
CALLING = [
    Turn("user", "Who?"),
    Turn("assistant", "", more=json.dumps({"tool_calls": [{"id": "a", **CALL}]})),
    Turn("tool", "4 <|im_end|>", more=json.dumps({"tool_call_id": "a"})),
    Turn("assistant", "Four."),
    Turn("user", "So?"),
    Turn("assistant", "Yes."),
]
OBJECT = '{"name": "w", "%s": {"city": "<|im_end|>", "n": 3}}'


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (QWEN, f"<think>{OBJECT % 'arguments'}</think>"),
        (LLAMA, OBJECT % "parameters"),
        ("hermes", f"<tool_call>\n{OBJECT % 'arguments'}\n</tool_call>"),
    ],
    ids=["Qwen", "Llama", "hermes"],
)
def test_calls_are_learned_and_results_are_context(template, call):
    if template == "hermes":
        tokenizer, found = fit_template(carrying(ODD), template)
    else:
        tokenizer = carrying(template)
        found = format_of(tokenizer)
    arguments = "parameters" if template == LLAMA else "arguments"
    assert found.tools
    assert found.calling == (call[: call.index("{")], call[call.rindex("}") + 1 :], arguments)
    turns = with_tools(CALLING, [WEATHER])
    marked = found.encode(tokenizer, turns)
    ids, text = marked // MARK_KINDS, tokenizer.decode(marked // MARK_KINDS)
    assert json.dumps(WEATHER) in text and "4 <|im_end|>" in text
    learned = tokenizer.decode(ids[marked % MARK_KINDS == LEARNED])
    assert learned == f"{call}<|im_end|>Four.<|im_end|>Yes.<|im_end|>"
    # Names in what a tool or a client says are text, and a result is never divided from its call.
    assert (ids == tokenizer.special[END]).sum() == len(CALLING) + 1
    assert (marked % MARK_KINDS == CUT).sum() == 1
    for count in (1, 3):
        prompt = found.prompt(tokenizer, turns[:count])
        np.testing.assert_array_equal(prompt, ids[: len(prompt)])


@pytest.mark.parametrize("turns", [CALLING, with_tools(CONVERSATION, [WEATHER])])
@pytest.mark.parametrize("name", ["chatml", "llama3", "qa", ODD])
def test_a_template_without_tools_says_where_they_are(name, turns):
    if name == ODD:
        tokenizer, found = carrying(ODD), format_of(carrying(ODD))
    else:
        tokenizer, found = fit_template(Tokenizer(kind="byte"), name)
    located = Located(turns)
    located.where = "a.jsonl: line 3"
    assert not found.tools
    with pytest.raises(InputError, match=r"^a.jsonl: line 3: the conversation has tools, which"):
        found.encode_all(tokenizer, [CONVERSATION, located])


# Traits of published templates, in as few words as possible.
TRAITS = {
    "a name beside the result": (
        "{{ '<|im_start|>assistant ' }}{% for call in m.tool_calls %}call:{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ m.content }}<|im_end|>",
        "{% set asked = messages[loop.index0 - 1].tool_calls[0] %}<|im_start|>tool "
        "{{ asked.function.name }} {{ m.content }}<|im_end|>",
        'call:w{"city": "<|im_end|>", "n": 3}<|im_end|>',
    ),
    "a name twice in a call": (
        "{{ '<|im_start|>assistant ' }}{% for call in m.tool_calls %}to {{ call.function.name }}:"
        " {{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}<|im_end|>",
        "<|im_start|>tool {{ m.content }}<|im_end|>",
        'to w: w{"city": "<|im_end|>", "n": 3}<|im_end|>',
    ),
    "a prompt that begins as a call": (
        "{{ '<|im_start|>assistant ' }}{% if m.tool_calls %}<thing>"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %}{{ m.content }}<|im_end|>",
        "<|im_start|>tool {{ m.content }}<|im_end|>",
        '<thing>w{"city": "<|im_end|>", "n": 3}<|im_end|>',
    ),
    "arguments as JSON": (
        "{{ '<|im_start|>assistant ' }}{% for call in m.tool_calls %}{{ call.function.name + ' ' + "
        "call.function.arguments }}{% endfor %}{{ m.content }}<|im_end|>",
        "<|im_start|>tool {{ m.content }}<|im_end|>",
        'w {"city": "<|im_end|>", "n": 3}<|im_end|>',
    ),
    "calls without a text": (
        "{{ '<|im_start|>assistant ' }}{% if m.content is none %}"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>",
        "<|im_start|>tool {{ m.content }}<|im_end|>",
        "w{'city': '<|im_end|>', 'n': 3}<|im_end|>",
    ),
    "calls that it does not write": (
        "{# <tool_call> #}{{ '<|im_start|>assistant ' }}{{ m.content }}<|im_end|>",
        "<|im_start|>tool {{ m.content }}<|im_end|>",
        '<tool_call>\n{"name": "w", "arguments": {"city": "<|im_end|>", "n": 3}}\n</tool_call>'
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", TRAITS)
def test_calls_of_other_templates_are_learned_whole(name):
    answer, result, call = TRAITS[name]
    tokenizer = carrying(
        "{% if tools is not none %}<|im_start|>system {{ tools[0] }}<|im_end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + answer
        + "{% elif m.role == 'tool' %}"
        + result
        + "{% else %}<|im_start|>user {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}"
        + ("<think>" if name == "a prompt that begins as a call" else "")
        + "{% endif %}"
    )
    found = format_of(tokenizer)
    assert found.tools and found.end == END
    marked = found.encode(tokenizer, with_tools(CALLING, [WEATHER]))
    ids = marked // MARK_KINDS
    learned = tokenizer.decode(ids[marked % MARK_KINDS == LEARNED])
    assert learned == f"{call}Four.<|im_end|>Yes.<|im_end|>"
    # A tool that a template writes whole is text too, with the names in it.
    assert (ids == tokenizer.special[END]).sum() == len(CALLING) + 1
    assert "system" not in tokenizer.decode(found.encode(tokenizer, CONVERSATION) // MARK_KINDS)


@pytest.mark.parametrize("ends", [[END], [END, BEGIN]])
def test_an_answer_ends_before_a_header_that_is_always_written(ends):
    """Some templates begin the next turn whoever speaks in it; others name two ends."""
    tokenizer = carrying(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant "
    )
    numbers = [tokenizer.special[name] for name in ends]
    config = {**tokenizer.published, "generation_config.json": {"eos_token_id": numbers}}
    found = format_of(tokenizer.with_published(config))
    assert found.end == END
    marked = found.encode(tokenizer, CONVERSATION)
    learned = tokenizer.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)
    assert learned == "I <|im_end|> am.<|im_end|>So.<|im_end|>"


def test_a_call_ends_with_the_token_before_its_result():
    """In GLM's way: the token that ends an answer begins the next turn, whose it is."""
    names = ["<|user|>", "<|answer|>", "<|result|>", "<tool_call>", "</tool_call>"]
    template = (
        "{% for t in tools or [] %}{{ t.function.description }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|answer|>{{ m.content }}{% for c in m.tool_calls %}"
        "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
        "{% endfor %}{% elif m.role == 'tool' %}"
        "<|result|>{{ m.content }}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|answer|>{% endif %}"
    )
    tokenizer = Tokenizer(TEXT, "bpe", vocab_size=257).with_special(names)
    ends = [tokenizer.special[name] for name in ("<|user|>", "<|result|>")]
    settings = {"generation_config.json": {"eos_token_id": ends}}
    settings["tokenizer_config.json"] = {"chat_template": template}
    tokenizer = tokenizer.with_published(settings)
    found = format_of(tokenizer)
    assert found.calls and found.calls.begin == "<tool_call>"
    call = "<tool_call>w<arg_key>city</arg_key><arg_value><|im_end|></arg_value>"
    call += "<arg_key>n</arg_key><arg_value>3</arg_value></tool_call><|result|>"
    for count in (2, 4):
        marked = found.encode(tokenizer, with_tools(CALLING[:count], [WEATHER]))
        learned = tokenizer.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)
        assert learned == call + "Four.<|user|>" * (count == 4)

"""Conversations as tokens: what is learned, where turns begin, what names in a text do not do."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind import InputError, Tokenizer
from smallmind.text.chat import CUT, LEARNED, MARK_KINDS, START, TEXT, Located, Turn
from smallmind.text.templates import TEMPLATES, fit_template, format_of
from tests.programs import refuses

CONVERSATION = [
    Turn("system", "Be brief."),
    Turn("user", "Who has the owl?"),
    Turn("assistant", "Ivy has."),
    Turn("user", "Why?"),
    Turn("assistant", "She found it."),
]
TEXTS = "".join(turn.text for turn in CONVERSATION) + "useraistnmy QA:\n"
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho has the owl?<|im_end|>\n"
        "<|im_start|>assistant\n[Ivy has.<|im_end|>]\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n[She found it.<|im_end|>]\n"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho has the owl?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Ivy has.<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[She found it.<|eot_id|>]"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\nWho has the owl?<end_of_turn>\n"
        "<start_of_turn>model\n[Ivy has.<end_of_turn>]\n<start_of_turn>user\nWhy?<end_of_turn>\n"
        "<start_of_turn>model\n[She found it.<end_of_turn>]\n"
    ),
    "qa": (
        "Be brief.\nQ: Who has the owl?\nA:[ Ivy has.<|endoftext|>]"
        "Q: Why?\nA:[ She found it.<|endoftext|>]"
    ),
}
# As published, and in checkpoints: a run is resumed only with the same text.
JINJA = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{% if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ '<bos>' }}{% set first = '' %}{% set turns = messages %}"
        "{% if messages[0]['role'] == 'system' %}"
        "{% set first = messages[0]['content'] + '\\n\\n' %}"
        "{% set turns = messages[1:] %}{% endif %}{% for message in turns %}{{ '<start_of_turn>' + "
        "('model' if message['role'] == 'assistant' else message['role']) + '\\n' + "
        "(first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "qa": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ 'Q: ' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}"
        "{{ 'A:' + ('' if message['content'][:1] == ' ' else ' ') + message['content']"
        " + '<|endoftext|>' }}{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    ),
}
FREE = ("system", "user", "assistant")  # roles that a turn before others may have
# Bytes and characters, and learned tokens that join headers with what follows them.
KINDS_OF_TOKENS = {
    "char": lambda: Tokenizer(TEXTS, "char"),
    "byte": lambda: Tokenizer(kind="byte"),
    "bpe": lambda: Tokenizer(TEXTS * 20, "bpe", vocab_size=300),
}


@pytest.fixture(params=KINDS_OF_TOKENS, scope="module")
def tokenizer(request):
    return KINDS_OF_TOKENS[request.param]()


def shown(tokenizer, marked):
    """The text of marked tokens, with brackets around what is learned."""
    pieces, learned = [], False
    for token in marked.tolist():
        if (token % MARK_KINDS == LEARNED) != learned:
            pieces.append("]" if learned else "[")
            learned = not learned
        pieces.append(tokenizer.decode([token // MARK_KINDS]))
    return "".join(pieces) + ("]" if learned else "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_as_it_is_written_and_what_is_learned_of_it(tokenizer, name):
    grown, template = fit_template(tokenizer, name)
    marked = template.encode(grown, CONVERSATION)
    assert shown(grown, marked) == EXPECTED[name]
    assert marked[0] % MARK_KINDS == START and (marked % MARK_KINDS == START).sum() == 1
    (cut,) = np.flatnonzero(marked % MARK_KINDS == CUT)
    assert grown.decode(marked[cut:] // MARK_KINDS).endswith(
        "She found it." + template.end + ("\n" if name in ("chatml", "gemma") else "")
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_ends_where_the_answer_begins(tokenizer, name):
    grown, template = fit_template(tokenizer, name)
    prompt = template.prompt(grown, CONVERSATION[:-1])
    marked = template.encode(grown, CONVERSATION)
    np.testing.assert_array_equal(marked[: len(prompt)] // MARK_KINDS, prompt)
    assert (marked[len(prompt) :] % MARK_KINDS == LEARNED)[0]


def test_a_plain_document_is_learned_but_for_its_first_token(tokenizer):
    grown, template = fit_template(tokenizer, "chatml")
    marked = template.encode(grown, [Turn(TEXT, "Who has the owl?")])
    assert (marked % MARK_KINDS).tolist() == [START] + [LEARNED] * (len(marked) - 1)
    assert grown.decode(marked // MARK_KINDS) == "Who has the owl?"


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, role) for name in TEMPLATES for role in FREE if name != "gemma" or role == "system"],
)
def test_names_of_special_tokens_in_a_turn_are_ordinary_text(name, role):
    grown, template = fit_template(Tokenizer(kind="byte"), name)
    hostile = f"a{template.end}{''.join(template.special)}b<|im_<|im_end|>end|>"
    turns = [Turn(role, hostile), Turn("user", hostile), Turn("assistant", hostile)]
    plain = [Turn(turn.role, "ab") for turn in turns]
    marked, expected = template.encode(grown, turns), template.encode(grown, plain)

    def special(tokens):
        return [i for i in (tokens // MARK_KINDS).tolist() if i in grown.special.values()]

    assert special(marked) == special(expected)
    assert grown.decode(marked // MARK_KINDS).count(hostile) == 3


def test_any_character_may_be_in_a_turn():
    """Also those that guard names: all that Unicode keeps for programs, and many after them."""
    grown, template = fit_template(Tokenizer(kind="byte"), "chatml")
    for last in (0xFDD0, 0xFDEF, 0x10FFFF):
        text = "".join(map(chr, range(0xFDD0, last + 1))) + "<|im_end|>"
        marked = template.encode(grown, [Turn("user", text), Turn("assistant", text)])
        ids = marked // MARK_KINDS
        assert (ids == grown.special["<|im_end|>"]).sum() == 2
        assert grown.decode(ids).count(text) == 2
        assert grown.decode(ids[marked % MARK_KINDS == LEARNED]) == text + "<|im_end|>"


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"gemma"}))
def test_nothing_between_two_answers_is_learned(name):
    grown, template = fit_template(Tokenizer(kind="byte"), name)
    marked = template.encode(grown, [Turn("assistant", "a"), Turn("assistant", "b")])
    learned = grown.decode(marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS)
    assert learned == "".join(template.lead + answer + template.end for answer in "ab")


@pytest.mark.parametrize(
    "roles", ["user user", "assistant", "user assistant system", "system system"]
)
def test_roles_alternate_where_the_template_says_so(roles):
    grown, template = fit_template(Tokenizer(kind="byte"), "gemma")
    turns = [Turn(role, "a") for role in roles.split()]
    refuses("^the chat template refuses the conversation: its roles", template.encode, grown, turns)
    located = Located(turns)
    located.where = "a.jsonl, line 57"
    refuses("^a.jsonl, line 57: the chat template refuses", template.encode, grown, located)


def test_thousands_of_turns_are_learned_like_few():
    grown, template = fit_template(Tokenizer(kind="byte"), "chatml")
    few = [Turn("user", "Who?"), Turn("assistant", "Tom.")]
    expected = template.encode(grown, few)
    marked = template.encode(grown, few * 5_000).reshape(5_000, -1)
    np.testing.assert_array_equal(marked[0], expected)
    expected[0] += CUT - START
    np.testing.assert_array_equal(marked[1:], np.tile(expected, (4_999, 1)))


def test_names_of_tokens_that_are_not_of_the_template_are_ordinary_text():
    grown, template = fit_template(KINDS_OF_TOKENS["bpe"]().with_special(["<tool>"]), "chatml")
    said = "a<tool>b<|endoftext|>c"
    turns = [Turn("user", said), Turn("assistant", said)]
    for tokens in (template.encode(grown, turns) // MARK_KINDS, template.prompt(grown, turns)):
        assert not {grown.special["<tool>"], grown.end_of_text} & set(tokens.tolist())
        assert grown.decode(tokens).count(said) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4),
    st.sampled_from(list(TEMPLATES)),
)
def test_any_conversation_gives_its_answers_and_no_more(pairs, name):
    grown, template = fit_template(Tokenizer(kind="byte"), name)
    turns = [
        Turn(role, text)
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    marked = template.encode(grown, turns)
    learned = marked[marked % MARK_KINDS == LEARNED] // MARK_KINDS
    answers = [answer.strip() if template.strips else answer for _, answer in pairs]
    answers = [
        template.lead + answer.removeprefix(template.lead) for answer in answers if answer.strip()
    ]
    wanted = "".join(answer + template.end for answer in answers)
    assert grown.decode(learned) == wanted.encode(errors="replace").decode()


def test_the_template_is_found_again_in_what_is_published(tokenizer):
    for name, template in TEMPLATES.items():
        grown, _ = fit_template(tokenizer, name)
        again = Tokenizer.from_saved(grown.saved)
        assert format_of(again) is template
        assert again.special[template.end] in again.ends
        assert fit_template(again, None) == (again, template)


def test_a_default_system_turn_is_added_where_there_is_none():
    grown = Tokenizer(kind="byte").with_special(TEMPLATES["chatml"].special)
    template = dataclasses.replace(
        TEMPLATES["chatml"], name="chatml with a system turn", system="You are kind."
    )
    grown = grown.with_published(template.published(grown))
    found = format_of(grown)
    assert found == template
    text = grown.decode(found.encode(grown, CONVERSATION[1:3]) // MARK_KINDS)
    assert text.startswith("<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n")
    assert "You are kind" not in grown.decode(found.encode(grown, CONVERSATION) // MARK_KINDS)


def test_the_jinja_of_a_template_does_not_change():
    assert {name: template.jinja for name, template in TEMPLATES.items()} == JINJA


def test_an_unknown_template_is_refused():
    with pytest.raises(InputError, match="chat_template='alpaca' must be one of chatml, llama3"):
        fit_template(Tokenizer(kind="byte"), "alpaca")

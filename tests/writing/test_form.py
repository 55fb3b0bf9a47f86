"""Texts in a form: whatever a model writes can be read, also where max_tokens cuts it."""

import json
import re
import sys

import pytest

from smallmind import Form, ModelConfig, Tokenizer, TransformerModel, generate
from smallmind.settings.config import GenerationConfig
from smallmind.text.hf_tokenizer import HFTokenizer
from smallmind.writing.decoder import Continuation, Decoder
from smallmind.writing.form import FormState
from tests.exchange.models import varied
from tests.programs import refuses

pytest.importorskip("llguidance")

TEXT = '{"name": "Ann", "age": 31, "tags": ["a", "b"]}\n<end>\\ 0456789 [yes] (no) truefalsnul.-+'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c]+ | "(" item ")"'


def tokenizers():
    """One of each kind, with and without a token that ends texts."""
    yield "char", Tokenizer(TEXT)
    yield "char that ends", ending(Tokenizer(TEXT))
    yield "byte", ending(Tokenizer(kind="byte"))
    yield "bpe", ending(Tokenizer(TEXT * 3, "bpe", vocab_size=300))
    pytest.importorskip("tokenizers")
    pieces = ["<unk>", "</s>", "▁", *dict.fromkeys(TEXT.replace(" ", "▁")), '":', '"}', '{"', "▁["]
    vocabulary = [[piece, -float(i)] for i, piece in enumerate(dict.fromkeys(pieces))]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
    contents = {
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary},
        "added_tokens": [{"content": "</s>", "id": 1, "special": True, "normalized": False}],
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
    }
    yield "hf", HFTokenizer.from_json(contents)


def ending(tokenizer):
    made = tokenizer.with_special(("<end>",))
    return made.with_published({"config.json": {"eos_token_id": made.special["<end>"]}})


TOKENIZERS = dict(tokenizers())


def new_model(tokenizer):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, block_size=160, n_layer=1, n_embd=16, n_head=2
    )
    return varied(TransformerModel(config, seed=3), 0.3)


def written(tokenizer, forms, most, seed=0, model=None):
    """Writes a text of each form, all in shared steps."""
    texts = [
        Continuation(
            tokenizer,
            tokenizer.encode("a"),
            GenerationConfig(max_tokens=most, seed=seed + i, temperature=1.5),
            form=form,
        )
        for i, form in enumerate(forms)
    ]
    with Decoder(model or new_model(tokenizer), tokenizer, len(forms)) as decoder:
        for _ in decoder.write([text] for text in texts):
            pass
    return texts


def is_person(text):
    found = json.loads(text)
    return list(found) == ["name", "age", "tags"] and set(found["tags"]) <= {"a", "b"}


FORMS = {
    "json": (None, lambda text: isinstance(json.loads(text), dict)),
    "schema": (SCHEMA, is_person),
    "regex": ("(yes|no)[0-9]{3,}", re.compile("(yes|no)[0-9]{3,}").fullmatch),
    "grammar": (GRAMMAR, re.compile(r"\[[a-c(),]+\]").fullmatch),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_whatever_is_written_can_be_read(tokenizer, kind):
    value, matches = FORMS[kind]
    form, model = Form(tokenizer, kind, value), new_model(tokenizer)
    shortest = len(form.begin()._ending)
    reasons = set()
    for most in (shortest, shortest + 1, shortest + 2, shortest + 7, 90):
        for text in written(tokenizer, [form] * 4, most, most, model):
            assert matches(text.text), (most, text.text)
            assert text.count <= most
            reasons.add(text.ended)
    assert "length" in reasons and reasons <= {"length", "end", "form"}


def test_a_text_is_the_same_whatever_forms_others_have():
    tokenizer = TOKENIZERS["bpe"]
    forms = [None, Form(tokenizer, "json"), Form(tokenizer, "schema", SCHEMA), None]
    together = written(tokenizer, forms, 40)
    for i, (form, text) in enumerate(zip(forms, together, strict=True)):
        (alone,) = written(tokenizer, [form], 40, seed=i)
        assert (alone.text, alone.ended) == (text.text, text.ended)
    assert together[0].text != together[1].text


def test_too_few_tokens_for_the_form_are_said():
    tokenizer = TOKENIZERS["byte"]
    (text,) = written(tokenizer, [Form(tokenizer, "schema", SCHEMA)], 9)
    assert text.ended == "length" and text.count == 9 and text.text.startswith("{")


def test_an_ending_that_is_not_found_is_looked_for_less_and_less_often(monkeypatch):
    searches, searched = [], FormState._searched

    def counted(state, *arguments, **named):
        searches.append(state)
        return searched(state, *arguments, **named)

    monkeypatch.setattr(FormState, "_searched", counted)
    tokenizer = TOKENIZERS["byte"]
    state = Form(tokenizer, "regex", "[a-z]{3000,}").begin()
    searches.clear()
    assert all(state.take(tokenizer.encode("b")[0], left) for left in range(100, 84, -1))
    assert 0 < len(searches) <= 5  # instead of 16


def test_a_form_that_is_complete_ends_the_text():
    tokenizer = TOKENIZERS["char"]
    text = generate(new_model(tokenizer), tokenizer, "a", Form(tokenizer, "regex", "yes|no"))
    assert text in ("ayes", "ano")


def test_a_text_in_a_form_may_have_begun():
    tokenizer = TOKENIZERS["char"]
    form = Form(tokenizer, "regex", "yes|no")
    begun = tokenizer.encode("ye").tolist()
    config = GenerationConfig(max_tokens=9)
    text = Continuation(tokenizer, tokenizer.encode("a"), config, None, begun, form)
    with Decoder(new_model(tokenizer), tokenizer, 1) as decoder:
        assert [token.piece for (token,) in decoder.write([[text]])] == ["s"]
    problem = "no text in this format starts with the given tokens"
    refuses(problem, form.begin, begun[1:])


REFUSED = {
    "not in a property": (
        {"properties": {"q": {"type": "string", "not": {"const": "a"}}}},
        "properties.q.not",
    ),
    "one of several": ({"anyOf": [{"type": "string"}, {"contains": {}}]}, "anyOf.1.contains"),
    "a format": ({"type": "string", "format": "foo"}, "format"),
    "a type": ({"type": "objec"}, "type"),
    "a reference": ({"$ref": "#/nothing"}, "$ref"),
}


@pytest.mark.parametrize(("schema", "keyword"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_compiled_names_its_keyword(schema, keyword):
    problem = re.escape(f"the schema cannot be compiled: the keyword '{keyword}'")
    refuses(problem, Form, TOKENIZERS["byte"], "schema", schema)


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("regex", "(a", "the regex cannot be compiled: "),
        ("grammar", "root ::= other", "the grammar cannot be compiled: "),
        ("schema", "{", "the schema is not JSON: "),
        ("schema", [], "the schema is not a JSON object"),
        ("xml", None, "form='xml' must be one of"),
        ("regex", "ü+", "cannot spell what the regex asks for"),
    ],
)
def test_what_is_no_form_is_refused(kind, value, problem):
    refuses(problem, Form, TOKENIZERS["char"], kind, value)


def test_without_the_package_one_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    refuses(r'pip install "smallmind\[format\]"', Form, Tokenizer("{}"), "json")

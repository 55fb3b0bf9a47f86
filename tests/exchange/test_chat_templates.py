"""Chat templates in exports: transformers makes the same tokens of a conversation as here."""

import json
import random
import re

import pytest

import smallmind
from smallmind import Chat, Tokenizer
from smallmind.text.chat import KINDS as MARKS
from smallmind.text.chat import Turn
from smallmind.text.templates import HEADERS, TEMPLATES, fit_template, format_of
from tests.exchange import chat
from tests.exchange.models import TEXT, model_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.interop
NAMES = sorted({name for template in TEMPLATES.values() for name in template.special})
PIECES = [
    "",
    " ",
    "\n",
    "\r\n\t",
    "\u00a0\u3000",
    "The cat",
    " sat on 12 mats,",
    "it's über Äpfel",
    "日本語",
    "e\u0301👩\u200d👩",
    "{{ messages }}{% if %}{# #}\\n'\"",
    "<|im_",
    "Q: A:",
]
ALPHABET = TEXT + HEADERS + "".join(PIECES + NAMES)
MADE = {
    "char": lambda: Tokenizer(ALPHABET),
    "byte": lambda: Tokenizer(kind="byte"),
    "bpe": lambda: Tokenizer(ALPHABET * 2, "bpe", vocab_size=400),
}
COUNT = 60  # conversations for each template and kind of tokenizer


@pytest.fixture(scope="module", params=[(name, kind) for name in TEMPLATES for kind in MADE])
def exported(request, tmp_path_factory):
    """A template, its tokenizer here and there, and the directory of an export."""
    name, kind = request.param
    tokenizer, template = fit_template(MADE[kind](), name)
    path = tmp_path_factory.mktemp("model") / "model"
    smallmind.export(model_of("Llama", tokenizer, block_size=256), tokenizer, path)
    return template, tokenizer, transformers.AutoTokenizer.from_pretrained(path), path


def conversations(pieces):
    """Draws one to three questions, with or without a system turn and the last answer."""
    choose = random.Random(7)
    for number in range(COUNT):
        roles = ["system"] * (number % 2) + ["user", "assistant"] * choose.randint(1, 3)
        roles = roles[: len(roles) - number // 2 % 2]
        yield [
            Turn(role, "".join(choose.choices(pieces, k=choose.randint(0, 4)))) for role in roles
        ]


def messages_of(conversation):
    return [{"role": turn.role, "content": turn.text} for turn in conversation]


def test_transformers_makes_the_same_tokens(exported):
    template, tokenizer, theirs, _ = exported
    for conversation in conversations(PIECES):
        messages = messages_of(conversation)
        found = theirs.apply_chat_template(messages, return_dict=False)
        assert found == (template.encode(tokenizer, conversation) // MARKS).tolist()
        found = theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
        assert found == template.prompt(tokenizer, conversation).tolist()


def test_names_of_special_tokens_in_a_turn_are_text_as_there(exported):
    """Their template knows no such text: between its special tokens, they are told not to look."""
    template, tokenizer, theirs, _ = exported
    instead = {name: chr(0xE000 + i) for i, name in enumerate(NAMES)}
    special = re.compile("(" + "|".join(map(re.escape, template.special)) + ")")
    count = 0
    for conversation in conversations([*PIECES, *instead.values()]):
        rendered = theirs.apply_chat_template(messages_of(conversation), tokenize=False)
        found = []
        for piece in special.split(rendered):
            if piece in template.special:
                found.append(theirs.convert_tokens_to_ids(piece))
                continue
            for name, character in instead.items():
                count += piece.count(character)
                piece = piece.replace(character, name)
            found += theirs(piece, add_special_tokens=False, split_special_tokens=True).input_ids
        named = []
        for role, text in conversation:
            for name, character in instead.items():
                text = text.replace(character, name)
            named.append(Turn(role, text))
        assert found == (template.encode(tokenizer, named) // MARKS).tolist()
    assert count > COUNT


def test_the_files_say_where_an_answer_ends(exported, tmp_path):
    template, tokenizer, theirs, path = exported
    end = tokenizer.special[template.end]
    assert theirs.eos_token == template.end and theirs.eos_token_id == end
    generation = transformers.GenerationConfig.from_pretrained(path)
    ends = generation.eos_token_id
    assert set(ends if isinstance(ends, list) else [ends]) == tokenizer.ends
    settings = json.loads((path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (path / "chat_template.jinja").read_text() == template.jinja
    smallmind.export(*smallmind.load(path, "numpy"), tmp_path / "model.gguf", "gguf")
    for place in (path, tmp_path / "model.gguf"):
        model, again = smallmind.load(place, "numpy")
        assert format_of(again) is template
        assert again.ends == tokenizer.ends and again.special == tokenizer.special
        assert Chat(model, again, max_tokens=2).say("A cat?") is not None


def test_transformers_answers_as_here(exported):
    _, _, theirs, path = exported
    their_model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = theirs.apply_chat_template(
        [{"role": "user", "content": "A cat?"}], add_generation_prompt=True, return_dict=False
    )
    found = their_model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0]
    answer = theirs.decode(found[len(prompt) :], skip_special_tokens=True)
    ours = Chat(*smallmind.load(path, "numpy"), max_tokens=30, temperature=0)
    assert ours.say("A cat?") == answer.removeprefix(ours.template.lead)


def test_a_named_template_takes_the_place_of_a_models_own(tmp_path):
    _, tokenizer = smallmind.load(chat.made(tmp_path / "source", "SmolLM"), "numpy")
    grown, template = fit_template(tokenizer, "llama3")
    smallmind.export(model_of("Llama", grown), grown, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs.eos_token == template.end
    turns = [Turn("user", "A cat?"), Turn("assistant", "It sat.")]
    found = theirs.apply_chat_template(messages_of(turns), return_dict=False)
    assert found == (template.encode(grown, turns) // MARKS).tolist()
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "model")
    assert set(generation.eos_token_id) == grown.ends >= {grown.special[template.end]}
    assert generation.top_p == chat.SAMPLING["top_p"]

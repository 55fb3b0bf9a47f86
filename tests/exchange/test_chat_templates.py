"""Chat templates in exports: transformers makes the same tokens of a conversation as here."""

import functools
import importlib.util
import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import Chat, Tokenizer
from smallmind.text.chat import LEARNED, Turn
from smallmind.text.chat import MARK_KINDS as MARKS
from smallmind.text.stories import built_in_text
from smallmind.text.templates import HEADERS, TEMPLATES, fit_template, format_of
from tests.exchange import chat
from tests.exchange.models import TEXT, model_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")

pytestmark = pytest.mark.interop
NAMES = sorted({name for template in TEMPLATES.values() for name in template.special})
PIECES = ["", " ", "\n", "\r\n\t", "\u00a0\u3000", "The cat", " sat on 12 mats,", "it's über Äpfel"]
PIECES += ["日本語", "e\u0301👩\u200d👩", "{{ messages }}{% if %}{# #}\\n'\"", "<|im_", "Q: A:"]
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
        texts = ["".join(choose.choices(pieces, k=choose.randint(0, 4))) for _ in roles]
        yield list(map(Turn, roles, texts))


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
        for role, text, *_ in conversation:
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
    _, tokenizer, theirs, path = exported
    their_model = transformers.AutoModelForCausalLM.from_pretrained(path)
    prompt = theirs.apply_chat_template(
        [{"role": "user", "content": "A cat?"}], add_generation_prompt=True, return_dict=False
    )
    found = their_model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0]
    ids = itertools.takewhile(lambda i: i not in tokenizer.ends, found[len(prompt) :].tolist())
    answer = theirs.decode(list(ids))
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


# --- templates of other models ---

# Added tokens, as they stand in templates of published models.
ADDED = re.compile(
    r"<[|\uff5c]?/?[A-Za-z][\w▁ ]*[|\uff5c]?>|\[/?[A-Z_a-z]+\]"
    r"|<(?:turn|channel)\||<\|(?:turn|channel)>"
)
BELONGING = re.compile("think|tool")  # in the names of those that are `special: false`
# transformers' mask of `{% generation %}` also has the end of a prompt, which a model never writes,
# white space after the token that ends a turn, and that token where the model goes on after it.
NEVER_WRITTEN = re.compile(
    r"(\s|<think>|</think>|<eos>|<[|\uff5c](start|end|Assistant)[|\uff5c]>|assistant)*"
)


def templates_of_trl():
    """The templates of models that the package trl has, by name."""
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin if found and found.origin else "").parent / "chat_templates"
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


@functools.cache
def plain_tokens():
    text = built_in_text(20_000)[:20_000] + "".join(map(chr, range(32, 127)))
    return Tokenizer(text, "bpe", vocab_size=500)


def both_of(template):
    """Our tokenizer and that of transformers with a template and all tokens that it names."""
    names = dict.fromkeys(["<bos>", "<eos>", *ADDED.findall(template)])
    data = plain_tokens().with_special(list(names)).as_json()
    for token in data["added_tokens"]:
        token["special"] = not BELONGING.search(token["content"])
    settings = {"chat_template": template, "bos_token": "<bos>", "eos_token": "<eos>"}
    ours = Tokenizer.from_json(data).with_published({"tokenizer_config.json": settings})
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(data)), **settings
    )
    return ours, theirs


TALK = [
    Turn("user", "Who has <think> it?"),
    Turn("assistant", " Ivy has. "),
    Turn("user", "Why?"),
    Turn("assistant", "<think>\nhm\n</think>\n\nSo it is."),
    Turn("user", "Sure?"),
    Turn("assistant", "Yes.", thought="I am"),
]


def talk_of(template, turns):
    def message(turn):
        takes_parts = getattr(template, "parts", False)  # of Jinja
        content = [{"type": "text", "text": turn.text}] if takes_parts else turn.text
        said = {"role": turn.role, "content": content}
        return said | ({"reasoning_content": turn.thought} if turn.thought else {})

    return list(map(message, turns))


@pytest.mark.parametrize("name", templates_of_trl())
def test_a_published_template_gives_the_ids_of_transformers(name):
    """For several turns with thoughts, whole and up to the next answer."""
    ours, theirs = both_of(templates_of_trl()[name])
    template = format_of(ours)
    rendered = 0
    for turns in (TALK, TALK[:2], [Turn("system", "Be brief."), *TALK]):
        messages = talk_of(template, turns)
        try:
            wanted = theirs.apply_chat_template(messages, return_dict=False)
        except jinja2.TemplateError as error:  # no system turns, for some
            with pytest.raises(smallmind.InputError, match=re.escape(str(error))):
                template.encode(ours, turns)
            continue
        rendered += 1
        marked = template.encode(ours, turns)
        if name == "glm4moe":  # the last answer ends as the others do, and as trl's training does
            wanted = [*wanted, ours.special["<|user|>"]]
        assert (marked // MARKS).tolist() == wanted
        asked = {"add_generation_prompt": True, "return_dict": False}
        for count in range(len(turns) % 2 + 1, len(turns), 2):
            wanted = theirs.apply_chat_template(messages[:count], **asked)
            assert template.prompt(ours, turns[:count]).tolist() == wanted
        said = ours.decode(marked[marked % MARKS == LEARNED] // MARKS)
        answers = [turn.text.strip() for turn in turns if turn.role == "assistant"]
        assert all(answer.rpartition("</think>")[2].strip() in said for answer in answers)
        assert not any(turn.text in said for turn in turns if turn.role != "assistant")
        # Earlier answers of one have another end, which its model also writes before an answer.
        ends = (marked == ours.special[template.end] * MARKS + LEARNED).sum()
        assert ends == (1 if name.startswith("gptoss") else len(answers))
    assert rendered >= 2


@pytest.mark.parametrize("name", templates_of_trl())
def test_names_in_a_published_template_are_tokens_only_where_it_writes_them(name):
    ours, theirs = both_of(templates_of_trl()[name])
    template = format_of(ours)
    guarded = [name for name in ours.special if not BELONGING.search(name)]
    # Nothing that a template itself looks for.
    hostile = "".join(one for one in guarded if not re.search("channel|message", one))
    turns = [Turn(turn.role, f"a{hostile}b") for turn in TALK]
    plain = [Turn(turn.role, "ab") for turn in TALK]
    marked, expected = template.encode(ours, turns), template.encode(ours, plain)

    def special(ids):
        return [i for i in (ids // MARKS).tolist() if i in ours.special.values()]

    assert special(marked) == special(expected)
    wanted = theirs.apply_chat_template(talk_of(template, turns), tokenize=False)
    assert ours.decode(marked // MARKS) == wanted + "<|user|>" * (name == "glm4moe")


@pytest.mark.parametrize(
    "name", [name for name, text in templates_of_trl().items() if "endgeneration" in text]
)
def test_what_is_learned_is_what_transformers_masks_and_a_model_writes(name):
    ours, theirs = both_of(templates_of_trl()[name])
    template = format_of(ours)
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = theirs.apply_chat_template(talk_of(template, TALK), **asked)
    masked = np.array(found["assistant_masks"]) == 1
    learned = template.encode(ours, TALK) % MARKS == LEARNED
    assert learned.any() and not (learned & ~masked).any()
    beyond = theirs.decode(np.array(found["input_ids"])[masked & ~learned])
    assert NEVER_WRITTEN.fullmatch(beyond)


def test_the_template_of_smollm2_is_known_without_jinja(tmp_path, monkeypatch):
    """It has real line breaks between its quotes."""
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    source = chat.made(tmp_path / "source", "SmolLM")
    text = (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
        "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (source / "chat_template.jinja").write_text(text)
    _, tokenizer = smallmind.load(source, "numpy")
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    template = format_of(tokenizer)
    for turns in (TALK, TALK[:2], [Turn("system", "Be brief."), *TALK]):
        turns = [turn._replace(thought="") for turn in turns]
        wanted = theirs.apply_chat_template(messages_of(turns), return_dict=False)
        assert (template.encode(tokenizer, turns) // MARKS).tolist() == wanted

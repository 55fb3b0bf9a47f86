"""Pages with a model inside: what they compute in JavaScript is what the model computes here."""

import contextlib
import functools
import json
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

import smallmind
from smallmind import Tokenizer, TransformerModel, parts
from smallmind.exchange.format import padded
from smallmind.files import durable
from smallmind.kernels.bpe.characters import LETTER, NUMBER, OTHER, character_classes
from smallmind.kernels.number_types import DTYPES, FLOAT16, round_to, to_float32
from smallmind.nn.rmsnorm import RMSNorm
from smallmind.randomness import hash64
from smallmind.settings.config import GenerationConfig
from smallmind.text.chat import Turn
from smallmind.text.stories import built_in_text
from smallmind.text.templates import HEADERS, TEMPLATES, fit_template
from smallmind.writing.generation import Writer, stream
from smallmind.writing.sampling import Drawing, SeenTokens, choose_each
from tests.exchange import chat
from tests.exchange.full import Full
from tests.exchange.models import MODELS, ONLY_TRANSFORMERS, tokenizer_of, varied
from tests.programs import PATIENCE, printed_by, refuses
from tests.text import published

NODE = shutil.which("node")
HERE = __file__.removesuffix("test_html.py")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node")

ALL = {
    **MODELS["Llama"],
    "qk_norm": True,
    "value_residual": True,
    "x0_scalars": True,
    "bigram_rows": 2**20,
    "logit_softcap": 9.0,
}
ARCHITECTURES = {
    **MODELS,
    **ONLY_TRANSFORMERS,
    "default": {**MODELS["Qwen3"], "value_residual": True, "bigram_rows": 2**20},
    "everything": ALL,
    "everything, learned positions": {**ALL, "position": "learned", "norm": "layernorm"},
    "hashed pairs": {**MODELS["Llama"], "bigram_rows": 300},
    "no positions": {**MODELS["GPT-2"], "position": "none", "mlp": "swiglu"},
    "odd heads": {**MODELS["Llama"], "head_size": 7},
    "sandwich": {
        **{**ALL, "mlp": "geglu"},
        "part_settings": {"block": "sandwich", "embedding": "scaled"},
    },
    "parallel": {**ALL, "mlp": "gelu-erf", "part_settings": {"block": "parallel"}},
    "not parallel": {
        **MODELS["GPT-2"],
        "part_settings": {"block": "parallel", "parallel_residual": False},
    },
    "by block": {
        **ALL,
        "head_size": 8,
        "part_settings": {
            "window": 7,
            "window_layers": (0, 1, 1),
            "window_theta": 90.0,
            "rotary_share": 0.5,
            "rotary_layers": (1, 1, 0),
            "score_divisor": 11.0,
        },
    },
    "grown": {**ALL, "bigram_vocab": 20, "bigram_rows": 90},
}
# 12 tokens of context are soon full.
SHAPE = {"block_size": 12, "n_embd": 24, "n_layer": 3, "n_head": 4}
PROMPT = "The cat sat on the mat, isn't it?"


@functools.cache
def tokenizer_for(kind):
    return tokenizer_of(kind)


def varied_model(name, tokenizer, tied=True, **fields):
    fields = {**SHAPE, **ARCHITECTURES[name], "tie_weights": tied, **fields}
    return varied(TransformerModel(vocab_size=tokenizer.vocab_size, backend="numpy", **fields))


def page_of(tmp_path, model, tokenizer, **options):
    path = tmp_path / "page.html"
    smallmind.export(model, tokenizer, path, "html", **options)
    return path


def made(tmp_path, name="Llama", tokenizer=None, **fields):
    """A page, its model and its tokenizer, of single characters by default."""
    tokenizer = tokenizer or tokenizer_for("char")
    model = varied_model(name, tokenizer, **fields)
    return page_of(tmp_path, model, tokenizer), model, tokenizer


def asked(page, *calls):
    """The answers of the programs in a page to calls, each a name and its arguments."""
    path = page.with_suffix(".json")
    path.write_text(json.dumps(calls), encoding="utf-8")
    return json.loads(printed_by([NODE, f"{HERE}page.js", str(page), str(path)], timeout=PATIENCE))


def written(model, tokenizer, prompt, **settings):
    return "".join(stream(model, tokenizer, prompt, GenerationConfig(**settings)))


# Each of them with either head, and some with both.
HEADS = [(name, number % 2 == 0) for number, name in enumerate(ARCHITECTURES)]
HEADS += [("GPT-2", False), ("Llama", False), ("everything", False)]


@needs_node
@pytest.mark.parametrize(("name", "tied"), dict.fromkeys(HEADS))
def test_logits_and_texts_are_the_same(tmp_path, name, tied):
    page, model, tokenizer = made(tmp_path, name, tied=tied)
    ids = tokenizer.encode(PROMPT[:12])
    greedy, drawn = {"temperature": 0, "max_tokens": 40}, {"seed": 7, "max_tokens": 40}
    logits, *texts = asked(
        page,
        ["logits", ids.tolist()],
        ["write", PROMPT[:5], greedy],
        ["write", PROMPT, greedy],  # longer than the context
        ["write", PROMPT, drawn],
    )
    np.testing.assert_allclose(logits, model.forward(ids[None])[0], rtol=0, atol=1e-4)
    given = ((PROMPT[:5], greedy), (PROMPT, greedy), (PROMPT, drawn))
    for text, (prompt, settings) in zip(texts, given, strict=True):
        assert text["text"] == written(model, tokenizer, prompt, **settings)


@needs_node
def test_attention_stays_inside_documents(tmp_path):
    tokenizer = tokenizer_for("char")
    space = int(tokenizer.encode(" ")[0])
    for position in ("rope", "learned"):
        fields = {"position": position, "bigram_rows": 90, "document_token": space}
        page, model, _ = made(tmp_path, "everything", **fields)
        prompt = PROMPT[:10]
        ids = tokenizer.encode(prompt)
        logits, text, rows = asked(
            page,
            ["logits", ids.tolist()],
            ["write", prompt, {"temperature": 0, "max_tokens": 40}],
            ["attention", ids.tolist(), 1, 3],
        )
        np.testing.assert_allclose(logits, model.forward(ids[None])[0], rtol=0, atol=1e-4)
        assert text["text"] == written(model, tokenizer, prompt, temperature=0, max_tokens=40)
        assert_same_rows(rows, model.inspect(ids[None]).attention[1, 0, 3])


def assert_same_rows(rows, attention):
    assert [len(row) for row in rows] == list(range(1, len(attention) + 1))
    for row, expected in zip(rows, attention, strict=True):
        np.testing.assert_allclose(row, expected[: len(row)], atol=1e-5)


@needs_node
def test_what_happens_inside_is_the_same(tmp_path):
    """The probability and entropy of each token, the likeliest others, and where heads look."""
    page, model, tokenizer = made(tmp_path, "default")
    ids = tokenizer.encode(PROMPT[:12])
    tokens, rows, text, *refused = asked(
        page,
        ["inspect", ids.tolist(), 5],
        ["attention", ids.tolist(), 2, 1],
        ["write", PROMPT[:5], {"max_tokens": 7, "top": 3}],
        ["inspect", [*ids.tolist(), 1]],
        ["attention", ids.tolist(), 3, 0],
        ["attention", [99], 0, 0],
    )
    inspection = model.inspect(ids[None])
    assert_same_rows(rows, inspection.attention[2, 0, 1])
    logits = inspection.logits[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert tokens[0] == {"id": int(ids[0]), "logprob": None, "entropy": None, "top": []}
    for token, i, row in zip(tokens[1:], ids[1:].tolist(), logprobs, strict=False):
        assert token["id"] == i
        np.testing.assert_allclose(token["logprob"], row[i], atol=1e-4)
        np.testing.assert_allclose(token["entropy"], -(np.exp(row) * row).sum(), atol=1e-4)
        best = np.argsort(-row, kind="stable")[:5]
        assert [each["id"] for each in token["top"]] == best.tolist()
        np.testing.assert_allclose([each["logprob"] for each in token["top"]], row[best], atol=1e-4)
    whole = tokenizer.encode(PROMPT[:5]).tolist() + text["ids"]
    before = np.array([whole[:-1]], np.int32)
    event, row = text["events"][6], model.forward(before)[0, -1].astype(np.float64)
    assert len(event["top"]) == 3
    np.testing.assert_allclose(
        event["logprob"], row[whole[-1]] - np.log(np.exp(row).sum()), atol=1e-4
    )
    messages = [answer["error"] for answer in refused]
    assert messages[0] == "the text has 13 tokens, and the model sees from 1 to 12"
    assert messages[1] == "the model has 3 layers of 4 heads, counted from 0"
    assert messages[2] == f"a token is outside the vocabulary of {tokenizer.vocab_size}"


# --- tokenizers ---

PIECES = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\r\n\r\n \t",
        "\u00a0\u3000",
        "\x85",
        "\ufeff",
        "\u200b\u2028",
        "\x00\x1c",
    ),
    *("The cat", " sat", "it's", "IT'S", "don'\u017f", "x'LL", "'d", "1234567", " 12", "  7"),
    *("über Äpfel", "日本語", "e\u0301A\u030a\u212b", "👩\u200d👩🏽", "\u1c89\U00016d40"),
    *("\u0661\u0662\u00bd", "<|endoftext|>", "<|im_start|>", "<|im_end|>x", "<|end"),
    *("</script><!--", "caf\xe9 \xc5", "x<|"),
    *("a" * 70, "=" * 9, "\\x41", "__proto__", "constructor", "12", "{}[]()^$.*+?|"),
]


def texts(count=150):
    random = np.random.default_rng(5)
    for n in random.integers(1, 9, count):
        yield "".join(random.choice(PIECES, n))


def specials(tokenizer):
    return tokenizer.with_special(["</script>", "12", "__proto__", "<|im_end|>", "👩|x", "(.*)"])


def kinds():
    yield "byte", lambda: Tokenizer(kind="byte")
    yield "byte with special tokens", lambda: specials(Tokenizer(kind="byte"))
    yield "char", lambda: Tokenizer("".join(PIECES))
    yield "char with special tokens", lambda: specials(Tokenizer("".join(PIECES)))
    text = built_in_text(20_000)[:20_000] + "".join(PIECES) * 20
    for split in ("gpt2", "gpt4", "gpt2-digits", "gpt4-digits"):
        yield split, lambda split=split: Tokenizer(text, "bpe", vocab_size=420, split=split)
    yield "bpe with special tokens", lambda: specials(Tokenizer(text, "bpe", vocab_size=300))
    for name in published.PUBLISHED:
        yield name, lambda name=name: Tokenizer.from_json(published.file_of(name))


KINDS = dict(kinds())


@needs_node
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same(tmp_path, kind):
    tokenizer = KINDS[kind]()
    tokenizer = padded(tokenizer, tokenizer.vocab_size + 2)
    page, _, _ = made(tmp_path, tokenizer=tokenizer, n_layer=1)
    known = [text for text in texts() if not tokenizer.unknown(text)]
    assert len(known) > 20
    ids = [tokenizer.encode(text).tolist() for text in known]
    plain = [text for text in known if not tokenizer._unknown(text)]
    random = np.random.default_rng(3)
    drawn = random.integers(0, tokenizer.vocab_size, (40, 20)).tolist()
    answers = asked(
        page,
        *(["encode", text] for text in known),
        *(["encode", text, False] for text in plain),
        *(["decode", each] for each in ids + drawn),
        *(["pieces", each] for each in ids + drawn),
    )
    expected = [
        *ids,
        *(each.tolist() for each in tokenizer.encode_each(plain)),
        *map(tokenizer.decode, ids + drawn),
        *([*tokenizer.stream(each), ""][: len(each) + 1] for each in ids + drawn),
    ]
    for answer, each in zip(answers, expected, strict=True):
        assert answer == each


@needs_node
def test_characters_that_a_vocabulary_has_grown_by_are_tokens_of_the_page(tmp_path):
    """They follow all other tokens, also those of a chat template."""
    base = Tokenizer("The cat sat.").with_special(["<|im_start|>", "<|im_end|>"])
    grown = base.with_characters("?ä🐈")
    page, _, _ = made(tmp_path, tokenizer=grown, n_layer=1)
    known = "?The 🐈 sät<|im_end|>?"
    ids = grown.encode(known).tolist()
    new = range(base.vocab_size, grown.vocab_size)
    assert {grown.encode(c)[0] for c in "?ä🐈"} == {*new} and base.unknown("?ä🐈")
    answers = asked(page, ["encode", known], ["decode", ids], ["pieces", ids], ["encode", "ö"])
    assert answers[:2] == [ids, grown.decode(ids)]
    assert answers[2] == [*grown.stream(ids), ""][: len(ids) + 1]
    assert "never seen the character" in answers[3]["error"]


@pytest.mark.slow
@needs_node
def test_every_character_is_of_its_class(tmp_path):
    """Words end where they end here, whatever version of Unicode a browser knows."""
    tokenizer = Tokenizer("ab" * 9, "bpe", vocab_size=258)
    page, _, _ = made(tmp_path, tokenizer=tokenizer, n_layer=1)
    classes = character_classes()
    (found,) = asked(page, ["classes"])
    for name, kind in (("letters", LETTER), ("numbers", NUMBER), ("others", OTHER)):
        own = np.zeros(0x110000, bool)
        for first, last in found[name]:
            own[first : last + 1] = True
        expected = classes == kind
        expected[0xD800:0xE000] = False  # halves of characters
        np.testing.assert_array_equal(own, expected)


@needs_node
def test_unknown_characters_are_named(tmp_path):
    page, _, _ = made(tmp_path, tokenizer=Tokenizer("abc"))
    assert [answer["error"] for answer in asked(page, ["encode", "ab🐈"], ["write", ""])] == [
        'the model has never seen the character "🐈": leave it out',
        "the prompt is empty; give at least one character",
    ]


@needs_node
def test_stop_strings_and_the_end_of_texts(tmp_path):
    tokenizer = tokenizer_for("bpe")
    model = varied_model("Llama", tokenizer, block_size=64)
    model.parameters["token_embedding.weight"][...] *= 0.1  # all tokens about as likely
    page = page_of(tmp_path, model, tokenizer)
    choices = []
    for seed in range(30):
        stops = "e", "at", "\ufffd ", tokenizer.decode([seed])
        choices.append({"max_tokens": 200, "seed": seed, "stop": stops[: seed % 5]})
    texts = asked(page, *(["write", "The", settings] for settings in choices))
    for text, settings in zip(texts, choices, strict=True):
        config = GenerationConfig(**{**settings, "stop": settings["stop"] or None})
        (sample,) = Writer(model, tokenizer, "The", config).samples()
        assert (text["text"], len(text["ids"]), text["ended"]) == sample[:3]


# --- choices ---

SETTINGS = [
    {"temperature": 0},
    {"temperature": 1e-40},
    {"temperature": 0.3},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 99},
    {"top_p": 0.5},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "presence_penalty": 0.4, "frequency_penalty": -0.3},
]


@needs_node
def test_choices_are_the_same(tmp_path):
    page, _, _ = made(tmp_path)
    random = np.random.default_rng(1)
    calls, expected = [], []
    for settings in SETTINGS:
        for _ in range(40):
            logits = random.normal(0, 2, 30).astype(np.float32)
            logits[random.integers(0, 30, 8)] = logits[3]  # equal ones
            prompt, more = random.integers(0, 30, (2, 6))
            seen = SeenTokens(30, prompt)
            for token in more:
                seen.add(token)
            counts = [[i, int(seen.counts[i])] for i in np.flatnonzero(seen.occurs).tolist()]
            uniform = float(random.random())
            calls.append(["choose", logits.tolist(), settings, uniform, counts])
            drawing = Drawing(GenerationConfig(**settings), uniform, seen)
            expected += choose_each(logits[None], [drawing])
    assert asked(page, *calls) == expected


@needs_node
def test_draws_are_the_same(tmp_path):
    page, _, _ = made(tmp_path)
    words = [(0, 0), (1337, 5), (2**53 - 1, 499), (7,)]
    assert asked(page, *(["hash", *each] for each in words)) == [
        str(hash64(*each)) for each in words
    ]


# --- conversations ---


@needs_node
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_become_the_same_tokens(tmp_path, name, kind):
    alphabet = "".join(PIECES) + HEADERS + "".join(TEMPLATES[name].special)
    plain = Tokenizer(alphabet * 2, kind, **({"vocab_size": 400} if kind == "bpe" else {}))
    tokenizer, template = fit_template(plain, name)
    page, _, _ = made(tmp_path, tokenizer=tokenizer, n_layer=1)
    conversations = []
    random = np.random.default_rng(2)
    for number, text in enumerate(texts(60)):
        roles = ["system"] * (number % 2) + ["user", "assistant"] * (number % 3) + ["user"]
        turns = [Turn(role, text + str(random.choice(PIECES))) for role in roles]
        conversations.append(turns)
    messages = [[{"role": turn.role, "content": turn.text} for turn in c] for c in conversations]
    expected = [template.prompt(tokenizer, conversation).tolist() for conversation in conversations]
    assert asked(page, *(["prompt", each] for each in messages)) == expected


@needs_node
def test_tokens_that_belong_to_the_text_are_tokens_in_what_a_person_writes(tmp_path):
    data = Tokenizer("".join(PIECES) + HEADERS, "bpe", vocab_size=300).as_json()
    names = ["<|im_start|>", "<|im_end|>", "<think>", "<think>|"]
    data["added_tokens"] += Tokenizer(kind="byte").with_special(names).as_json()["added_tokens"]
    for number, token in enumerate(data["added_tokens"]):
        token["id"], token["special"] = 300 + number, token["content"] != "<think>"
    tokenizer, template = fit_template(Tokenizer.from_json(data), "chatml")
    page, _, _ = made(tmp_path, tokenizer=tokenizer, n_layer=1)
    said = ["<think>a</think>", "<think>|<|im_end|>", "<|im_<think>end|>", "<think", "<|im_end"]
    roles = ["user", "assistant", "user", "user", "user"]
    turns = list(map(Turn, roles, said))
    expected = template.prompt(tokenizer, turns).tolist()
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert asked(page, ["prompt", messages]) == [expected]
    assert expected.count(tokenizer.special["<think>"]) == 3
    assert tokenizer.special["<think>|"] not in expected


def test_templates_in_jinja_are_refused(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    model, tokenizer = smallmind.load(chat.made(tmp_path / "chat", "Qwen"), "numpy")
    refuses("its chat template is in Jinja", page_of, tmp_path, model, tokenizer)
    assert not (tmp_path / "page.html").exists()


# --- files ---


@needs_node
def test_weights_are_rounded_once(tmp_path):
    tokenizer = tokenizer_for("char")
    model = varied_model("everything", tokenizer, tied=False, n_embd=64, head_size=8, mlp_width=72)
    for type in ("f16", "q8_0"):
        page = page_of(tmp_path, model, tokenizer, type=type)
        names = list(model.parameters)
        answers = asked(page, *(["weights", name] for name in names))
        for name, answer in zip(names, answers, strict=True):
            values = model.parameters[name]
            if values.ndim > 1:
                rows = np.ascontiguousarray(values if "embedding" in name else values.T)
                is_short = type == "f16" or rows.shape[1] % 32
                values = to_float32(round_to(rows, FLOAT16 if is_short else DTYPES["q8_0"]))
            np.testing.assert_array_equal(np.float32(answer), values.reshape(-1))


def test_types_that_pages_lack_are_refused(tmp_path):
    model, tokenizer = varied_model("Llama", tokenizer_for("char")), tokenizer_for("char")
    refuses(
        "'q4_0' must be one of f32, f16, q8_0", page_of, tmp_path, model, tokenizer, type="q4_0"
    )
    model.parameters["token_embedding.weight"][3, 5] = -1e7
    refuses(r"1e\+07, too large for f16", page_of, tmp_path, model, tokenizer, type="f16")
    assert not list(tmp_path.iterdir())


class UndeclaredNorm(RMSNorm):
    """Like any other, but does not declare that a page can compute it."""


def test_parts_of_others_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(parts.NORMS, "again", parts.NORMS["rmsnorm"])
    monkeypatch.setitem(parts.NORMS, "mine", f"{__name__}:UndeclaredNorm")
    made(tmp_path, norm="again")
    refuses("a page cannot run norm='mine', only layernorm", made, tmp_path, norm="mine")


def test_only_pages_are_replaced(tmp_path):
    path, model, tokenizer = made(tmp_path)
    first = path.read_bytes()
    page_of(tmp_path, model, tokenizer)
    assert path.read_bytes() == first
    path.write_text("<html>my own page</html>")
    refuses("already exists and was not made by", page_of, tmp_path, model, tokenizer)
    assert path.read_text() == "<html>my own page</html>"
    for name, reason in (("page.txt", "must end in .html"), ("folder.html", "is a directory")):
        (tmp_path / "folder.html").mkdir(exist_ok=True)
        refuses(reason, smallmind.export, model, tokenizer, tmp_path / name, "html")


@pytest.mark.parametrize("left", [0, 5_000, 60_000])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, left):
    monkeypatch.setattr(durable, "files", Full(left))
    with pytest.raises(OSError, match="No space left"):
        made(tmp_path)
    assert not list(tmp_path.iterdir())


class Elements(HTMLParser):
    """The elements of a page, and the text of each script by its attributes."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self._inside = False


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>\"'><img src=x onerror=alert(1)>",
    "</title><meta http-equiv=refresh content=0>",
    "\u2028\u2029\\u003c/script>",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_names_and_tokens_do_not_become_html(tmp_path, hostile):
    tokenizer = Tokenizer("abc" + hostile).with_special([hostile])
    model = varied_model("Llama", tokenizer)
    sound, _, _ = made(tmp_path, tokenizer=Tokenizer("abc"))
    tags = Elements(sound.read_text(encoding="utf-8")).tags
    page = page_of(tmp_path, model, tokenizer, name=hostile, history={hostile: hostile})
    assert Elements(page.read_text(encoding="utf-8")).tags == tags
    if NODE:
        assert asked(page, ["encode", hostile], ["encode", hostile, False]) == [
            [tokenizer.vocab_size - 1],
            tokenizer.encode(hostile, special=False).tolist(),
        ]


# --- in a browser ---

GENERATES = """async ([prompt, settings]) => {
    const { program } = smallmindClient, frames = [];
    const count = () => frames.push(requestAnimationFrame(count));
    count();
    let text = "";
    for await (const { piece } of program.write(program.tokenizer.encode(prompt), settings))
        text += piece;
    return [text, frames.length];
}"""
REACHES_OUT = """async () => {
    const script = document.createElement("script"), image = new Image();
    script.textContent = "window.ran = true";
    document.body.append(script, image);
    document.body.insertAdjacentHTML("beforeend", "<p onclick='window.ran = true'></p>");
    document.body.lastChild.click();
    const failed = new Promise((resolve) => { image.onerror = () => resolve("no image"); });
    image.src = "https://localhost:1/picture.png";
    const found = await fetch("https://localhost:1/").catch(() => "no answer");
    return [found, await failed, window.ran];
}"""


@contextlib.contextmanager
def opened(browser, path):
    """A page without a network -> it, and what it complained of."""
    complaints, requests = [], []
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        yield page, complaints
    assert requests[0] == path.as_uri() and all("localhost:1/" in url for url in requests[1:])


def test_a_browser_runs_a_page_from_disk(tmp_path, browser):
    fields = {"block_size": 64, "n_embd": 128}
    path, model, tokenizer = made(tmp_path, "default", tokenizer_for("bpe"), **fields)
    settings = {"max_tokens": 200, "temperature": 0}
    with opened(browser, path) as (page, complaints):
        text, frames = page.evaluate(GENERATES, [PROMPT, settings])
        assert text == written(model, tokenizer, PROMPT, **settings)
        assert frames > 1  # it is drawn while it computes
        assert complaints == []


def test_a_page_reaches_nothing_and_runs_nothing_else(tmp_path, browser):
    hostile = "".join(HOSTILE)
    tokenizer = Tokenizer("abc" + hostile).with_special([hostile])
    path = page_of(tmp_path, varied_model("Llama", tokenizer), tokenizer, name=hostile)
    with opened(browser, path) as (page, complaints):
        text, _ = page.evaluate(GENERATES, [hostile, {"max_tokens": 5}])
        assert len(text) >= 5 and complaints == []
        assert page.evaluate(REACHES_OUT) == ["no answer", "no image", None]
        assert len(complaints) >= 4 and all("Security Policy" in text for text in complaints)

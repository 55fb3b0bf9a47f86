"""Files with real weights, as they are: logits, losses and verdicts of transformers, answers of
llama.cpp.
"""

import gzip
import json

import numpy as np
import pytest

import smallmind
from smallmind.tasks.task import evaluate_task
from smallmind.text.chat import USER, Turn
from smallmind.text.templates import format_of
from tests.exchange.test_llama_cpp import served
from tests.exchange.weights import BLIMP, GEMMA3, SHAKESPEARE, SMOLLM2, real
from tests.programs import ROOT
from tests.text import published

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
functional = torch.nn.functional

pytestmark = [pytest.mark.interop, pytest.mark.slow]
LENGTH = 600  # tokens: more than a window of Gemma's
ROWS = 512  # whose logits exist at once: a token may be one of 262,144
PAIRS = 2000
ANSWER = 30  # tokens


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def path(request):
    return real(request.param)


@pytest.fixture(scope="module")
def ours(path):
    return smallmind.load(path, precision="float32")


@pytest.fixture(scope="module")
def theirs(path):
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model.eval(), tokenizer


@torch.no_grad()
def losses_of(model, ids, mask=None):
    """ids (B, T + 1), and where they are texts -> the loss of each but the first, (B, T)."""
    hidden = model.model(ids[:, :-1], attention_mask=mask).last_hidden_state.flatten(0, 1)
    rows = zip(hidden.split(ROWS), ids[:, 1:].flatten().split(ROWS), strict=True)
    losses = [functional.cross_entropy(model.lm_head(x), y, reduction="none") for x, y in rows]
    return torch.cat(losses).reshape(len(ids), -1).double().numpy()


def test_logits_are_those_of_transformers(ours, theirs):
    (model, tokenizer), (other, their_tokenizer) = ours, theirs
    shakespeare = real(SHAKESPEARE).read_text(encoding="utf-8")
    files = "smallmind/guide/adapting.md", "smallmind/nn/attention.py"
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    for text in (shakespeare, shakespeare[500_000:], *texts, published.TEXT):
        ids = tokenizer.prompt(text[:4000])[:LENGTH]
        assert len(ids) == LENGTH
        assert ids.tolist() == their_tokenizer(text[:4000]).input_ids[:LENGTH]
        with torch.no_grad():
            expected = other(torch.from_numpy(ids[None].astype(np.int64))).logits[0].numpy()
        found, most = model.forward(ids[None])[0], max(expected.max(), -expected.min())
        found -= expected
        assert max(found.max(), -found.min()) < 1e-5 * most


def test_the_perplexity_of_a_text_is_that_of_transformers(cli, path, theirs, tmp_path):
    """In windows that overlap by half, as `smallmind evaluate` has them."""
    model, tokenizer = theirs
    text = real(SHAKESPEARE).read_text(encoding="utf-8")[:50_000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    ids = torch.tensor(tokenizer(text).input_ids)
    n, total, scored = len(ids) - 1, 0.0, 0
    T = min(model.config.max_position_embeddings, n)
    for begin in [*range(0, n - T, T // 2), n - T]:
        losses = losses_of(model, ids[None, begin : begin + T + 1])[0]
        total, scored = total + losses[max(0, scored - begin) :].sum(), begin + T
    cells = cli("evaluate", path, tmp_path / "text.txt").cells
    assert cells["tokens predicted"] == f"{n:,}"
    assert float(cells["loss"].split()[0]) == pytest.approx(total / n, rel=0, abs=1e-4)
    assert float(cells["perplexity"]) == pytest.approx(np.exp(total / n), rel=0.002)


def test_verdicts_on_pairs_of_sentences_are_those_of_transformers(ours, theirs, tmp_path):
    model, tokenizer = theirs
    with gzip.open(real(BLIMP), "rt", encoding="utf-8") as file:
        lines = file.readlines()
    lines = [lines[i * len(lines) // PAIRS] for i in range(PAIRS)]
    (tmp_path / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    result = evaluate_task(*ours, "pairs", tmp_path / "pairs.jsonl")
    found = "".join(group.verdicts[0] for group in result.groups)
    pairs = [json.loads(line) for line in lines]
    texts = [pair[name] for name in ("good", "bad") for pair in pairs]
    tokens = [
        [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        for text in texts
    ]
    totals, order = np.empty(len(texts)), np.argsort([len(ids) for ids in tokens])
    for some in np.split(order, range(ROWS // 16, len(order), ROWS // 16)):
        longest = max(len(tokens[i]) for i in some)
        ids = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in some])
        for i, losses in zip(some, losses_of(model, ids), strict=True):
            totals[i] = losses[: len(tokens[i]) - 1].sum()
    good, bad = np.split(totals, 2)
    assert found == "".join("01"[is_right] for is_right in (good < bad).astype(int))
    assert 0.6 < np.mean(good < bad) < 0.95


QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits.",
    "Write a sentence about a dog.",
    "How many days has a week?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Translate to French: Good morning.",
    "What is 7 times 8?",
    "Which planet is nearest to the sun?",
    "Give a synonym of happy.",
    "What is the opposite of cold?",
    "Is a whale a fish?",
    "What is water made of?",
    "Explain photosynthesis in one sentence.",
    "Rewrite in the past tense: I go home.",
    "What colour do blue and yellow make?",
    "Write a line of a poem about the sea.",
    "List the seasons.",
    "How does one boil an egg?",
]


GREEDY = {"temperature": 0, "max_tokens": ANSWER}


def test_from_the_same_weights_llama_cpp_answers_the_same(ours, tmp_path):
    model, tokenizer = ours
    smallmind.export(model, tokenizer, tmp_path / "model.gguf", "gguf", type="f32")
    with served(tmp_path / "model.gguf") as ask:
        for question in QUESTIONS:
            if format_of(tokenizer):
                answer = smallmind.Chat(model, tokenizer, **GREEDY).say(question)
                messages = [{"role": "user", "content": question}]
                found = ask("v1/chat/completions", messages=messages, **GREEDY)
                assert found["choices"][0]["message"]["content"] == answer
            else:
                prompt = f"Question: {question}\nAnswer:"
                text = smallmind.generate(model, tokenizer, prompt, **GREEDY)
                found = ask("v1/completions", prompt=prompt, **GREEDY)
                assert prompt + found["choices"][0]["text"] == text
    (tmp_path / "model.gguf").unlink()


def test_from_the_same_file_llama_cpp_answers_as_well(ours, path):
    """It rounds what is multiplied with blocks to 8 bits: its choices are ours, or as good within
    that.
    """
    model, tokenizer = ours
    template, same = format_of(tokenizer), []
    with served(path) as ask:
        for question in QUESTIONS:
            if template:
                prompt = template.prompt(tokenizer, [Turn(USER, question)])
            else:
                prompt = tokenizer.prompt(f"Question: {question}\nAnswer:")
            settings = {"n_predict": ANSWER, "temperature": 0, "return_tokens": True}
            tokens = np.array(ask("completion", prompt=prompt.tolist(), **settings)["tokens"])
            ids = np.concatenate([prompt, tokens]).astype(np.int32)
            logits = model.forward(ids[None])[0, len(prompt) - 1 : -1]
            chosen = np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
            assert (logits.max(axis=1) - chosen).max() < 0.15 * logits.std()
            same += (logits.argmax(axis=1) == tokens).tolist()
    assert np.mean(same) > 0.9

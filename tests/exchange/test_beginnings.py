"""Texts begin as the files of their tokenizer say: here, in transformers and in llama.cpp."""

import json

import numpy as np
import pytest

import smallmind
from smallmind import Run, Tokenizer
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.exchange import gguf_file
from smallmind.exchange.format import Exported, padded
from smallmind.exchange.html import describe
from smallmind.losses.preferences import encode_pairs
from smallmind.tasks.likelihood import Scorer
from smallmind.text.chat import TEXT as DOCUMENT
from smallmind.text.chat import Turn
from smallmind.text.dataset import Dataset
from smallmind.text.templates import fit_template, format_of
from smallmind.writing.generation import Writer
from tests.exchange.models import model_of
from tests.exchange.test_html import asked, needs_node, page_of
from tests.programs import edited, refuses
from tests.text import published

BEGIN, END = published.BEGIN, published.LLAMA_END
PROMPT = "The cat sat on"
TRAINING = {"steps": 2, "batch_size": 2, "backend": "numpy", "val_batches": 1, "warmup_steps": 0}


def numbers():
    return {token["content"]: token["id"] for token in published.file_of("Llama 3")["added_tokens"]}


def around(*names):
    """A post_processor that puts these tokens before each text."""
    pieces = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    known = numbers()
    single = [*pieces, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {n: {"id": n, "ids": [known[n]], "tokens": [n]} for n in names},
    }


def ended():
    """One that puts tokens before and after each text."""
    data = around(BEGIN, END)
    end = data["single"].pop(1)
    return {**data, "single": [*data["single"], end]}


def roberta():
    known = numbers()
    return {
        "type": "RobertaProcessing",
        "sep": [END, known[END]],
        "cls": [BEGIN, known[BEGIN]],
        "trim_offsets": True,
        "add_prefix_space": False,
    }


PROCESSORS = {
    "none": None,
    "bytes only": published.byte_level(),
    "a beginning": around(BEGIN),
    "a beginning within a sequence": published.file_of("Llama 3")["post_processor"],
    "two tokens": around(BEGIN, "<|reserved_special_token_0|>"),
    "a beginning and an end": ended(),
    "as Roberta": roberta(),
}
SETTINGS = {
    "nothing": {},
    "true": {"add_bos_token": True},
    "false": {"add_bos_token": False},
}


def made(path, processor, **settings):
    """Writes a model of transformers whose tokenizer has this post_processor -> the directory."""
    data = {**published.file_of("Llama 3"), "post_processor": processor}
    tokenizer = padded(Tokenizer.from_json(data), 640)
    model = model_of("Llama", tokenizer, n_embd=64, block_size=64)
    smallmind.export(model, tokenizer, path)
    said = {"bos_token": BEGIN, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    contents = {"tokenizer.json": data, "tokenizer_config.json": {**said, **settings}}
    for file, content in contents.items():
        (path / file).write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def begins(tmp_path_factory):
    """A model whose tokenizer begins each text, imported."""
    root = tmp_path_factory.mktemp("begins")
    return Run.import_model(made(root / "hf", around(BEGIN)), root / "run").path


@pytest.fixture(scope="module")
def tokenizer(begins):
    return smallmind.load(begins, "numpy")[1]


@pytest.mark.interop
@pytest.mark.parametrize("said", SETTINGS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_prompts_have_the_tokens_of_transformers(tmp_path, processor, said):
    transformers = pytest.importorskip("transformers")
    path = made(tmp_path / "model", PROCESSORS[processor], **SETTINGS[said])
    ours = smallmind.load(path, "numpy")[1]
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in (PROMPT, "\n", "a 12" + END):
        found = theirs(text).input_ids
        if processor in ("a beginning and an end", "as Roberta"):
            found = found[:-1]  # a model continues a prompt
        assert ours.prompt(text).tolist() == found
    # A text that begins so itself has it once, which transformers has twice.
    whole = "".join(token for token, i in ours.special.items() if i in ours.beginning) + PROMPT
    assert ours.prompt(whole).tolist() == ours.prompt(PROMPT).tolist()


@pytest.mark.parametrize(
    "damage",
    [
        {"type": "TemplateProcessing"},
        {**around(BEGIN), "special_tokens": {}},
        {**around(BEGIN), "special_tokens": {BEGIN: {"ids": ["x"]}}},
        {**around(BEGIN), "special_tokens": {BEGIN: {"ids": [10**6]}}},
        {"type": "Sequence", "processors": 3},
        [1],
    ],
)
def test_a_damaged_post_processor_is_refused_in_one_line(tmp_path, damage):
    path = made(tmp_path / "model", None)
    with edited(path / "tokenizer.json") as data:
        data["post_processor"] = damage
    refuses("post_processor", Run.import_model, path, tmp_path / "run")


def test_everything_that_reads_a_text_begins_it_once(begins, tokenizer):
    (begin,) = tokenizer.beginning
    model = smallmind.load(begins, precision="float32")[0]
    ids = tokenizer.encode(PROMPT).tolist()
    writer = Writer(model, tokenizer, PROMPT, smallmind.GenerationConfig())
    assert writer.texts[0].ids.tolist() == [begin, *ids]
    scorer = Scorer(model, tokenizer)
    assert scorer.encode_each([PROMPT, BEGIN + PROMPT], begins=True)[0].tolist() == [begin, *ids]
    assert scorer.encode_each([BEGIN + PROMPT], begins=True)[0].tolist() == [begin, *ids]
    assert scorer.alone(tokenizer.encode(PROMPT)).ids.tolist() == [begin, *ids]
    batch = encode_pairs(tokenizer, [(PROMPT, " a", " b")])
    assert batch.ids[0, : len(ids) + 1].tolist() == [begin, *ids]
    _, template = fit_template(tokenizer, "chatml")
    grown, _ = fit_template(tokenizer, "chatml")
    document = template.encode(grown, [Turn(DOCUMENT, PROMPT)])
    assert (document // 4).tolist() == [begin, *ids]


def test_a_model_can_write_after_the_beginning_alone(begins, tokenizer):
    model = smallmind.load(begins, precision="float32")[0]
    assert isinstance(smallmind.generate(model, tokenizer, "", max_tokens=3), str)
    plain = Tokenizer("abc", "byte")
    other = smallmind.TransformerModel(256, 16, 16, 1, 2)
    refuses("the prompt is empty", smallmind.generate, other, plain, "", max_tokens=3)


DOCUMENTS = ["One cat.", "Two dogs sat.", f"{BEGIN}Three logs.", "Four."]


def wanted(tokenizer, documents):
    """The tokens of documents, each of which begins once, with the separator between them."""
    found = []
    for document in documents:
        found += [*tokenizer.prompt(document).tolist(), tokenizer.end_of_text]
    return found[:-1]


def test_every_document_of_a_text_begins_once(tokenizer):
    text = END.join(DOCUMENTS)
    assert tokenizer.encode_documents(text).tolist() == wanted(tokenizer, DOCUMENTS)
    # Wherever it is divided.
    ids = tokenizer.encode(text)
    for size in range(1, len(ids)):
        chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
        found = np.concatenate(list(tokenizer.begin_documents(chunks)))
        assert found.tolist() == wanted(tokenizer, DOCUMENTS)
    data = Dataset.from_text(text, tokenizer, 4, held_out=len("Four."))
    assert data.train.tolist() == [*wanted(tokenizer, DOCUMENTS[:3]), tokenizer.end_of_text]
    assert data.held_out.tolist() == wanted(tokenizer, DOCUMENTS[3:])


def test_prepared_texts_begin_too(tmp_path, begins, tokenizer):
    texts = [f"{document} {'the cat. ' * 40}" for document in DOCUMENTS * 3]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    # The file of the tokenizer alone says it.
    alone = Tokenizer.load(begins / "tokenizer.json")
    assert alone.beginning == tokenizer.beginning
    corpus = Corpus(tmp_path / "texts")
    found = prepare(corpus, tmp_path / "data", Encoding(alone))
    tokens = np.concatenate([found.train[:], found.held_out[:]]).tolist()
    assert tokens == wanted(tokenizer, texts)
    shape = {"init_from": str(begins), "out": tmp_path / "a", **TRAINING}
    run = Run.create(text=tmp_path / "data", **shape)
    assert run.data.tokenizer.beginning == tokenizer.beginning
    run.directory.unlock()
    run = Run.create(text=tmp_path / "texts", **{**shape, "out": tmp_path / "b"})
    assert np.concatenate([run.data.train, run.data.held_out]).tolist() == tokens


def test_a_run_of_an_earlier_version_resumes_without(tmp_path, begins, tokenizer):
    """It had no beginnings: the same tokens as then, so the same bits."""
    text = END.join(DOCUMENTS * 30)
    run = Run.create(text=text, init_from=str(begins), out=tmp_path / "run", **TRAINING)
    assert run.data.train[0] == tokenizer.beginning[0]
    run.train()
    with edited(tmp_path / "run" / "config.json") as config:
        del config["begins_texts"]
    old = Run.open(tmp_path / "run")
    every = np.concatenate([old.data.train, old.data.held_out])
    assert every.tolist() == tokenizer.encode(text).tolist()
    assert old.data.tokenizer.saved == run.data.tokenizer.saved
    # Prompts begin as those of the base do.
    assert smallmind.load(old.path, "numpy")[1].beginning == tokenizer.beginning


@pytest.mark.interop
def test_the_loss_of_a_text_is_that_of_transformers(tmp_path, begins, tokenizer):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    path = begins.parent / "hf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = "The cat sat on the mat, and the dog on 12 logs."
    ids = torch.tensor([their_tokenizer(text).input_ids])
    with torch.no_grad():
        wanted = float(theirs(ids, labels=ids).loss)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = Run.open(begins).evaluate(tmp_path / "a.txt")
    assert found.tokens == ids.shape[1] - 1
    np.testing.assert_allclose(found.loss, wanted, rtol=1e-5)
    model = smallmind.load(begins, precision="float32")[0]
    (scored,) = Scorer(model, tokenizer).texts([text])
    np.testing.assert_allclose(-scored.value / found.tokens, wanted, rtol=1e-5)


@pytest.mark.interop
@pytest.mark.parametrize("name", ["a beginning", "none"])
def test_exports_say_what_training_did(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    source = made(tmp_path / "source", PROCESSORS[name], add_bos_token=name == "none")
    text = END.join(DOCUMENTS * 30)
    run = Run.create(text=text, init_from=str(source), out=tmp_path / "run", **TRAINING)
    run.train()
    run.export(tmp_path / "out")
    run.export(tmp_path / "a.gguf", "gguf")
    ours = run.load()[1]
    begins = bool(ours.beginning)
    assert begins == (name == "a beginning")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is begins
    metadata, _ = gguf_file.read(tmp_path / "a.gguf")
    assert metadata["tokenizer.ggml.add_bos_token"] is begins
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(PROMPT).input_ids == ours.prompt(PROMPT).tolist()
    again = Run.import_model(tmp_path / "a.gguf", tmp_path / "again").load(backend="numpy")[1]
    assert again.beginning == ours.beginning
    model = run.load(backend="numpy")[0]
    about = describe(Exported(model, ours, "", {}))
    assert list(about["beginning"]) == list(ours.beginning)


@pytest.mark.interop
def test_llama_cpp_counts_the_same_tokens(tmp_path):
    pytest.importorskip("xllamacpp")
    from tests.exchange.test_llama_cpp import served

    for name in ("a beginning", "none"):
        source = made(tmp_path / name, PROCESSORS[name])
        run = Run.import_model(source, tmp_path / f"run {name}")
        run.export(tmp_path / f"{name}.gguf", "gguf")
        model, ours = run.load()
        ids = ours.prompt(PROMPT).tolist()
        with served(tmp_path / f"{name}.gguf") as ask:
            assert ask("tokenize", content=PROMPT, add_special=True)["tokens"] == ids
            answer = ask("completion", prompt=PROMPT, n_predict=8, temperature=0)
        assert answer["tokens_evaluated"] == len(ids)
        text = smallmind.generate(model, ours, PROMPT, max_tokens=8, temperature=0)
        assert text == PROMPT + answer["content"]


def test_a_tokenizer_of_its_own_file_begins_the_texts_of_a_new_model(tmp_path, begins):
    run = Run.create(
        text=END.join(DOCUMENTS * 30),
        tokenizer=str(begins / "tokenizer.json"),
        out=tmp_path / "run",
        **{**TRAINING, "n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16},
        recipe="gpt2",
    )
    run.train()
    (begin,) = run.load()[1].beginning
    assert run.data.train[0] == begin
    run.export(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (saved["bos_token"], saved["add_bos_token"]) == (BEGIN, True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == begin


@pytest.mark.interop
@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_an_export_says_that_conversations_did_not_begin_so(tmp_path, begins, cli, template):
    """The template of Llama 3 writes its beginning itself, ChatML has none."""
    pytest.importorskip("xllamacpp")
    from tests.exchange.test_llama_cpp import served

    pair = {"question": "the cat?", "answer": "the mat"}
    (tmp_path / "chats.jsonl").write_text((json.dumps(pair) + "\n") * 8)
    run = Run.create(
        text=tmp_path / "chats.jsonl",
        init_from=str(begins),
        out=tmp_path / "run",
        chat_template=template,
        **TRAINING,
    )
    run.train()
    ours = run.load()[1]
    ids = format_of(ours).prompt(ours, [Turn("user", "the cat?")]).tolist()
    assert ids.count(ours.beginning[0]) == (template == "llama3")
    run.export(tmp_path / "a.gguf", "gguf")
    cli("export", run.path, "--to gguf", tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    with served(tmp_path / "a.gguf") as ask:
        messages = [{"role": "user", "content": "the cat?"}]
        answer = ask("v1/chat/completions", messages=messages, max_tokens=1, temperature=0)
    assert answer["usage"]["prompt_tokens"] == len(ids)


@needs_node
def test_a_page_begins_prompts_too(tmp_path, begins, tokenizer):
    model = smallmind.load(begins, "numpy")[0]
    page = page_of(tmp_path, model, tokenizer)
    texts = PROMPT, BEGIN + PROMPT, ""
    found = asked(page, *(["begun", text] for text in texts))
    assert found == [tokenizer.prompt(text).tolist() for text in texts]
    settings = {"max_tokens": 6, "temperature": 0}
    (written,) = asked(page, ["write", PROMPT, settings])
    ours = smallmind.generate(model, tokenizer, PROMPT, **settings)
    assert PROMPT + written["text"] == ours

"""Tokenizers of SentencePiece, Unigram and WordPiece in directories, in GGUF and in runs."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import Run, Tokenizer
from smallmind.corpus.corpus import Corpus
from smallmind.corpus.preparation import Encoding, prepare
from smallmind.exchange import gguf_file
from smallmind.exchange.gguf import GGUF
from smallmind.exchange.gguf_tokenizer import EXPRESSIONS, metadata_of, tokenizer_of
from smallmind.exchange.published import of_metadata
from smallmind.text import hf_tokenizer, tokenizer_json
from smallmind.text.chat import LEARNED, Turn
from smallmind.text.templates import TEMPLATES, format_of
from smallmind.writing.generation import Writer
from tests.exchange.models import model_of
from tests.exchange.weights import GEMMA3, real
from tests.programs import edited, refuses
from tests.text import pieces
from tests.text.published import TEXT

pytest.importorskip("tokenizers")
NAMES = (*pieces.TRAINED, *pieces.MADE)
# llama.cpp puts a space before texts that begin with one, and after special tokens; transformers
# only before texts that begin without.
ALIKE = [x for x in pieces.hard(400, seed=2) if x[:1] != " " and not {"\x00", "▁"} & {*x}]
ALIKE = [x for x in ALIKE if "<0x41>" not in x]


def begun(name, path):
    """A tokenizer that begins texts with <s>, <bos> or [CLS], where it has one."""
    tokenizer = opened(name, path)
    first = next((x for x in ("<s>", "<bos>", "[CLS]") if x in tokenizer.special), None)
    if first is None:
        return tokenizer
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": first, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            first: {"id": first, "ids": [tokenizer.special[first]], "tokens": [first]}
        },
    }
    return tokenizer.with_published({"tokenizer.json": {"post_processor": processor}})


def opened(name, path):
    if name in pieces.MADE:
        return Tokenizer.from_json(pieces.file_of(name))
    file = path / f"{name}.model"
    file.write_bytes(pieces.trained(name))
    return Tokenizer.load(file)


def exported(name, path, to="hf"):
    """A model with this tokenizer, exported -> its tokenizer, the path."""
    tokenizer = begun(name, path)
    place = path / ("model" if to == "hf" else "model.gguf")
    model = model_of("Llama", tokenizer, n_embd=32, n_head=2, n_kv_head=2, block_size=64)
    smallmind.export(model, tokenizer, place, to)
    return tokenizer, place


@pytest.mark.parametrize("name", NAMES)
def test_a_directory_holds_the_tokenizer_as_it_was(name, tmp_path):
    tokenizer, place = exported(name, tmp_path)
    again = smallmind.load(place, "numpy")[1]
    assert again.digest == tokenizer.digest and again.beginning == tokenizer.beginning
    found = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    assert {**found, "post_processor": None} == pieces.written(tokenizer)


@pytest.mark.interop
@pytest.mark.parametrize("name", NAMES)
def test_transformers_makes_the_same_tokens_of_a_directory(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer, place = exported(name, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    for text in pieces.hard(1000):
        if tuple(tokenizer.encode(text)[:1]) != tokenizer.beginning:  # it begins by itself
            assert tokenizer.prompt(text).tolist() == theirs.encode(text)


@pytest.mark.interop
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}])
@pytest.mark.parametrize("name", pieces.TRAINED)
def test_a_model_of_sentencepiece_is_read_as_transformers_reads_it(name, settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    place = exported(name, tmp_path)[1]
    kind = {"llama": "LlamaTokenizer", "gemma": "GemmaTokenizer"}.get(name, "TokenizersBackend")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (place / file).unlink()
    said = {"tokenizer_class": kind, **settings}
    if name != "t5":
        said["bos_token"] = "<bos>" if name == "gemma" else "<s>"
    (place / "tokenizer_config.json").write_text(json.dumps(said))
    (place / "tokenizer.model").write_bytes(pieces.trained(name))
    ours = smallmind.load(place, "numpy")[1]
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    for text in pieces.hard(500):
        if "<mask>" not in text:  # which a class adds after the vocabulary of the model
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text).tolist() == ids
    assert ours.prompt("a b").tolist() == theirs.encode("a b")


def test_gguf_has_all_of_a_tokenizer(tmp_path):
    for name in ("llama", "gemma", "t5"):
        tokenizer, place = exported(name, tmp_path, "gguf")
        metadata, _ = gguf_file.read(place)
        assert metadata["tokenizer.ggml.model"] == ("t5" if name == "t5" else "llama")
        assert metadata["tokenizer.ggml.add_space_prefix"] == (name != "gemma")
        assert metadata["tokenizer.ggml.add_bos_token"] == bool(tokenizer.beginning)
        again = smallmind.load(place, "numpy")[1]
        assert again.beginning == tokenizer.beginning
        assert again.end_of_text == tokenizer.end_of_text
        for text in ALIKE:
            if not any(x in text for x in tokenizer.special):
                assert again.prompt(text).tolist() == tokenizer.prompt(text).tolist()
        place.unlink()


@pytest.mark.interop
@pytest.mark.parametrize("name", ["llama", "gemma", "t5"])
def test_llama_cpp_makes_the_same_tokens(name, tmp_path):
    pytest.importorskip("xllamacpp")
    from tests.exchange.test_llama_cpp import served

    tokenizer, place = exported(name, tmp_path, "gguf")
    with served(place) as ask:
        for text in ALIKE[:150]:
            if not text.startswith(("<s>", "<bos>")) and "\u200d" not in text * (name == "t5"):
                found = ask("tokenize", content=text, add_special=True)["tokens"]
                assert found == tokenizer.prompt(text).tolist()


def divided_by(pattern, path):
    """Bytes in pairs, divided as llama.cpp divides texts by this pattern, in GGUF -> the path."""
    expressions, ignores = EXPRESSIONS[pattern]
    data = pieces.file_of("bytes")
    data["pre_tokenizer"] = tokenizer_json.split_by(expressions)
    data["model"]["ignore_merges"] = ignores
    data["added_tokens"] = data["added_tokens"][:2]
    tokenizer, place = Tokenizer.from_json(data), path / "model.gguf"
    model = model_of("Llama", tokenizer, n_embd=32, n_head=2, n_kv_head=2, block_size=64)
    smallmind.export(model, tokenizer, place, "gguf")
    return tokenizer, place


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_gguf_keeps_how_texts_are_divided(pattern, tmp_path):
    tokenizer, place = divided_by(pattern, tmp_path)
    metadata, _ = gguf_file.read(place)
    found = metadata["tokenizer.ggml.pre"]
    assert EXPRESSIONS[found] == EXPRESSIONS[pattern]
    again = smallmind.load(place, "numpy")[1]
    assert again.end_of_text == tokenizer.end_of_text == tokenizer.special["</s>"]
    for text in pieces.hard(300):
        ids = tokenizer.encode(text).tolist()
        assert again.encode(text).tolist() == ids
        assert again.decode(ids) == tokenizer.decode(ids)
    if pattern == "default":  # early files do not say how
        del metadata["tokenizer.ggml.pre"]
        assert tokenizer_of(metadata).digest == again.digest


@pytest.mark.interop
@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_llama_cpp_divides_texts_in_the_same_way(pattern, tmp_path):
    pytest.importorskip("xllamacpp")
    from tests.exchange.test_llama_cpp import served

    tokenizer, place = divided_by(pattern, tmp_path)
    with served(place) as ask:
        for text in pieces.hard(150):
            found = ask("tokenize", content=text, parse_special=False)["tokens"]
            assert found == tokenizer.encode(text, special=False).tolist(), text


def as_published(name):
    """The path of a tokenizer.json that comes with the package litellm."""
    found = importlib.util.find_spec("litellm") or pytest.skip("no litellm")
    return next(Path(found.origin).parent.rglob(f"{name}_tokenizer.json"))


@pytest.mark.interop
@pytest.mark.parametrize("name", ["anthropic", "deepseek"])
def test_published_bytes_in_pairs_make_the_tokens_of_the_package(name):
    tokenizers = pytest.importorskip("tokenizers")
    ours = Tokenizer.load(as_published(name))
    theirs = tokenizers.Tokenizer.from_file(str(as_published(name)))
    for text in (*pieces.hard(1000), TEXT):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.interop
def test_llama_cpp_makes_the_tokens_of_a_published_file(tmp_path):
    pytest.importorskip("xllamacpp")
    from tests.exchange.test_llama_cpp import served

    tokenizer, place = Tokenizer.load(as_published("deepseek")), tmp_path / "model.gguf"
    model = model_of("Llama", tokenizer, n_embd=32, n_head=2, n_kv_head=2, block_size=64)
    smallmind.export(model, tokenizer, place, "gguf")
    assert gguf_file.read(place)[0]["tokenizer.ggml.pre"] == "deepseek-v3"
    assert (
        smallmind.load(place, "numpy")[1].encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    )
    with served(place) as ask:
        for text in (*pieces.hard(200), TEXT):
            found = ask("tokenize", content=text, parse_special=False)["tokens"]
            assert found == tokenizer.encode(text, special=False).tolist(), text


@pytest.mark.interop
def test_gguf_is_read_as_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    _, place = exported("llama", tmp_path, "gguf")
    ours = smallmind.load(place, "numpy")[1]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=place.name)
    for text in pieces.hard(2000):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids
    assert ours.prompt("a b").tolist() == theirs.encode("a b")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unigram", "llama.cpp has no tokenizer that divides texts as this one does"),
        ("metaspace", "llama.cpp has no tokenizer that divides texts as this one does"),
        ("wordpiece", "llama.cpp has no tokenizer that divides texts as this one does"),
        ("bytes", "llama.cpp has no tokenizer that divides texts as this one does"),
        ("prepend", "llama.cpp would merge"),
    ],
)
def test_what_llama_cpp_does_otherwise_is_refused_with_what_to_do(name, reason, tmp_path):
    refuses(f"{reason}.*--to hf", exported, name, tmp_path, "gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_words_of_bert_are_read_from_gguf():
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "able", "▁able", "▁!"]
    keys = {"model": "bert", "tokens": tokens, "unknown_token_id": 1, "bos_token_id": 2}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    found = tokenizer_of(metadata)
    found = found.with_published(of_metadata(metadata, found))
    assert found.prompt("Unable able! x").tolist() == [2, 4, 5, 6, 7, 1]
    assert found.decode([4, 5, 6, 7]) == "unable able!"


def changed(metadata, **values):
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}


def test_a_damaged_table_of_gguf_is_refused_in_a_line(tmp_path):
    metadata = metadata_of(opened("llama", tmp_path))
    scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("scores", "token_type"))
    tokens = metadata["tokenizer.ggml.tokens"]
    nan = scores.copy()
    nan[400] = np.nan
    refuses("is not a number", tokenizer_of, changed(metadata, scores=nan))
    refuses("numbers of tokens", tokenizer_of, changed(metadata, scores=scores[1:]))
    refuses("numbers of tokens", tokenizer_of, changed(metadata, token_type=types[1:]))
    refuses("are the same", tokenizer_of, changed(metadata, tokens=[*tokens[1:], tokens[5]]))
    refuses("damaged", tokenizer_of, changed(metadata, tokens=3))
    assert tokenizer_of(changed(metadata, unknown_token_id=10**6)).encode("a").size


def test_a_tokenizer_and_a_model_of_other_sizes(tmp_path):
    tokenizer, place = exported("llama", tmp_path)
    V = tokenizer.vocab_size
    with edited(place / "tokenizer.json") as data:  # of images, as in Gemma 3: the model has none
        data["added_tokens"].append({**pieces.added("<image>"), "id": V})
    assert smallmind.load(place, "numpy")[1].digest == tokenizer.digest
    with edited(place / "tokenizer.json") as data:
        data["model"]["vocab"]["elsewhere"] = data["added_tokens"].pop()["id"]
    refuses(f"its tokenizer has {V + 1} tokens, its model {V}", smallmind.load, place, "numpy")
    with edited(place / "tokenizer.json") as data:
        del data["model"]["vocab"]["elsewhere"]
    larger = model_of("Llama", tokenizer.with_special([f"[PAD{V}]", f"[PAD{V + 1}]"]), n_embd=32)
    with edited(place / "config.json") as config:
        config["vocab_size"] = larger.config.vocab_size
    shutil.rmtree(tmp_path / "larger", ignore_errors=True)
    found = smallmind.exchange.huggingface.HuggingFaceDirectory(place).tokenizer()
    assert found.vocab_size == V + 2 and found.encode("a b").tolist()


def test_a_run_keeps_the_tokenizer_and_goes_on_with_it(tmp_path):
    tokenizer, place = exported("llama", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("One cat sat.\nTwo dogs ran  home.\n" * 60, encoding="utf-8")
    settings = {"steps": 2, "batch_size": 2, "backend": "numpy", "val_batches": 1, "seed": 3}
    run = Run.create(text=text, out=tmp_path / "run", init_from=str(place), **settings)
    run.train()
    model, again = smallmind.load(run.path, "numpy")
    assert again.digest == tokenizer.digest == model.tokenizer_digest
    assert again.beginning == tokenizer.beginning
    (begin,) = tokenizer.beginning
    assert run.load()[1].contents == pieces.written(tokenizer)
    smallmind.export(model, again, tmp_path / "exported")
    third = smallmind.load(tmp_path / "exported", "numpy")[1]
    assert third.digest == tokenizer.digest and third.beginning == (begin,)
    assert Run.open(run.path).verify()


def test_prepared_documents_are_encoded_one_by_one_and_begin(tmp_path, monkeypatch):
    tokenizer = begun("llama", tmp_path)
    documents = [f"{i} cats sat.\n  Dogs ran {'home. ' * 30}" for i in range(12)]
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(documents):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(document, encoding="utf-8")
    wanted = []
    for document in documents:
        wanted += [*tokenizer.prompt(document).tolist(), tokenizer.end_of_text]
    tokenizer.save(tmp_path / "tokenizer.json")
    for size in (1 << 20, 300):  # whole, and in chunks
        monkeypatch.setattr(hf_tokenizer, "CHUNK", size)
        encoding = Encoding(Tokenizer.load(tmp_path / "tokenizer.json"))
        found = prepare(Corpus(tmp_path / "texts"), tmp_path / f"data{size}", encoding)
        assert np.concatenate([found.train[:], found.held_out[:]]).tolist() == wanted[:-1]
    settings = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16, "recipe": "gpt2"}
    run = Run.create(
        text=tmp_path / "data300", out=tmp_path / "run", steps=1, backend="numpy", **settings
    )
    run.train()
    assert run.load()[1].digest == tokenizer.digest
    run = Run.create(
        text=tmp_path / "texts",
        tokenizer=str(tmp_path / "llama.model"),
        out=tmp_path / "other",
        **{"steps": 1, "backend": "numpy", **settings},
    )
    assert run.data.tokenizer.digest == tokenizer.digest


@pytest.mark.interop
@pytest.mark.parametrize("name", ["llama", "gemma", "wordpiece"])
def test_a_model_writes_what_it_writes_in_transformers(name, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer, place = exported(name, tmp_path)
    model = smallmind.load(place, "numpy")[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    for prompt in ("The cat", "日本 "):
        ids = their_tokenizer(prompt, return_tensors="pt").input_ids
        found = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
        config = smallmind.GenerationConfig(max_tokens=12, temperature=0)
        writer = Writer(model, tokenizer, prompt, config)
        (sample,) = writer.samples()
        continuation = writer.texts[0]
        assert [*ids[0].tolist(), *continuation.tokens] == found[: ids.shape[1] + sample.tokens]
        whole = their_tokenizer.decode([*tokenizer.encode(prompt).tolist(), *continuation.tokens])
        if "\ufffd" not in whole:  # what follows a prompt does not begin a sequence
            assert tokenizer.decode(tokenizer.encode(prompt)) + sample.text == whole


@pytest.mark.interop
def test_the_tokenizer_of_gemma_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    path = real(GEMMA3)
    ours = GGUF().find(path).tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [*pieces.hard(2000), *(" " * i + "a" for i in range(70)), "日" * 33_000, "a" * 100_000]
    for text in texts:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.prompt("Hello").tolist() == theirs.encode("Hello") == [2, 9259]
    assert ours.special["<end_of_turn>"] == 106 and ours.end_of_text == 1
    again = tokenizer_of(metadata_of(ours) | {"general.architecture": "gemma3"})
    assert again.digest == Tokenizer.from_saved(again.saved).digest
    assert all(again.encode(x).tolist() == ours.encode(x).tolist() for x in texts[:500])


ZEPHYR = (  # also TinyLlama's: its roles are words, only </s> is a token
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.interop
@pytest.mark.parametrize("kind", ["sentencepiece", "llama"])
@pytest.mark.parametrize("name", ["zephyr", "mistral", "gemma"])
def test_conversations_have_the_tokens_of_transformers(name, kind, tmp_path):
    pytest.importorskip("jinja2")
    transformers = pytest.importorskip("transformers")
    source = "gemma" if name == "gemma" else "llama"
    _, place = exported(source, tmp_path)
    said = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if name == "gemma":
        said = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    if kind == "llama":  # SentencePiece's file, read as a class of transformers reads it
        (place / "tokenizer.json").unlink()
        (place / "tokenizer.model").write_bytes(pieces.trained(source))
        kinds = {"gemma": "GemmaTokenizer", "llama": "LlamaTokenizer"}
        said |= {"tokenizer_class": kinds[source], "add_bos_token": True}
    text = {"zephyr": ZEPHYR, "mistral": MISTRAL, "gemma": TEMPLATES["gemma"].jinja}[name]
    (place / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": text}))
    (place / "chat_template.jinja").write_text(text)
    tokenizer = smallmind.load(place, "numpy")[1]
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    template = format_of(tokenizer)
    for said in ("Hello", " a  b ", "日本 👩\u200d👩", "x\n\n"):
        turns = [Turn("user", said), Turn("assistant", "Yes, it is.\n"), Turn("user", "the cat")]
        if name != "mistral":
            turns = [Turn("system", "Be brief."), *turns]
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        wanted = theirs.apply_chat_template(messages, return_dict=False)
        assert (template.encode(tokenizer, turns) // 4).tolist() == wanted
        asked = {"add_generation_prompt": True, "return_dict": False}
        prompt = template.prompt(tokenizer, turns)
        assert prompt.tolist() == theirs.apply_chat_template(messages, **asked)
        assert (prompt == tokenizer.special.get("<s>", 2)).sum() <= 1  # one beginning
        learned = template.encode(tokenizer, turns)
        answer = tokenizer.decode(learned[learned % 4 == LEARNED] // 4)
        assert answer.strip().startswith("Yes, it is.") and answer.endswith(template.end)

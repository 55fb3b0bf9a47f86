"""Against llama.cpp itself, where xllamacpp is installed, and the reader of the gguf package."""

import json
import unicodedata
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

import smallmind
from smallmind.exchange import gguf_file
from smallmind.exchange.format import export_adapter, padded
from smallmind.kernels import reference
from smallmind.kernels.number_types import DTYPES, round_to, to_float32
from smallmind.nn.loading import read_tensor
from smallmind.parts import NUMBER_TYPES, types_for
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.chat import ASSISTANT, USER, Turn
from smallmind.text.conversations import PackedDataset
from smallmind.text.templates import HEADERS, fit_template
from tests.exchange import chat
from tests.exchange.adapters import adapted, saved
from tests.exchange.models import MODELS, TEXT, model_of, tokenizer_of
from tests.exchange.weights import GEMMA3, SMOLLM2, real
from tests.programs import PATIENCE
from tests.text import published

xllamacpp = pytest.importorskip("xllamacpp")
gguf = pytest.importorskip("gguf")
STORED = [kind.name for kind in types_for("store")]
BLOCKS = [kind.name for kind in types_for("store") if kind.block > 1]

pytestmark = pytest.mark.interop
KINDS = "char", "byte", "bpe"
PROMPT = TEXT[:40]
T = 256


@contextmanager
def served(path, adapter=None):
    """llama.cpp with this model -> a function that asks it something."""
    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = T, 1, 0
    settings.warmup, settings.fit_params, settings.verbosity = False, False, 0
    # Its defaults keep keys and values in float16; so texts part at the first near tie.
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    if adapter:
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = str(adapter), 1.0
        settings.lora_adapters = [lora]
    server = xllamacpp.Server(settings)

    def ask(endpoint, **body):
        url, kind = f"{server.listening_address}/{endpoint}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    yield ask  # ends with the last reference to the server


def made(tmp_path, name, kind, tied=True, type="f32", **fields):
    tokenizer = tokenizer_of(kind)
    model = model_of(name, tokenizer, tied, **{"block_size": T, "n_embd": 64, **fields})
    path = tmp_path / "model.gguf"
    smallmind.export(model, tokenizer, path, "gguf", type=type)
    return path, model, tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_writes_the_same_text(tmp_path, name, tied, kind):
    path, model, tokenizer = made(tmp_path, name, kind, tied)
    greedy = {"n_predict": 110, "temperature": 0, "return_tokens": True}
    with served(path) as ask:
        assert ask("tokenize", content=PROMPT)["tokens"] == tokenizer.encode(PROMPT).tolist()
        answer = ask("completion", prompt=PROMPT, **greedy)
    ours = smallmind.generate(model, tokenizer, PROMPT, max_tokens=110, temperature=0)
    same = tokenizer.decode([i for i in answer["tokens"][:100] if i != tokenizer.end_of_text])
    assert ours[len(PROMPT) :].startswith(same.rstrip("\ufffd"))
    assert len(answer["tokens"]) == 110 or answer["stop_type"] == "eos"


@pytest.mark.parametrize("on", [("attention", "mlp"), ("mlp", "head")], ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_loads_our_adapters_beside_their_base(tmp_path, name, on):
    path, base, tokenizer = made(tmp_path, name, "char", tied=False)
    model = adapted(base, on)
    export_adapter(saved(model), tmp_path / "adapter.gguf", "gguf-adapter")
    greedy = {"n_predict": 30, "temperature": 0, "return_tokens": True}
    prompt = tokenizer.encode(PROMPT).tolist()
    with served(path, tmp_path / "adapter.gguf") as ask:
        tokens = ask("completion", prompt=prompt, **greedy)["tokens"]
    ours = smallmind.generate(model, tokenizer, PROMPT, max_tokens=30, temperature=0)
    same = tokenizer.decode([i for i in tokens[:25] if i != tokenizer.end_of_text])
    assert ours[len(PROMPT) :].startswith(same)
    assert ours != smallmind.generate(base, tokenizer, PROMPT, max_tokens=30, temperature=0)


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    """A model that has learned a little: random ones amplify rounded activations."""
    tokenizer = tokenizer_of("char")
    fields = {"block_size": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, **MODELS[request.param]}
    model = smallmind.TransformerModel(tokenizer.vocab_size, **fields, backend="numpy")
    training = smallmind.Training(model, tokenizer, TEXT, block_size=64, batch_size=4)
    training.train(30, learning_rate=3e-3, val_every=0)
    return model, tokenizer


@pytest.mark.parametrize("type", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (7, 352), (2, 5, 96), (129, 1536)])
def test_blocks_are_those_of_the_gguf_package(shape, type):
    random = np.random.default_rng(shape[0])
    magnitudes = 10.0 ** random.integers(-6, 6, (*shape[:-1], 1))
    most = min(NUMBER_TYPES[type].limit, 5e5)
    values = (random.normal(0, 1, shape) * magnitudes).clip(-most, most).astype(np.float32)
    values[..., : shape[-1] // 3] *= np.float32(1e-3)
    values.reshape(-1, 32)[::5, ::7] = 0
    values.reshape(-1, 32)[1::9] = 0
    values[..., -1] = -values[..., -2]  # the largest of a block may have a twin
    kind = gguf.GGMLQuantizationType[type.upper()]
    theirs = gguf.quants.quantize(values, kind)
    ours = round_to(values, DTYPES[type])
    np.testing.assert_array_equal(ours.view(np.uint8).reshape(theirs.shape), theirs)
    np.testing.assert_array_equal(to_float32(ours), gguf.quants.dequantize(theirs, kind))


GREEDY = 40  # tokens


@pytest.mark.parametrize("type", BLOCKS)
def test_its_greedy_text_of_small_weights_is_ours(tmp_path, trained, type):
    """It rounds activations to 8 bits: at each token its choice is ours, or as good within that."""
    model, tokenizer = trained
    path = tmp_path / "model.gguf"
    smallmind.export(model, tokenizer, path, "gguf", type=type)
    with served(path) as ask:
        prompt = tokenizer.encode(PROMPT[:20])
        greedy = {"n_predict": GREEDY, "temperature": 0, "return_tokens": True}
        tokens = ask("completion", prompt=prompt.tolist(), **greedy)["tokens"]
    model, _ = smallmind.load(path, "numpy")
    ids = np.concatenate([prompt, tokens]).astype(np.int32)[None]
    logits = model.forward(ids)[0, len(prompt) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
    assert (logits.max(axis=1) - chosen).max() < 0.05 * logits.std()
    assert (logits.argmax(axis=1) == tokens).mean() > 0.9


@pytest.mark.parametrize("type", STORED)
def test_its_perplexity_is_ours(tmp_path, trained, type):
    model, tokenizer = trained
    smallmind.export(model, tokenizer, tmp_path / "model.gguf", "gguf", type=type)
    rounded, _ = smallmind.load(tmp_path / "model.gguf", "numpy")
    tokens = tokenizer.encode(TEXT)[:60]
    ours = rounded.losses(tokens[None, :-1], tokens[None, 1:]).mean()
    theirs = []
    with served(tmp_path / "model.gguf") as ask:
        for i in range(1, len(tokens)):
            settings = {"n_predict": 1, "temperature": 0, "n_probs": tokenizer.vocab_size}
            answer = ask("completion", prompt=tokens[:i].tolist(), **settings)
            ranked = answer["completion_probabilities"][0]["top_logprobs"]
            theirs.append(-next(t["logprob"] for t in ranked if t["id"] == tokens[i]))
    assert 2 < np.exp(ours) < 30
    assert np.exp(np.mean(theirs)) == pytest.approx(np.exp(ours), rel=0.005)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("type", STORED)
def test_the_gguf_package_reads_the_same(tmp_path, type, kind):
    path, _, tokenizer = made(tmp_path, "Qwen3", kind, tied=False, type=type)
    reader = gguf.GGUFReader(path)
    found, _ = smallmind.load(path, "numpy")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = tensors["output.weight"]
    values = gguf.quants.dequantize(head.data, head.tensor_type)
    np.testing.assert_array_equal(values.reshape(-1, 64).T, found.parameters["head.weight"])
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == tokenizer.vocab_size
    assert reader.fields["qwen3.context_length"].contents() == T


@pytest.mark.slow
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_real_weights_are_those_of_the_gguf_package(name):
    path = real(name)
    metadata, tensors = gguf_file.read(path)
    reader = gguf.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    assert metadata["tokenizer.ggml.tokens"] == reader.get_field("tokenizer.ggml.tokens").contents()
    for theirs in reader.tensors:
        first = np.arange(0, len(theirs.data), 1 + len(theirs.data) // 5000)  # some rows of many
        wanted = gguf.quants.dequantize(theirs.data[first], theirs.tensor_type)
        found = np.empty((len(theirs.data), *tensors[theirs.name].shape[1:]), np.float32)
        read_tensor(reference, found, tensors[theirs.name], theirs.name)
        np.testing.assert_array_equal(found[first], wanted, theirs.name)


def test_files_of_the_gguf_package_are_read(tmp_path):
    """As its writer lays them out: with scores, texts and numbers that are not needed here."""
    path, model, tokenizer = made(tmp_path, "Llama", "bpe", tied=False)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama", endianess=gguf.GGUFEndian.LITTLE)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
    writer.add_description("a model")
    writer.add_token_scores([0.5] * tokenizer.vocab_size)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, same = smallmind.load(tmp_path / "theirs.gguf", "numpy")
    np.testing.assert_array_equal(found.flat.data, model.flat.data)
    assert same.state() == tokenizer.state()


@pytest.mark.parametrize("text", [TEXT[:300], "a\tb\r\n \\x41 'll  12345 ünïcödé 日本 😀"])
@pytest.mark.parametrize("split", ["gpt2", "gpt4"])
def test_its_tokens_are_ours(tmp_path, split, text):
    tokenizer = smallmind.Tokenizer(TEXT + text * 9, "bpe", vocab_size=330, split=split)
    model = model_of("Llama", tokenizer)
    smallmind.export(model, tokenizer, tmp_path / "model.gguf", "gguf")
    with served(tmp_path / "model.gguf") as ask:
        assert ask("tokenize", content=text)["tokens"] == tokenizer.encode(text).tolist()
        ids = tokenizer.encode(text).tolist()
        assert ask("detokenize", tokens=ids)["content"] == text


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_its_tokens_are_those_of_published_tokenizers(tmp_path, name):
    tokenizer = padded(smallmind.Tokenizer.from_json(published.file_of(name)), 640)
    smallmind.export(model_of("Llama", tokenizer), tokenizer, tmp_path / "model.gguf", "gguf")
    text = published.TEXT[-2000:]
    if name == "Qwen":
        text = unicodedata.normalize("NFC", text)
    for special in (published.END, published.BEGIN, published.TURN_END, published.CALL):
        text += f"a 12{special} b"
    ids = tokenizer.encode(text).tolist()
    with served(tmp_path / "model.gguf") as ask:
        assert ask("tokenize", content=text)["tokens"] == ids
        control = {tokenizer.special[s] for s in tokenizer.special.keys() - tokenizer.rules.shown}
        shown = [i for i in ids if i not in control]
        assert ask("detokenize", tokens=shown)["content"] == tokenizer.decode(shown)


@pytest.mark.parametrize("name", chat.ENDS)
def test_it_asks_in_the_form_of_the_chat_model(tmp_path, name):
    run = smallmind.Run.import_model(chat.made(tmp_path / "source", name), tmp_path / "run")
    run.export(tmp_path / "model.gguf", "gguf")
    begin, turn_end = chat.ENDS[name]
    with served(tmp_path / "model.gguf") as ask:
        prompt = ask("apply-template", messages=[{"role": "user", "content": "A cat?"}])["prompt"]
        ids = ask("tokenize", content="The cat", add_special=True)["tokens"]
    assert prompt == f"<user>A cat?{turn_end}<assistant>"
    tokenizer = run.load(backend="numpy")[1]
    added = [tokenizer.special[begin]] if name == "Llama 3" else []
    assert ids == [*added, *tokenizer.encode("The cat").tolist()]


ANSWERS = {"The cat?": "On the mat.", "A dog?": "A log: über Äpfel!", "The owl?": ""}


@pytest.fixture(scope="module", params=[("chatml", "char"), ("llama3", "byte"), ("qa", "bpe")])
def answering(request, tmp_path_factory):
    """A model that has learned to answer, its tokenizer, and its file for llama.cpp."""
    name, kind = request.param
    known = TEXT + HEADERS + "".join([*ANSWERS, *ANSWERS.values()])
    tokenizer, template = fit_template(smallmind.Tokenizer(known, kind), name)
    turns = [turn for q, a in ANSWERS.items() for turn in (Turn(USER, q), Turn(ASSISTANT, a))]
    marked = np.concatenate([template.encode(tokenizer, turns[:end]) for end in (2, 4, 6)] * 4)
    fields = {"block_size": T, "n_embd": 64, "n_head": 4, "n_layer": 1, **ARCHITECTURES["llama"]}
    model = smallmind.TransformerModel(tokenizer.vocab_size, **fields)
    data = PackedDataset(marked, marked, T, 2, 1, tokenizer)
    training = smallmind.Training(model, data=data)
    training.train(60, learning_rate=5e-3, val_every=0)
    path = tmp_path_factory.mktemp("answering") / "model.gguf"
    smallmind.export(model, tokenizer, path, "gguf")
    return model, tokenizer, path


def test_its_chat_answers_as_here_and_ends(answering):
    model, tokenizer, path = answering
    ours, turns = smallmind.Chat(model, tokenizer, temperature=0), []
    with served(path) as ask:
        for question in ANSWERS:
            turns.append({"role": "user", "content": question})
            answer = ask("v1/chat/completions", messages=turns, temperature=0, max_tokens=60)
            (choice,) = answer["choices"]
            turns.append({"role": "assistant", "content": choice["message"]["content"]})
            assert turns[-1]["content"] == ours.template.lead + ours.say(question)
            assert (choice["finish_reason"], ours.ended) == ("stop", "end")
            ids = ours.template.prompt(tokenizer, ours.turns[:-1])
            assert answer["usage"]["prompt_tokens"] == len(ids)
            prompt = ask("apply-template", messages=turns[:-1])["prompt"]
            assert ask("tokenize", content=prompt, add_special=True)["tokens"] == ids.tolist()

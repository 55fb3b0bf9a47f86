"""Exports come back: in each format, the same logits bit for bit, and the same tokens."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Tokenizer, TransformerModel
from smallmind.exchange.format import find_external, padded
from smallmind.files import durable, safetensors
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from tests.exchange.full import Full
from tests.exchange.models import MODELS, TEXT, assert_same_logits, model_of, shard, tokenizer_of
from tests.peaks import traced
from tests.programs import refuses
from tests.text import published

KINDS = "char", "byte", "bpe"
CHAR = tokenizer_of("char")
PLACES = {"hf": "model", "gguf": "model.gguf"}


def sent(tmp_path, model, tokenizer, to, **options):
    path = tmp_path / PLACES[to]
    smallmind.export(model, tokenizer, path, to, **options)
    return path


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_with_the_same_logits(tmp_path, name, tied, to):
    model = model_of(name, CHAR, tied)
    path = sent(tmp_path, model, CHAR, to)
    found, same = smallmind.load(path, backend="numpy")
    assert_same_logits(found, model)
    assert same.state() == CHAR.state()
    has_head = to == "gguf" and name.startswith("GPT-NeoX")  # llama.cpp refuses it without
    config = replace(model.config, tie_weights=tied and not has_head)
    assert found.config == config or name == "GPT-2 without biases"
    prompt = TEXT[:9]
    assert smallmind.generate(found, same, prompt, max_tokens=9) == smallmind.generate(
        model, CHAR, prompt, max_tokens=9
    )


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["gpt2", "gpt4"])
def test_every_kind_of_tokenizer_comes_back(tmp_path, kind, split, to):
    text = TEXT + " \\ \\x41 \t\r\n\u2028 \u4e2d\U0001f600"
    settings = {"vocab_size": 290, "split": split} if kind == "bpe" else {}
    tokenizer = Tokenizer(text, kind, **settings)
    path = sent(tmp_path, model_of("Llama", tokenizer), tokenizer, to)
    found = find_external(path).tokenizer()
    assert found.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert found.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("to", "type", "dtype"),
    [(to, *kind) for to in PLACES for kind in (("f16", FLOAT16), ("bf16", BFLOAT16))],
)
def test_16_bit_weights_are_rounded_once(tmp_path, to, type, dtype):
    model = model_of("Qwen3", CHAR, tie_weights=False)
    found, _ = smallmind.load(sent(tmp_path, model, CHAR, to, type=type), "numpy")
    for name, values in model.parameters.items():
        rounded = to_float32(round_to(values, dtype))
        is_kept = to == "gguf" and values.ndim == 1
        np.testing.assert_array_equal(found.parameters[name], values if is_kept else rounded)


# The largest error over the largest weight: half a step and, where one side has one step less, one.
BLOCKS = {
    "q8_0": 0.51 / 127,
    "q5_0": 1.01 / 16,
    "q4_0": 1.01 / 8,
    "q5_1": 1.05 / 31,
    "q4_1": 1.05 / 15,
}


@pytest.mark.parametrize("type", BLOCKS)
def test_blocks_of_integers_are_within_a_step(tmp_path, type):
    model = model_of("Llama", CHAR, n_embd=64, head_size=8, mlp_width=96)
    found, _ = smallmind.load(sent(tmp_path, model, CHAR, "gguf", type=type), "numpy")
    for name, values in model.parameters.items():
        if values.ndim == 1:
            np.testing.assert_array_equal(found.parameters[name], values)
        else:
            most = BLOCKS[type] * np.abs(values).max()
            assert 0 < np.abs(found.parameters[name] - values).max() <= most
    again = sent(tmp_path, found, CHAR, "gguf", type=type)
    assert_same_logits(smallmind.load(again, "numpy")[0], found)


@pytest.mark.parametrize(("to", "type"), [("hf", "f16"), *(("gguf", x) for x in ("f16", *BLOCKS))])
def test_a_weight_that_is_too_large_is_refused(tmp_path, to, type):
    model = model_of("Llama", CHAR, n_embd=64)
    model.parameters["token_embedding.weight"][3, 5] = -1e7
    refuses(r"a weight is 1e\+07, too large for", sent, tmp_path, model, CHAR, to, type=type)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("type", BLOCKS)
def test_rows_too_short_for_blocks_have_16_bits(tmp_path, type):
    model = model_of("Llama", CHAR)
    found, _ = smallmind.load(sent(tmp_path, model, CHAR, "gguf", type=type), "numpy")
    for name, values in model.parameters.items():
        wanted = values if values.ndim == 1 else values.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(found.parameters[name], wanted)


def test_shards_are_read_together(tmp_path):
    model = model_of("Arcee", CHAR)
    path = sent(tmp_path, model, CHAR, "hf")
    shard(path)
    assert_same_logits(smallmind.load(path, "numpy")[0], model)


def test_files_of_earlier_versions_of_gpt2_are_read(tmp_path):
    """Without the word transformer, and with the mask of its attention."""
    model = model_of("GPT-2", CHAR)
    path = sent(tmp_path, model, CHAR, "hf")
    tensors, _ = safetensors.read(path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    tensors["h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
    safetensors.write(path / "model.safetensors", tensors, {})
    assert_same_logits(smallmind.load(path, "numpy")[0], model)


def test_a_vocabulary_is_padded_to_the_rows_of_the_model():
    tokenizer = tokenizer_of("bpe")
    more = padded(tokenizer, 320)
    assert more.vocab_size == 320 and more.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    assert padded(tokenizer, tokenizer.vocab_size) is tokenizer
    assert padded(tokenizer_of("byte"), 258).special == {"[PAD256]": 256, "[PAD257]": 257}
    for kind, size in (("bpe", tokenizer.vocab_size - 1), ("bpe", 2**20), ("byte", 255)):
        refuses("its tokenizer has", padded, tokenizer_of(kind), size)


@pytest.mark.parametrize("to", PLACES)
def test_a_padded_vocabulary_goes_out_and_comes_back(tmp_path, to):
    tokenizer = padded(tokenizer_of("bpe"), 320)
    path = sent(tmp_path, model_of("Qwen3", tokenizer), tokenizer, to)
    assert find_external(path).tokenizer().state() == tokenizer.state()


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("name", published.PUBLISHED)
def test_tokenizers_of_published_models_go_out_and_come_back(tmp_path, name, to):
    tokenizer = padded(Tokenizer.from_json(published.file_of(name)), 640)
    path = sent(tmp_path, model_of("Llama", tokenizer), tokenizer, to)
    found = find_external(path).tokenizer()
    # GGUF cannot say that accents are joined, nor what that takes.
    lost = ("normalizer", "late") if to == "gguf" else ()
    kept = {key: value for key, value in tokenizer.state().items() if key not in lost}
    assert found.state() == kept
    # Equal rules have another name in llama.cpp, and are refused where it has none.
    if name == "Llama 3":
        other = Tokenizer.from_state({**tokenizer.state(), "split": "gpt2"})
        if to == "gguf":
            with pytest.raises(InputError, match=r"cannot ignore merges .*; export .* --to hf"):
                sent(tmp_path, model_of("Llama", other), other, to)


@pytest.mark.parametrize("to", PLACES)
def test_export_and_import_take_no_second_copy_of_the_weights(tmp_path, to):
    tokenizer = tokenizer_of("byte")
    model = TransformerModel(256, 8, 256, 8, 4, norm="rmsnorm", position="rope", mlp="swiglu",
                             bias=False, backend="numpy")  # fmt: skip
    size = model.flat.data.nbytes
    with traced():
        path = sent(tmp_path, model, tokenizer, to)
        assert tracemalloc.get_traced_memory()[1] < 0.2 * size
        del model
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = find_external(path).model("numpy")
        # Its parameters and gradients, and a copy of the parameters that shrinks as they are moved.
        assert tracemalloc.get_traced_memory()[1] - before < 3.3 * size
        assert found.flat.data.nbytes == size


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("left", [0, 1000, 12_000, 60_000])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, to, left):
    model = model_of("Llama", CHAR, n_embd=16, mlp_width=16)
    monkeypatch.setattr(durable, "files", Full(left))
    if left == 60_000:
        sent(tmp_path, model, CHAR, to)
        return
    with pytest.raises(OSError, match="No space left"):
        sent(tmp_path, model, CHAR, to)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_but_a_gguf_file(tmp_path):
    model = model_of("Llama", CHAR)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("mine")
    refuses("is not an empty directory", sent, tmp_path, model, CHAR, "hf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "missing")
    for name, content in (("mine", b"mine"), ("empty", b""), ("almost", b"GGU"), ("link", None)):
        if content is not None:
            (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(InputError, match=f"{name}.gguf already exists and is not a GGUF file"):
            smallmind.export(model, CHAR, tmp_path / f"{name}.gguf", "gguf")
    assert (tmp_path / "mine.gguf").read_bytes() == b"mine"
    assert (tmp_path / "link.gguf").is_symlink() and not (tmp_path / "missing").exists()
    smallmind.export(model, CHAR, tmp_path / "other.gguf", "gguf")
    before = (tmp_path / "other.gguf").read_bytes()
    smallmind.export(model, CHAR, tmp_path / "other.gguf", "gguf")
    assert (tmp_path / "other.gguf").read_bytes() == before
    for name, reason in (("model", "must end in .gguf"), ("file.txt", "must end in .gguf")):
        refuses(reason, smallmind.export, model, CHAR, tmp_path / name, "gguf")


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    model = model_of("Llama", tokenizer_of("char"))
    with pytest.raises(InputError, match="the tokenizer has 256 tokens, the model vocab_size="):
        smallmind.export(model, tokenizer_of("byte"), tmp_path / "x")


def test_the_card_says_how_the_model_was_trained(tmp_path):
    tokenizer = tokenizer_of("bpe")
    history = {"text": "a | b\n<script>", "length": "3 steps"}
    options = {"name": "tiny\n# llama", "history": history}
    path = sent(tmp_path, model_of("Llama", tokenizer), tokenizer, "hf", **options)
    card = Path(path / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\n# tiny # llama\n" in card and "| text | a \\| b &lt;script> |" in card
    assert "| architecture | Llama (`LlamaForCausalLM`) |" in card

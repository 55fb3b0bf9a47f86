"""Models that only run have their weights once, read from any file straight into place."""

import functools
import gc
import itertools
import weakref

import numpy as np
import pytest

import smallmind
from smallmind import InputError, Precision, Run, Tokenizer, Training, TransformerModel
from smallmind.exchange.stored import find
from smallmind.files import safetensors
from smallmind.kernels.number_types import BFLOAT16, FLOAT16, round_to, to_float32
from smallmind.nn import loading
from smallmind.nn.loading import Stored, read_tensor
from tests.exchange.models import MODELS, TEXT, ids_for, model_of, tokenizer_of
from tests.programs import refuses

FORMATS = {"own": None, "hf": "f32", "hf-bf16": "bf16", "hf-f16": "f16", "gguf": "bf16"}
TYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": np.float32}


def written(tmp_path, name, form, tied=True):
    """A model -> where it was written in this format."""
    tokenizer = tokenizer_of("bpe")
    model, to, type = model_of(name, tokenizer, tied), form.split("-")[0], FORMATS[form]
    if type is None:
        path = tmp_path / "model.safetensors"
        model.save(path, {"tokenizer": tokenizer.saved})
        return path
    path = tmp_path / ("model.gguf" if to == "gguf" else "exported")
    smallmind.export(model, tokenizer, path, to, type)
    return path


# Two formats for each model, and all of them for one whose file has matrices transposed.
FORMS = [*FORMATS] * len(MODELS)
LOADED = [(name, FORMS[2 * i + j]) for i, name in enumerate(MODELS) for j in (0, 1)]
LOADED += [("GPT-2", form) for form in FORMATS]


@pytest.mark.parametrize(("name", "form"), dict.fromkeys(LOADED))
def test_it_computes_what_a_model_in_that_precision_computes(tmp_path, name, form):
    path = written(tmp_path, name, form, tied=name != "Llama")
    for precision in TYPES:
        trainable, _ = smallmind.load(path)
        trainable.use_precision(Precision(precision))
        model, _ = smallmind.load(path, precision=precision)
        ids = ids_for(model)
        np.testing.assert_array_equal(model.forward(ids), trainable.forward(ids))
        assert model.precision == precision
        assert model.flat.data.size == model.flat.grad.size == 0 == model.flat.copied_bytes
        assert {array.dtype for array in model.flat.arrays[1:]} == {np.dtype(TYPES[precision])}


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_of_any_size_are_put_together(tmp_path, monkeypatch, form):
    path = written(tmp_path, "Qwen3", form)
    expected, _ = smallmind.load(path)
    for piece, precision in itertools.product((1, 300, 1000), (None, "bfloat16")):
        monkeypatch.setattr(loading, "PIECE_BYTES", piece)
        model, _ = smallmind.load(path, precision=precision)
        for name, values in expected.parameters.items():
            values = values if precision is None else to_float32(round_to(values, BFLOAT16))
            np.testing.assert_array_equal(model.parameters[name], values)


def test_the_numpy_backend_reads_too(tmp_path):
    path = written(tmp_path, "Llama", "hf-bf16")
    plain, _ = smallmind.load(path, "numpy", precision="float32")
    compiled, _ = smallmind.load(path)
    for name, values in compiled.parameters.items():
        np.testing.assert_array_equal(plain.parameters[name], values)
    refuses("needs backend", smallmind.load, path, "numpy", precision="bfloat16")


def test_it_refuses_training_and_says_what_to_do(tmp_path):
    path = written(tmp_path, "Llama", "own")
    model, tokenizer = smallmind.load(path, precision="float32")
    ids = ids_for(model)
    refused = pytest.raises(InputError, match="load it without `precision` to train it")
    attempts = [
        lambda: model.loss_and_gradients(ids, ids),
        lambda: model.inspect(ids, ids),
        lambda: model.freeze("embedding"),
        lambda: model.freeze(None),
        lambda: Training(model, tokenizer, TEXT),
    ]
    for attempt in attempts:
        with refused as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert model.inspect(ids).logits.shape == (*ids.shape, model.config.vocab_size)
    assert model.loss(ids, ids) == smallmind.load(path)[0].loss(ids, ids)
    saved = tmp_path / "again.safetensors"
    model.save(saved, {"tokenizer": tokenizer.saved})
    assert smallmind.load(saved)[0].loss(ids, ids) == model.loss(ids, ids)
    refuses("must be one of", smallmind.load, path, precision="float8")


def test_damage_is_found_after_reading_and_nothing_is_returned(tmp_path):
    path = written(tmp_path, "GPT-2", "own")
    content = bytearray(path.read_bytes())
    for place in (len(content) // 2, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        for precision in (None, "bfloat16"):
            refuses("does not match its SHA-256", smallmind.load, path, precision=precision)
        content[place] ^= 1


def with_weight(tmp_path, form, value):
    """A model in this format, one of whose weights is this."""
    path = written(tmp_path, "Llama", form)
    file = path if form == "own" else path / "model.safetensors"
    tensors, metadata = safetensors.read(file)
    name = list(tensors)[2]
    flat = tensors[name].reshape(-1)
    if flat.dtype == safetensors.BFLOAT16:
        flat[-1:] = round_to(np.array([value], np.float32), BFLOAT16).view(safetensors.BFLOAT16)
    else:
        flat[-1] = value
    safetensors.write(file, tensors, metadata)
    return path


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["own", "hf", "hf-bf16", "hf-f16"])
def test_weights_that_are_not_finite_are_refused(tmp_path, form, value):
    path = with_weight(tmp_path, form, value)
    for precision in (None, *TYPES):
        with pytest.raises(InputError, match="is not finite") as raised:
            smallmind.load(path, precision=precision)
        assert "\n" not in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize("form", FORMATS)
def test_truncation_while_it_is_read_is_one_line(tmp_path, monkeypatch, form):
    path = written(tmp_path, "Llama", form)
    file = path / "model.safetensors" if path.is_dir() else path
    read, count = loading.is_finite, itertools.count()

    def truncating(values):
        if next(count) == 3:
            with open(file, "r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
        return read(values)

    monkeypatch.setattr(loading, "is_finite", truncating)
    with pytest.raises(InputError, match="was truncated while it was read") as raised:
        smallmind.load(path, precision="bfloat16")
    assert "\n" not in str(raised.value)


def test_a_float16_weight_too_large_for_it_is_infinite_as_before(tmp_path):
    path = with_weight(tmp_path, "own", 1e6)
    trainable, _ = smallmind.load(path)
    trainable.use_precision(Precision.FLOAT16)
    model, _ = smallmind.load(path, precision="float16")
    for name, values in trainable.flat.compute.items():
        np.testing.assert_array_equal(model.parameters[name], to_float32(values))


def test_double_precision_is_read_in_pieces(tmp_path):
    path = written(tmp_path, "Llama", "hf")
    expected, _ = smallmind.load(path)
    file = path / "model.safetensors"
    tensors, metadata = safetensors.read(file)
    wide = {name: tensor.astype("<f8") for name, tensor in tensors.items()}
    safetensors.write(file, wide, metadata)
    found, _ = smallmind.load(path)
    for name, values in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], values)


@pytest.mark.parametrize("shape", [(), (3,), (5, 4), (2, 3, 4)])
def test_a_tensor_in_memory_is_one_too(shape):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = Stored.of(values)
    np.testing.assert_array_equal(stored.values(), values)
    target = np.zeros(shape, BFLOAT16)
    read_tensor(TransformerModel(5, 4, 8, 1, 1).workspace.kernels, target, stored, "it")
    np.testing.assert_array_equal(target, round_to(values, BFLOAT16))


def test_the_tokenizer_is_the_one_of_the_model(tmp_path):
    path = written(tmp_path, "Llama", "hf-bf16")
    model, tokenizer = smallmind.load(path, precision="bfloat16")
    assert model.tokenizer_digest == tokenizer.digest
    generate = functools.partial(smallmind.generate, prompt="The cat", max_tokens=3)
    assert generate(model, tokenizer).startswith("The cat")
    refuses("is not the tokenizer", generate, model, Tokenizer(TEXT))


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_compressed_files_are_read(tmp_path, precision):
    path = written(tmp_path, "Qwen3", "own")
    expected, _ = smallmind.load(path, precision=precision)
    safetensors.write(path, *safetensors.compressed(*safetensors.read(path)))
    found, _ = smallmind.load(path, precision=precision)
    for name, values in expected.flat.compute.items():
        np.testing.assert_array_equal(found.flat.compute[name], values)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    refuses("does not match its SHA-256", smallmind.load, path, precision=precision)


def test_a_stream_checks_what_nobody_reads_too(tmp_path):
    path = tmp_path / "file"
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=(5, 7)).astype(np.float32) for name in "abc"}
    safetensors.write(path, tensors, {"x": "y"})
    with safetensors.streaming(path) as (stored, metadata):
        assert metadata == {"x": "y"}
        for name in ("a", "c"):  # one is left out
            rows = np.empty((5, 7), np.float32)
            for first in (0, 2):
                stored[name].read_rows(first, rows[first : 2 if first == 0 else None])
            np.testing.assert_array_equal(rows, tensors[name])
    content = bytearray(path.read_bytes())
    content[-4 * 5 * 7 - 30] ^= 1  # of b
    path.write_bytes(content)
    with (
        pytest.raises(InputError, match="does not match its SHA-256"),
        safetensors.streaming(path) as (stored, _),
    ):
        stored["a"].read_rows(0, rows)


@pytest.mark.parametrize("form", ["own", "hf-bf16", "gguf"])
def test_a_run_never_holds_the_weights_that_it_starts_from_twice(tmp_path, monkeypatch, form):
    """They are read one by one, while there is no model but the one that is trained."""
    path = written(tmp_path, "Llama", form)
    built, alive = [], []
    kind = type(find(path))
    unfilled = TransformerModel.unfilled

    def noted(*given, **named):
        built.append(weakref.ref(model := unfilled(*given, **named)))
        return model

    def watched(read):
        def counting(*given):
            gc.collect()
            alive.append(sum(ref() is not None for ref in built))
            return read(*given)

        return counting

    monkeypatch.setattr(TransformerModel, "unfilled", noted)
    for name in ("parameters", "write_to"):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    settings = {"steps": 1, "val_every": 0, "batch_size": 2, "precision": "float32"}
    run = Run.create(text=TEXT, out=tmp_path / "run", init_from=str(path), **settings)
    assert run.training.model.config.n_layer == 2
    assert alive[0] == 0 and alive[-1] == 1 == max(alive)

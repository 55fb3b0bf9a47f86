"""Models of any file, loaded with blocks of integers: those of the file, or of its values."""

import itertools
import tracemalloc

import numpy as np
import pytest

import smallmind
from smallmind import Run
from smallmind.exchange import gguf, gguf_file
from smallmind.exchange.format import find_external
from smallmind.files import safetensors
from smallmind.kernels.number_types import BFLOAT16, DTYPES, is_quantised, round_to, to_float32
from smallmind.nn import loading
from smallmind.nn.parameters import OUTPUTS_FIRST
from smallmind.parts import NUMBER_TYPES, types_for
from tests.exchange.models import TEXT, model_of, tokenizer_of
from tests.exchange.test_round_trip import sent
from tests.peaks import traced
from tests.programs import refusal, refuses

CHAR = tokenizer_of("char")
NAMES = ["GPT-2", "Llama", "Qwen3"]
SIZES = {"n_embd": 64, "mlp_width": 96, "head_size": 16}
FILES = [("own", None), ("hf", "f32"), ("hf", "bf16")]
FILES += [("gguf", kind.name) for kind in types_for("store")]
PRECISIONS = ["q8_0", "q4_0"]
PRECISION_DTYPES = {None: np.float32, "bfloat16": BFLOAT16, **DTYPES}


def written(tmp_path, name, to, type, **fields):
    model = model_of(name, CHAR, **{**SIZES, "tie_weights": name == "GPT-2", **fields})
    if to == "own":
        model.save(tmp_path / "model.safetensors", {"tokenizer": safetensors.to_json(CHAR.state())})
        return tmp_path / "model.safetensors"
    return sent(tmp_path, model, CHAR, to, type=type)


@pytest.mark.parametrize(
    ("name", "to", "type", "precision"),
    [  # every two of them
        (name, *file, PRECISIONS[(i + j) % 2])
        for i, name in enumerate(NAMES)
        for j, file in enumerate(FILES)
    ],
)
def test_blocks_are_those_of_the_values_in_the_file(
    tmp_path, monkeypatch, name, to, type, precision
):
    path = written(tmp_path, name, to, type)
    monkeypatch.setattr(loading, "PIECE_BYTES", 2**10)  # bytes: tensors are read in pieces
    values = smallmind.load(path, "numpy")[0].parameters
    model, _ = smallmind.load(path, "numpy", precision=precision)
    assert model.precision == precision and not model.flat.trained and not model.flat.data.size
    for spec in model.flat.specs:
        stored, value = model.flat.compute[spec.name], values[spec.name]
        if type == precision or not is_quantised(stored.dtype):
            np.testing.assert_array_equal(model.parameters[spec.name], value)
        else:
            rows = value.T if spec.role in OUTPUTS_FIRST else value
            np.testing.assert_array_equal(stored, round_to(rows, stored.dtype))
    kinds = [array.dtype for array in model.flat.compute.values()]
    assert kinds.count(DTYPES[precision]) == (9 if name == "GPT-2" else 10)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_the_same_type_are_copied(tmp_path, monkeypatch, name, precision):
    path = written(tmp_path, name, "gguf", precision)
    expected = smallmind.load(path, "numpy")[0].parameters
    for function in ("round_to", "to_float32"):
        monkeypatch.setattr(loading, function, None)
    model, _ = smallmind.load(path, "numpy", precision=precision)
    for name, value in expected.items():
        np.testing.assert_array_equal(model.parameters[name], value)


def test_rows_that_are_not_whole_blocks_stay_float32(tmp_path):
    path = written(tmp_path, "Qwen3", "hf", "f32", head_size=20, mlp_width=80)
    model, _ = smallmind.load(path, "numpy", precision="q8_0")
    kinds = {name: array.dtype for name, array in model.flat.compute.items()}
    assert kinds["blocks.0.attention.projection.weight"] == np.float32  # 80 channels in
    assert kinds["blocks.0.attention.qkv.weight"] == DTYPES["q8_0"]


@pytest.mark.parametrize("to", ["own", "gguf"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_that_is_too_large_is_refused(tmp_path, to, precision):
    model = model_of("Llama", CHAR, **SIZES)
    model.parameters["blocks.0.mlp.projection.weight"][3, 5] = -1e7
    if to == "own":
        path = tmp_path / "model.safetensors"
        model.save(path, {"tokenizer": safetensors.to_json(CHAR.state())})
    else:
        path = sent(tmp_path, model, CHAR, to)
    message = refusal(smallmind.load, path, precision=precision)
    assert f"projection.weight is too large for {precision}; choose bfloat16" in message


@pytest.mark.parametrize("loaded", [None, *PRECISIONS])
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize("type", [kind.name for kind in types_for("store") if kind.block > 1])
def test_a_scale_that_is_not_finite_is_refused(tmp_path, type, scale, loaded):
    path = written(tmp_path, "Llama", "gguf", type)
    _, tensors = gguf_file.read(path)
    start = tensors["blk.1.ffn_down.weight"].read.args[1]
    damaged = bytearray(path.read_bytes())
    damaged[start : start + 2] = scale.to_bytes(2, "little")
    path.write_bytes(damaged)
    assert f"is not finite {type}" in refusal(smallmind.load, path, precision=loaded)


def mixed(tmp_path, monkeypatch, name, **fields):
    """A file whose matrices are of each type of blocks in turn, of any integers."""
    random = np.random.default_rng(4)
    kinds = itertools.cycle(kind for kind in NUMBER_TYPES.values() if kind.block > 1)

    def type_of(shape, type):
        return NUMBER_TYPES["f32"] if len(shape) == 1 or type == "f32" else next(kinds)

    def encode(values, kind):
        if kind.block == 1:
            return values
        blocks = random.integers(0, 256, kind.size(values.shape), np.uint8).view(DTYPES[kind.name])
        for field in ("scale", "min"):
            if field in blocks.dtype.names:
                blocks[field] = random.normal(0, 1e-3, len(blocks))
        return blocks

    with monkeypatch.context() as patched:
        patched.setattr(gguf, "type_of", type_of)
        patched.setattr(gguf_file, "encode", encode)
        fields = {"n_embd": 256, "mlp_width": 512, "head_size": 64, "tie_weights": False} | fields
        return sent(tmp_path, model_of(name, CHAR, **fields), CHAR, "gguf", type="q8_0")


@pytest.mark.parametrize("precision", [None, "bfloat16", *PRECISIONS])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_may_mix_all_types(tmp_path, monkeypatch, name, precision):
    path = mixed(tmp_path, monkeypatch, name)
    _, tensors = gguf_file.read(path)
    monkeypatch.setattr(loading, "PIECE_BYTES", 2**15)  # bytes: tensors are read in pieces
    model, tokenizer = smallmind.load(path, precision=precision)
    smallmind.export(model, tokenizer, tmp_path / "again.gguf", "gguf")
    dtype = PRECISION_DTYPES[precision]
    for tensor, found in gguf_file.read(tmp_path / "again.gguf")[1].items():
        value, (shape, stored, _) = tensors[tensor].values(), tensors[tensor]
        stays = len(shape) == 1 or tensor.startswith(gguf.FLOAT32)
        if stored != dtype and not (stays and is_quantised(dtype)):
            value = to_float32(round_to(value, dtype))
        np.testing.assert_array_equal(found.values(), value, tensor)
    assert len({tensor.dtype for tensor in tensors.values()}) > 8


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_trains_beside_blocks_as_they_are(tmp_path, monkeypatch, precision):
    """Blocks of any integers change if they are rounded again: their largest is not the extreme."""
    path = mixed(tmp_path, monkeypatch, "Llama", n_layer=1)
    fields = {"lora_rank": 2, "precision": precision, "steps": 1, "batch_size": 1, "val_every": 0}
    run = Run.create(text=TEXT, init_from=str(path), out=tmp_path / "run", block_size=16, **fields)
    run.train()
    wanted = smallmind.load(path, precision=precision)[0].flat.compute
    for model in (run.training.model, smallmind.load(run.path, precision=precision)[0]):
        kept = [name for name in wanted if wanted[name].dtype == DTYPES[precision]]
        for name in kept:
            np.testing.assert_array_equal(model.flat.compute[name], wanted[name])
        assert len(kept) > 5


def test_a_file_of_many_types_takes_no_second_copy(tmp_path, monkeypatch):
    path = mixed(tmp_path, monkeypatch, "Llama", n_layer=12)
    monkeypatch.setattr(loading, "PIECE_BYTES", 2**18)
    with traced():
        model = find_external(path).model("numpy", "q8_0")
        held, peak = tracemalloc.get_traced_memory()
    assert sum(array.nbytes for array in model.flat.compute.values()) < held
    assert peak - held < 0.3 * held


@pytest.mark.parametrize("precision", PRECISIONS)
def test_such_a_model_only_runs(tmp_path, precision):
    path = written(tmp_path, "Qwen3", "gguf", precision)
    model, tokenizer = smallmind.load(path, precision=precision)
    assert smallmind.generate(model, tokenizer, max_tokens=3)
    ids = np.zeros((1, 4), np.int32)
    assert model.loss(ids, ids) > 0
    refuses("only runs", model.loss_and_gradients, ids, ids)


def test_it_is_exported_with_the_same_blocks(tmp_path):
    path = written(tmp_path, "Qwen3", "gguf", "q4_0")
    model, tokenizer = smallmind.load(path, "numpy", precision="q4_0")
    again = tmp_path / "again.gguf"
    smallmind.export(model, tokenizer, again, "gguf", type="q4_0")
    assert again.read_bytes()[-10_000:] == path.read_bytes()[-10_000:]

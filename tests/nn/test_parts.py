"""Every part of the architecture, alone and together: gradients, precision, recompute, threads."""

import importlib
import inspect
import json
import math
import pkgutil
import re
from dataclasses import replace

import numpy as np
import pytest

from smallmind import (
    CheckpointManager,
    InputError,
    ModelConfig,
    Precision,
    TransformerModel,
    gradient_check,
    nn,
    parts,
)
from smallmind.files import safetensors
from smallmind.nn.attention import Attention
from smallmind.nn.layer import Layer
from smallmind.settings.presets import ARCHITECTURES
from smallmind.settings.settings import Settings

LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "n_kv_head": 2}
EVERYTHING = {"norm": "rmsnorm", "position": "rope", "mlp": "relu2", "bias": False, "qk_norm": True}
EVERYTHING |= {"n_kv_head": 1, "head_size": 7, "value_residual": True, "x0_scalars": True}
EVERYTHING |= {"bigram_rows": 2**16, "logit_softcap": 3.0}
DOCUMENTS = {"document_token": 3}
ROPE = {"position": "rope"}
WINDOWS = {"window": 3, "window_layers": (1, 0)}
BY_BLOCK = {**WINDOWS, "rotary_layers": (1, 1, 0), "window_theta": 50.0}
# Blocks of Gemma and GPT-NeoX have no shortcuts elsewhere.
SHORTCUTS = {"value_residual": True, "x0_scalars": True, "bigram_rows": 2**16}
SANDWICH = {"norm": "rmsnorm", "part_settings": {"block": "sandwich", "embedding": "scaled"}}
PARALLEL = {"part_settings": {"block": "parallel"}}
PARTS = {
    "none": {},
    "untied": {"tie_weights": False},
    "no biases": {"bias": False},
    "neither": {"bias": False, "tie_weights": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "epsilon": {"norm_epsilon": 0.1},
    "epsilon of rmsnorm": {"norm_epsilon": 0.1, "norm": "rmsnorm", "qk_norm": True},
    "rope": {"position": "rope"},
    "no positions": {"position": "none"},
    "relu2": {"mlp": "relu2"},
    "swiglu": {"mlp": "swiglu"},
    "exact gelu": {"mlp": "gelu-erf"},
    "geglu": {"mlp": "geglu"},
    "width": {"mlp": "swiglu", "mlp_width": 5},
    "two key-value heads": {"n_kv_head": 2},
    "one key-value head": {"n_kv_head": 1},
    "head size": {"head_size": 5},
    "head size with rope": {"head_size": 5, "position": "rope", "n_kv_head": 2},
    "qk norm": {"qk_norm": True},
    "value residual": {"value_residual": True},
    "x0 scalars": {"x0_scalars": True},
    "pairs": {"bigram_rows": 2**16},
    "hashed pairs": {"bigram_rows": 50},
    "zero init": {"zero_init": True},
    "soft cap": {"logit_softcap": 2.0},
    "llama": LLAMA,
    "everything": EVERYTHING,
    "scaled embedding": {"part_settings": {"embedding": "scaled"}},
    "sandwich": SANDWICH,
    "sandwich of everything": {**EVERYTHING, **SANDWICH},
    "parallel": PARALLEL,
    "parallel with shortcuts": {**PARALLEL, **SHORTCUTS},
    "not parallel": {"part_settings": {"block": "parallel", "parallel_residual": False}},
    "documents": DOCUMENTS,
    "documents without positions": {"position": "none", **DOCUMENTS},
    "llama in documents": LLAMA | DOCUMENTS,
    "everything in documents": EVERYTHING | DOCUMENTS,
    "windows": {"part_settings": WINDOWS},
    "biases of queries, keys and values": LLAMA | {"part_settings": {"qkv_bias": True}},
    "other biases": {"part_settings": {"qkv_bias": False}},
    "scale of scores": {"part_settings": {"score_divisor": 11.0}},
    "rotated first channels": {**ROPE, "head_size": 10, "part_settings": {"rotary_share": 0.4}},
    "rotated first channels, normalised": {
        **ROPE,
        "qk_norm": True,
        "head_size": 8,
        "part_settings": {"rotary_share": 0.5},
    },
    "blocks without rotations": {**ROPE, "part_settings": {"rotary_layers": (1, 0)}},
    "another base in windows": {
        **{**ROPE, "head_size": 8},
        "part_settings": {"window": 9, "window_theta": 50.0},
    },
    "slower rotations": {**ROPE, "part_settings": {"rope_scaling": ("linear", 4.0)}},
    "Llama 3.1": {**ROPE, "part_settings": {"rope_scaling": ("llama3", 8.0, 0.1, 4.0, 16)}},
    "everything by block": EVERYTHING | DOCUMENTS | {"part_settings": BY_BLOCK},
}
V, T = 11, 6


def make(n_embd=12, n_layer=3, noise=0.3, **settings):
    """A model away from its initial values, where some parts have no effect."""
    model = TransformerModel(V, T, n_embd, n_layer, 4, **settings)
    random = np.random.default_rng(1)
    for value in model.parameters.values():
        value += noise * random.standard_normal(value.shape)
    return model


def batch(B=3):
    ids = np.random.default_rng(2).integers(0, V, (B, T + 1)).astype(np.int32)
    ids[0, 2:4] = ids[-1, 3] = DOCUMENTS["document_token"]
    return ids[:, :-1], ids[:, 1:]


def gradients(model, scale=1.0):
    model.zero_gradients()
    model.passes = 4
    loss = model.loss_and_gradients(*batch(), scale)
    return loss, model.flat.grad / np.float32(scale)


@pytest.mark.parametrize(
    ("part", "dropout"),
    [
        *((part, 0.3) for part in PARTS),  # with masks on the way, which others lack
        *((part, 0.0) for part in ("none", "llama", "everything in documents", "parallel")),
    ],
)
def test_gradients_match_finite_differences(part, dropout):
    model = make(dropout=dropout, backend="numpy", dtype=np.float64, **PARTS[part])
    found = gradient_check(model, *batch())
    assert found.errors.keys() == model.parameters.keys()
    assert found.ok, found


@pytest.mark.parametrize(
    ("part", "n_embd"),
    [(part, n_embd) for i, part in enumerate(PARTS) for n_embd in ((12, 20)[i % 2], 132)],
)
def test_compiled_kernels_match_plain_numpy(part, n_embd):
    plain = make(n_embd, backend="numpy", dtype=np.float64, **PARTS[part])
    fast = make(n_embd, **PARTS[part])
    (expected_loss, expected), (loss, actual) = gradients(plain), gradients(fast)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert np.linalg.norm(actual - expected) < 2e-4 * np.linalg.norm(expected)
    assert fast.loss(*batch()) == pytest.approx(plain.loss(*batch()), rel=1e-5)


@pytest.mark.parametrize(
    ("part", "backend", "precision"),
    [
        ("none", "numpy", "float32"),
        *(("none", "numba", precision) for precision in ("float32", "float16", "bfloat16")),
        *((part, "numba", "float32") for part in ("llama", "everything in documents")),
        *((part, "numba", "float32") for part in ("sandwich of everything", "not parallel")),
        ("sandwich", "numba", "bfloat16"),
        ("parallel with shortcuts", "numba", "float32"),
        ("parallel", "numba", "bfloat16"),
        ("everything", "numba", "float32"),
        ("everything by block", "numba", "float32"),
    ],
)
@pytest.mark.parametrize("interval", [1, 2, 3, 99])
def test_recompute_gives_the_same_bits(part, backend, precision, interval):
    model = make(n_layer=5, dropout=0.2, backend=backend, **PARTS[part])
    model.use_precision(precision)
    plain = gradients(model, scale=256.0)
    assert plain[1].any()
    model.use_checkpointing(CheckpointManager(interval))
    recomputed = gradients(model, scale=256.0)
    assert recomputed[0] == plain[0]
    np.testing.assert_array_equal(recomputed[1], plain[1])


@pytest.mark.parametrize("part", PARTS)
def test_micro_batches_change_only_rounding(part):
    model = make(dropout=0.2, backend="numpy", dtype=np.float64, **PARTS[part])
    _, whole = gradients(model)
    model.micro_batch_size = 1
    _, divided = gradients(model)
    np.testing.assert_allclose(divided, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("precision", "scale", "error"),
    [(Precision.FLOAT16, 1024.0, 1e-2), (Precision.BFLOAT16, 1.0, 6e-2)],
)
@pytest.mark.parametrize(
    "part", ["llama", "everything", "sandwich", "parallel", "geglu", "everything by block"]
)
def test_16_bits_match_float32_up_to_rounding(part, precision, scale, error):
    model = make(48, noise=0.05, **PARTS[part])
    _, exact = gradients(model)
    model.use_precision(precision)
    _, half = gradients(model, scale)
    assert 1e-5 < np.linalg.norm(half - exact) / np.linalg.norm(exact) < error


@pytest.mark.parametrize("part", PARTS)
def test_a_pass_returns_all_that_it_rents(part):
    model, data = make(dropout=0.1, **PARTS[part]), batch()
    pool = model.workspace.pool
    before = pool.statistics().bytes_rented
    for call in (model.loss_and_gradients, model.loss, model.losses):
        call(*data)
        assert pool.statistics().bytes_rented == before
    model.forward(data[0])
    assert pool.statistics().bytes_rented == before
    misses = pool.statistics().misses
    model.loss_and_gradients(*data)
    assert pool.statistics().misses == misses


@pytest.mark.parametrize("part", PARTS)
def test_a_saved_model_loads_with_all_its_parts(part, tmp_path):
    model = make(**PARTS[part])
    path = tmp_path / "model.safetensors"
    model.save(path)
    assert safetensors.read_metadata(path)["format"] == "smallmind model 1"
    loaded = TransformerModel.load(path)
    assert loaded.config == model.config
    assert loaded.flat.data.tobytes() == model.flat.data.tobytes()
    np.testing.assert_array_equal(loaded.forward(batch()[0]), model.forward(batch()[0]))


@pytest.mark.parametrize("part", ["none", "everything"])
def test_later_tokens_change_no_earlier_logits(part):
    model = make(**PARTS[part])
    ids = batch()[0]
    before = model.forward(ids)
    ids = ids.copy()
    ids[:, -1] = (ids[:, -1] + 1) % V
    after = model.forward(ids)
    np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
    assert (after[:, -1] != before[:, -1]).any()


def test_pairs_start_without_effect_and_projections_at_zero():
    pairs = TransformerModel(V, T, 12, 2, 4, bigram_rows=1000).parameters["bigram_embedding.weight"]
    assert pairs.shape == (V * V, 12)
    assert not pairs.any()
    zero = TransformerModel(V, T, 12, 2, 4, zero_init=True)
    assert not zero.parameters["blocks.1.mlp.projection.weight"].any()


def test_positions_matter_only_if_the_model_has_them():
    ids = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
    swapped = ids[:, [1, 0, 2, 3, 4, 5]]
    for position, differs in (("learned", True), ("rope", True), ("none", False)):
        model = make(position=position, n_layer=1)
        changed = np.abs(model.forward(ids)[0, -1] - model.forward(swapped)[0, -1]).max()
        assert (changed > 1e-4) == differs, position


@pytest.mark.parametrize("part", ["llama", "everything"])
def test_heads_with_a_size_of_their_own_need_not_divide_the_channels(part):
    fields = {**PARTS[part], "head_size": 9}
    model = make(13, backend="numpy", dtype=np.float64, **fields)
    assert model.parameters["blocks.0.attention.projection.weight"].shape == (36, 13)
    assert (found := gradient_check(model, *batch())).ok, found
    _, expected = gradients(model)
    _, actual = gradients(make(13, **fields))
    assert np.linalg.norm(actual - expected) < 2e-4 * np.linalg.norm(expected)


def test_a_published_architecture_is_named():
    def name(**settings):
        return ModelConfig(n_head=4, n_embd=16, **settings).architecture

    base = {"norm": "rmsnorm", "position": "rope", "bias": False}
    assert name() == "GPT-2"
    assert name(mlp="swiglu", **base) == name(mlp="swiglu", n_kv_head=2, **base) == "Llama"
    assert name(mlp="swiglu", qk_norm=True, **base) == "Qwen3"
    assert name(mlp="relu2", **base) == "Arcee"
    assert name(mlp="relu2", logit_softcap=15.0, **base) is None
    assert name(n_kv_head=2) is None
    assert name(mlp="gelu", **base) is None
    assert name(mlp="swiglu", head_size=10, **base) == "Llama"
    assert name(head_size=4) == "GPT-2"
    assert name(head_size=10) is None
    odd = {"n_head": 4, "n_embd": 12, "mlp": "swiglu", **base}
    assert ModelConfig(**odd).architecture is None
    assert ModelConfig(**odd, head_size=4).architecture == "Llama"


@pytest.mark.parametrize(
    "field",
    [
        *({"n_kv_head": 3}, {"n_kv_head": 8}, {"rope_theta": 1.0}),
        *({"logit_softcap": cap} for cap in (1e-9, 1e9)),  # which float32 cannot compute
    ],
)
def test_a_part_that_does_not_fit_is_refused(field):
    with pytest.raises(InputError, match=next(iter(field))):
        ModelConfig(n_head=4, n_embd=16, **field)


def test_what_later_blocks_mix_in_is_copied_once_also_with_recompute():
    model = make(**EVERYTHING)
    model.use_checkpointing(CheckpointManager(1))
    layers = []

    def wrap(name, kernel):
        def counted(*arguments, **named):
            if name == "copy_columns":
                layers.append(model.workspace.layer)
            return kernel(*arguments, **named)

        return counted

    with model.workspace.wrapped_kernels(wrap):
        gradients(model)
    # Once forward, and once more to add its gradient.
    assert layers.count("first_values") == layers.count("embedding_residual") == 2


@pytest.mark.parametrize(("V", "C"), [(65, 64), (65, 128), (65, 256), (65, 1024), (11, 256)])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_tied_head_starts_close_to_guessing(norm, V, C):
    parts = {**ARCHITECTURES["modern"], "zero_init": True, "norm": norm, "mlp_width": 4}
    model = TransformerModel(V, 32, C, 1, C // 32, **parts, backend="numpy")
    ids, targets = np.random.default_rng(0).integers(0, V, (2, 8, 32))
    assert model.loss(ids, targets) == pytest.approx(np.log(V), abs=0.25)


@pytest.mark.parametrize(
    ("arch", "settings", "is_one"),
    [
        ("gpt2", {}, True),
        ("llama", {}, True),
        ("modern", {}, True),
        ("modern", {"zero_init": True, "tie_weights": False}, True),
        ("modern", {"zero_init": True, "n_embd": 128}, True),
        ("modern", {"zero_init": True}, False),
    ],
)
def test_the_final_gain_starts_at_one_unless_a_tied_head_needs_less(arch, settings, is_one):
    shape = {"n_embd": 512, "n_layer": 1, "n_head": 8, "block_size": 8, "mlp_width": 4}
    fields = {**ARCHITECTURES[arch], **shape, **settings}
    gain = TransformerModel(ModelConfig(65, **fields), backend="numpy").parameters
    assert ((gain["final_norm.weight"] == 1).all()) == is_one
    assert (gain["blocks.0.mlp_norm.weight"] == 1).all()


class UnscaledAttention(Attention):
    """Attention whose scores are the products of queries and keys."""

    def __init__(self, scope, *arguments):
        super().__init__(scope, *arguments)
        self.scale = 1.0


@pytest.fixture
def unscaled(monkeypatch):
    """The config of a model with an attention of its own."""
    monkeypatch.setitem(parts.ATTENTIONS, "unscaled", f"{__name__}:UnscaledAttention")
    settings = {"attention": "unscaled", "qkv_bias": True, "window_layers": [1, 0]}
    return ModelConfig(31, 12, 2, 4, 24, **LLAMA, part_settings=settings)


def test_an_architecture_may_bring_a_part_of_its_own(unscaled, tmp_path):
    model = TransformerModel(unscaled, backend="numpy", dtype=np.float64)
    assert [name for name in model.parameters if name.endswith("bias")] == [
        f"blocks.{i}.attention.qkv.bias" for i in range(2)
    ]
    assert gradient_check(model)
    model = TransformerModel(unscaled)
    assert model.workspace.new_recording is None  # it does not declare that it only calls kernels
    model.save(tmp_path / "model")
    loaded = TransformerModel.load(tmp_path / "model")
    assert loaded.config == unscaled and hash(loaded.config) == hash(unscaled)
    assert loaded.config != ModelConfig(31, 12, 2, 4, 24, **LLAMA)
    scaled = {**dict(unscaled.part_settings), "attention": "causal", "score_divisor": 1.0}
    ids = batch()[0]
    same = TransformerModel(replace(unscaled, part_settings=scaled))
    np.testing.assert_array_equal(model.forward(ids), same.forward(ids))


SET = [name for name, part in PARTS.items() if "block" not in part.get("part_settings", "block")]


@pytest.mark.parametrize("name", SET)
def test_settings_of_parts_change_what_a_model_computes(name):
    model = make(**PARTS[name])
    same = {key: value for key, value in PARTS[name].items() if key != "part_settings"}
    other = make(**same)
    for parameter, values in model.parameters.items():
        if parameter in other.parameters:
            other.parameters[parameter][...] = values
    ids = batch()[0]
    assert np.abs(model.forward(ids) - other.forward(ids)).max() > 1e-3


def test_blocks_with_a_window_see_the_last_tokens_alone():
    model = TransformerModel(V, 40, 12, 1, 4, position="rope", part_settings={"window": 5})
    model.flat.data += np.random.default_rng(1).normal(0, 0.3, model.flat.data.size)
    ids = np.random.default_rng(1).integers(0, V, (2, 40)).astype(np.int32)
    changed = ids.copy()
    changed[:, :20] = (ids[:, :20] + 1) % V
    found, other = model.forward(ids), model.forward(changed)
    assert np.abs(found[:, 23] - other[:, 23]).max() > 1e-4  # sees 19 to 23
    np.testing.assert_array_equal(found[:, 24:], other[:, 24:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"window": 2.5}, "window=2.5 must be a whole number"),
        ({"window_layers": 1}, "window_layers=1 must be a list of 0 and 1"),
        ({"rotary_layers": [1, 2]}, "rotary_layers=.* must be a list of 0 and 1"),
        ({"rotary_layers": []}, "rotary_layers=.* must be a list of 0 and 1"),
        ({"rotary_share": 0.0}, "rotary_share=0.0 must be above 0"),
        ({"score_divisor": -1.0}, "score_divisor=-1.0 must be above 0"),
        ({"window_theta": math.inf}, "window_theta=inf must be"),
        ({"qkv_bias": "yes"}, "qkv_bias='yes' must be true or false"),
        ({"rope_scaling": ["yarn", 4.0]}, "rope_scaling=.*yarn.* must be linear"),
        ({"rope_scaling": ["linear", "4"]}, "rope_scaling=.* must be linear"),
        ({"rope_scaling": ["llama3", 8, 4, 4, 8192]}, "a low and a higher frequency factor"),
    ],
)
def test_settings_of_parts_that_cannot_be_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        ModelConfig(part_settings=settings)


def test_lists_by_block_are_the_same_however_often_they_are_repeated():
    lists = [{"rotary_layers": (1, 0, 1) * n} for n in (1, 2, 4)]
    assert len({ModelConfig(part_settings=settings) for settings in lists}) == 1
    config = ModelConfig(part_settings=lists[1])
    assert [config.of_block("rotary_layers", i) for i in range(5)] == [1, 0, 1, 1, 0]


def test_files_mention_part_settings_only_where_there_are_any(unscaled):
    assert "part_settings" not in Settings().to_dict()["model"]
    saved = json.loads(json.dumps(Settings(model=unscaled).to_dict()))
    assert Settings.from_dict(saved).model == unscaled


@pytest.mark.parametrize("wrong", [3, "word", {"a b": 1}, {"a": {}}, [["a"]], {1: 2}])
def test_part_settings_are_names_with_values(wrong):
    with pytest.raises(InputError, match="part_settings="):
        ModelConfig(part_settings=wrong)


FORMULA = re.compile(r"\[?[a-z]\w*(\[\w+\])?(, \w+)* = ")


def layers_of_the_package():
    """All classes of layers in `smallmind.nn` that a model can have."""
    for module in pkgutil.iter_modules(nn.__path__, "smallmind.nn."):
        importlib.import_module(module.name)
    waiting = [Layer]
    while waiting:
        waiting += (kind := waiting.pop()).__subclasses__()
        if kind.__module__.startswith("smallmind.nn.") and not inspect.isabstract(kind):
            yield kind


def test_the_first_line_of_a_layer_is_its_formula():
    kinds = [kind for kind in layers_of_the_package() if kind is not Layer]
    assert len(kinds) > 20
    lacking = [x.__name__ for x in kinds if not FORMULA.match((x.__doc__ or "").splitlines()[0])]
    assert lacking == []
    assert not FORMULA.match("A gain (C,).") and not FORMULA.match("Normalises x: y = x.")

"""The whole model: gradients, agreement with PyTorch, both backends, invalid use."""

import dataclasses
import inspect
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind.files import safetensors
from smallmind.nn.network import declare_parameters
from smallmind.nn.parameters import Role
from smallmind.nn.workspace import Pass
from smallmind.settings.config import ModelConfig
from tests.peaks import rented_at_the_peak

GOLDEN = Path(__file__).parent.parent / "golden"
BACKENDS = ("numba", "numpy")
MODELS = ("tied", "untied", "llama", "everything", "wide_heads")


def small_model(**settings):
    defaults = {"vocab_size": 11, "block_size": 7, "n_embd": 12, "n_layer": 2, "n_head": 3}
    return smallmind.TransformerModel(**{**defaults, **settings})


def batch(model, B=2, T=None, seed=0):
    random = np.random.default_rng(seed)
    T = model.config.block_size if T is None else T
    data = random.integers(0, model.config.vocab_size, (B, T + 1)).astype(np.int32)
    return data[:, :-1], data[:, 1:]


def load_golden(name, backend, dtype=np.float32):
    tensors, metadata = safetensors.read(GOLDEN / f"{name}.safetensors")
    config = ModelConfig(**safetensors.from_json(metadata["config"]))
    model = smallmind.TransformerModel(**dataclasses.asdict(config), backend=backend, dtype=dtype)
    for parameter, value in model.parameters.items():
        value[...] = tensors[f"parameters/{parameter}"]
    return model, tensors


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_match_pytorch(name, backend):
    model, golden = load_golden(name, backend)
    ids, targets = golden["ids"], golden["targets"]
    assert relative_error(model.forward(ids), golden["logits"].reshape(*ids.shape, -1)) < 1e-5
    assert model.loss(ids, targets) == pytest.approx(golden["loss"][0], rel=1e-5)
    assert model.loss_and_gradients(ids, targets) == pytest.approx(golden["loss"][0], rel=1e-5)
    for parameter, gradient in model.gradients.items():
        assert relative_error(gradient, golden[f"gradients/{parameter}"]) < 1e-5, parameter


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_ten_losses_of_training_match_pytorch(name, backend):
    model, golden = load_golden(name, backend)
    optimizer = smallmind.AdamW(model, 1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    losses = []
    for _ in golden["losses"]:
        losses.append(model.loss_and_gradients(golden["ids"], golden["targets"]))
        optimizer.step(max_grad_norm=1.0)
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-5)


def test_gradients_are_added_and_cleared():
    model = small_model()
    ids, targets = batch(model)
    model.loss_and_gradients(ids, targets)
    once = {name: gradient.copy() for name, gradient in model.gradients.items()}
    model.loss_and_gradients(ids, targets)
    for name, gradient in model.gradients.items():
        np.testing.assert_allclose(gradient, 2 * once[name], rtol=1e-4, atol=1e-7)
    model.zero_gradients()
    assert not any(gradient.any() for gradient in model.gradients.values())


def test_a_batch_goes_through_the_model_in_micro_batches(monkeypatch):
    """The gradients stay the same, and memory does not grow with the batch."""
    model = small_model(backend="numpy", dtype=np.float64)
    ids, targets = batch(model, B=5)

    def pass_through(micro_batch_size):
        model.micro_batch_size = micro_batch_size
        model.zero_gradients()
        loss = model.loss_and_gradients(ids, targets, scale=3.0)
        results = [loss, model.flat.grad.copy(), model.losses(ids, targets)]
        return [*results, model.forward(ids)]

    whole = pass_through(5)
    for windows in (1, 2, 3, 4):
        for actual, expected in zip(pass_through(windows), whole, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)

    def peak(B):
        data = batch(model, B=B)
        return rented_at_the_peak(monkeypatch, model, lambda model: model.loss_and_gradients(*data))

    model.micro_batch_size = 5
    assert peak(5) == peak(50) > peak(2)


def test_scale_multiplies_the_gradients_and_not_the_loss():
    model = small_model(backend="numpy", dtype=np.float64)
    ids, targets = batch(model)
    loss = model.loss_and_gradients(ids, targets)
    once = model.flat.grad.copy()
    model.zero_gradients()
    assert model.loss_and_gradients(ids, targets, scale=0.25) == loss
    np.testing.assert_allclose(model.flat.grad, 0.25 * once, atol=1e-15)


def test_parameters_and_gradients_are_views_of_one_flat_vector_each():
    model = small_model()
    for mapping, flat in ((model.parameters, model.flat.data), (model.gradients, model.flat.grad)):
        for name, array in mapping.items():
            assert np.shares_memory(array, flat), name
            assert array.dtype == np.float32
            assert array.ctypes.data % 64 == flat.ctypes.data % 64
        flat[:] = 7
        assert all((array == 7).all() for array in mapping.values())
        next(iter(mapping.values()))[...] = 8
        assert (flat == 8).any()


def test_an_interrupted_pass_returns_every_array(monkeypatch):
    model = small_model(dropout=0.1)
    ids, targets = batch(model)
    rented = model.workspace.pool.statistics().bytes_rented
    expected = model.loss(ids, targets)

    def interrupt(dx):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[0], "backward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.loss_and_gradients(ids, targets)
    assert model.workspace.pool.statistics().bytes_rented == rented
    assert model.loss(ids, targets) == expected


def test_dropout_is_off_outside_training_and_differs_in_every_pass():
    model = small_model(dropout=0.5)
    ids, targets = batch(model)
    assert model.loss(ids, targets) == model.loss(ids, targets)
    losses = [model.loss_and_gradients(ids, targets) for _ in range(3)]
    assert len({*losses, model.loss(ids, targets)}) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_dropout_does_not_depend_on_the_micro_batches(backend, recomputes, micro_batch_size):
    def accumulate(size):
        model = small_model(dropout=0.3, backend=backend)
        model.use_recompute(smallmind.CheckpointManager(1, enabled=recomputes))
        model.micro_batch_size = size
        # Two batches, accumulated: the second one has its own masks.
        losses = [model.loss_and_gradients(*batch(model, B=5, seed=seed)) for seed in (0, 0)]
        assert losses[0] != losses[1]
        return losses, model.flat.grad

    losses, gradients = accumulate(micro_batch_size)
    expected_losses, expected = accumulate(5)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_allclose(gradients, expected, rtol=0, atol=2e-7)


def test_the_seed_determines_the_weights():
    values = [small_model(seed=seed).flat.data.tobytes() for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_files_without_a_format_number_are_read(tmp_path):
    model, path = small_model(), tmp_path / "model"
    config = safetensors.to_json(dataclasses.asdict(model.config))
    safetensors.write(path, model.parameters, {"config": config})
    assert smallmind.TransformerModel.load(path).flat.data.tobytes() == model.flat.data.tobytes()
    safetensors.write(path, model.parameters, {"config": config, "format": "smallmind model 2"})
    with pytest.raises(smallmind.InputError, match="is 'smallmind model 2'; this version reads"):
        smallmind.TransformerModel.load(path)


def test_a_file_is_checked_before_anything_is_allocated(tmp_path):
    model, path = small_model(), tmp_path / "model"
    for change in ({"n_layer": 1000}, {"n_embd": 65_535}, {"vocab_size": 12}):
        config = safetensors.to_json({**dataclasses.asdict(model.config), **change})
        safetensors.write(path, model.parameters, {"config": config})
        with pytest.raises(smallmind.InputError, match="does not hold the parameters"):
            smallmind.TransformerModel.load(path)


def test_the_constructor_takes_a_config_or_its_fields():
    names = (
        "vocab_size block_size n_embd n_layer n_head dropout seed tie_weights bias backend dtype"
    )
    values = 11, 7, 12, 2, 3, 0.1, 5, False, False, "numpy", np.float64
    expected = dict(zip(names.split(), values, strict=True))
    settings = {"seed": 5, "backend": "numpy", "dtype": np.float64}
    by_position = smallmind.TransformerModel(*values)
    by_name = smallmind.TransformerModel(**expected)
    by_config = smallmind.TransformerModel(by_name.config, **settings)
    for model in (by_position, by_config):
        assert model.config == by_name.config and model.seed == 5 and model.backend == "numpy"
        assert model.flat.data.tobytes() == by_name.flat.data.tobytes()
    defaults = inspect.signature(smallmind.TransformerModel).parameters
    assert list(defaults)[: len(expected)] == list(expected)
    assert defaults["n_head"].default is inspect.Parameter.empty
    assert defaults["dropout"].default == 0.0 and defaults["seed"].default == 42
    assert smallmind.TransformerModel(11, 7, 12, 2, 3).config == ModelConfig(11, 7, 2, 3, 12)
    for wrong in ((11, 7, 12, 2), (by_name.config, 7)):
        with pytest.raises(TypeError):
            smallmind.TransformerModel(*wrong)
    with pytest.raises(TypeError, match="n_heads"):
        small_model(n_heads=3)


def test_parameters_have_roles():
    flat = small_model(tie_weights=False).flat
    roles = {spec.name: spec.role for spec in flat.specs}
    assert roles["token_embedding.weight"] == roles["position_embedding.weight"] == "embedding"
    assert roles["blocks.1.mlp.projection.weight"] == "matrix" and roles["head.weight"] == "head"
    assert roles["final_norm.weight"] == "gain" and roles["final_norm.bias"] == "bias"
    (matrices,) = flat.ranges(Role.EMBEDDING, Role.MATRIX, Role.HEAD)
    vectors = flat.ranges(Role.GAIN, Role.BIAS)
    assert matrices.start == 0 and matrices.stop == vectors[0].start
    assert vectors[-1].stop == flat.data.size
    marked = np.zeros(flat.data.size, bool)
    for place in flat.ranges(Role.GAIN):
        marked[place] = True
    flat.data[...] = marked
    for name, values in flat.views.items():
        assert (values == (roles[name] == "gain")).all(), name
    whole = flat.ranges(*Role)
    assert [(place.start, place.stop) for place in whole] == [(0, flat.data.size)]


def test_declaring_parameters_allocates_nothing():
    config = ModelConfig(50_000, 1024, 48, 12, 12288)
    tracemalloc.start()
    flat = declare_parameters(config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert flat.count > 8e10 and peak < 4e6
    small = small_model()
    assert declare_parameters(small.config).specs == small.flat.specs
    shapes = {name: value.shape for name, value in small.parameters.items()}
    assert declare_parameters(small.config).shapes == shapes


def test_loading_a_file_that_is_not_a_model_is_refused(tmp_path):
    safetensors.write(tmp_path / "other", {"x": np.zeros(3, np.float32)}, {})
    with pytest.raises(smallmind.InputError, match="not a model saved by smallmind"):
        smallmind.TransformerModel.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((1, 8), int), "8 tokens are more than block_size=7"),
        (np.zeros(3, int), r"\(3,\); it must be \(B, T\)"),
        (np.zeros((0, 3), int), "not empty"),
        (np.full((1, 3), 11), "is outside the vocabulary of 11"),
        (np.full((1, 3), 2**32 + 1), "is outside the vocabulary of 11"),
        (np.full((1, 3), 1.5), "ids is of type float64; it must hold whole numbers"),
        (np.full((1, 3), -1), "is outside the vocabulary of 11"),
    ],
)
def test_invalid_ids_are_refused(ids, message):
    with pytest.raises(smallmind.InputError, match=message):
        small_model().forward(ids)


def test_targets_of_another_shape_are_refused():
    model = small_model()
    with pytest.raises(smallmind.InputError, match=r"targets have shape \(2, 5\), ids \(2, 7\)"):
        model.loss_and_gradients(batch(model)[0], batch(model, T=5)[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_embd": 13}, "n_embd=13 must be a multiple of n_head=3, for example 12"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"vocab_size": 11.0}, "vocab_size=11.0 must be a whole number"),
        ({"dropout": "x"}, "dropout='x' must be a number"),
        ({"n_layer": 0}, "n_layer=0 must be at least 1"),
        ({"backend": "cuda"}, "backend='cuda' must be numba or numpy"),
        ({"dtype": np.float64}, "needs backend='numpy'"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(smallmind.InputError, match=message):
        small_model(**settings)


def test_every_dropout_site_has_its_own_key():
    model = small_model(dropout=0.2, n_layer=3)
    keys = []

    def record(name, kernel):
        def recording(*arguments):
            if name in ("dropout", "attention"):
                keys.append(int(arguments[2] if name == "dropout" else arguments[3]))
            return kernel(*arguments)

        return recording

    with model.workspace.wrapped_kernels(record):
        model.workspace.one_pass(lambda: model.network.forward(batch(model)[0]), Pass(7))
    assert len(set(keys)) == len(keys) == 1 + 3 * 3


def test_initial_weights_have_the_documented_deviations():
    model = smallmind.TransformerModel(300, 64, 64, 8, 2, tie_weights=False)
    for name, value in model.parameters.items():
        if value.ndim == 2:
            expected = 0.02 / np.sqrt(2 * 8) if "projection" in name else 0.02
            assert value.std() == pytest.approx(expected, rel=0.05), name
        else:
            assert (value == (1 if name.endswith("weight") else 0)).all(), name


def test_a_second_thread_cannot_use_a_busy_model():
    model = small_model()
    ids, targets = batch(model)
    with pytest.raises(RuntimeError, match="from one thread at a time"):
        model.with_logits(ids, lambda _: model.loss(ids, targets))
    assert math.isfinite(model.loss(ids, targets))


def test_settings_may_be_numpy_numbers(tmp_path):
    model = small_model(vocab_size=np.int64(11), dropout=np.float32(0.0))
    model.save(tmp_path / "model")
    assert smallmind.TransformerModel.load(tmp_path / "model").config == model.config

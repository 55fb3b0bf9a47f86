"""The result of `model.inspect` is what the kernels compute, in any architecture."""

from xml.etree import ElementTree

import numpy as np
import pytest

from smallmind import CheckpointManager, InputError, Precision, TransformerModel, gradient_check
from smallmind.kernels import reference
from smallmind.kernels.reference import split_heads
from smallmind.settings.presets import ARCHITECTURES
from tests.nn.test_parts import DOCUMENTS, EVERYTHING, LLAMA, PARTS, T, V, batch, make
from tests.unchanged import unchanged

IDS, TARGETS = batch()
ARCHS = {
    "modern": ARCHITECTURES["modern"],
    **PARTS,
}


def plain(arch, **settings):
    return make(backend="numpy", dtype=np.float64, **{**ARCHS[arch], **settings})


def relative_error(actual, expected):
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-9)


def arrays(found):
    """Everything that was found, by name."""
    yield from (("logits", found.logits), ("attention", found.attention), ("losses", found.losses))
    for kind in ("activations", "gradients", "activation_gradients"):
        for name, value in getattr(found, kind).items():
            yield f"{kind}: {name}", value


@pytest.mark.parametrize("arch", ARCHS)
def test_both_backends_show_the_same(arch):
    expected = dict(arrays(plain(arch).inspect(IDS, TARGETS)))
    actual = dict(arrays(make(**ARCHS[arch]).inspect(IDS, TARGETS)))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert value.dtype == np.float32 and value.shape == expected[name].shape
        assert relative_error(value, expected[name]) < 5e-4, name


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("arch", ARCHS)
def test_it_shows_the_bits_that_passes_compute(arch, backend):
    model = make(backend=backend, **ARCHS[arch])
    found = model.inspect(IDS, TARGETS)
    np.testing.assert_array_equal(found.logits, model.forward(IDS))
    np.testing.assert_array_equal(found.losses, model.losses(IDS, TARGETS))
    model.loss_and_gradients(IDS, TARGETS)
    for name, gradient in model.gradients.items():
        np.testing.assert_array_equal(found.gradients[name], gradient)
    without = model.inspect(IDS)
    np.testing.assert_array_equal(without.attention, found.attention)
    assert without.activations.keys() == found.activations.keys()
    for name, value in without.activations.items():
        np.testing.assert_array_equal(value, found.activations[name])
    assert without.losses is None and not without.gradients


@pytest.mark.parametrize("arch", ARCHS)
def test_probabilities_belong_to_the_heads(arch):
    model = make(**ARCHS[arch])
    found, config = model.inspect(IDS), model.config
    B, H = len(IDS), config.n_head
    assert found.attention.shape == (config.n_layer, B, H, T, T)
    np.testing.assert_allclose(found.attention.sum(axis=-1), 1, rtol=1e-5)
    assert not found.attention[..., ~np.tri(T, dtype=bool)].any()
    for layer, p in enumerate(found.attention):
        v = found.activations[f"blocks.{layer}.attention.value"]
        heads = p @ v.repeat(H // v.shape[1], axis=1)
        expected = found.activations[f"blocks.{layer}.attention"]
        np.testing.assert_allclose(
            heads.transpose(0, 2, 1, 3).reshape(B, T, -1), expected, rtol=1e-4, atol=1e-5
        )


def test_no_query_looks_past_the_beginning_of_its_document():
    found = make(**ARCHS["documents"]).inspect(IDS)
    begins = IDS[0].tolist().index(DOCUMENTS["document_token"])
    assert begins > 0
    assert not found.attention[:, 0, :, begins:, :begins].any()
    assert make().inspect(IDS).attention[:, 0, :, begins:, :begins].all()


def overwriting(name, value, workspace):
    """A wrapper of kernels that puts a value in place of the activation with this name."""
    layer, _, kind = name.rpartition(".")
    rows = value.reshape(-1, value.shape[-1])

    def wrap(kernel_name, kernel):
        def run(*arguments, **named):
            if (kernel_name, workspace.layer) == ("attention", layer) and value.ndim == 4:
                parts = split_heads(arguments[2], arguments[1].shape, arguments[0].shape[1])
                parts[("query", "key", "value").index(kind)][...] = value
            kernel(*arguments, **named)
            if kernel_name == "matmul_gelu" and workspace.layer == name:
                arguments[1][...] = rows
                reference.gelu(*arguments[:2])
            elif kernel_name == "matmul_gelu" and workspace.layer == f"{name}.expansion":
                arguments[0][...] = rows
            elif workspace.layer == name and kernel_name not in ("bigrams", "copy_columns", "rope"):
                has_first = kernel_name == "mix" and len(arguments) > 4
                first = arguments[4] if has_first else 0
                arguments[0][:, first : first + rows.shape[1]] = rows

        return run

    return wrap


# Together they have every layer that keeps something to be shown.
LAYERS = "modern", "none", "untied", "exact gelu", "geglu", "head size with rope", "llama"
LAYERS += "everything in documents", "sandwich of everything", "parallel with shortcuts"
LAYERS += "not parallel", "windows", "biases of queries, keys and values", "everything by block"


@pytest.mark.parametrize("arch", LAYERS)
def test_gradients_of_activations_match_finite_differences(arch):
    model = plain(arch, n_layer=2)
    found = model.inspect(IDS, TARGETS)
    assert found.activations.keys() == found.activation_gradients.keys()
    for name, gradient in found.activation_gradients.items():

        def loss(value, name=name):
            wrap = overwriting(name, value, model.workspace)
            with model.workspace.wrapped_kernels(wrap):
                return model.loss(IDS, TARGETS)

        def backward(dy, _, gradient=gradient):
            return dy * gradient

        assert loss(found.activations[name]) == pytest.approx(found.losses.mean(), rel=1e-12), name
        checked = gradient_check(loss, found.activations[name], backward=backward)
        assert checked.ok and checked.rows[0].note == "", (name, checked)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_the_model_stays_as_it_was(precision):
    model = make(dropout=0.3, **EVERYTHING)
    model.use_precision(precision)
    model.use_checkpointing(CheckpointManager(1))
    model.loss_and_gradients(IDS, TARGETS)
    segments = model.network.segments
    for targets in (None, TARGETS):
        with unchanged(model):
            model.inspect(IDS, targets)
        assert model.network.segments is segments
    other = make(dropout=0.3, **EVERYTHING)
    other.use_precision(precision)
    for each in (model, other):
        each.passes = 5
        each.zero_gradients()
        each.loss_and_gradients(IDS, TARGETS)  # drops as before
    np.testing.assert_array_equal(model.flat.grad, other.flat.grad)


def test_an_error_leaves_the_model_as_it_was(monkeypatch):
    model = make()
    model.loss_and_gradients(IDS, TARGETS)

    def fail(*_):
        raise RuntimeError("planted")

    with unchanged(model), monkeypatch.context() as patch:
        patch.setattr(model.network.embedding, "backward", fail)
        with pytest.raises(RuntimeError, match="planted"):
            model.inspect(IDS, TARGETS)
    model.inspect(IDS, TARGETS)


def test_dropout_and_recompute_change_nothing():
    expected = dict(arrays(make(**EVERYTHING).inspect(IDS, TARGETS)))
    model = make(dropout=0.3, **EVERYTHING)
    model.use_checkpointing(CheckpointManager(2))
    for name, value in arrays(model.inspect(IDS, TARGETS)):
        np.testing.assert_array_equal(value, expected[name])


def test_what_it_returns_is_copied():
    model = make(**LLAMA)
    first = model.inspect(IDS, TARGETS)
    kept = {name: value.copy() for name, value in arrays(first)}
    kept_ids = first.ids.copy()
    model.inspect(IDS[:, ::-1], TARGETS)
    model.loss_and_gradients(IDS, TARGETS)
    for name, value in arrays(first):
        np.testing.assert_array_equal(value, kept[name])
        value[...] = 99
    np.testing.assert_array_equal(first.ids, kept_ids)
    np.testing.assert_array_equal(model.inspect(IDS, TARGETS).logits, kept["logits"])


@pytest.mark.parametrize("precision", [Precision.FLOAT16, Precision.BFLOAT16])
def test_16_bits_are_shown_as_float32(precision):
    model = make(48, noise=0.05, **EVERYTHING)
    exact = dict(arrays(model.inspect(IDS, TARGETS)))
    model.use_precision(precision)
    for name, value in arrays(model.inspect(IDS, TARGETS)):
        assert value.dtype == np.float32
        if "gradient" not in name or precision == Precision.BFLOAT16:
            assert relative_error(value, exact[name]) < 0.2, name


def test_one_token_is_enough():
    found = make().inspect(IDS[:1, :1], TARGETS[:1, :1])
    assert (found.attention == 1).all() and found.attention.shape == (3, 1, 4, 1, 1)
    assert "1 x 1 token" in repr(found)


def test_it_prints_as_a_table():
    model = make()
    text = repr(model.inspect(IDS, TARGETS))
    assert text.startswith("Inspection of 3 x 6 tokens: 3 x 4 heads, loss ")
    row = next(line for line in text.split("\n") if " blocks.1.mlp " in line)
    assert " 3 x 6 x 48 " in row and len(row.split()) == 8
    assert "of its gradient" in text and "of its gradient" not in repr(model.inspect(IDS))


def test_a_notebook_shows_a_table_and_heat_maps():
    found = make().inspect(IDS, TARGETS)
    table = ElementTree.fromstring(found._repr_html_())
    assert len(table.findall("tbody/tr")) == len(found.activations)
    svg = ElementTree.fromstring(found.attention_svg(1, 2, batch=1, tokens=["<", *"bcdef"]))
    cells = svg.findall(".//{http://www.w3.org/2000/svg}rect/{http://www.w3.org/2000/svg}title")
    assert len(cells) == T * (T + 1) // 2
    p = found.attention[1, 1, 2]
    assert cells[3].text == f"query 2 'c', key 0 '<': {p[2, 0]:.3f}"


def test_a_long_window_is_drawn_with_fewer_cells():
    model = TransformerModel(V, 300, 8, 1, 1)
    svg = model.inspect(np.zeros((1, 300), np.int32)).attention_svg(0, 0)
    assert svg.count("<rect") == 100 * 101 // 2 + 2
    assert "query 298, key" in svg  # the first of three equal ones


def test_wrong_arguments_are_refused():
    model = make()
    found = model.inspect(IDS)
    for wrong in ({"layer": 3, "head": 0}, {"layer": 0, "head": 4}, {"layer": 0, "head": -1}):
        with pytest.raises(InputError, match="must be at least 0 and below"):
            found.attention_svg(**wrong)
    with pytest.raises(InputError, match="batch=3 must be"):
        found.attention_svg(0, 0, batch=3)
    with pytest.raises(InputError, match="2 tokens are not 6"):
        found.attention_svg(0, 0, tokens=["a", "b"])
    with pytest.raises(InputError, match="block_size"):
        model.inspect(np.zeros((1, 99), np.int32))
    with pytest.raises(InputError, match="targets have shape"):
        model.inspect(IDS, TARGETS[:, 1:])

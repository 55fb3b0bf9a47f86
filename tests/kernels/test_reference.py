"""Every backward pass of the reference kernels against finite differences, in float64."""

from typing import ClassVar

import numpy as np
import pytest

from smallmind.kernels import cases, reference
from smallmind.kernels.description import KERNELS
from smallmind.kernels.reference_optimizers import AdamWCoefficients
from tests.gradcheck import assert_gradients
from tests.kernels.activations import ACTIVATIONS

SEED = 7

R, C, K = 5, 6, 4


def nan(*shape):
    return np.full(shape, np.nan)


def weighted(u, name, *others):
    """A function of a kernel's inputs: its output, weighted by u; others are further outputs."""

    def f(*inputs):
        out = nan(*u.shape)
        getattr(reference, name)(out, *others, *inputs)
        return float((out * u).sum())

    return f


def test_gradients_of_matmul_and_its_bias_match_finite_differences(random):
    shapes = (R, K), (K, C), (C,), (R, C)
    x, weight, bias, u = (random.standard_normal(shape) for shape in shapes)
    dx, dweight, dbias = nan(R, K), nan(K, C), np.zeros(C)
    reference.matmul_transpose_b(dx, u, weight)
    reference.matmul_transpose_a(dweight, x, u)
    reference.column_sum(dbias, u)
    assert_gradients(weighted(u, "matmul"), [dx, dweight], [x, weight])
    assert_gradients(weighted(u, "matmul"), [dx, dweight, dbias], [x, weight, bias])


@pytest.mark.parametrize(("name", "columns"), ACTIVATIONS.items())
def test_gradients_of_activations_match_finite_differences(random, name, columns):
    """The backward pass returns the activation too, which need not be kept."""
    width = C // columns
    x, u = 3 * random.standard_normal((R, C)), random.standard_normal((R, width))
    dx, y, out = nan(R, C), nan(R, width), nan(R, width)
    getattr(reference, f"{name}_backward")(dx, y, u, x)
    assert_gradients(weighted(u, name), [dx], [x])
    if name == "gelu":
        reference.matmul_gelu(out, nan(R, C), x, np.eye(C))
    else:
        getattr(reference, name)(out, x)
    np.testing.assert_allclose(y, out, rtol=1e-14)


def test_gradient_of_softcap_matches_finite_differences(random):
    x, u, y, dx = (
        3 * random.standard_normal((R, C)),
        random.standard_normal((R, C)),
        nan(R, C),
        nan(R, C),
    )
    reference.softcap(y, x, 2.0)
    reference.softcap_backward(dx, u, y, 2.0)
    f = weighted(u, "softcap")
    assert_gradients(lambda x: f(x, 2.0), [dx], [x])


@pytest.mark.parametrize(("first", "width"), [(0, 5), (2, 9)])
def test_gradients_of_mix_match_finite_differences(random, first, width):
    shapes = (4, 5), (4, 5), (2,), (4, width)
    *inputs, u = (random.standard_normal(shape) for shape in shapes)
    dx, dother, dweights = u.copy(), np.zeros((4, 5)), np.zeros(2)
    reference.mix_backward(dx, dother, dweights, *inputs, first)

    def f(*inputs):
        out = np.zeros((4, width))
        reference.mix(out, *inputs, first)
        return float((out * u).sum())

    assert_gradients(f, [dx[:, first : first + 5], dother, dweights], inputs)


@pytest.mark.parametrize("D", [3, 4])
def test_gradient_of_rope_matches_finite_differences(random, D):
    x, u = random.standard_normal((2, 6, 2 * D + 1))
    arguments = (1.0, 0.01)[: D // 2], 3, 2, D, np.array([1, 4])

    def f(x):
        y = x.copy()
        reference.rope(y, *arguments)
        return float((y * u).sum())

    dx = u.copy()
    reference.rope(dx, *arguments, inverse=True)
    assert_gradients(f, [dx], [x])


def test_gradients_of_rmsnorm_match_finite_differences(random):
    x, weight, u = (random.standard_normal(s) for s in ((R, C), (C,), (R, C)))
    rstd, dx, dweight = nan(R), u.copy(), np.zeros(C)
    reference.rmsnorm(nan(R, C), rstd, x, weight)
    reference.rmsnorm_backward(dx, dweight, dx, x, rstd, weight)
    assert_gradients(weighted(u, "rmsnorm", nan(R)), [dx, dweight], [x, weight])


@pytest.mark.parametrize("frequencies", [None, (1.0, 0.01)])
@pytest.mark.parametrize("D", [3, 4])
def test_gradients_of_norm_heads_match_finite_differences(random, D, frequencies):
    H, G, T = 2, 1, 3
    x, u = random.standard_normal((2, 2 * T, (H + 2 * G) * D))
    gains = random.standard_normal((2, D))
    n, rotation = (H + G) * D, () if frequencies is None else (frequencies[: D // 2],)

    def forward(x, gains):
        y, kept, rstd = x.copy(), nan(2 * T, n), nan(2 * T, H + G)
        reference.norm_heads(y, kept, rstd, *gains, H, T, *rotation)
        return y, kept, rstd

    _, *kept = forward(x, gains)
    dx, dgains = u.copy(), np.zeros((2, D))
    reference.norm_heads_backward(dx, *dgains, *kept, *gains, H, T, *rotation)
    assert_gradients(lambda x, g: float((forward(x, g)[0] * u).sum()), [dx, dgains], [x, gains])


class Assigned(np.ndarray):
    """An output that records the dtypes of the values written to it, before conversion."""

    dtypes: ClassVar[list] = []

    def __setitem__(self, index, value):
        self.dtypes.append(np.asarray(value).dtype)
        super().__setitem__(index, value)

    def __iadd__(self, value):
        self.dtypes.append(np.asarray(value).dtype)
        return super().__iadd__(value)

    def __isub__(self, value):
        self.dtypes.append(np.asarray(value).dtype)
        return super().__isub__(value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_computes_in_the_type_of_its_inputs(name, optional, dtype):
    sizes = list(cases.awkward(name))[3]
    case = cases.Case(name, sizes, cases.types(name)[0], optional)
    if case.exact_type == np.float32 != dtype:
        pytest.skip("float32 decides which integers there are")
    _, operations = case.exact(count=True)
    arguments = case.widened(dtype)
    outputs = {key: arguments[key].view(Assigned) for key in case.names}
    Assigned.dtypes.clear()
    getattr(reference, name)(*(arguments | outputs).values())
    floats = {kind for kind in Assigned.dtypes if kind.kind == "f"}
    assert floats == {np.dtype(dtype)} or not (operations and outputs and floats)


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_layernorm_match_finite_differences(random, with_bias):
    x, weight, u = (random.standard_normal(s) for s in ((R, C), (C,), (R, C)))
    arrays = [x, weight] + ([random.standard_normal(C)] if with_bias else [])
    mean, rstd, out, dx = nan(R), nan(R), nan(R, C), nan(R, C)
    dweight, dbias = np.zeros(C), np.zeros(C) if with_bias else None
    reference.layernorm(out, mean, rstd, *arrays)
    reference.layernorm_backward(dx, dweight, dbias, u, x, mean, rstd, weight)
    gradients = [dx, dweight] + ([dbias] if with_bias else [])
    assert_gradients(weighted(u, "layernorm", nan(R), nan(R)), gradients, arrays)


DOCUMENTS = np.array([[0, 0, 2, 2, 2, 5], [0, 0, 0, 3, 3, 3]], np.int32)


@pytest.mark.parametrize("probability", [0.0, 0.4])
@pytest.mark.parametrize(
    ("H", "G", "T", "D", "firsts"),
    [(3, 3, 5, 4, None), (4, 2, 5, 3, None), (4, 2, 6, 3, DOCUMENTS)],
)
def test_gradient_of_attention_matches_finite_differences(random, H, G, T, D, firsts, probability):
    B = 2
    qkv = random.standard_normal((B * T, (H + 2 * G) * D))
    u = random.standard_normal((B * T, H * D))
    mask = (12345 << 32) + 678, probability, 0, firsts

    def forward(qkv):
        out, logsumexp = nan(B * T, H * D), nan(B, H, T)
        reference.attention(out, logsumexp, qkv, *mask)
        return out, logsumexp

    dqkv = nan(*qkv.shape)
    reference.attention_backward(dqkv, u, *forward(qkv), qkv, *mask)
    assert_gradients(lambda qkv: float((forward(qkv)[0] * u).sum()), [dqkv], [qkv])


def test_attention_does_not_see_later_tokens(random):
    T, C = 6, 4
    qkv = random.standard_normal((T, 3 * C))
    outs = []
    for changed in (0.0, 1.0):
        qkv[4:] += changed
        out = nan(T, C)
        reference.attention(out, nan(1, 2, T), qkv)
        outs.append(out)
    np.testing.assert_array_equal(outs[0][:4], outs[1][:4])
    assert np.abs(outs[0][4:] - outs[1][4:]).min() > 0


def test_gradients_of_embedding_match_finite_differences(random):
    B, T, V = 2, 3, 5
    ids = np.array([[1, 1, 4], [0, 1, 4]], np.int32)
    arrays = [random.standard_normal((V, C)), random.standard_normal((T, C))]
    u = random.standard_normal((B * T, C))
    gradients = [np.zeros((V, C)), np.zeros((T, C))]
    reference.embedding_backward(*gradients, u, ids)
    f = weighted(u, "embedding")
    assert_gradients(lambda x, addend: f(x, ids, addend, np.array([0])), gradients, arrays)


def test_gradient_of_dropout_matches_finite_differences(random):
    x, u, dx = random.standard_normal((R, C)), random.standard_normal((R, C)), nan(R, C)
    reference.dropout(dx, u, 99, 0.3)
    f = weighted(u, "dropout")
    assert_gradients(lambda x: f(x, 99, 0.3), [dx], [x])


def test_dropout_drops_its_share_keeps_the_mean_and_other_keys_drop_others():
    x = np.ones((1000, 100))
    out, first, second = nan(1000, 100), nan(1000, 100), nan(1000, 100)
    reference.dropout(out, x, 5, 0.25)
    assert abs((out == 0).mean() - 0.25) < 0.006  # four standard errors
    assert set(np.unique(out)) == {0, 1 / 0.75}
    reference.dropout(first, x, 5, 0.5)
    reference.dropout(second, x, 6, 0.5)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.013


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("key", [5, 0x500320D4F8F2A545, 0xAC889374D0D638])
def test_dropout_masks_are_not_correlated_with_themselves(probability, key):
    n = 1 << 21
    dropped = reference.dropout_mask((n,), key, probability, np.float32) == 0
    deviation = np.sqrt(probability * (1 - probability))
    mask = (dropped - np.float32(probability)) / np.float32(deviation)
    lags = [1, 2, 16, 64, 128, 1000, 1024, *(4096 * odd for odd in (1, 3, 5, 7, 9)), 8192, 65536]
    # The sum of n products of independent elements, in standard deviations.
    z = {lag: float(mask[:-lag] @ mask[lag:]) / np.sqrt(n - lag) for lag in lags}
    assert max(map(abs, z.values())) < 4.5, z


def test_gradient_of_cross_entropy_matches_finite_differences(random):
    V = 7
    logits, targets = 3 * random.standard_normal((R, V)), random.integers(0, V, R)
    dlogits = nan(R, V)
    reference.cross_entropy(nan(R), dlogits, logits, targets, 1 / R)
    f = weighted(np.full(R, 1 / R), "cross_entropy", nan(R, V))
    assert_gradients(lambda logits: f(logits, targets, 1.0), [dlogits], [logits])


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    losses = nan(2)
    reference.cross_entropy(losses, nan(2, 10), np.full((2, 10), 3.0), np.array([0, 9]), 1.0)
    np.testing.assert_allclose(losses, np.log(10))


@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.4, 2.0), (1.0, 5.0)])
def test_gradients_of_distillation_match_finite_differences(random, alpha, temperature):
    V = 7
    logits, teacher_logits = 3 * random.standard_normal((R, V)), 2 * random.standard_normal((R, V))
    targets = random.integers(0, V, R)
    mean = weighted(np.full(R, 1 / R), "distillation", nan(R, V), nan(R))

    def f(logits, temperature):
        return mean(logits, teacher_logits, targets, alpha, float(temperature), 1.0)

    dlogits, slopes = nan(R, V), nan(R)
    others = (logits, teacher_logits, targets, alpha, temperature, 1 / R)
    reference.distillation(nan(R), dlogits, slopes, *others)
    gradients = [dlogits, np.array(slopes.mean())]
    assert_gradients(f, gradients, [logits, np.array(temperature)])


def test_distillation_matches_a_calculation_by_hand():
    logits, teacher_logits = np.log([[0.25, 0.25, 0.5]]), np.log([[0.64, 0.32, 0.04]])
    losses, dlogits = nan(1), nan(1, 3)
    reference.distillation(losses, dlogits, nan(1), logits, teacher_logits, [2], 0.25, 2.0, 1.0)
    # At temperature 2 probabilities become their square roots, normalised to sum to 1.
    p, q = np.array([0.8, 0.8 / 2**0.5, 0.2]), np.array([0.5, 0.5, 0.5**0.5])
    p, q = p / p.sum(), q / q.sum()
    divergence = (p * np.log(p / q)).sum()
    np.testing.assert_allclose(losses, 0.75 * np.log(2) + 0.25 * 4 * divergence)
    hard, soft = np.array([0.25, 0.25, -0.5]), q - p
    np.testing.assert_allclose(dlogits[0], 0.75 * hard + 0.25 * 2 * soft)


def test_a_student_equal_to_its_teacher_has_no_distillation_loss(random):
    logits, targets = random.standard_normal((R, 7)), random.integers(0, 7, R)
    losses, dlogits, slopes, usual = nan(R), nan(R, 7), nan(R), nan(R)
    reference.distillation(losses, dlogits, slopes, logits, logits, targets, 1.0, 3.0, 1.0)
    np.testing.assert_allclose([np.abs(x).max() for x in (losses, dlogits, slopes)], 0, atol=1e-14)
    reference.distillation(losses, dlogits, slopes, logits, logits, targets, 0.0, 3.0, 1.0)
    reference.cross_entropy(usual, nan(R, 7), logits, targets, 1.0)
    np.testing.assert_allclose(losses, usual)


def test_adamw_matches_a_calculation_by_hand():
    p, g, m, v = (np.array(x, np.float64) for x in ([1.0, 1.0], [2.0, 2.0], [0, 0], [0, 0]))
    beta1, beta2, rate, decay = 0.9, 0.99, 0.1, 0.5
    coefficients = AdamWCoefficients(
        rate, beta1, beta2, 1e-8, decay, 1 / (1 - beta1), 1 / (1 - beta2), gradient_scale=0.5
    )
    reference.adamw(p, g, m, v, 1, coefficients)
    # Adam's first step is the learning rate, whatever the gradient; only the first element decays.
    np.testing.assert_allclose(p, [1 - rate * decay - rate, 1 - rate])
    np.testing.assert_allclose(m, [0.1, 0.1])
    np.testing.assert_allclose(v, [0.01, 0.01])
    assert not g.any()

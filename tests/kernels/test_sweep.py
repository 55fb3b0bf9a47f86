"""Every size from 1 to 130, between guard values: the tails of every kernel."""

import numpy as np
import pytest

from smallmind.kernels.reference_optimizers import AdamWCoefficients
from tests.kernels.test_compiled import (
    KEY,
    assert_attention_matches,
    assert_close,
    assert_products_match,
    kernels_of_elements,
    normal,
    run_both,
)

SEED = 5

SIZES = range(1, 131)


def swept(**others):
    """Shapes in which each dimension in turn takes every size, with the others as given."""
    for name in others:
        for size in SIZES:
            yield tuple((others | {name: size}).values())


@pytest.mark.parametrize("others", [(7, 33, 65), (13, 17, 3)], ids=str)
def test_products_of_every_size_match_the_reference(random, others):
    for shape in swept(**dict(zip("MKN", others, strict=True))):
        assert_products_match(random, *shape, tolerance=5e-6)


def test_kernels_of_rows_of_every_size_match_the_reference(random):
    for R, C in swept(R=5, C=37):
        x, dy, addend, weight = (normal(random, *s) for s in ((R, C), (R, C), (R, C), (C,)))
        pairs = run_both("layernorm", [(R, C), (R,), (R,)], x, weight, weight)
        # With few channels rstd may be large, and it multiplies rounding errors.
        mean, rstd = pairs[1][1].astype(np.float32), pairs[2][1].astype(np.float32)
        assert_close(pairs, 1e-5 * max(1, rstd.max()))
        sums = [normal(random, C), normal(random, C)]
        pairs = run_both("layernorm_backward", [(R, C), *sums], dy, x, mean, rstd, weight, addend)
        assert_close(pairs, 1e-5 * max(1, rstd.max()))
        pairs = kernels_of_elements(random, R, C)
        targets = random.integers(0, C, R).astype(np.int32)
        pairs += run_both("cross_entropy", [(R,), (R, C), x.copy()], targets, 1 / R)[:2]
        logits = normal(random, R, C)
        outputs = [(R,), (R, C), (R,), logits]
        distilled = run_both("distillation", outputs, x, targets, 0.4, 2.0, 1 / R)[:3]
        assert_close(distilled, 5e-6, min_scale=1)
        indices = np.argsort(x, axis=1)[:, : (C + 1) // 2].astype(np.int32)
        chosen = normal(random, R, indices.shape[1] + 1)
        pairs += run_both("top_k_logits", [(R, C)], indices, chosen)
        assert_close(pairs, 5e-6)


def test_embedding_of_every_size_matches_the_reference(random):
    for B, T, C in swept(B=3, T=5, C=37):
        ids = random.integers(0, 7, (B, T)).astype(np.int32)
        token, position, dout = normal(random, 7, C), normal(random, T, C), normal(random, B * T, C)
        pairs = run_both("embedding", [(B * T, C)], token, ids, position, np.array([0]))
        pairs += run_both("embedding_backward", [token, position], dout, ids)
        assert_close(pairs, 5e-6)


@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_attention_of_every_size_matches_the_reference(random, probability):
    for B, H, T, D in swept(B=1, H=1, T=23, D=13):
        if B * T * H * D > 23 * 130:
            continue
        tolerances = 5e-6, 1e-5
        assert_attention_matches(random, B, H, H, T, D, KEY, probability, tolerances=tolerances)


def test_adamw_of_every_size_matches_the_reference(random):
    coefficients = AdamWCoefficients(1e-2, 0.9, 0.99, 1e-8, 0.1, 2.0, 3.0, 0.5)
    for n in (*SIZES, 1000):
        p, g, m, v = normal(random, n), normal(random, n), normal(random, n), random.random(n, "f")
        pairs = run_both("adamw", [p, g, m, v], n // 2, coefficients)
        assert_close(pairs)
        assert not pairs[1][0].any()  # the gradient is cleared

"""Choosing tokens: penalties, and which tokens are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smallmind import GenerationConfig, InputError
from smallmind.writing.sampling import Drawing, SeenTokens, choose_each

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def choose(logits, config, uniform, seen=None):
    """The token of one row."""
    return choose_each(logits[None], [Drawing(config, uniform, seen)])[0]


def frequencies(n=2000, logits=LOGITS, seen=None, **settings):
    """The shares of the tokens that n evenly spaced numbers draw: exact to 1 / n."""
    config = GenerationConfig(**{"temperature": 1.0, **settings})
    drawn = [choose(logits, config, (i + 0.5) / n, seen) for i in range(n)]
    return np.bincount(drawn, minlength=len(logits)) / n


def shares(logits):
    p = np.exp(logits - np.max(logits))
    return p / p.sum()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 1e6}, [0.25] * 4),
        ({"temperature": 1e-6}, [0, 1, 0, 0]),
        ({"temperature": 1e-310}, [0, 1, 0, 0]),
        ({"top_k": 99, "top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(settings, expected):
    np.testing.assert_allclose(frequencies(**settings), expected, atol=1e-3)


@pytest.mark.parametrize("count", [3, 700, 1999])  # of 2,000: few, many and nearly all
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_only_allowed_tokens_are_drawn_as_if_there_were_no_others(count, settings):
    random = np.random.default_rng(count)
    logits = random.normal(0, 3, 2000).astype(np.float32)
    tokens = np.sort(random.permutation(2000)[:count])
    allowed = np.isin(np.arange(2000), tokens)
    config = GenerationConfig(**{"temperature": 1.0, **settings})
    for uniform in (0.0, 0.2, 0.5, 0.9, 1 - 2**-53):
        (drawn,) = choose_each(logits[None], [Drawing(config, uniform, None, allowed)])
        assert drawn == tokens[choose(logits[tokens], config, uniform)]


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="logits are not finite"):
        choose(np.array([0, np.nan], np.float32), GenerationConfig(), uniform=0.5)


def test_min_p_is_a_share_of_the_most_likely_token():
    np.testing.assert_allclose(frequencies(min_p=0.45), [0, 4 / 9, 2 / 9, 3 / 9], atol=1e-3)
    np.testing.assert_allclose(frequencies(min_p=1.0), [0, 1, 0, 0])
    np.testing.assert_allclose(frequencies(min_p=0.0), frequencies())
    np.testing.assert_allclose(frequencies(min_p=0.7, top_k=3), [0, 4 / 7, 0, 3 / 7], atol=1e-3)


def test_tokens_of_the_prompt_and_the_text_are_penalised_as_the_field_does():
    logits = np.array([1.0, -1.0, 2.0, 0.5], np.float32)
    seen = SeenTokens(4, [0, 1])
    for token in (2, 2):
        seen.add(token)
    expected = {
        "repetition_penalty": shares([1 / 1.5, -1.5, 2 / 1.5, 0.5]),
        "presence_penalty": shares([1, -1, 2 - 1.5, 0.5]),
        "frequency_penalty": shares([1, -1, 2 - 2 * 1.5, 0.5]),
    }
    for name, wanted in expected.items():
        np.testing.assert_allclose(
            frequencies(logits=logits, seen=seen, **{name: 1.5}), wanted, atol=1e-3
        )
    together = dict.fromkeys(expected, 1.5)
    np.testing.assert_allclose(
        frequencies(logits=logits, seen=seen, **together),
        shares([1 / 1.5, -1.5, 2 / 1.5 - 1.5 - 3, 0.5]),
        atol=1e-3,
    )
    assert choose(logits, GenerationConfig(temperature=0, presence_penalty=1.5), 0.5, seen) == 0


def test_of_equal_tokens_the_first_are_kept():
    equal = np.zeros(6, np.float32)
    np.testing.assert_allclose(frequencies(logits=equal, top_k=2), [0.5, 0.5, 0, 0, 0, 0])
    kept = frequencies(logits=equal, top_p=0.5)
    np.testing.assert_allclose(kept[4:], 0)
    assert choose(equal, GenerationConfig(temperature=0), 0.5) == 0


def naive(logits, config, uniform):
    """Samples by sorting everything, as the definitions read."""
    p = shares(logits.astype(np.float64) / config.temperature)
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if config.top_k is not None:
        order = order[: config.top_k]
    if config.top_p is not None:
        total, kept = p[order].sum(), []
        for token in order:
            if kept and p[kept].sum() > config.top_p * total:
                break
            kept.append(token)
        order = kept
    if config.min_p is not None:
        order = [token for token in order if p[token] >= config.min_p * p[order[0]]]
    order = sorted(order)
    cumulative = np.cumsum(p[order])
    return order[int(np.sum(cumulative <= uniform * cumulative[-1]))]


def assert_as_defined(logits, **settings):
    config = GenerationConfig(**settings)
    for uniform in np.linspace(0.003, 0.997, 40):  # rare tokens too
        assert choose(logits, config, uniform) == naive(logits, config, uniform)


@given(
    st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=30),
    st.sampled_from([None, 1, 2, 5, 100]),
    st.sampled_from([None, 0.15, 0.55, 0.95]),
    st.sampled_from([None, 0.07, 0.6]),
)
def test_all_filters_together_equal_their_definitions(logits, top_k, top_p, min_p):
    # Different logits, none at the edge of a filter: there rounding would decide.
    logits = np.array(logits, np.float32) + np.arange(len(logits), dtype=np.float32) * 1e-3
    assert_as_defined(logits, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.45, 0.6, 0.8, 0.95])
def test_top_p_is_a_share_of_what_top_k_leaves(temperature, top_k, top_p):
    assert_as_defined(LOGITS, temperature=temperature, top_k=top_k, top_p=top_p)


@pytest.mark.parametrize(
    "settings",
    [{"min_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"presence_penalty": np.nan}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(InputError):
        GenerationConfig(**settings)

"""The law of a loss: fitted to outcomes of made-up texts whose constants are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smallmind.forecast import law as scaling
from smallmind.forecast.law import DEVIATIONS, MEANS, NOISE, Law, Outcome, law_of
from smallmind.settings.config import ModelConfig

SURE = Law(MEANS, np.zeros((len(MEANS), len(MEANS))))


def text_of(seed):
    """The law of a made-up text: within what texts differ."""
    random = np.random.default_rng(seed)
    logarithms = MEANS + DEVIATIONS * random.normal(0, 0.7, len(MEANS))
    return Law(logarithms, SURE.covariance), random


def outcomes_of(law, random, sizes, tokens, unique, noise=NOISE):
    """Outcomes of models of these sizes after so many tokens."""
    return [
        Outcome(N, D, unique, law.loss(N, D, unique) * np.exp(random.normal(0, noise)))
        for N in sizes
        for D in tokens
    ]


SIZES, TOKENS = (3e4, 1e5, 3e5), (3e5, 1e6, 3e6)


def test_a_law_is_found_again():
    law, random = text_of(1)
    sizes, tokens = np.geomspace(1e4, 1e7, 8), np.geomspace(1e5, 1e9, 8)
    outcomes = outcomes_of(law, random, sizes, tokens, 1e7, noise=1e-5)
    for N in sizes:
        for D in tokens:
            found = law_of(outcomes, 6 * N * D)
            assert found.loss(N, D, 1e7) == pytest.approx(law.loss(N, D, 1e7), rel=1e-3)


def test_outcomes_of_like_runs_count_most():
    """A text of which short runs learn 10 % less than the law of long ones says."""
    law, random = text_of(2)
    long = outcomes_of(law, random, SIZES, TOKENS, 1e8, noise=1e-4)
    short = outcomes_of(law, random, [N / 30 for N in SIZES], [D / 30 for D in TOKENS], 1e8, 1e-4)
    both = long + [outcome._replace(loss=1.1 * outcome.loss) for outcome in short]
    for factor in (1, 10):
        N, D = factor * SIZES[-1], factor * TOKENS[-1]
        assert law_of(both, 6 * N * D).loss(N, D, 1e8) == pytest.approx(law.loss(N, D, 1e8), 0.02)
    first = both[len(long)]
    found = law_of(both, 6 * first.parameters * first.tokens)
    assert found.loss(*first[:3]) == pytest.approx(first.loss, 0.02)
    assert law_of(both).constants == law_of(both, 6 * SIZES[-1] * TOKENS[-1]).constants


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_ten_times_as_much_arithmetic_is_predicted(seed):
    law, random = text_of(seed)
    found = law_of(outcomes_of(law, random, SIZES, TOKENS, 1e6))
    expected, outcome = found.loss(1e6, 1e7, 1e6), law.loss(1e6, 1e7, 1e6)
    assert abs(np.log(outcome / expected)) < 5 * found.deviation(1e6, 1e7, 1e6)


def test_intervals_are_as_wide_as_they_should_be():
    within = 0
    for seed in range(200):
        law, random = text_of(seed)
        found = law_of(outcomes_of(law, random, SIZES, TOKENS, 1e6))
        for N, D in ((3e5, 1e7), (1e6, 1e7), (1e6, 3e7)):
            error = np.log(law.loss(N, D, 1e6) / found.loss(N, D, 1e6)) + random.normal(0, NOISE)
            within += abs(error) < scaling.INTERVAL_DEVIATIONS * found.deviation(N, D, 1e6)
    assert 0.8 * 600 < within < 0.99 * 600


def test_more_outcomes_make_it_surer():
    law, random = text_of(3)
    outcomes = outcomes_of(law, random, SIZES, TOKENS, 1e6)
    deviations = [law_of(outcomes[:count]).deviation(1e6, 1e7, 1e6) for count in (0, 3, 6, 9)]
    assert deviations == sorted(deviations, reverse=True) and deviations[-1] < deviations[0] / 10


def test_without_outcomes_it_is_that_of_all_texts():
    assert law_of([]).logarithms == pytest.approx(MEANS)


@given(N=st.floats(1e3, 1e9), D=st.floats(1e4, 1e11), U=st.floats(1e4, 1e11))
def test_more_of_anything_never_makes_it_worse(N, D, U):
    before = SURE.loss(N, D, U)
    assert SURE.loss(2 * N, D, U) < before
    assert SURE.loss(N, 2 * D, U) <= before
    assert SURE.loss(N, D, 2 * U) <= before


def test_tokens_seen_again_are_worth_less_and_less():
    once, twice, ten, many = (SURE.loss(1e6, passes * 1e6, 1e6) for passes in (1, 2, 10, 1000))
    fresh = SURE.loss(1e6, 2e6, 2e6)
    assert fresh < twice < once and (ten - twice) / 8 > twice - once
    R = np.exp(MEANS[-1])
    assert many == pytest.approx(SURE.loss(1e6, (1 + R) * 1e6, 1e9), rel=1e-6) and many < ten


def test_an_outcome_that_fits_badly_does_not_stop_the_fit():
    found = law_of([Outcome(1e5, 1e6, 1e6, 1e-3), Outcome(1e5, 1e6, 1e6, 49.0)])
    assert np.isfinite(found.logarithms).all() and np.isfinite(found.loss(1e6, 1e7, 1e6))


def test_a_few_strange_outcomes_change_little():
    law, random = text_of(5)
    outcomes = outcomes_of(law, random, SIZES, TOKENS, 1e6)
    expected = law_of(outcomes).loss(1e6, 1e7, 1e6)
    strange = Outcome(1e5, 1e6, 1e6, 3 * outcomes[0].loss)
    assert law_of([*outcomes, strange]).loss(1e6, 1e7, 1e6) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"loss": 0.0}, {"loss": np.nan}, {"parameters": 1e-300}, {"tokens": np.inf}]
)
def test_outcomes_that_cannot_be_do_not_count(change):
    law, random = text_of(6)
    outcomes = outcomes_of(law, random, SIZES, TOKENS, 1e6)
    more = [*outcomes, outcomes[0]._replace(**change)]
    assert law_of(more).constants == law_of(outcomes).constants


def test_intervals_of_losses_are_above_zero():
    nothing = law_of([])
    low, high = nothing.interval(1e6, 1e7, 1e6)
    assert 0 < low < nothing.loss(1e6, 1e7, 1e6) < high
    assert high > 5 * low  # nothing is known


def test_tables_are_no_parameters_that_a_token_is_multiplied_by():
    plain = {"vocab_size": 50, "n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 64}
    rotated = scaling.parameters_of(ModelConfig(**plain, position="rope", tie_weights=False))
    with_tables = ModelConfig(**plain, position="learned", bigram_rows=512, tie_weights=False)
    assert scaling.parameters_of(with_tables) == rotated
    tied = scaling.parameters_of(ModelConfig(**plain, position="rope", tie_weights=True))
    assert tied == rotated

"""Every schedule at its corners, between them, and across a saved state."""

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smallmind import TrainingConfig
from smallmind.optim.schedule import Cosine, schedule, too_short
from smallmind.settings.config import SCHEDULES

PEAK, MIN_LR = 1e-3, 1e-4
# A share of the steps is rounded by 1e-16, and a rate of 1e-13 to its power by 30 times as much.
ROUNDING = 1 + 4e-15


def make(name, **settings):
    settings = {"learning_rate": PEAK, "min_lr": MIN_LR, "warmup_steps": 100, **settings}
    return schedule(TrainingConfig(schedule=name, **settings))


@st.composite
def configs(draw, names=SCHEDULES):
    """Runs of any length, including some that are shorter than their warmup."""
    peak = draw(st.floats(1e-7, 10))
    return TrainingConfig(
        schedule=draw(st.sampled_from(names)),
        steps=draw(st.integers(0, 400)),
        learning_rate=peak,
        min_lr=peak * draw(st.floats(1e-6, 1)),
        warmup_steps=draw(st.integers(0, 150)),
        lr_decay_factor=draw(st.floats(0.01, 0.99)),
        lr_decay_every=draw(st.integers(1, 300)),
        lr_decay_share=draw(st.floats(0, 1)),
        plateau_patience=draw(st.integers(1, 4)),
    )


def test_every_name_makes_a_schedule_of_its_own():
    assert len({type(make(name)) for name in SCHEDULES}) == len(SCHEDULES)
    assert type(schedule(TrainingConfig())) is Cosine


# {step: lr(step)} after a warmup of 100 in a run of 1000.
AFTER_WARMUP = {
    "constant": {101: PEAK, 550: PEAK, 999: PEAK, 1000: PEAK, 5000: PEAK},
    "cosine": {
        101: MIN_LR + 0.5 * (1 + math.cos(math.pi / 900)) * 9e-4,
        550: 5.5e-4,
        999: MIN_LR + 0.5 * (1 - math.cos(math.pi / 900)) * 9e-4,
        1000: MIN_LR,
        5000: MIN_LR,
    },
    "linear": {101: PEAK - 1e-6, 550: 5.5e-4, 999: MIN_LR + 1e-6, 1000: MIN_LR, 5000: MIN_LR},
    # Three decays of a half, then min_lr is the limit.
    "step": {
        101: PEAK, 299: PEAK, 300: 5e-4, 499: 5e-4, 500: 2.5e-4, 700: 1.25e-4, 899: 1.25e-4,
        900: MIN_LR, 1000: MIN_LR, 5000: MIN_LR, 10**9: MIN_LR,
    },
    "exponential": {
        101: PEAK * 0.1 ** (1 / 900), 400: PEAK * 0.1 ** (1 / 3), 550: 10**-3.5, 1000: MIN_LR,
        5000: MIN_LR,
    },
    "wsd": {
        101: PEAK, 799: PEAK, 800: PEAK, 801: PEAK - 4.5e-6, 900: 5.5e-4, 999: MIN_LR + 4.5e-6,
        1000: MIN_LR, 5000: MIN_LR,
    },
    "plateau": {101: PEAK, 550: PEAK, 999: PEAK, 1000: PEAK, 5000: PEAK},
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_rates_are_exact_at_the_corners_of_each_schedule(name):
    rates = make(name, steps=1000, lr_decay_factor=0.5, lr_decay_every=200, lr_decay_share=0.2)
    warmup = [rates.lr(step) for step in range(101)]
    assert warmup == pytest.approx([PEAK * n / 101 for n in range(1, 102)], rel=1e-15)
    for step, expected in AFTER_WARMUP[name].items():
        assert rates.lr(step) == pytest.approx(expected, rel=1e-12), step


def test_one_cycle_is_exact_at_its_corners():
    rates = make("one-cycle", steps=1000)
    assert rates.lr(0) == pytest.approx(PEAK / 25)
    assert rates.lr(50) == pytest.approx((PEAK / 25 + PEAK) / 2)
    assert rates.lr(99) == pytest.approx(
        PEAK - 0.5 * (1 - math.cos(math.pi / 100)) * 0.96 * PEAK, rel=1e-12
    )
    assert rates.lr(100) == pytest.approx(PEAK, rel=1e-15)
    assert rates.lr(101) < PEAK
    assert rates.lr(550) == pytest.approx(5.5e-4)
    assert rates.lr(1000) == rates.lr(5000) == MIN_LR
    other = make("one-cycle", steps=1000, warmup_steps=500)
    assert [other.lr(step) for step in range(1001)] == [rates.lr(step) for step in range(1001)]


@given(configs(["cosine"]), st.integers(0, 600))
def test_cosine_is_the_textbook_formula_to_the_bit(config, step):
    if step < config.warmup_steps:
        expected = config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    elif step >= config.steps:
        expected = config.resolved_min_lr
    else:
        progress = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        expected = config.resolved_min_lr + cosine * (config.learning_rate - config.resolved_min_lr)
    assert schedule(config).lr(step) == expected


@given(configs(), st.lists(st.floats(0, 20), max_size=20))
def test_rates_are_between_min_lr_and_the_peak(config, losses):
    rates = schedule(config)
    for loss in losses:
        rates.observe(loss)
    for step in range(config.steps + 200):
        assert 0 < rates.lr(step) <= config.learning_rate * ROUNDING
        if step >= rates.warmup:
            assert rates.lr(step) >= config.resolved_min_lr / ROUNDING


@given(configs())
def test_rates_rise_in_the_warmup_and_never_after_it(config):
    rates = schedule(config)
    values = [rates.lr(step) for step in range(config.steps)]
    up, down = values[: rates.warmup + 1], values[rates.warmup :]
    assert all(b > a for a, b in itertools.pairwise(up))
    assert all(b <= a * ROUNDING for a, b in itertools.pairwise(down))


@given(configs(["cosine", "one-cycle", "linear", "exponential", "wsd"]))
@example(TrainingConfig(schedule="exponential", learning_rate=6e-4, min_lr=3e-5))
def test_decays_end_at_min_lr_exactly(config):
    end = max(config.steps, config.warmup_steps)
    assert schedule(config).lr(end) == config.resolved_min_lr


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_warmup_the_first_step_is_at_the_peak(name):
    first = make(name, steps=1000, warmup_steps=0).lr(0)
    assert first == pytest.approx(PEAK / 25 if name == "one-cycle" else PEAK, rel=1e-15)


@pytest.mark.parametrize("name", AFTER_WARMUP)
@pytest.mark.parametrize("warmup", [50, 51, 1000])
def test_a_run_no_longer_than_its_warmup_ends_before_the_peak(name, warmup):
    rates = make(name, steps=50, warmup_steps=warmup)
    assert [rates.lr(step) for step in range(50)] == pytest.approx(
        [PEAK * n / (warmup + 1) for n in range(1, 51)]
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_runs_of_zero_and_one_steps_have_valid_rates(name):
    assert make(name, steps=1, warmup_steps=0).lr(0) == pytest.approx(PEAK, rel=1e-15)
    for steps in (0, 1):
        for warmup in (0, 1, 100):
            assert 0 < make(name, steps=steps, warmup_steps=warmup).lr(steps) <= PEAK * ROUNDING


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "exponential"])
def test_min_lr_may_be_0(name):
    rates = make(name, steps=50, min_lr=0.0, warmup_steps=10)
    assert min(rates.lr(step) for step in range(50)) > 0
    assert rates.lr(50) == 0 or name in ("constant", "step", "plateau")


@pytest.mark.parametrize(("share", "last"), [(0.0, 999), (0.1, 900), (0.95, 100), (1.0, 100)])
def test_wsd_decays_over_the_last_share_but_never_in_the_warmup(share, last):
    rates = make("wsd", steps=1000, lr_decay_share=share)
    assert {rates.lr(step) for step in range(100, last + 1)} == {PEAK}
    assert rates.lr(last + 1) < PEAK


def test_plateau_waits_for_patience_evaluations_without_a_lower_loss():
    rates = make("plateau", plateau_patience=2, lr_decay_factor=0.4)
    seen = []
    for loss in (3.0, 2.0, 2.1, 1.9, 1.9, 2.5, 1.8, 1.8, 1.8, 1.8, 1.8):
        rates.observe(loss)
        seen.append(rates.lr(500))
    assert seen == pytest.approx([PEAK] * 5 + [4e-4] * 3 + [1.6e-4] * 2 + [MIN_LR])


def test_plateau_ignores_improvements_below_a_ten_thousandth():
    for lower, expected in ((2.0 * (1 - 0.9e-4), PEAK / 2), (2.0 * (1 - 1.1e-4), PEAK)):
        rates = make("plateau", plateau_patience=1, lr_decay_factor=0.5)
        rates.observe(2.0)
        rates.observe(lower)
        assert rates.lr(500) == expected


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_plateau_never_counts_a_non_finite_loss_as_the_best(loss):
    rates = make("plateau", plateau_patience=3)
    rates.observe(loss)
    assert rates.state()["best"] is None
    rates.observe(2.0)
    assert rates.state() == {"best": 2.0, "waited": 0, "reductions": 0}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "plateau"])
def test_other_schedules_ignore_losses_and_have_no_state(name):
    rates, other = make(name, steps=300), make(name, steps=300)
    for _ in range(10):
        rates.observe(5.0)
    assert rates.state() == {}
    other.load_state(rates.state())
    assert [rates.lr(step) for step in range(300)] == [other.lr(step) for step in range(300)]


@given(
    configs(["plateau"]),
    st.lists(st.floats(0, 4), max_size=15),
    st.lists(st.floats(0, 4), max_size=15),
)
def test_a_state_saved_as_json_continues_identically(config, before, after):
    rates, resumed = schedule(config), schedule(config)
    for loss in before:
        rates.observe(loss)
    resumed.load_state(json.loads(json.dumps(rates.state(), allow_nan=False)))
    for loss in [None, *after]:
        if loss is not None:
            rates.observe(loss)
            resumed.observe(loss)
        assert resumed.state() == rates.state()
        assert [resumed.lr(step) for step in (0, 150, 399)] == [
            rates.lr(step) for step in (0, 150, 399)
        ]


def test_schedules_of_two_runs_are_independent():
    config = TrainingConfig(schedule="plateau", plateau_patience=1, warmup_steps=0)
    first = schedule(config)
    first.observe(1.0)
    first.observe(1.0)
    assert schedule(config).lr(0) > first.lr(0)
    later = dataclasses.replace(config, learning_rate=5e-4)
    assert later.resolved_min_lr == 5e-5 and config.with_min_lr().min_lr == MIN_LR


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 101}, None),
        ({"steps": 100}, "ends during its warmup of 100 steps, at a learning rate of 9.9e-04"),
        ({"steps": 30}, "use --warmup-steps 3, or more --steps"),
        ({"steps": 30, "schedule": "one-cycle"}, None),
        ({"steps": 5, "warmup_steps": 10**9}, "use --warmup-steps 0, or more --steps"),
        ({"steps": 1, "warmup_steps": 0}, None),
        ({"steps": 0}, "steps=0 trains nothing"),
    ],
)
def test_a_run_too_short_for_its_schedule_is_noticed(settings, words):
    config = TrainingConfig(**settings)
    said = too_short(config)
    assert words in said if words else said is None
    if words and "use --warmup-steps" in said:  # the advice helps
        warmup = int(said.split("--warmup-steps ")[1].split(",")[0])
        assert too_short(dataclasses.replace(config, warmup_steps=warmup)) is None
        # Which a run that has begun cannot do.
        assert too_short(config, has_begun=True).endswith(": use more --steps")

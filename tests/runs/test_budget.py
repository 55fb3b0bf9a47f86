"""With --minutes, a run gets a model and a batch for the time, the machine and the text."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from smallmind import Run
from smallmind.cli.flags import choices_of_run
from smallmind.cli.program import make_parser
from smallmind.forecast import budget, pace
from smallmind.forecast.budget import (
    MAX_BATCH,
    MIN_BATCH,
    STEPS_SHARE,
    UPDATES,
    Cost,
    best,
    fit,
    regularization,
    sizes_for,
    tokens_of,
)
from smallmind.forecast.law import Outcome, Trial, law_of
from smallmind.forecast.pace import MAX_PASSES, Pace
from smallmind.settings.rules import FITTED_FIELDS, Choices, Facts
from smallmind.settings.settings import to_saved
from smallmind.text.dataset import HELD_OUT
from tests.programs import CATS, costs_at, refuses

BOOK = 1_000_000  # characters


def sizes(operations, characters=BOOK, known=(), **given):
    """Each size as it would be trained in a time for so many operations."""
    fields = Choices(given).fields
    text = tokens_of(fields, characters)
    return sizes_for(given, fields, text, 1 / STEPS_SHARE, costs_at(operations), law_of(known))


def chosen(operations, characters=BOOK, **given):
    """The settings of a run of so many operations."""
    size = best(sizes(operations, characters, **given))
    return Choices(given | size.fields).settings()


def test_more_time_makes_larger_models_that_see_more_text():
    found = [best(sizes(10.0**power, characters=10**9)) for power in range(9, 18)]
    counts, tokens = [size.parameters for size in found], [size.tokens for size in found]
    assert counts == sorted(counts) and counts[-1] > 100 * counts[0]
    assert tokens == sorted(set(tokens))
    for size in found:
        batch = size.fields["batch_size"] * size.fields["block_size"]
        assert budget.MIN_BATCH <= batch <= budget.MAX_BATCH
    losses = [size.loss for size in found]
    assert losses == sorted(set(losses), reverse=True)


def test_sizes_are_worse_the_further_they_are_from_the_best():
    for power in range(12, 16):
        found = sizes(10.0**power, characters=10**9)
        losses = [size.loss for size in found]
        place = losses.index(min(losses))
        assert found[place] == best(found) and 0 < place < len(found) - 1
        assert losses[:place] == sorted(losses[:place], reverse=True)
        assert losses[place:] == sorted(losses[place:])
        assert [size.parameters for size in found] == sorted({size.parameters for size in found})


def test_a_text_is_passed_over_only_so_often():
    for size in sizes(1e17, characters=10**5):
        assert size.passes <= MAX_PASSES * (1 + 1e-9)


def test_what_is_known_of_a_text_changes_the_size():
    """A text that large models learn no better than small ones, and the opposite."""
    N, D = np.geomspace(3e4, 1e6, 4), np.geomspace(3e5, 1e7, 4)
    larger, longer = (
        [
            Outcome(n, d, 1e9, 1 + 0.3 * (n / 1e5) ** -a + 0.3 * (d / 1e6) ** -b)
            for n in N
            for d in D
        ]
        for a, b in ((0.6, 0.1), (0.1, 0.6))
    )
    counts = [best(sizes(1e13, 10**9, known)).parameters for known in (larger, (), longer)]
    assert counts == sorted(set(counts), reverse=True)


@examples(
    operations=st.floats(1e6, 1e18),
    characters=st.integers(100, 10**9),
    given=st.fixed_dictionaries(
        {},
        optional={
            "n_layer": st.integers(1, 12),
            "n_embd": st.sampled_from([16, 48, 130, 512]),
            "n_head": st.sampled_from([1, 2, 5]),
            "block_size": st.integers(1, 300),
            "batch_size": st.integers(1, 64),
            "dropout": st.floats(0, 0.5),
            "weight_decay": st.floats(0, 0.5),
            "n_kv_head": st.just(1),
            "head_size": st.sampled_from([5, 64, 1000]),
        },
    ),
)
def test_what_is_given_stays(operations, characters, given):
    if given.get("n_embd", 130) % given.get("n_head", 1):
        return
    settings = chosen(operations, characters, **given)
    values = settings.fields
    assert {name: values[name] for name in given} == given
    if "block_size" not in given:
        # A window fits into the held-out tenth.
        assert settings.model.block_size <= max(8, characters // 10)


def test_windows_are_alike_for_all_but_long_runs():
    """So that short trials tell of longer runs."""
    short, long = sizes(1e12), sizes(1e14, characters=10**9)
    assert {size.fields["block_size"] for size in short} == {128}
    for size in long:
        assert size.fields["block_size"] == (128 if size.tokens < budget.LONG_RUN else 256)
    assert {size.fields["block_size"] for size in long} == {128, 256}


def test_what_could_be_memorised_needs_dropout_and_weight_decay():
    def dropout(*given):
        return regularization(*given)["dropout"]

    assert dropout(1e5, 1e6, 1e6) == 0 < dropout(1e6, 1e7, 1e6) < dropout(1e7, 1e7, 1e6)
    assert dropout(1e6, 1e7, 1e6) < dropout(1e6, 1e8, 1e6) < dropout(1e6, 1e8, 1e5)
    assert dropout(1e9, 1e10, 1e5) == budget.MAX_DROPOUT
    found = [chosen(1e14, characters) for characters in (10**8, 10**6, 10**5)]
    shares = [settings.model.dropout for settings in found]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] > shares[0]
    decays = [settings.training.weight_decay for settings in found]
    assert decays == [0.1, 0.3, 0.3]
    assert chosen(1e14, 10**5, weight_decay=0.02).training.weight_decay == 0.02


def test_a_student_needs_less_dropout():
    alone = chosen(1e14, 10**5)
    taught = chosen(1e14, 10**5, teacher="runs/before")
    assert 0 < taught.model.dropout < alone.model.dropout / 3
    assert taught.training.weight_decay == alone.training.weight_decay
    assert chosen(1e14, 10**5, teacher="runs/before", dropout=0.3).model.dropout == 0.3


def test_a_text_has_fewer_learned_tokens_than_characters():
    """So its windows are shorter, and it is passed over more often."""
    windows = [chosen(1e14, 1200, tokenizer=kind).model.block_size for kind in ("char", "bpe")]
    assert windows[0] == 30 and windows[1] == 15
    shapes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "block_size": 128}
    (char,), (bpe,) = (sizes(1e14, tokenizer=kind, **shapes) for kind in ("char", "bpe"))
    assert char.passes < bpe.passes and char.fields["dropout"] < bpe.fields["dropout"]


def test_small_texts_need_small_models():
    texts = 10**4, 10**5, 10**6, 10**7
    models = [dataclasses.asdict(chosen(1e16, characters=text).model) for text in texts]
    sizes = [budget.parameters(model) for model in models]
    assert sizes == sorted(set(sizes))
    # But for the smallest model.
    assert all(size <= 4 * text for size, text in zip(sizes[1:], texts[1:], strict=True))


def test_only_what_is_missing_is_chosen(monkeypatch):
    def timed(_):
        raise AssertionError("passes were timed")

    monkeypatch.setattr(budget, "cost_of", timed)
    for given, recipe in [
        ({}, "gpt2"),
        ({}, None),  # it chooses nothing: a saved run
        ({"init_from": "runs/book"}, "modern"),
        (dict.fromkeys(FITTED_FIELDS, 8) | {"dropout": 0.1}, "modern"),
    ]:
        choices = Choices({**given, "minutes": 1.0}, recipe)
        assert choices.settings(Facts(forecast=timed)) == choices.settings()
    options = make_parser(["train"]).parse_args(
        ["train", "--recipe", "gpt2", "--size", "medium", "--minutes", "1"]
    )
    assert choices_of_run(options).settings().training.learning_rate == 6e-4
    for wrong, message in [
        ({"n_layer": 0}, "n_layer=0 must be at least 1"),
        ({"n_embd": "64"}, "n_embd='64' must be a number"),
        ({"n_head": 0}, "n_head=0 must be at least 1"),
        ({"n_embd": 100, "n_head": 3}, "n_embd=100 must be a multiple of n_head=3"),
        ({"minutes": -1.0}, "minutes=-1.0 must be above 0"),
        ({"minutes": "1"}, "minutes='1' must be a number"),
        ({"minutes": 1e300}, r"minutes=1e\+300 must be above 0 and at most 1e\+06"),
    ]:
        refuses(message, fit, Choices({"minutes": 1.0, **wrong}), BOOK)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_speed_of_the_machine_is_measured(backend):
    small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 8}
    cost = budget.cost_of(Choices({**small, "backend": backend}).settings())
    assert cost.token > 0 and cost.update >= 0


COSTS = st.builds(Cost, st.floats(1e-9, 1e-1), st.floats(0, 1e2))


@examples(cost=COSTS, seconds=st.floats(1e-3, 1e7), batch=st.sampled_from([None, 64, 10**6]))
def test_as_many_tokens_are_expected_as_take_the_time(cost, seconds, batch):
    tokens = cost.tokens(seconds, batch)
    assert cost.seconds(tokens, batch) == pytest.approx(seconds)
    assert cost.tokens(2 * seconds, batch) > tokens


def test_updates_count_by_their_number():
    """A run of many tokens has large batches, and fewer updates for each token."""
    cost = Cost(1e-5, 1e-2)
    assert cost.seconds(1e5) == pytest.approx(1e5 * 1e-5 + 1e5 / MIN_BATCH * 1e-2)
    assert cost.seconds(2e6) == pytest.approx(2e6 * 1e-5 + UPDATES * 1e-2)
    assert cost.seconds(1e8) == pytest.approx(1e8 * 1e-5 + 1e8 / MAX_BATCH * 1e-2)
    assert cost.seconds(1e8, batch=1000) == pytest.approx(1e8 * 1e-5 + 1e5 * 1e-2)
    (given,) = sizes_of_cost(cost, batch_size=1, n_layer=2, n_embd=64, n_head=2, block_size=100)
    assert given.tokens == pytest.approx(cost.tokens(100.0, batch=100))


@pytest.mark.parametrize(
    "given",
    [
        {"batch_size": 1},
        {"batch_size": 7, "grad_accum_steps": 3},
        {"grad_accum_steps": 64},
        {"block_size": 4096},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize(("seconds", "text"), [(1.0, 1e3), (100.0, 1e12), (1e4, 1e12)])
def test_the_tokens_that_fit_are_those_of_the_batches_that_are_chosen(given, seconds, text):
    cost = Cost(1e-5, 1e-2)
    lengths = set()
    for size in sizes_of_cost(cost, seconds, text, **given):
        batch = budget.tokens_per_step(Choices(given).fields | size.fields)
        usable = (1 - HELD_OUT) * text
        most = cost.tokens(seconds, batch)
        assert size.tokens == pytest.approx(min(most, MAX_PASSES * usable))
        lengths.add(size.fields["block_size"])
    expected = {1.0: 25, 100.0: 128, 1e4: 256}[seconds]
    assert lengths == {given.get("block_size", expected)}


def sizes_of_cost(cost, seconds=100.0, text=1e12, **given):
    fields = Choices(given).fields
    return sizes_for(given, fields, text, seconds / STEPS_SHARE, lambda _: cost, law_of(()))


@pytest.mark.parametrize("T, accumulated", [(100, 1), (100, 3), (10_000, 1)])
def test_what_tokens_and_updates_take_follows_from_large_batches(monkeypatch, T, accumulated):
    batches = []

    def rough_pace(training, config):
        tokens = training.data.batch_size * training.data.block_size * config.grad_accum_steps
        batches.append(tokens)
        return Pace(1e-5 * tokens + 0.02, 0.0, 0.0, 0.0, update=0.02)

    monkeypatch.setattr(pace, "rough_pace", rough_pace)
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "batch_size": 2}
    settings = Choices({**small, "block_size": T, "grad_accum_steps": accumulated}).settings()
    assert budget.cost_of(settings) == pytest.approx(Cost(1e-5, 0.02))
    assert batches == [max(T, MAX_BATCH // T // accumulated * T) * accumulated]


@pytest.mark.parametrize("takes, sizes", [(0.5, 3), (1.5, 1)])
def test_sizes_are_timed_while_that_takes_little_of_the_time(monkeypatch, takes, sizes):
    timed, now = [], [0.0]

    def cost_of(settings):
        timed.append(budget.parameters_of(settings.model))
        now[0] += takes
        return Cost(1e-11 * timed[-1], len(timed) * 1e-8 * timed[-1])

    monkeypatch.setattr(budget, "cost_of", cost_of)
    monkeypatch.setattr(budget.activity, "clock", lambda: now[0])
    costs = budget.costs_of(Choices({}), seconds=100.0)
    assert len(timed) == sizes
    for place, N in enumerate(timed, 1):
        assert costs(N) == pytest.approx((1e-11 * N, place * 1e-8 * N))
    assert costs(10**9) == pytest.approx((1e-2, sizes * 10.0))
    between = int(np.sqrt(timed[0] * timed[-1]))
    assert timed[0] * 1e-8 <= costs(between).update <= sizes * 1e-8 * timed[-1]
    monkeypatch.setattr(budget, "cost_of", lambda _: Cost(1.0, 1.0))
    assert budget.costs_of(Choices({"n_layer": 1, "n_embd": 8}), 100.0)(5).token > 0


@pytest.mark.parametrize(
    "given",
    [
        *({"n_kv_head": count} for count in (*range(1, 9), 10, 12, 14, 16)),
        {"n_head": 6},
        {"n_head": 16, "n_embd": 1024, "n_kv_head": 4},
        {"n_layer": 24, "n_embd": 1536, "n_head": 16},
        {"n_layer": 24},
    ],
    ids=str,
)
def test_what_is_timed_makes_a_model_and_takes_little_time(monkeypatch, given):
    def cost_of(settings):
        timed.append(budget.parameters_of(settings.model))
        return Cost(1e-11 * timed[-1], 0.0)

    timed = []
    monkeypatch.setattr(budget, "cost_of", cost_of)
    costs = budget.costs_of(Choices(given), 1e9)
    assert timed == sorted(set(timed)) and timed
    if given.get("n_kv_head", 1) <= 10:  # models with so many are wide
        assert timed[-1] <= budget.MAX_TIMED_PARAMETERS
    assert costs(10**8).token == pytest.approx(1e-3)


def test_ranks_divide_the_tokens_of_a_step(monkeypatch):
    monkeypatch.setattr(budget, "cost_of", lambda _: Cost(1e-5, 0.2))
    alone, four = (budget.costs_of(Choices({}), 100.0, number) for number in (1, 4))
    for N in (10**4, 10**6):
        assert four(N) == pytest.approx((alone(N).token / 4, alone(N).update))


def test_sizes_are_timed_on_the_threads_that_a_run_of_theirs_has(monkeypatch):
    used = []
    monkeypatch.setattr(budget, "choose_threads", lambda _, settings: 3 * settings.model.n_layer)
    monkeypatch.setattr(budget, "use_threads", lambda run: used.append(run.threads))
    monkeypatch.setattr(budget.pace, "rough_pace", lambda *_: Pace(1.0, 0.0, 0.0, 0.0))
    for layers in (1, 2):
        budget.cost_of(Choices({"n_layer": layers, "n_embd": 16, "n_head": 1}).settings())
    assert used == [3, 6]


def test_trials_correct_what_was_timed():
    def costs(N):
        return Cost(1e-11 * N, 1e-8 * N)

    assert budget.corrected(costs, ()) is costs
    small, large = 1e5, 1e6
    slow = Trial(Outcome(small, 1e6, 1e6, 2.0), 3 * costs(small).seconds(1e6))
    fast = Trial(Outcome(large, 1e7, 1e6, 2.0), 0.5 * costs(large).seconds(1e7))
    short = Trial(Outcome(large, 1e5, 1e6, 2.0), 9 * costs(large).seconds(1e5))
    apart = Trial(Outcome(10, 1e6, 1e6, 2.0), 2 * costs(10).seconds(1e6, 64), batch=64)
    found = budget.corrected(costs, [slow, fast, short, apart])
    assert found(9) == pytest.approx([2 * x for x in costs(9)])
    for N, ratio in ((1e4, 3), (small, 3), (2e5, 3), (5e5, 0.5), (large, 0.5), (1e8, 0.5)):
        assert found(int(N)) == pytest.approx([ratio * x for x in costs(N)])


def test_the_command_line_and_the_library_choose_the_same(text, tmp_path, monkeypatch, cli):
    monkeypatch.setattr(budget, "costs_of", lambda *_: costs_at(2e6))
    monkeypatch.setattr(pace, "measure", lambda *_: Pace(100.0, 0.0, 0.0, 0.0))  # for few steps
    run = Run.create(text=text, out=tmp_path / "library", minutes=10)
    expected = best(sizes(2e6 * 600 * STEPS_SHARE, len(CATS))).fields
    model = run.settings.model
    assert {name: expected[name] for name in ("n_layer", "n_embd")} == {
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
    }
    printed = cli("train", text, "--minutes 10 --batch-size 4 --out", tmp_path / "run").flat
    saved = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert saved["model"] == to_saved(model) and saved["run"]["batch_size"] == 4
    shape = f"{model.n_layer} layers of {model.n_embd} channels, 4 windows of {model.block_size}"
    assert f"For 10 minutes: {shape}" in printed

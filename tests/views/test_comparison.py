"""Runs differ in settings, and their losses are compared at equal places."""

import pytest

from smallmind.views.comparison import COMPARED, compare, compared_field, differences
from smallmind.views.run_view import RunView
from tests.programs import edited
from tests.test_old_runs import OLD_RUNS
from tests.views.written import evaluation, step, write


@pytest.fixture
def view(tmp_path):
    """Writes a run and opens it."""

    def view(name, *records, **settings):
        return RunView(write(tmp_path / name, *records, **settings), COMPARED)

    return view


def test_only_settings_that_differ_are_named(view):
    runs = [view("a", n_layer=2, out="a"), view("b", steps=50, out="b", saved={"smallmind": "9"})]
    assert differences(runs) == {"n_layer": [2, 4], "steps": [100, 50], "smallmind": ["0.2.0", "9"]}
    assert differences([runs[0], runs[0]]) == {}


def test_a_setting_that_a_version_lacked_is_what_it_meant_then():
    old = RunView(OLD_RUNS / "float32", COMPARED)
    muon = RunView(OLD_RUNS / "muon", COMPARED)
    assert differences([old, muon]) == {
        "optimizer": ["adamw", "muon"],
        "precision": ["float32", None],
        "smallmind": ["0.1.0", "0.2.0"],
    }


def test_settings_of_a_newer_version_are_compared_as_they_are(tmp_path, view):
    plain = view("a")
    path = write(tmp_path / "b", saved={"format": 99})
    with edited(path / "config.json") as config:
        config["model"]["novelty"] = True
    assert differences([plain, RunView(path, COMPARED)]) == {"novelty": [None, True]}


def test_losses_are_compared_where_all_runs_have_got_to(view):
    often = view("a", *(evaluation(n, n / 10) for n in range(10, 101, 10)))
    seldom = view("b", *(evaluation(n, 1.0) for n in (25, 50, 75)))
    losses = compare([often, seldom], "val_loss", "steps")
    assert losses.places == [25, 50, 75]
    assert losses.values == [[2.5, 1.0], [5.0, 1.0], [7.5, 1.0]]  # between two evaluations
    short = view("c", *(evaluation(n, 2.0) for n in (10, 60)))
    assert compare([often, short], "val_loss", "steps").places == [10, 60]


def test_a_long_run_has_a_few_places_and_its_end_is_one(view):
    runs = [view(name, *(evaluation(n, 1.0) for n in range(1, 32))) for name in "ab"]
    losses = compare(runs, "val_loss", "steps")
    assert losses.places == [1, 7, 13, 19, 25, 31]


def test_times_are_compared_evenly(view):
    fast = view("a", *(step(n, loss=1.0, elapsed_seconds=n / 10) for n in range(1, 101)))
    slow = view("b", *(step(n, loss=2.0, elapsed_seconds=n / 2) for n in range(1, 101)))
    losses = compare([fast, slow], "loss", "time")
    assert losses.places == pytest.approx([0.5, 2.4, 4.3, 6.2, 8.1, 10.0])
    assert losses.values == [pytest.approx([1.0, 2.0])] * 6


def test_runs_that_never_met_have_no_places(view):
    runs = [view("a", evaluation(10, 1.0)), view("b", evaluation(20, 1.0)), view("c")]
    assert compare(runs[:2], "val_loss", "steps").places == []
    assert compare(runs, "loss", "time").places == []


def test_what_is_compared_follows_from_what_there_is(view):
    whole = view("a", evaluation(10, 1.0))
    bytes_ = view("b", evaluation(10, 1.0), tokenizer="byte")
    untested = view("c", step(10))
    for runs, field in [
        ([whole, whole], "val_loss"),
        ([whole, bytes_], "bits_per_byte"),
        ([whole, untested], "loss"),
        ([bytes_, untested], "loss"),
    ]:
        assert compared_field(runs, differences(runs)) == field

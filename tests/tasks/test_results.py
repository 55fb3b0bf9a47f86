"""Intervals of shares, and of the difference of two models on the same items."""

import pytest

from smallmind.tasks import results
from smallmind.tasks.results import ItemGroup, TaskResult, difference, paired, read_results, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (462, 1000, 0.4313, 0.4930),
    ],
)
def test_wilson_intervals_are_those_of_the_tables(right, count, low, high):
    found = wilson(right, count)
    assert found.value == right / count
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_equal_verdicts_are_no_difference():
    verdicts = "0110" * 50
    found = difference([verdicts], [verdicts])
    assert found.value == 0 and found.has_zero and "no difference" in found.told()


def test_a_few_changes_are_no_difference_and_many_are():
    before = [0.0] * 100
    few, many = [1.0] * 3 + [0.0] * 97, [1.0] * 30 + [0.0] * 70
    assert paired(before, few).has_zero
    assert not paired(before, many).has_zero and paired(before, many).value == 0.3


def test_a_difference_that_seeds_explain_is_none():
    def verdicts(right):
        return "1" * right + "0" * (1000 - right)

    alone = difference([verdicts(500)], [verdicts(600)])
    seeds = difference([verdicts(500), verdicts(600)], [verdicts(520), verdicts(640)])
    assert not alone.has_zero and seeds.has_zero


@pytest.mark.parametrize(("limit", "value"), [("MAX_RESULTS", 3), ("MAX_BYTES", 1000)])
def test_a_run_keeps_its_last_results(tmp_path, monkeypatch, limit, value):
    monkeypatch.setattr(results, limit, value)
    file = tmp_path / "tasks.json"
    for number in range(9):
        name = f"{number}.jsonl"
        groups = (ItemGroup("(none)", ("01" * 50,)),)
        found = TaskResult("pairs", "pair", name, name, "a", "float32", ("right",), groups)
        found.keep(file)
        kept = [result.file for result in read_results(file)]
        assert kept == [f"{i}.jsonl" for i in range(number + 1 - len(kept), number + 1)]
        assert len(kept) == min(number + 1, 3)


def test_long_names_that_begin_alike_stay_apart():
    names = [f"a very long name that many groups have, {number}" for number in range(3)]
    groups = tuple(ItemGroup(name, ("01",)) for name in names)
    table = TaskResult("pairs", "pair", "a", "a", "a", "float32", ("right",), groups).table()
    shown = [row[0] for row in table.rows]
    assert len(set(shown)) == 3 and all(name.startswith("a very") for name in shown)
    assert len({len(name) for name in shown}) == 1 and len(shown[0]) < len(names[0])

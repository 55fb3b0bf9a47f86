"""The number of threads is chosen by what repetitions take, here by a clock of the tests' own."""

import pytest

from smallmind.kernels.codegen.thread_choice import (
    LONG_PAUSE_NS,
    SHORT_PAUSE_NS,
    TRIAL_REPETITIONS,
    ThreadChoice,
)

RARELY = 128  # repetitions
MS = 1_000_000  # nanoseconds


def chosen(choice, cost, repetitions=4000):
    """The numbers of threads of repetitions that take cost(number, threads) nanoseconds."""
    counts = []
    for number in range(repetitions):
        counts.append(choice.next())
        choice.took(cost(number, counts[-1]))
    return counts


def alone(counts):
    return sum(count == 1 for count in counts)


def test_the_faster_way_is_taken_and_the_other_one_tried_again():
    def cost(number, threads):
        is_crowded = 1000 <= number < 2500  # by another program
        return 20 if threads == 1 else 200 if is_crowded else 11

    counts = chosen(ThreadChoice({1, 2}), cost)
    assert set(counts[: 2 * TRIAL_REPETITIONS]) == {1, 2}
    assert alone(counts[300:1000]) <= 7 * TRIAL_REPETITIONS
    assert (
        1500 - alone(counts[1000:2500]) <= 4 * TRIAL_REPETITIONS
    )  # trials that cost much are rare
    assert alone(counts[3800:]) <= 2 * TRIAL_REPETITIONS


@pytest.mark.parametrize(("on_one", "on_two", "share"), [(20, 11, 0.01), (11, 20, 0.03)])
def test_trials_of_the_slower_way_take_little_time(on_one, on_two, share):
    counts = chosen(ThreadChoice({1, 2}), lambda _, n: on_one if n == 1 else on_two)[
        2 * TRIAL_REPETITIONS :
    ]
    taken = sum(on_one if count == 1 else on_two for count in counts)
    assert len(set(counts)) == 2
    assert taken <= (1 + share) * min(on_one, on_two) * len(counts)


def test_repetitions_that_are_interrupted_do_not_change_the_way():
    def cost(number, threads):
        return 10**6 if number % 5 < 2 else 20 if threads == 1 else 5

    counts = chosen(ThreadChoice({1, 2}), cost)
    assert alone(counts[300:]) <= (4000 // RARELY + 1) * TRIAL_REPETITIONS


def test_long_repetitions_are_not_tried_on_one_thread_without_a_reason():
    quiet = chosen(ThreadChoice({1, 2}), lambda _, n: 1000 * MS // n, 200)
    assert set(quiet) == {2}
    eight = chosen(ThreadChoice({1, 4, 7, 8}), lambda _, n: 1000 * MS // n, 200)
    assert set(eight) == {8}


def test_threads_that_wait_for_each_other_become_fewer_and_all_again_when_the_machine_is_quiet():
    """By what a model that trains for seconds per step takes, and one of milliseconds."""
    for ms in (5, 500):
        busy = range(200, 200 + 60_000 // ms)

        def cost(number, threads, ms=ms, busy=busy):
            waiting = 8 if threads > 1 else 1.7
            return int(ms * MS / threads**0.9 * (waiting if number in busy else 1))

        choice = ThreadChoice({1, 2})
        counts = chosen(choice, cost, busy.stop + 60_000 // ms)
        assert alone(counts[:200]) <= 5 * TRIAL_REPETITIONS
        assert alone(counts[busy.start + 20 : busy.stop]) > 0.95 * (len(busy) - 20)
        after, quiet = counts[busy.stop :], 2 * SHORT_PAUSE_NS // (ms * MS) + 20
        assert alone(after[quiet:]) <= 0.05 * len(after)
        assert choice.best == 2


def test_rare_but_long_waits_count_too():
    def cost(number, threads):
        return 13 * MS if threads == 1 else 110 * MS if number % 10 == 0 else 8 * MS

    counts = chosen(ThreadChoice({1, 2}), cost)
    assert alone(counts) > 0.9 * len(counts)


def test_beside_one_busy_core_the_others_are_used():
    def cost(_, threads):
        return 800 * MS // threads * (2 if threads == 8 and crowded else 1)

    choice, crowded = ThreadChoice({1, 4, 7, 8}), False
    assert set(chosen(choice, cost, 50)) == {8}
    crowded = True
    counts = chosen(choice, cost, 300)
    assert counts.count(7) > 250 and counts.count(1) == 0
    crowded = False
    assert set(chosen(choice, cost, 2 * LONG_PAUSE_NS // (115 * MS))[-50:]) == {8}


def test_a_change_is_news_once_and_only_if_it_lasts():
    news, on_two = [], 3 * MS

    def train(repetitions):
        for _ in range(repetitions):
            choice.took(5 * MS if choice.next() == 1 else on_two)
            if choice.has_news():
                news.append(choice.best)

    choice = ThreadChoice({1, 2})
    train(2000)
    assert news == []
    on_two = 40 * MS
    train(100)
    assert choice.best == 1 and news == []
    train(4000)
    assert news == [1]
    on_two = 3 * MS
    train(40_000)
    assert news == [1, 2]

"""Steps run on the number of threads that is fastest, by a clock of the tests' own."""

import io
from collections import Counter

import pytest
from numba import get_num_threads

from smallmind import TrainingConfig
from smallmind.cli.console import Console
from smallmind.cli.display import ProgressDisplay
from smallmind.forecast.threads import use_threads
from smallmind.kernels.codegen import threads
from smallmind.settings.config import RunConfig
from smallmind.training import step_threads
from smallmind.training.records import StepRecord, ThreadsRecord
from tests.runs.small import create
from tests.training.small import small_training

MS = 1_000_000  # nanoseconds
CONFIG = TrainingConfig(steps=120, log_every=1, val_every=50, val_batches=1, max_rollbacks=0)
BUSY = range(30, 70)  # steps

needs_two = pytest.mark.skipif(threads.max_threads() < 2, reason="needs two threads")


@pytest.fixture
def two_threads():
    """Two threads that nobody has fixed."""
    before = threads.threads(), threads.are_fixed()
    threads.set_threads(2, are_fixed=False)
    yield
    threads.set_threads(*before)


class Clock:
    """A clock by which steps take some time on one thread and another on two."""

    def __init__(self, monkeypatch):
        self.now, self.readings, self.counts = 0, 0, []
        monkeypatch.setattr(step_threads, "clock_ns", self.read)

    def read(self):
        self.readings += 1
        if self.readings % 2 == 0:  # a step ends
            self.counts.append(get_num_threads())
            waiting = 400 if len(self.counts) + step_threads.COLD_STEPS in BUSY else 60
            self.now += (waiting if self.counts[-1] == 2 else 200) * MS
        return self.now


def losses(records):
    return [record.loss for record in records if isinstance(record, StepRecord)]


@needs_two
def test_a_run_that_changes_its_threads_has_the_same_bits(monkeypatch, two_threads):
    threads.set_threads(2)
    expected = small_training()
    records = list(expected.steps(CONFIG))
    threads.set_threads(2, are_fixed=False)
    clock, training, seen = Clock(monkeypatch), small_training(), []
    for record in training.steps(CONFIG):
        seen.append(record)
        assert threads.passes_choose() == (get_num_threads() > 1)  # between steps
    assert get_num_threads() == threads.threads() == 2
    assert set(clock.counts) == {1, 2} and len(clock.counts) == 120 - step_threads.COLD_STEPS
    busy = Counter(clock.counts[10 + BUSY.start : BUSY.stop - step_threads.COLD_STEPS])
    assert busy[1] > 0.8 * busy.total()
    assert losses(seen) == losses(records)
    assert training.model.flat.data.tobytes() == expected.model.flat.data.tobytes()
    told = [record for record in seen if isinstance(record, ThreadsRecord)]
    assert [(record.threads, record.most_threads) for record in told] == [(1, 2)]


@needs_two
def test_a_number_that_the_user_sets_stays(monkeypatch, two_threads):
    clock = Clock(monkeypatch)
    threads.set_threads(2)
    list(small_training().steps(CONFIG, until=30))
    assert not clock.counts
    threads.set_threads(2, are_fixed=False)
    for record in small_training().steps(CONFIG, until=30):
        if isinstance(record, StepRecord) and record.step == 20:
            threads.set_threads(1)  # meanwhile
            counted = len(clock.counts)
    assert len(clock.counts) == counted and threads.threads() == 1


@needs_two
def test_an_error_leaves_all_threads(monkeypatch, two_threads):
    Clock(monkeypatch)
    training = small_training()
    monkeypatch.setattr(step_threads.FastestThreads, "end", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(training.steps(CONFIG))
    assert threads.threads() == get_num_threads() == 2 and threads.passes_choose()


def test_runs_remember_who_has_chosen_their_threads(tmp_path, two_threads):
    chosen, given = create(tmp_path / "a").settings.run, create(tmp_path / "b", threads=1)
    assert chosen.adapt_threads and not given.settings.run.adapt_threads
    assert not create(tmp_path / "c", adapt_threads=False).settings.run.adapt_threads
    given.change(threads=1, adapt_threads=True)
    assert given.settings.run.adapt_threads
    given.change(threads=1)
    assert not given.settings.run.adapt_threads
    use_threads(RunConfig(threads=1))
    assert not threads.are_fixed()
    use_threads(RunConfig(threads=1, adapt_threads=False))
    assert threads.are_fixed()


def test_the_command_line_says_in_a_line_that_threads_wait_and_that_they_no_longer_do():
    stream = io.StringIO()
    display = ProgressDisplay(Console(stream), 500)
    display.show(ThreadsRecord(120, 1, 2))
    display.show(ThreadsRecord(260, 2, 2))
    assert stream.getvalue().splitlines() == [
        "step 120/500  using 1 of 2 threads: more would only wait for each other",
        "step 260/500  using all 2 threads again",
    ]


@needs_two
def test_what_follows_a_step_runs_on_the_best_number_also_in_a_trial(monkeypatch, two_threads):
    clock, chosen, in_trials = Clock(monkeypatch), step_threads.FastestThreads(), 0
    for _ in range(100):
        chosen.begin()
        chosen.end()
        best = chosen._choice.best
        in_trials += bool(clock.counts) and clock.counts[-1] != best
        assert get_num_threads() == best
    chosen.close()
    assert in_trials

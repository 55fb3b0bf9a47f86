"""Batches drawn ahead by a thread: the same run, one error, and no thread left behind."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import smallmind
from smallmind import InputError, TrainingConfig
from smallmind.console import activity
from smallmind.memory.tensor_pool import TensorPool
from smallmind.text.dataset import Dataset
from smallmind.text.samplers import Epochs, RandomWindows, ShuffledWindows, draw
from smallmind.training import checkpoint as checkpoints
from smallmind.training import prefetch
from smallmind.training.checkpoint import BackgroundSaver
from smallmind.training.prefetch import drawing
from smallmind.training.records import RollbackRecord, StepRecord
from tests.corpus.files import llm_c, tokens_of
from tests.faults.interrupts import interrupted_everywhere
from tests.training.test_resume import SMALL, Saves, digest, losses, new_training, shown, tensors_of
from tests.training.test_spikes import spiking_training

AHEAD = [1, 2, 7]
RANDOM = {"steps": 14, "grad_accum_steps": 2}
EPOCHS = {"epochs": 2, "grad_accum_steps": 3}
# With 7 windows in a batch, an epoch ends with a batch of 6 windows and one without any.
UNEVEN = {"epochs": 3, "grad_accum_steps": 4, "check_gradient_health": True}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def config(ahead=None, **settings):
    each = {"log_every": 1, "val_every": 5, "val_batches": 1, "save_every": 0}
    return TrainingConfig(**{**each, "diagnostic_interval": 1, **settings}, prefetch=ahead)


class Reads:
    """Tokens that are read when they are sliced, by `read` if there is one."""

    def __init__(self, tokens, read=lambda: None):
        self.tokens, self.read = tokens, read

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, key):
        if threading.current_thread().name == "batches":
            self.read()
        return self.tokens[key]


class Drawn:
    """The numbers of the batches that samplers draw; `on_draw` is called before each of them."""

    def __init__(self, monkeypatch, on_draw=None):
        self.numbers, self.change = [], threading.Condition()

        def observed(original):
            def starts(sampler, number):
                if on_draw:
                    on_draw(number)
                with self.change:
                    self.numbers.append(number)
                    self.change.notify_all()
                return original(sampler, number)

            return starts

        for kind in (RandomWindows, ShuffledWindows, Epochs):
            monkeypatch.setattr(kind, "starts", observed(kind.starts))

    def wait_for(self, count):
        with self.change:
            self.change.wait_for(lambda: len(self.numbers) >= count)


def failing(error, at):
    """For Drawn: the batch with this number cannot be drawn."""

    def on_draw(number):
        if number == at:
            raise error

    return on_draw


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("settings", [RANDOM, EPOCHS, UNEVEN])
def test_the_results_are_those_without_a_thread(ahead, settings):
    plain, drawn = new_training(), new_training()
    for training in (plain, drawn):
        training.data.batch_size = 7
    records = list(plain.steps(config(0, **settings)))
    assert shown(drawn.steps(config(ahead, **settings))) == shown(records)
    assert digest(drawn) == digest(plain)


@pytest.mark.parametrize("settings", [RANDOM, EPOCHS])
def test_a_run_is_resumed_with_another_number(settings):
    whole = new_training()
    list(whole.steps(config(0, **settings)))
    for step, before, after in ((3, 2, 7), (8, 7, 0), (11, 0, 1)):
        first, rest = new_training(), new_training()
        list(first.steps(config(before, **settings, save_every=1), saver=Saves(first, step)))
        assert first.progress.step == step
        list(rest.steps(config(after, **settings, save_every=1), first.state()))
        assert rest.model.flat.data.tobytes() == whole.model.flat.data.tobytes()


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_rollback_and_skipped_steps_draw_again(ahead, monkeypatch):
    settings = {"steps": 12, "grad_accum_steps": 2, "val_every": 0}
    runs, numbers = [], []
    for count in (0, ahead):
        with monkeypatch.context() as patch:
            drawn = Drawn(patch)
            training = spiking_training({7: 1e3, 9: np.nan})
            records = list(training.steps(config(count, **settings)))
        assert sum(isinstance(record, RollbackRecord) for record in records) == 2
        runs.append((shown(records), digest(training)))
        numbers.append(drawn.numbers)
    assert runs[0] == runs[1]
    assert set(numbers[1]) == set(range(24)) and len(numbers[1]) >= len(numbers[0])


@pytest.mark.parametrize("ahead", [0, *AHEAD])
@pytest.mark.parametrize("until", [None, 3])
def test_batches_are_drawn_in_order_and_none_after_the_last(ahead, until, monkeypatch):
    drawn = Drawn(monkeypatch)
    list(new_training().steps(config(ahead, steps=5, grad_accum_steps=2, val_every=0), until=until))
    assert drawn.numbers == list(range(2 * (until or 5)))


def test_so_many_are_drawn_while_a_step_computes(monkeypatch):
    drawn = Drawn(monkeypatch)
    steps = new_training().steps(config(3, steps=100))
    next(steps)
    drawn.wait_for(4)  # that of the first step, and three
    steps.close()  # the thread waits for a buffer
    assert drawn.numbers == [0, 1, 2, 3]


def test_a_run_reads_from_disk_ahead_unless_told_otherwise(monkeypatch):
    names = set()
    for ahead, expected in ((None, "batches"), (0, "MainThread"), (1, "batches")):
        training, names = new_training(), set()
        with monkeypatch.context() as patch:
            Drawn(patch, lambda _, names=names: names.add(threading.current_thread().name))
            assert not training.data.is_on_disk
            training.data.train = Reads(training.data.train)
            assert training.data.is_on_disk
            list(training.steps(config(ahead, steps=3)))
        assert names == {expected}
    assert config().batches_ahead(is_on_disk=True) == 2
    assert config().batches_ahead(is_on_disk=False) == 0
    assert config(5).batches_ahead(is_on_disk=False) == 5


def test_the_buffers_are_returned_and_rented_once():
    training = new_training()
    with TensorPool() as pool:
        training.model.workspace.pool, misses = pool, []
        for record in training.steps(config(4, steps=9, val_every=0)):
            if isinstance(record, StepRecord):
                misses.append(pool.statistics().misses)
        assert pool.statistics().bytes_rented == 0 and misses[0] == misses[-1]


def test_the_thread_runs_no_kernel():
    files = set()

    def called(frame, event, _):
        files.add(frame.f_code.co_filename)

    root = Path(smallmind.__file__).parent
    threading.setprofile(called)
    try:
        for settings in (RANDOM, EPOCHS):
            list(new_training().steps(config(2, **settings)))
    finally:
        threading.setprofile(None)
    ours = {Path(file).relative_to(root) for file in files if Path(file).is_relative_to(root)}
    allowed = {"training/prefetch.py", "text/samplers.py", "text/dataset.py", "randomness.py"}
    allowed |= {"parallel/shards.py"}  # which windows a shard has
    assert ours == set(map(Path, allowed))
    assert not any("numba" in file for file in files)


ERRORS = [
    InputError("tokens.bin was truncated while it was read; restore it"),
    OSError(5, "Input/output error"),
    MemoryError("no"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("ahead", [0, 1, 7])
def test_a_failure_is_that_of_the_step_and_what_was_learned_is_saved(
    ahead, error, monkeypatch, tmp_path
):
    settings = {"steps": 12, "grad_accum_steps": 2, "val_every": 0, "save_every": 5}
    whole = new_training()
    expected = list(whole.steps(config(**settings)))
    training, records = new_training(), []
    with monkeypatch.context() as patch, pytest.raises(type(error)) as raised:
        Drawn(patch, failing(error, at=15))  # the second batch of step 8
        with BackgroundSaver(tmp_path) as saver:
            for record in training.steps(config(ahead, **settings), saver=saver):
                records.append(record)
    assert raised.value is error
    assert not training.model.flat.grad.any()
    saved = checkpoints.newest(tmp_path)[0]
    assert saved.step == 7
    rest = new_training()
    records += rest.steps(config(ahead, **settings), saved)
    assert shown(records) == shown(expected) and digest(rest) == digest(whole)


def test_a_batch_that_could_not_be_drawn_may_be_asked_for_again(monkeypatch):
    data = new_training().data
    tries = []

    def on_draw(number):
        if number == 1 and not tries:
            tries.append(number)
            raise OSError(5, "Input/output error")

    Drawn(monkeypatch, on_draw)
    with drawing(RandomWindows(data), TensorPool(), 2, 9) as batches:
        for number in (0, 1, 1, 2):
            try:
                ids = batches.get(number).ids
            except OSError:
                assert number == 1
                continue
            np.testing.assert_array_equal(ids, draw(RandomWindows(data), number).ids)
    assert tries == [1]


def stop(training, steps):
    training.stop()
    list(steps)


def fail(training, steps):
    def broken(*_):
        raise ZeroDivisionError

    training.model.loss_and_gradients = broken
    with pytest.raises(ZeroDivisionError):
        list(steps)


def interrupt(training, steps):
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)


ENDS = [stop, fail, interrupt, lambda _, steps: steps.close(), lambda _, steps: list(steps)]


@pytest.mark.parametrize("end", ENDS)
def test_the_thread_ends_with_the_run(end):
    training = new_training()
    steps = training.steps(config(2, steps=30))
    next(steps)
    assert len(threads()) == 1
    end(training, steps)
    assert not threads()
    assert training.model.workspace.pool.statistics().bytes_rented == 0


@pytest.mark.parametrize("end", [stop, interrupt, lambda _, steps: steps.close()])
def test_a_slow_read_is_finished_and_nothing_is_read_after_it(end, monkeypatch):
    training, reading, released = new_training(), threading.Event(), threading.Event()
    join = prefetch._Ahead._join

    def read():
        if 3 in drawn.numbers:
            reading.set()
            released.wait()

    def release_and_join(ahead):
        assert threads()
        released.set()
        join(ahead)

    drawn = Drawn(monkeypatch)
    training.data.train = Reads(training.data.train, read)
    steps = training.steps(config(7, steps=30, val_every=0))
    next(steps)
    reading.wait()
    monkeypatch.setattr(prefetch._Ahead, "_join", release_and_join)
    end(training, steps)
    assert not threads() and drawn.numbers == [0, 1, 2, 3]


def test_progress_is_shown_while_a_batch_is_awaited(monkeypatch):
    data, released = new_training().data, threading.Event()
    data.train = Reads(data.train, released.wait)
    monkeypatch.setattr(activity, "REFRESH", 1e-3)
    monkeypatch.setattr(activity, "tick", released.set)  # else the read would never end
    with drawing(RandomWindows(data), TensorPool(), 1, 1) as batches:
        assert len(batches.get(0).ids) == 3


def test_ctrl_c_at_any_moment_leaves_no_thread_and_returns_the_buffers():
    data = Dataset(np.arange(200, dtype=np.int32), 4, 2, 1)
    pool, expected = TensorPool(), draw(RandomWindows(data), 6).ids

    def act():
        with drawing(RandomWindows(data), pool, 1, 8) as batches:
            for number in (0, 1, 6):
                ids = batches.get(number).ids
            np.testing.assert_array_equal(ids, expected)

    interrupts = 0
    for error in interrupted_everywhere(act, "prefetch.py"):
        assert not threads(), error
        assert pool.statistics().bytes_rented == 0, error
        interrupts += 1
    assert interrupts > 50


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_a_token_file_that_is_truncated_ends_the_run_at_that_batch(ahead, tmp_path, monkeypatch):
    ids = new_training().data.train[:600]
    path = llm_c(tmp_path / "tokens.bin", ids)
    whole, training, records = new_training(), new_training(), []
    whole.data.train, training.data.train = ids, tokens_of(path)
    expected = list(whole.steps(config(steps=5, val_every=0)))

    def on_draw(number):
        if number == 3:
            os.truncate(path, 1100)

    Drawn(monkeypatch, on_draw)
    with pytest.raises(InputError, match=r"tokens\.bin was truncated while it was read; restore"):
        for record in training.steps(config(ahead, steps=5, val_every=0)):
            records.append(record)
    assert shown(records) == shown(expected)[: len(records)] and len(records) == 3


def test_the_command_line_sets_it_and_a_resumed_run_may_change_it(tmp_path, text, cli):
    whole, out = tmp_path / "whole", tmp_path / "run"
    arguments = "train", text, SMALL, "--steps 20"
    cli(*arguments, "--out", whole)
    cli(*arguments, "--prefetch 3 --out", out)
    assert smallmind.Run.open(whole).settings.training.prefetch is None
    assert smallmind.Run.open(out).settings.training.prefetch == 3
    assert tensors_of(out) == tensors_of(whole) and losses(out) == losses(whole)
    for flags in ("--prefetch 0", ""):
        again = tmp_path / f"again{flags[-1:]}"
        shutil.copytree(out, again)
        for name in ("step-00000020.safetensors", "best.safetensors"):
            os.remove(again / "checkpoints" / name)
        assert "Resuming after step 10" in cli("train --resume", again, flags).out
        assert tensors_of(again) == tensors_of(whole) and losses(again) == losses(whole)
    cli.refuses("prefetch=-1 must be at least 0", *arguments, "--prefetch -1")


def test_a_failed_read_is_one_line_and_the_run_resumes(tmp_path, text, cli, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "run"
    arguments = "train", text, SMALL, "--steps 20 --prefetch 2 --out"
    cli(*arguments, whole)
    with monkeypatch.context() as patch:
        Drawn(patch, failing(ERRORS[0], at=16))
        assert cli(*arguments, out, ends=2).err == f"smallmind: {ERRORS[0]}\n"
    assert "Resuming after step 16" in cli("train --resume", out).out
    assert tensors_of(out) == tensors_of(whole) and losses(out) == losses(whole)

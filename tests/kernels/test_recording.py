"""Recorded calls of kernels: repeated, they do what they did, with what their arrays hold now."""

import numpy as np
import pytest
from numba import get_num_threads, prange

from smallmind.kernels import compiled
from smallmind.kernels.codegen.jit import parallel_jit, serial_jit
from smallmind.kernels.codegen.recording import Recording
from smallmind.kernels.codegen.thread_choice import TRIAL_REPETITIONS
from smallmind.kernels.codegen.threads import max_threads
from tests.threads import in_threads, on_threads


@serial_jit
def add_scaled(out, x, whole, fraction, single, flag):
    for i in range(x.size):
        out[i] += x[i] * whole * fraction * single if flag else 1


@serial_jit
def divide(out, x, y):
    if y[0] == 0:
        raise ZeroDivisionError
    out[0] = x[0] / y[0]


@parallel_jit
def count_threads(out, _other):
    for i in prange(1):
        out[i] = get_num_threads()


@parallel_jit
def count_up(out, start):
    begin = start[()]
    for i in prange(1):
        out[i] += begin


def test_calls_are_repeated_with_what_the_arrays_hold_now():
    x, out, start = np.arange(5.0), np.zeros(5), np.array(3)
    recording = Recording()
    with recording.recording():
        add_scaled(out, x, -2, 0.5, np.float32(3), True)
        add_scaled(out, x, 1, 1.0, np.float32(1), False)
        count_up(out, start)
    assert len(recording) == 3
    count_up(out, start)  # is not recorded
    np.testing.assert_array_equal(out, -3 * x + 1 + [6, 0, 0, 0, 0])
    x[:], out[:], start[...] = 1, 0, 7
    for repetition in (1, 2):
        recording.repeat()
        np.testing.assert_array_equal(out, repetition * (np.array([5, -2, -2, -2, -2])))


def test_a_recording_keeps_its_arrays_alive_and_nothing_may_be_recorded():
    recording = Recording()
    with recording.recording():
        out = np.zeros((300, 200), np.float32)
        x = np.ones((300, 200), np.float32)
        compiled.gelu(out, x)
    view, expected = out[:1], out.copy()
    out[...] = 0
    del x, out
    junk = [np.full((300, 200), np.nan, np.float32) for _ in range(20)]
    recording.repeat()
    np.testing.assert_array_equal(view.base, expected)
    assert len(junk) == 20
    empty = Recording()
    with empty.recording():
        pass
    empty.repeat()


def test_only_the_calls_of_its_own_thread_are_recorded():
    out, other, recording = np.zeros(1), np.zeros(1), Recording()
    with recording.recording():
        in_threads(lambda: count_up(other, np.array(1)))
        count_up(out, np.array(1))
    recording.repeat()
    assert (out[0], other[0], len(recording)) == (2, 1, 1)


def test_the_first_failure_ends_a_repetition():
    out, x, y = np.zeros(2), np.ones(1), np.ones(1)
    recording = Recording()
    with recording.recording():
        divide(out, x, y)
        add_scaled(out, np.ones(2), 1, 1.0, np.float32(1), True)
    y[0] = 0
    with pytest.raises(RuntimeError, match="a recorded kernel failed"):
        recording.repeat()
    np.testing.assert_array_equal(out, [2, 1])


def test_a_failed_call_is_not_recorded():
    recording = Recording()
    with pytest.raises(ZeroDivisionError), recording.recording():
        divide(np.zeros(1), np.ones(1), np.zeros(1))
    assert len(recording) == 0


def test_repetitions_are_made_on_one_thread_and_on_all():
    if max_threads() == 1:
        pytest.skip("needs two threads")
    found, recording, seen = np.zeros(1, np.int64), Recording(), set()
    for _ in on_threads(2):
        with recording.recording():
            count_threads(found, np.zeros(1000, np.float32))
        assert found[0] == 2 and recording.nbytes == 8 + 4000
        for _ in range(2 * TRIAL_REPETITIONS):
            recording.repeat()
            seen.add(int(found[0]))
        assert seen == {1, 2}
        count_threads(found, np.zeros(1, np.float32))
        assert found[0] == 2

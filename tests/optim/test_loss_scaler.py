"""The loss scale at its corners."""

import json

from smallmind import LossScaler


def scale_after(scaler, clean=0, overflowed=0):
    """The scale after some steps without an overflow, and then some with one."""
    for number in range(clean + overflowed):
        scaler.update(overflowed=number >= clean)
    return scaler.scale


def test_the_scale_halves_down_to_one_and_doubles_after_a_thousand_clean_steps():
    scaler = LossScaler()
    assert scaler.scale == 65536
    assert scale_after(scaler, clean=999) == 65536
    assert scale_after(scaler, clean=1) == 131072
    assert scale_after(scaler, overflowed=1) == 65536
    assert scale_after(scaler, overflowed=40) == 1
    assert scale_after(scaler, clean=1000 * 30) == 2**24


def test_an_overflow_restarts_the_count_of_clean_steps():
    scaler = LossScaler()
    scale_after(scaler, clean=999, overflowed=1)
    assert scale_after(scaler, clean=999) == 32768
    assert scale_after(scaler, clean=1) == 65536


def test_the_scaler_is_lost_after_ten_overflows_in_a_row():
    scaler = LossScaler()
    for clean in (0, 1):
        scale_after(scaler, clean, overflowed=9)
        assert not scaler.is_lost
    scale_after(scaler, overflowed=1)
    assert scaler.is_lost


def test_a_scaler_continues_from_its_saved_state():
    scaler, resumed = LossScaler(), LossScaler()
    for i in range(500):
        scaler.update(overflowed=i in (3, 4, 100))
    resumed.load_state(json.loads(json.dumps(scaler.state())))
    for i in range(1500):
        for one in (scaler, resumed):
            one.update(overflowed=i in (7, 1200))
        assert (resumed.scale, resumed.clean_steps) == (scaler.scale, scaler.clean_steps)


def test_it_keeps_falling_after_five_halvings_within_200_steps_and_says_so_once_per_period():
    scaler, said = LossScaler(2.0**24), []
    overflows = {10, 40, 70, 100, 209, 210, 211, *range(1000, 2000, 60)}
    for step in range(1, 2000):
        scaler.update(step in overflows)
        if scaler.keeps_falling:
            said.append(step)
    assert said == [209]  # the halvings before it are forgotten; every 60 steps is four in 200

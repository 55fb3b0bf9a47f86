"""The loss scale at its corners."""

import json

from smallmind import LossScaler


def test_the_scale_halves_down_to_one_and_doubles_after_a_thousand_clean_steps():
    scaler = LossScaler()
    assert scaler.scale == 65536
    for _ in range(999):
        scaler.update(overflowed=False)
    assert scaler.scale == 65536
    scaler.update(overflowed=False)
    assert scaler.scale == 131072
    scaler.update(overflowed=True)
    assert scaler.scale == 65536
    for _ in range(40):
        scaler.update(overflowed=True)
    assert scaler.scale == 1
    for _ in range(1000 * 30):
        scaler.update(overflowed=False)
    assert scaler.scale == 2**24


def test_an_overflow_restarts_the_count_of_clean_steps():
    scaler = LossScaler()
    for _ in range(999):
        scaler.update(overflowed=False)
    scaler.update(overflowed=True)
    for _ in range(999):
        scaler.update(overflowed=False)
    assert scaler.scale == 32768
    scaler.update(overflowed=False)
    assert scaler.scale == 65536


def test_the_scaler_is_lost_after_ten_overflows_in_a_row():
    scaler = LossScaler()
    for _ in range(9):
        scaler.update(overflowed=True)
    assert not scaler.is_lost
    scaler.update(overflowed=False)
    for _ in range(9):
        scaler.update(overflowed=True)
    assert not scaler.is_lost
    scaler.update(overflowed=True)
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

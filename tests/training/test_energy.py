"""The joules of a run, from a directory like that of Linux."""

import os

import pytest

from smallmind.training.energy import EnergyMeter

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no colons in names of files")


@pytest.fixture
def counters(tmp_path):
    """Writes the counter of a zone, in joules -> the directory."""

    def write(**zones):
        for name, joules in zones.items():
            folder = tmp_path / name.replace("_", ":").replace("rapl", "intel-rapl")
            folder.mkdir(exist_ok=True)
            (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
            (folder / "max_energy_range_uj").write_text("1000000000\n")  # 1000 J
        return tmp_path

    return write


def test_packages_are_added_and_their_parts_are_not(counters):
    meter = EnergyMeter(counters(rapl_0=100, rapl_1=50, rapl_0_0=7))
    assert meter.joules == 0
    counters(rapl_0=130, rapl_1=55, rapl_0_0=29)
    meter.update()
    assert meter.joules == pytest.approx(35)
    assert str(meter).startswith("The CPU took 35 J, ")


def test_a_counter_that_starts_again_loses_nothing(counters):
    meter = EnergyMeter(counters(rapl_0=990))
    for joules in (5, 900, 10):
        counters(rapl_0=joules)
        meter.update()
    assert meter.joules == pytest.approx(15 + 895 + 110)


def test_nothing_is_said_where_nothing_can_be_read(counters, tmp_path):
    assert str(EnergyMeter(tmp_path / "missing")) == ""
    folder = counters(rapl_0=5)
    os.remove(folder / "intel-rapl:0" / "energy_uj")
    (folder / "intel-rapl:0" / "energy_uj").mkdir()  # unreadable, also for an administrator
    assert EnergyMeter(folder).joules is None


def test_a_counter_that_goes_away_ends_the_count(counters):
    meter = EnergyMeter(folder := counters(rapl_0=5))
    os.remove(folder / "intel-rapl:0" / "energy_uj")
    assert str(meter) == "" and meter.joules is None

"""The joules of a run, from a directory like that of Linux."""

import json
import os

import pytest

from smallmind.runs import session
from smallmind.runs.files import PROFILE
from smallmind.training.energy import EnergyMeter
from smallmind.views.report import report
from tests.runs import small

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


def test_a_run_logs_its_joules_and_the_report_shows_them(counters, tmp_path, monkeypatch):
    folder = counters(rapl_0=100)
    monkeypatch.setattr(session, "EnergyMeter", lambda: EnergyMeter(folder))
    run = small.create(tmp_path / "run", enable_diagnostics=True)
    run.train(on_record=lambda record: counters(rapl_0=100 + record.step))
    (logged,) = [row for row in run.metrics().rows if "joules" in row]
    assert logged["step"] == 6 and logged["joules"] == pytest.approx(6)
    page = report(run.path)
    assert "The CPU took 6 J, " in page and "in the last session" in page
    assert "Garbage collections by generation" in page and "of NumPy" not in page  # not traced
    profile = json.loads((run.path / PROFILE).read_text())
    profile["memory"]["numpy"] = 3_000_000
    (run.path / PROFILE).write_text(json.dumps(profile))
    assert "3 MB of them in NumPy arrays" in report(run.path)
    for damaged in ({}, {"collections": ["x"]}, [], None, {**profile["memory"], "collecting": "x"}):
        (run.path / PROFILE).write_text(json.dumps({**profile, "memory": damaged}))
        assert "Garbage" not in report(run.path) and "Where the time went" in report(run.path)


def test_without_counters_nothing_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "EnergyMeter", lambda: EnergyMeter(tmp_path / "missing"))
    run = small.create(tmp_path / "run")
    run.train()
    assert not [row for row in run.metrics().rows if "joules" in row]
    assert "The CPU took" not in report(run.path)

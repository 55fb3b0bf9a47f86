"""Scopes, the report and the trace."""

import io
import json
import re
import threading
import time

import numpy as np
import pytest

import smallmind
from smallmind.console import activity
from smallmind.training.profiler import TrainingProfiler
from tests.threads import in_threads


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.wait(milliseconds)` moves."""

    class Clock:
        now = 0

        def wait(self, milliseconds):
            self.now += int(milliseconds * 1e6)

    clock = Clock()
    monkeypatch.setattr("smallmind.training.profiler.clock_ns", lambda: clock.now)
    return clock


@pytest.fixture
def profiler(clock):
    profiler = TrainingProfiler(keep_events=True)
    for _ in range(2):
        with profiler.profile("Forward"):
            clock.wait(1)
            with profiler.profile("matmul", bytes=6_000_000):
                clock.wait(6)
            with profiler.profile("gelu"):
                clock.wait(1)
        with profiler.profile("Backward"):
            with profiler.profile("matmul"):
                clock.wait(10)
            with profiler.profile("matmul"):
                clock.wait(2)
    return profiler


def cells(report):
    lines = report.splitlines()
    return [[c.strip() for c in re.split("[║│]", line)[1:-1]] for line in lines if "║" in line]


def test_every_moment_is_counted_once(profiler):
    rows = {row.path: row for row in profiler.rows()}
    assert rows["Forward",].total == 16_000_000 and rows["Forward",].own == 2_000_000
    assert rows["Forward", "matmul"].own == 12_000_000
    assert rows["Backward", "matmul"].count == 4
    assert rows["Backward", "matmul"].minimum == 2_000_000
    assert rows["Backward", "matmul"].maximum == 10_000_000
    assert rows["Backward",].own == 0
    assert sum(row.own for row in rows.values()) == 40_000_000


def test_compiling_kernels_counts_in_no_scope(monkeypatch):
    now = [0]
    monkeypatch.setattr(activity, "_state", activity._State())
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    profiler = TrainingProfiler()
    with profiler.profile("Forward"), profiler.profile("matmul"):
        activity.begin_compiling()
        now[0] += 3600 * 10**9
        activity.end_compiling()
        now[0] += 5
    assert [row.total for row in profiler.rows()] == [5, 5]


def test_the_report_looks_exactly_like_this(profiler):
    assert profiler.report() == (
        "╔═════════════════════════════════════════════════════════════════════════════╗\n"
        "║                         TRAINING PERFORMANCE REPORT                         ║\n"
        "╠═════════════════════════════════════════════════════════════════════════════╣\n"
        "║ Operation              │ Total (ms) │ Self (ms) │ Count  │ % Total │ % Self ║\n"
        "╟────────────────────────┼────────────┼───────────┼────────┼─────────┼────────╢\n"
        "║ Backward               │      24.00 │      0.00 │      2 │   60.0% │   0.0% ║\n"
        "║   matmul               │      24.00 │     24.00 │      4 │   60.0% │  60.0% ║\n"
        "║ Forward                │      16.00 │      2.00 │      2 │   40.0% │   5.0% ║\n"
        "║   matmul               │      12.00 │     12.00 │      2 │   30.0% │  30.0% ║\n"
        "║   gelu                 │       2.00 │      2.00 │      2 │    5.0% │   5.0% ║\n"
        "╠═════════════════════════════════════════════════════════════════════════════╣\n"
        "║ TOTAL                  │      40.00 │     40.00 │        │  100.0% │ 100.0% ║\n"
        "╚═════════════════════════════════════════════════════════════════════════════╝\n"
    )


def test_the_wide_report_has_minimum_maximum_and_rate(profiler):
    rows = cells(profiler.report(wide=True))
    assert rows[1][-4:] == ["Avg (ms)", "Min (ms)", "Max (ms)", "GB/s"]
    matmul = [row[1:] for row in rows if row[0] == "matmul"]
    assert ["12.00", "12.00", "2", "30.0%", "30.0%", "6.000", "6.000", "6.000", "1.0"] in matmul
    assert ["24.00", "24.00", "4", "60.0%", "60.0%", "6.000", "2.000", "10.000", ""] in matmul


@pytest.mark.parametrize("wide", [False, True])
def test_the_right_edge_is_aligned_whatever_is_measured(clock, wide):
    profiler = TrainingProfiler()
    with profiler.profile("an operation with a name that is longer than the guide's column"):
        clock.wait(1e9)
    for _ in range(123_456):
        with profiler.profile("x"):
            clock.wait(12.3)
    report = profiler.report(wide)
    assert len({len(line) for line in report.splitlines()}) == 1
    assert "a name that is longer than the guide's column" in report


def test_percentages_add_to_a_hundred_after_rounding(clock):
    profiler = TrainingProfiler()
    for name in "abcdefg":
        with profiler.profile(name):
            clock.wait(1)
    shares = [float(row[5].rstrip("%")) for row in cells(profiler.report())[2:-1]]
    assert sum(shares) == pytest.approx(100)
    assert set(shares) == {14.3, 14.2}


def test_a_report_of_nothing_is_possible():
    assert "TOTAL" in TrainingProfiler().report()


def test_an_error_closes_the_scope(clock):
    profiler = TrainingProfiler()
    with pytest.raises(ZeroDivisionError), profiler.profile("Forward"):
        clock.wait(1)
        raise ZeroDivisionError
    with profiler.profile("Backward"):
        clock.wait(1)
    assert [row.depth for row in profiler.rows()] == [0, 0]


def test_a_scope_nested_in_one_of_the_same_name_has_its_own_row(clock):
    profiler = TrainingProfiler()
    with profiler.profile("block"):
        clock.wait(1)
        with profiler.profile("block"):
            clock.wait(1)
    found = [(row.path, row.own) for row in profiler.rows()]
    assert found == [(("block",), 1_000_000), (("block", "block"), 1_000_000)]


def test_a_report_from_inside_a_scope_shows_finished_scopes(clock):
    profiler = TrainingProfiler()
    with profiler.profile("Forward"):
        with profiler.profile("matmul"):
            clock.wait(1)
        assert cells(profiler.report())[-1] == ["TOTAL", "1.00", "1.00", "", "100.0%", "100.0%"]


def test_each_thread_has_its_own_scopes():
    profiler = TrainingProfiler()

    def work():
        for _ in range(100):
            with profiler.profile("outer"), profiler.profile("inner"):
                pass

    in_threads(*[work] * 4)
    found = [(row.path, row.count) for row in profiler.rows()]
    assert found == [(("outer",), 400), (("outer", "inner"), 400)]


def test_a_disabled_profiler_measures_nothing():
    profiler = TrainingProfiler(enabled=False)
    with profiler.profile("Forward", bytes=5):
        time.sleep(0)
    assert profiler.profile("a") is profiler.profile("b")
    assert profiler.rows() == []


def test_a_console_without_box_characters_gets_ascii(profiler):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    profiler.print_report(stream=stream)
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert text.startswith("+====") and "| Forward" in text


def test_the_trace_is_in_the_format_of_browsers(profiler, tmp_path):
    path = tmp_path / "trace.json"
    profiler.save_trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert len(events) == 12
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in events)
    first = next(event for event in events if event["name"] == "matmul")
    assert (first["ts"], first["dur"], first["args"]) == (1000, 6000, {"bytes": 6_000_000})
    with pytest.raises(ValueError, match="keep_events=True"):
        TrainingProfiler().save_trace(path)


def speedscope(profiler, path):
    """The file that the profiler writes, checked against the definitions of the format.

    github.com/jlfwong/speedscope, src/lib/file-format-spec.ts
    """
    profiler.save_speedscope(path)
    file = json.loads(path.read_text(encoding="utf-8"))
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert set(file) == {"$schema", "name", "exporter", "activeProfileIndex", "shared", "profiles"}
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    assert len(set(frames)) == len(frames)
    for profile in file["profiles"]:
        assert set(profile) == {"type", "name", "unit", "startValue", "endValue", "events"}
        assert (profile["type"], profile["unit"]) == ("evented", "nanoseconds")
        last, still_open = profile["startValue"], []
        for event in profile["events"]:
            assert set(event) == {"type", "frame", "at"}
            assert last <= event["at"] <= profile["endValue"]  # in order
            last = event["at"]
            if event["type"] == "O":
                assert 0 <= event["frame"] < len(frames)
                still_open.append(event["frame"])
            else:
                assert event["type"] == "C" and event["frame"] == still_open.pop()
        assert not still_open
    return file


def calls(file, number=0):
    """The scopes of a thread in the order of their beginning: depth, name, start, end."""
    names, stack, found = [frame["name"] for frame in file["shared"]["frames"]], [], []
    for event in file["profiles"][number]["events"]:
        if event["type"] == "O":
            stack.append([len(stack), names[event["frame"]], event["at"], None])
            found.append(stack[-1])
        else:
            stack.pop()[3] = event["at"]
    return [tuple(call) for call in found]


def test_the_profile_for_speedscope_has_every_scope_within_its_own(profiler, tmp_path):
    found = calls(speedscope(profiler, tmp_path / "run.speedscope.json"))
    assert len(found) == 12
    assert found[0][:2] == (0, "Forward") and found[1][:2] == (1, "matmul")
    assert found[1][2:] == (1_000_000, 7_000_000)
    for depth, _, start, end in found:
        around = [call for call in found if call[2] <= start and end <= call[3]]
        assert len(around) == depth + 1  # and itself
    with pytest.raises(ValueError, match="keep_events=True"):
        TrainingProfiler().save_speedscope(tmp_path / "no.json")


def test_scopes_without_length_and_scopes_that_were_left_late_stay_nested(clock, tmp_path):
    profiler = TrainingProfiler(keep_events=True)
    with profiler.profile("outer"):
        with profiler.profile("first"), profiler.profile("nothing"):
            pass
        late = profiler.profile("late")
        late.__enter__()
        clock.wait(2)
    clock.wait(1)
    late.__exit__()  # an interrupt kept it from closing
    found = calls(speedscope(profiler, tmp_path / "run.json"))
    assert sorted(name for _, name, _, _ in found) == ["first", "late", "nothing", "outer"]
    assert found[0][:2] in ((0, "outer"), (0, "late"))


def test_every_thread_has_a_profile_of_its_own(tmp_path):
    profiler = TrainingProfiler(keep_events=True)
    barrier = threading.Barrier(2)

    def work():
        with profiler.profile("outer"):
            barrier.wait()
            with profiler.profile("inner"):
                pass

    in_threads(work, work)
    file = speedscope(profiler, tmp_path / "run.json")
    assert [profile["name"] for profile in file["profiles"]] == ["thread 1", "thread 2"]
    for number in range(2):
        assert [call[:2] for call in calls(file, number)] == [(0, "outer"), (1, "inner")]


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_watched_model_shows_its_passes_and_kernels(backend):
    model = smallmind.TransformerModel(11, 8, 8, 2, 2, backend=backend)
    plain = model.workspace.kernels
    ids = np.arange(16).reshape(2, 8) % 11
    profiler = TrainingProfiler()
    with profiler.watch(model):
        model.loss_and_gradients(ids, ids)
        smallmind.AdamW(model).step(1.0)
    assert model.workspace.kernels is plain
    rows = {row.path: row for row in profiler.rows()}
    assert {path[0] for path in rows} == {
        "Forward",
        "Loss",
        "Backward",
        "ClipGradients",
        "OptimizerStep",
    }
    assert rows["Forward", "attention"].count == 2
    assert rows["Backward", "attention_backward"].count == 2
    assert rows["Loss", "cross_entropy"].nbytes > 16 * 11 * 4
    assert rows["OptimizerStep", "adamw"].nbytes == 4 * model.flat.data.nbytes

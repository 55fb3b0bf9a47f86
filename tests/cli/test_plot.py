"""`smallmind plot`: in the terminal, and to files that are read back."""

import os
import re
import shutil
from xml.etree import ElementTree

import pytest

from smallmind.charts import svg
from smallmind.cli import figures
from tests.faults.test_consoles import Recorded
from tests.programs import flat
from tests.test_old_runs import OLD_RUNS
from tests.views.written import append, evaluation, rollback, step, write


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, slowness in (("one", 1), ("two", 3)):
        records = []
        for n in range(10, 201, 10):
            records.append(step(n, elapsed_seconds=n * slowness))
            records += [evaluation(n, slowness + 0.5 + slowness / n)] * (n % 50 == 0)
        write(tmp_path / "runs" / name, *records)
    os.utime("runs/one/config.json", (10**9, 10**9))
    return tmp_path / "runs"


@pytest.fixture
def show(monkeypatch, cli):
    """Both outputs of `smallmind plot`, in a terminal of some size."""

    def show(*arguments, columns=80, lines=40, ends=0):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(lines))
        return cli("plot", *arguments, ends=ends)

    return show


def test_the_newest_run_is_drawn_if_none_is_named(runs, show):
    printed = show()
    assert "The newest run is runs/two" in printed.err
    assert printed.out.startswith("runs/two: training loss 1.0001, held-out loss 3.5150\n")
    titles = [line for line in printed.out.splitlines() if line[:1].isupper()]
    assert titles == [
        "Loss (nats per token); line: training, smoothed; o: held-out",
        "Learning rate",
        "Gradient norm, smoothed",
    ]
    assert printed.out.count("o", printed.out.index("held-out", 50) + 8) >= 4
    assert flat(printed.out).endswith("0 50 100 150 200 steps")


def test_a_run_is_found_by_the_name_that_runs_lists(runs, show, tmp_path):
    assert show("one").out == show("runs/one").out
    (tmp_path / "one").mkdir()  # a path comes first
    assert "is not a run" in show("one", ends=2).err
    assert "three is not a directory" in show("three", ends=2).err


def test_the_steep_start_of_a_loss_does_not_flatten_the_rest(tmp_path, show):
    steep = [step(n, 9.0 if n < 4 else 2 - n / 1000) for n in range(1, 1001)]
    write(tmp_path / "steep", *steep)
    rows = show(tmp_path / "steep").out.partition("Learning rate")[0].splitlines()[3:-1]
    drawn = [row.partition("┤")[2] or row.partition("│")[2] for row in rows]
    assert sum(bool(row.strip()) for row in drawn) >= len(rows) - 2
    assert all(float(row.split("┤")[0]) < 4 for row in rows if "┤" in row)


def test_several_runs_have_letters(runs, show):
    printed = show("runs/one", "runs/two").out
    assert (
        "A runs/one: " in printed and "B runs/two: " in printed and "letters: held-out" in printed
    )
    panels = printed.split("\n\n")
    assert panels[1].count("A") >= 4 <= panels[1].count("B")
    for panel in panels[2:]:  # equal curves: at different places
        assert panel.count("A") == panel.count("B") == 1


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["ascii", "cp437", "utf-8"])
def test_a_drawing_fits_the_width_in_every_encoding(runs, cli, monkeypatch, columns, encoding):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli.on(Recorded(encoding, is_terminal=True), "plot runs/one runs/two --x time")
    assert max(map(len, shown.splitlines())) == columns and "?" not in shown
    assert any("\u2801" <= c <= "\u28ff" for c in shown) == (encoding == "utf-8")
    assert flat(shown).endswith("minutes of training")


@pytest.mark.parametrize(
    ("seconds", "unit"), [(100, "seconds"), (301, "minutes"), (20_000, "hours")]
)
def test_times_are_in_a_unit_that_suits_them(tmp_path, show, seconds, unit):
    write(tmp_path / "run", step(1, elapsed_seconds=seconds / 2), step(2, elapsed_seconds=seconds))
    assert f"{unit} of training" in show(tmp_path / "run", "--x", "time").out


def test_a_run_that_is_going_was_killed_or_is_old_is_drawn(runs, show):
    append(runs / "one", rollback(150, 205), end='{"step": 1')
    assert flat(show("runs/one").out).endswith("0 50 100 150 steps")
    for name in ("float32", "muon"):
        # Beside a long path there is no space for the word loss.
        said = re.search(r"held-out (loss )?3\.7", show(OLD_RUNS / name).out)
        assert said or name == "muon"
    write(runs / "early", step(1))  # one point, no evaluation
    assert "training loss 3.85" in show("runs/early").out


def test_a_run_without_steps_is_refused(runs, show, cli):
    write(runs / "begun")
    message = "runs/begun has not logged a step yet: wait for the first"
    cli.refuses(message, "plot", "runs/begun")
    printed = show("runs/one", "runs/begun").out
    assert "A runs/one: " in printed and "B runs/begun\n" in printed


def test_a_drawing_is_no_higher_than_a_terminal_of_usual_size(runs, show):
    for lines in (36, 50):
        assert show("runs/one", lines=lines).out.count("\n") < lines
    assert show("runs/one", lines=5).out.count("\n") < 36


SVG = "{http://www.w3.org/2000/svg}"


def curves_of(file):
    """The curves of a picture with their classes, top to bottom: the places of each."""
    picture = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    found = [x for x in picture.iter(f"{SVG}polyline") if x.get("class").startswith("curve")]
    places = [[tuple(map(float, y.split(","))) for y in x.get("points").split()] for x in found]
    return list(zip([x.get("class").split()[1:] for x in found], places, strict=True))


def test_a_file_has_three_panels_over_one_axis(runs, show):
    printed = show("runs/one", "runs/two", "--out", "loss.svg", "--x", "time")
    assert printed.out == "" and printed.err == "Wrote the plot to loss.svg\n"
    file = runs.parent / "loss.svg"
    texts = [x.text for x in ElementTree.fromstring(file.read_text()).iter(f"{SVG}text")]
    legend = [
        f"runs/{name}: {kind}"
        for name in ("one", "two")
        for kind in ("training loss, smoothed", "held-out loss")
    ]
    assert texts[:4] == legend
    labels = ["loss (nats per token)", "learning rate", "gradient norm"]
    assert [text for text in texts if text in labels] == labels
    assert texts[-1] == "minutes of training"
    curves = curves_of(file)[4:]  # after the legend
    held_out = [(kinds, places) for kinds, places in curves if "dashed" in kinds]
    (one, _), (two, places) = held_out
    assert one == ["c0", "dashed"] and two == ["c1", "dashed"]
    width = svg.WIDTH - svg.LEFT - svg.RIGHT
    assert [round(4 * (x - svg.LEFT) / width) for x, _ in places] == [1, 2, 3, 4]
    (rate,) = {y for kinds, places in curves[6:8] for _, y in places}  # both are constant
    assert rate > svg.TOP


def test_a_picture_is_written_in_other_formats_too(runs, show):
    pytest.importorskip("matplotlib")
    for suffix, begin in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        show("runs/one", "runs/two", "--out", f"loss.{suffix}")
        assert (runs.parent / f"loss.{suffix}").read_bytes().startswith(begin)


def test_a_spike_does_not_flatten_the_rest(tmp_path, show):
    spiked = [step(n, loss=5000.0 if n == 150 else None) for n in range(1, 301)]
    run = write(tmp_path / "run", *spiked)
    show(run, "--out", tmp_path / "loss.svg")
    (_, raw), (_, mean), *_ = curves_of(tmp_path / "loss.svg")
    assert min(y for _, y in raw) == svg.TOP  # at the edge
    before = [y for _, y in mean[:100]]
    assert max(before) - min(before) > svg.LARGE / 10


def test_without_matplotlib_it_draws_in_the_terminal_and_says_so(runs, show, monkeypatch):
    monkeypatch.setattr(figures, "lacks_matplotlib", lambda _: True)
    printed = show("runs/one", "--out", "loss.png", ends=1)
    assert "Learning rate" in printed.out and not os.path.exists("loss.png")
    assert flat(printed.err) == (
        "loss.png was not written: that needs matplotlib: python -m pip install matplotlib"
    )


def test_wrong_files_and_runs_are_refused(runs, cli, tmp_path):
    shutil.copytree(runs / "one", tmp_path / "copy")
    for arguments, message in [
        ("runs/one --out loss.txt", "--out: the name loss.txt must end in .png, .pdf, .svg"),
        ("runs/one --out no/loss.png", "cannot write no/loss.png"),
        ("none", "none is not a directory; give that of a run"),
        ("runs", "runs is not a run"),
    ]:
        cli.refuses(message, "plot", arguments)

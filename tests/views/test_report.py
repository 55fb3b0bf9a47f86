"""The page about a run: complete, self-contained, and not led astray by what is in the files."""

import html.parser
import itertools
import json
import re
import shlex
import shutil
from collections import Counter

import pytest

from smallmind import InputError, Run
from smallmind.charts import svg
from smallmind.charts.axis import format_tick, ticks
from smallmind.charts.curve import Curve
from smallmind.charts.figure import Figure, Line, Panel, losses_of
from smallmind.files.lock import RunLock
from smallmind.settings.rules import Choices
from smallmind.views.report import report
from tests.programs import CATS, edited, refuses
from tests.runs import small

TEXT = CATS
FIELDS = {**small.FIELDS, "block_size": 16, "n_embd": 16, "batch_size": 4, "backend": "numba"}
FIELDS |= {"steps": 30, "val_every": 10, "val_batches": 2, "sample_every": 10, "warmup_steps": 5}
FIELDS |= {"enable_diagnostics": True, "check_gradient_health": True, "diagnostic_interval": 10}
VOID = {"meta", "br", "wbr"}


class Page(html.parser.HTMLParser):
    """The elements of a page, and its text; an element that is not closed in order is an error."""

    def __init__(self, content):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = Run.create(text=TEXT, out=tmp_path_factory.mktemp("report") / "cats & dogs", **FIELDS)
    run.train()
    return run


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished.path, tmp_path / "copy")


def test_everything_about_a_run_is_on_the_page(finished):
    content = report(finished.path)
    page = Page(content)
    titles = "What the model writes,Loss,How to use it,Training curves,Evaluations"
    titles += ",Where the time went,Health,Settings"
    assert re.findall("<h2>(.*?)</h2>", content) == titles.split(",")
    assert content.count('<div class="figure">') == 6
    assert "cats & dogs" in page.text and f"{finished.final.loss:.4f}" in page.text
    assert finished.sample.strip() in html.unescape(content)
    assert "2 earlier samples" in page.text
    own = Counter()
    for row in json.loads((finished.path / "profile.json").read_text())["rows"]:
        own[row["path"][-1]] += row["own"]
    ((longest, _),) = own.most_common(1)
    assert longest.replace("_", "_<wbr>") + '</span><i style="width:100.00%">' in content
    assert content.count('<i style="width:100.00%">') == 1
    roofline = re.search('aria-label="Roofline of kernels">(.*?)</svg>', content)[1]
    assert "cross_entropy" in roofline and "16 MB" in roofline
    assert "model.n_embd" in page.text and finished.settings.training.optimizer in page.text
    # Before, during and after: 3 of 3 evaluations, and one of them is the best.
    evaluations = content.partition("<h2>Evaluations</h2>")[2].partition("</table>")[0]
    assert re.findall(r"<tr[^>]*><td[^>]*>(\d+)</td>", evaluations) == ["10", "20", "30"]
    assert content.count('<tr style="font-weight: bold">') == 1


def test_the_chart_of_the_loss_has_the_axes_of_plot_and_uses_its_height(finished):
    content = report(finished.path)
    first = finished.metrics().curve("loss").values[0]
    assert f"Before training the loss was {first:.2f};" in content
    drawn = re.search(r'<svg class="chart wide" viewBox="0 0 720 (\d+)"(.*?)</svg>', content)
    (mean,) = re.findall('<polyline class="curve c0" points="([^"]*)"', drawn[2])
    places = [tuple(map(float, point.split(","))) for point in mean.split()]
    figure = losses_of(*(finished.metrics().curve(name) for name in ("loss", "val_loss")))
    assert all(f">{label}</text>" in drawn[2] for _, label in figure.x_ticks(5))
    xs, heights = zip(*places, strict=True)
    assert int(drawn[1]) > 300 and xs[0] > svg.LEFT and list(xs) == sorted(xs)
    assert heights[0] == pytest.approx(min(heights), abs=15)
    assert max(heights) - min(heights) > 0.75 * 300


def test_settings_are_compared_with_the_nearest_recipe(finished):
    settings = report(finished.path).partition("<h2>Settings</h2>")[2]
    fold, _, rest = settings.partition("</details>")
    assert re.search(r"<summary>\d+ differences from the recipe modern</summary>", fold)
    usual = Choices({}, "modern").settings()
    own = finished.settings.model.n_embd
    assert own != usual.model.n_embd
    row = f"n_embd</td><td[^>]*>{own}</td><td[^>]*>{usual.model.n_embd}</td>"
    assert re.search(row, fold) and "n_embd" in rest and "vocab_size" not in fold


def test_a_run_that_has_not_ended_says_how_to_go_on(finished, copy):
    assert "train --resume" in report(finished.path) and "--steps 60" in report(finished.path)
    (copy / "samples.txt").unlink()
    text = Page(report(copy)).text
    assert "smallmind train --resume copy\n" in text and "--steps" not in text
    with RunLock(copy):
        assert "smallmind watch copy\n" in Page(report(copy)).text


def test_the_page_needs_nothing_else(finished):
    page = Page(report(finished.path))
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not {"src", "href", "onload", "onclick"} & set(attributes)
    assert "http" not in report(finished.path).replace("http-equiv", "")


def test_what_is_in_the_files_stays_text(copy):
    evil = "</pre><script>alert(1)</script>"
    with open(copy / "samples.txt", "a") as file:
        file.write(f"--- step 31\n{evil}\n--- step {evil}\n{evil}\n")
    with open(copy / "metrics.jsonl", "a") as file:
        for record in (
            {"step": 40, "loss": "high", "lr": None, "val_loss": [1], "findings": [evil, {}]},
            {"step": 41, "warning": evil, "spike_step": "x", "findings": evil},
            {"step": 42, "loss": 1e308, "val_loss": -1e308, "memory": 10**400},
            {"step": 43, "final_loss": "low", "failure": {"a": evil}},
            {"step": 10**30, "loss": float("inf"), "tokens_per_second": "fast"},
        ):
            file.write(json.dumps(record) + "\n")
        file.write('{"step": 44, "lo')
    (copy / "profile.json").write_text('{"rows": [{"path": [], "own": "x"}]}')
    with edited(copy / "config.json") as config:
        config["run"]["text"] = evil
    page = Page(report(copy))
    assert "script" not in {tag for tag, _ in page.elements} and evil in page.text


@pytest.mark.parametrize(
    "missing", ["samples.txt", "profile.json", "checkpoints", "model.safetensors"]
)
def test_what_is_missing_is_left_out(copy, missing):
    path = copy / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    Page(report(copy))


def test_a_run_that_has_logged_nothing_has_a_page_too(copy):
    for name in ("metrics.jsonl", "samples.txt", "profile.json"):
        (copy / name).unlink()
    page = Page(report(copy))
    assert "Interrupted" in page.text and "model.n_embd" in page.text
    assert not [tag for tag, _ in page.elements if tag == "svg"]


def test_its_commands_can_be_pasted(finished):
    lines = "\n".join(Page(report(finished.path)).texts).split("\n")
    commands = [shlex.split(line) for line in lines if line.startswith("smallmind ")]
    assert len(commands) == 4 and all("cats & dogs" in words for words in commands)


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"model": 3}', '{"format": 99}'])
def test_a_directory_that_is_no_run_is_refused(copy, broken):
    (copy / "config.json").write_text(broken)
    with pytest.raises(InputError):
        report(copy)
    refuses("is not a run", report, copy / "checkpoints")


def test_the_command_writes_the_page_and_leaves_the_run_alone(copy, tmp_path, monkeypatch, cli):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    monkeypatch.chdir(tmp_path)
    assert "to copy-report.html" in cli("report", copy).out
    assert (tmp_path / "copy-report.html").read_text(encoding="utf-8") == report(copy)
    cli("export", copy, "--to html copy.html")
    cli("report", copy)
    content = (tmp_path / "copy.html").read_bytes()
    cli.refuses("copy.html is a page with a model inside", "report", copy, "--out copy.html")
    assert (tmp_path / "copy.html").read_bytes() == content
    cli("report", copy, "--out other.txt", ends=2)
    cli("report", copy, "--out missing/page.html", ends=2)
    assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*")}


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 1000), (1.2, 3.7), (-2, 5e-5), (1e-9, 2e-9), (1, 1e12)]
)
def test_ticks_are_round_numbers_inside_the_axis(low, high):
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 6
    margin = 1e-9 * (high - low)
    assert all(low - margin <= tick <= high + margin for tick in found)
    (step,) = {f"{b - a:.4e}" for a, b in itertools.pairwise(found)}
    assert step[:6] in ("1.0000", "2.0000", "5.0000")
    assert len({format_tick(tick) for tick in found}) == len(found)


def figure_of(curve):
    return Figure("title", [Panel("loss", "nats", [Line("x", curve)])])


def test_a_curve_of_any_length_stays_within_the_picture():
    for count in (1, 2, 7, 100_000):
        points = Curve(range(count), range(count), [(-1) ** i * i for i in range(count)])
        drawing = svg.chart(figure_of(points))
        assert len(drawing) < 20_000
        (points,) = re.findall('class="curve[^"]*" points="([^"]*)"', drawing)
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= svg.WIDTH and 0 <= y <= svg.TOP + svg.LARGE
    nan = float("nan")
    assert svg.chart(figure_of(Curve([1, 2], [1, 2], [nan, nan]))) == ""
    assert svg.chart(Figure("title", [])) == ""
    assert svg.chart(figure_of(Curve([1, 2], [1, 2], [nan, 3.0]))).count("<circle") == 1

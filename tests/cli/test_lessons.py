"""`smallmind lessons`: the list, and copies that are never overwritten."""

import json

import pytest

from smallmind.lessons import minutes, pages, short_name, solutions_of, summary, title
from smallmind.lessons.exercises import solved

PAGES = pytest.mark.parametrize("path", pages(), ids=short_name)


def test_every_page_is_listed_with_its_title_and_a_line(cli):
    printed = cli("lessons").flat
    for path in pages():
        time = f" ({minutes(path)} minutes)" if minutes(path) else ""
        line = f"{short_name(path)}: {title(path)}{time} {' '.join(summary(path).split())} "
        assert line in printed
    assert printed.endswith(f"Next: smallmind lessons {short_name(pages()[0])} --out lessons")


@PAGES
def test_a_page_is_copied_to_a_directory_that_is_made(path, tmp_path, cli):
    out = tmp_path / "my" / "lessons"
    printed = cli("lessons", short_name(path), "--out", out).out
    assert (out / path.name).read_bytes() == path.read_bytes()
    assert title(path) in printed and "python" in printed
    assert list(out.iterdir()) == [out / path.name]


@PAGES
def test_a_page_is_copied_as_a_notebook(path, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    printed = cli("lessons", short_name(path), "--notebook").out
    copy = tmp_path / f"{path.stem}.ipynb"
    made = json.loads(copy.read_text(encoding="utf-8"))
    assert made["nbformat"] == 4 and made["cells"][0]["cell_type"] == "markdown"
    assert f"jupyter lab {copy.name}" in printed


def test_a_page_is_copied_with_its_solutions(tmp_path, cli):
    path = pages()[0]
    cli("lessons", short_name(path), "--solutions", "--out", tmp_path)
    copy = tmp_path / f"{path.stem}_solved.py"
    source = path.read_text(encoding="utf-8")
    assert copy.read_text(encoding="utf-8") == solved(source, solutions_of(path)) != source


def test_a_class_is_marked_in_a_table_and_a_file(tmp_path, cli):
    page, marks = pages()[0], tmp_path / "marks.csv"
    (tmp_path / "class" / "Zoë").mkdir(parents=True)
    copy = tmp_path / "class" / "Zoë" / page.name
    written = page.read_text(encoding="utf-8").replace(
        'mean loss of tokens[1:], each predicted from the one before."""\n'
        "    raise NotImplementedError",
        '"""\n    return 1.0',
    )
    copy.write_text(written, encoding="utf-8")
    (tmp_path / "class" / "notes.py").write_text("x = 1")
    printed = cli("lessons --check", tmp_path / "class", "--csv", marks)
    assert "Zoë no -" in printed.flat and title(page) in printed.flat
    assert "Zoë, exercise 1: not right yet: for the tokens" in printed.flat
    assert "2 exercises, 0 solved." in printed.flat and "Not copies of a lesson: " in printed.flat
    assert marks.read_text(encoding="utf-8").count("\nZoë,1,") == 2


def test_a_copy_with_work_in_it_is_never_overwritten(tmp_path, cli):
    name = short_name(pages()[0])
    cli("lessons", name, "--out", tmp_path)
    (copy,) = tmp_path.iterdir()
    copy.write_text("my work")
    message = "exists, perhaps with your work in it; move it"
    cli.refuses(message, "lessons", name, "--out", tmp_path)
    assert copy.read_text() == "my work"
    cli("lessons", name, "--out", tmp_path / "other")


def test_wrong_input_is_refused_with_advice(tmp_path, cli):
    (tmp_path / "file").touch()
    name = short_name(pages()[0])
    for arguments, advice in (
        ("99", f"there is no lesson '99': choose from {name}"),
        (f"--out {tmp_path}", "name a lesson to copy"),
        ("--notebook", "name a lesson to copy"),
        ("--solutions", "name a lesson to copy"),
        (f"--check {tmp_path}", "has no copy of a lesson"),
        (f"--check {tmp_path}/file", "is not a directory"),
        (f"--check {tmp_path} --notebook", "give only --csv beside it"),
        ("--csv marks.csv", "--csv goes with --check"),
        (f"{name} --out {tmp_path}/file", "file is not a directory; name another one"),
    ):
        cli.refuses(advice, "lessons", arguments)

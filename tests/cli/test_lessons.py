"""`smallmind lessons`: the list, and copies that are never overwritten."""

import json

import pytest

from smallmind.cli import main
from smallmind.lessons import pages, short_name, summary, title

PAGES = pytest.mark.parametrize("path", pages(), ids=short_name)


def test_every_page_is_listed_with_its_title_and_a_line(capsys):
    assert main(["lessons"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for path in pages():
        assert f"{short_name(path)}: {title(path)} {' '.join(summary(path).split())} " in printed
    assert printed.endswith(f"Next: smallmind lessons {short_name(pages()[0])} --out lessons")


@PAGES
def test_a_page_is_copied_to_a_directory_that_is_made(path, tmp_path, capsys):
    out = tmp_path / "my" / "lessons"
    assert main(["lessons", short_name(path), "--out", str(out)]) == 0
    assert (out / path.name).read_bytes() == path.read_bytes()
    printed = capsys.readouterr().out
    assert title(path) in printed and "python" in printed
    assert list(out.iterdir()) == [out / path.name]


@PAGES
def test_a_page_is_copied_as_a_notebook(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["lessons", short_name(path), "--notebook"]) == 0
    copy = tmp_path / f"{path.stem}.ipynb"
    made = json.loads(copy.read_text(encoding="utf-8"))
    assert made["nbformat"] == 4 and made["cells"][0]["cell_type"] == "markdown"
    assert f"jupyter lab {copy.name}" in capsys.readouterr().out


def test_a_copy_with_work_in_it_is_never_overwritten(tmp_path, capsys):
    name = short_name(pages()[0])
    assert main(["lessons", name, "--out", str(tmp_path)]) == 0
    (copy,) = tmp_path.iterdir()
    copy.write_text("my work")
    assert main(["lessons", name, "--out", str(tmp_path)]) == 2
    assert copy.read_text() == "my work"
    assert "exists, perhaps with your work in it; move it" in capsys.readouterr().err
    assert main(["lessons", name, "--out", str(tmp_path / "other")]) == 0


def test_wrong_input_is_refused_with_advice(tmp_path, capsys):
    (tmp_path / "file").touch()
    name = short_name(pages()[0])
    for arguments, advice in (
        (["99"], f"there is no lesson '99': choose from {name}"),
        (["--out", str(tmp_path)], "name a lesson to copy"),
        (["--notebook"], "name a lesson to copy"),
        ([name, "--out", str(tmp_path / "file")], "file is not a directory; name another one"),
    ):
        assert main(["lessons", *arguments]) == 2
        printed = capsys.readouterr().err
        assert advice in printed and printed.count("\n") == 1

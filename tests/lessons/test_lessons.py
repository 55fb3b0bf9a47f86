"""Every lesson runs as it is shipped, from any directory."""

import pytest

from smallmind.lessons import judge, lessons, title
from tests.programs import output_of


def test_lessons_are_numbered_and_have_titles():
    names = [path.stem for path in lessons()]
    assert [name.split("_")[0] for name in names] == [f"lesson{i + 1}" for i in range(len(names))]
    assert all(title(path) for path in lessons())


@pytest.mark.parametrize("path", lessons(), ids=lambda path: path.stem)
def test_a_lesson_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where it leaves what it writes
    output_of(path.read_text(encoding="utf-8"))


def test_exercises_are_judged():
    def wrong():
        raise AssertionError("1 is not 2")

    def untried():
        raise NotImplementedError

    assert judge(untried) == "not tried yet"
    assert judge(wrong) == "not right yet: 1 is not 2"
    assert judge(lambda: None) == "solved"

"""A class is marked: honest files, broken ones, and some that never end, take memory or cheat."""

import csv
import json

import pytest

from smallmind.lessons import notebook, solutions_of
from smallmind.lessons.exercises import solved
from smallmind.lessons.marked import python_of, verdicts
from smallmind.lessons.marking import Mark, first_failure, marks_of, submissions, to_csv
from tests.lessons.judging import path_of

PAGE = path_of(1)
SOURCE = PAGE.read_text(encoding="utf-8")
SOLVED = solved(SOURCE, solutions_of(PAGE))
HEAD = "# %% [markdown]\n# # A language model in 100 lines\n\n# %%\n"


def on(written, *numbers):
    """The verdicts on the exercises of lesson 1 in what somebody has written."""
    found = verdicts(SOURCE, list(numbers or (1, 2)), HEAD + written, "mine.py")
    return [verdict for _, verdict in found if verdict]


def test_a_file_may_have_no_more_than_the_functions():
    right = "def pair_loss(tokens, V):\n    return 0.0\n"
    assert on(right)[0].startswith("not right yet: for the tokens [0, 0, 1, 1, 0] the loss is")
    assert on(right)[1] == "not right yet: the file has no probabilities"


def test_a_file_may_have_functions_imports_and_constants_of_its_own():
    written = """
from numpy import exp as power
OWN = 1.0
def own(x):
    return power(x * OWN)
def probabilities(logits, temperature):
    if temperature == 0:
        return (logits == logits.max()).astype(float)
    p = own((logits - logits.max()) / temperature)
    return p / p.sum()
"""
    assert on(written, 2) == ["solved"]


def test_functions_of_the_page_may_be_used_and_are_the_pages_own():
    written = """
def softmax(x):
    raise ValueError("not this one")
def probabilities(logits, temperature):
    return softmax(logits / temperature) if temperature else (logits == logits.max()) * 1.0
"""
    assert on(written, 2) == ["solved"]


def test_a_check_that_was_changed_does_not_count():
    written = (
        "def judge(check):\n    return 'solved'\ndef check_pair_loss(candidate):\n    pass\n"
        "def pair_loss(tokens, V):\n    return 7.0\n"
    )
    assert on(written, 1)[0].startswith("not right yet: for the tokens")


@pytest.mark.parametrize(
    ("written", "verdict"),
    [
        ("def pair_loss(:", "line 5 raised SyntaxError: invalid syntax"),
        ("def pair_loss(tokens, V):\n    return foo", "line 6 raised NameError: name 'foo' is"),
        ("@foo\ndef pair_loss(tokens, V):\n    pass", "line 5 raised NameError"),
        ("def pair_loss(tokens, V):\n    raise SystemExit(0)", "line 6 raised SystemExit: 0"),
        ("def pair_loss(tokens):\n    return 0", "raised TypeError: pair_loss() takes 1"),
        ("x = 1\0", "raised "),
    ],
)
def test_what_goes_wrong_is_said_with_the_line(written, verdict):
    assert verdict in on(written, 1)[0]


def test_a_notebook_is_read_without_its_commands(tmp_path):
    made = json.loads(notebook(SOLVED))
    made["cells"].append(
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!ls\n", "x = 1"]}
    )
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps(made), encoding="utf-8")
    read = [verdict for _, verdict in verdicts(SOURCE, [1, 2], python_of(path), "x") if verdict]
    assert read == ["solved", "solved"]


def test_files_are_told_apart_by_their_titles_and_students_by_names(tmp_path):
    for name in ("ben/lesson01.py", "anna_lesson01_language_model.py", "x/y/.hidden/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE, encoding="utf-8")
    (tmp_path / "carl.ipynb").write_text(notebook(SOURCE), encoding="utf-8")
    (tmp_path / "notes.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "lesson01.py").mkdir()
    found = submissions(tmp_path)
    assert [(each.student, each.page) for each in found] == [
        *((name, PAGE) for name in ("anna", "ben", "carl")),
        ("notes", None),
    ]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The signs and the first failure of each file of a class, by student."""
    directory = tmp_path_factory.mktemp("class")
    (directory / "anna.py").write_text(SOLVED, encoding="utf-8")
    ends = "def pair_loss(tokens, V):\n    while True:\n        pass\n"
    ends += "def probabilities(logits, temperature):\n    import os\n    os._exit(0)\n"
    (directory / "ben.py").write_text(HEAD + ends, encoding="utf-8")
    takes = "def pair_loss(tokens, V):\n    return np.ones(10**10).sum()\n"
    takes += "def probabilities(logits, temperature):\n    print('solved')\n    return 7\n"
    (directory / "carl.py").write_text(HEAD + takes, encoding="utf-8")
    found = {}
    for submission in submissions(directory):
        found[submission.student] = list(marks_of(submission, seconds=2.0, memory=1 << 30))
    return found


def test_a_right_file_is_solved(marked):
    assert [mark.sign for mark in marked["anna"]] == ["yes", "yes"]
    assert first_failure(marked["anna"]) is None


def test_an_endless_loop_and_an_exit_cost_one_exercise_each(marked):
    assert [mark.verdict for mark in marked["ben"]] == [
        "stopped: it took more than 2 s",
        "stopped: it ended the process that judges",
    ]


def test_memory_is_limited_and_what_is_printed_is_no_verdict(marked):
    first, second = marked["carl"]
    assert "MemoryError" in first.verdict or "more than 1.0 GB" in first.verdict
    assert first.exercise == 1 and second.sign == "no"
    assert first_failure(marked["carl"]) == first


def test_marks_are_a_table_that_a_spreadsheet_takes_for_text(tmp_path):
    marks = [
        Mark("=cmd()", tmp_path / "a.py", "1", 1, "solved"),
        Mark("Zoë", tmp_path / "b.py", "1", 2, 'not right yet: "a", b'),
        Mark("Zoë", tmp_path / "b.py", "1", 3, "not tried yet"),
    ]
    rows = list(csv.DictReader(to_csv(marks).splitlines()))
    assert [row["student"] for row in rows] == ["'=cmd()", "Zoë", "Zoë"]
    assert [row["solved"] for row in rows] == ["yes", "no", "-"]
    assert rows[1]["verdict"] == 'not right yet: "a", b'

"""Exercises are solved by their solutions, untried without, and have mistakes in these tests."""

import ast
import gc
from pathlib import Path

import pytest

from smallmind.lessons import pages, short_name, solutions_of
from smallmind.lessons.exercises import bound, exercises, needed, solved
from smallmind.lessons.marked import verdicts
from tests.lessons.judging import SHORTENED, path_of, shortened

FOUND = {
    short_name(path): exercises(ast.parse(path.read_text(encoding="utf-8"))) for path in pages()
}
NAMES = [name for name, found in FOUND.items() if found]
TESTS = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*"))


def verdicts_on(name, written):
    """The verdicts of a page's checks on a copy of it."""
    numbers = [exercise.number for exercise in FOUND[name]]
    source = shortened(int(name)) if name.isdigit() else shortened(name)
    return [verdict for _, verdict in verdicts(source, numbers, written, "copy.py") if verdict]


def test_a_page_has_two_to_four_exercises_in_order():
    for name, found in FOUND.items():
        assert [each.number for each in found] == list(range(1, len(found) + 1))
        assert 2 <= len(found) <= 4, name


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up")  # what a page removes at its end
@pytest.mark.parametrize("name", NAMES)
def test_exercises_are_solved_by_their_solutions_and_untried_without(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, path = path_of(name).read_text(encoding="utf-8"), path_of(name)
    count = len(FOUND[name])
    assert verdicts_on(name, solved(source, solutions_of(path))) == ["solved"] * count
    assert verdicts_on(name, source) == ["not tried yet"] * count
    gc.collect()


def test_each_check_is_tested_with_mistakes():
    checks = [each.check for found in FOUND.values() for each in found]
    assert [check for check in checks if f".{check}" not in TESTS] == []


def test_a_solved_page_differs_only_where_something_was_to_be_filled_in():
    for name in NAMES:
        source = path_of(name).read_text(encoding="utf-8")
        stubs = {each for exercise in FOUND[name] for each in exercise.candidates}
        page, complete = (
            [ast.dump(x) for x in ast.parse(text).body if not bound(x) & stubs]
            for text in (source, solved(source, solutions_of(path_of(name))))
        )
        imports = [line for line in complete if line not in page]
        assert [line for line in complete if line not in imports] == page
        assert all(line.startswith("Import") for line in imports)


def test_solutions_bring_only_imports_that_a_page_lacks():
    page = "import numpy as np\n\n\ndef f(x):\n    raise NotImplementedError\n\n\ny = 1\n"
    solution = (
        '"""Solutions."""\n\nimport math\n\nimport numpy as np\n\n\n'
        "# %% Exercise 1\ndef f(x):\n    return np.sin(math.pi * x)\n"
    )
    assert solved(page, solution) == (
        "import numpy as np\n\n\nimport math\n\n\n"
        "def f(x):\n    return np.sin(math.pi * x)\n\n\ny = 1\n"
    )


PROGRAM = """
import numpy as np
random = np.random.default_rng(0)
a = 1
b = a + 1
rows = []
for i in range(3):
    rows.append(i)
print(rows, a)
def f(x):
    return x + scale
scale = 2
unused = f(1)
a = 5
table = np.zeros(3)
table[0] = a
total = f(b)
"""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("b", ["a = 1", "b = a + 1"]),
        ("a", ["a = 5"]),
        ("rows", ["rows = []", "for i in range(3):"]),
        ("table", ["import numpy as np", "a = 5", "table = np.zeros(3)", "table[0] = a"]),
        ("total", ["a = 1", "b = a + 1", "def f(x):", "scale = 2", "total = f(b)"]),
    ],
)
def test_what_a_name_needs_is_found(name, wanted):
    statements = ast.parse(PROGRAM).body
    found = needed(statements, {len(statements): [name]})
    assert [ast.unparse(node).split("\n")[0] for node in found] == wanted


def test_the_checks_run_without_what_takes_long():
    for name in NAMES:
        page = ast.parse(path_of(name).read_text(encoding="utf-8"))
        wanted = {each.place: ["judge", each.check] for each in FOUND[name]}
        assert len(needed(page.body, wanted)) / len(page.body) < 0.75, name


def test_shortened_pages_exist():
    assert {str(name) for name in SHORTENED} <= FOUND.keys()

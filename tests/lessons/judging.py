"""Lessons that are run, and the verdicts of their exercises."""

import ast
import functools
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from smallmind.lessons import judge, pages, short_name
from smallmind.lessons.exercises import defined, exercises, needed


def path_of(name):
    """The page with a number or a name."""
    (path,) = (path for path in pages() if short_name(path) == str(name))
    return path


def source_of(name):
    return path_of(name).read_text(encoding="utf-8")


# Pairs of old and new code that make slow parts quick, and two headings, between which the text is
# left out.
SHORTENED = {
    1: [("STEPS, RATE = 200,", "STEPS, RATE = 5,")],
    3: [("STEPS, RATE = 8, 24, 250", "STEPS, RATE = 8, 24, 2"), ("N = 24", "N = 4")],
    4: [
        ("learn(words, 300)", "learn(words, 20)"),
        ("(0, 1, 2, 3, 10, 30, 100, 299)", "(0, 1, 2, 3, 10)"),
        ("LETTERS = 400_000", "LETTERS = 4_000"),
        ("text = built_in_text(200_000)", "text = built_in_text(20_000)"),
        ("built_in_text(300_000)[-50_000:]", "built_in_text(20_000)"),
        ("sizes = (257, 300, 350, 400, 500, 600, 700, 800)", "sizes = (257, 400, 800)"),
    ],
    5: [("built_in_text(400_000)", "built_in_text(40_000)"), ("0.9, 1000)", "0.9, 100)")],
    6: [("repeats=5", "repeats=1")],
    7: [
        ("PATIENCE = 0.05", "PATIENCE = 0.0001"),
        ("ROUNDS = 1_000_000", "ROUNDS = 1000"),
        ("M, K, N = 96, 1536, 1536", "M, K, N = 12, 128, 128"),
        ("4 * MIB, 16 * MIB, 128 * MIB):", "1 * MIB):"),
        ("FAR = bytes_per_second(128 * MIB)", "FAR = bytes_per_second(1 * MIB)"),
        ("random.standard_normal((4096, 1024)", "random.standard_normal((64, 1024)"),
        ("B.nbytes // (32 * KIB) * 32 * KIB", "32 * KIB"),
    ],
    9: [("STEPS = 100", "STEPS = 5")],
    11: [("steps=300", "steps=3")],
    12: [("train(300,", "train(30,"), ("train(400,", "train(60,")],
    13: [("STEPS = 120", "STEPS = 5"), ("_conversations(3000)", "_conversations(1100)")],
    14: [
        (
            "FEW_STEPS, REWARD_STEPS, ASKED = 400, 300, 100",
            "FEW_STEPS, REWARD_STEPS, ASKED = 9, 2, 3",
        ),
        ("rows[600:]", "rows[9900:]"),
    ],
}
RUN = 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14  # lessons that the tests of their exercises run
LEFT_OUT = {
    8: ("2. Where gradients", "Exercises"),
    10: ("6. The proof", "Exercises"),
    11: ("7. Fewer bits", "Exercises"),
}


def shortened(number):
    """The source of a lesson, whose slow parts are quick."""
    source = source_of(number)
    for old, new in SHORTENED.get(number, ()):
        assert source.count(old) == 1, f"lesson {number} has to have {old!r} once"
        source = source.replace(old, new)
    return source


@functools.cache
def lesson(number):
    """The names that a lesson defines, which is run once."""
    source = shortened(number)
    if number in LEFT_OUT:
        first, last = (source.index(f"# ## {heading}") for heading in LEFT_OUT[number])
        source = source[:first] + source[last:]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)  # where its pictures go
        script = Path(directory) / f"lesson{number}.py"
        script.write_text(source, encoding="utf-8")
        # Otherwise both would stay with the tests that follow.
        patch.setattr("smallmind.forecast.threads.set_threads", lambda *_: None)
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        return SimpleNamespace(**runpy.run_path(str(script)))


@functools.cache
def checks(name):
    """The names that the checks of a page's exercises need, when another test runs all of it."""
    page = ast.parse(shortened(name))
    found = exercises(page)
    stubs = {candidate for exercise in found for candidate in exercise.candidates}
    wanted = {exercise.place: ["judge", exercise.check] for exercise in found}
    nodes = [node for node in needed(page.body, wanted) if defined(node) not in stubs]
    names = {"__name__": "page"}
    exec(compile(ast.Module(nodes, []), str(name), "exec"), names)
    return SimpleNamespace(**names)


def refused(check, *candidates):
    """Why the check refuses a solution."""
    verdict = judge(lambda: check(*candidates))
    assert verdict.startswith("not right yet: "), verdict
    return verdict


def assert_judged(check, wrong, *right):
    """Wrong solutions are refused in words that the verdict must contain, other right ones not."""
    for solution in right:
        assert judge(lambda solution=solution: check(solution)) == "solved"
    for solution, words in wrong:
        assert words in refused(check, solution), solution

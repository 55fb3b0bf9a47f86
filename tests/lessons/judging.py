"""Lessons that are run, and the verdicts of their exercises."""

import functools
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from smallmind.lessons import judge, lessons


def source_of(number):
    (path,) = (path for path in lessons() if path.stem.startswith(f"lesson{number:02}_"))
    return path.read_text(encoding="utf-8")


# Pairs of old and new code that make slow parts quick, and two headings, between which the text is
# left out.
SHORTENED = {
    1: [("STEPS, RATE = 200,", "STEPS, RATE = 5,")],
    3: [("repeats=5", "repeats=1")],
    4: [
        ("PATIENCE = 0.05", "PATIENCE = 0.0001"),
        ("ROUNDS = 1_000_000", "ROUNDS = 1000"),
        ("M, K, N = 96, 1536, 1536", "M, K, N = 12, 128, 128"),
        ("4 * MIB, 16 * MIB, 128 * MIB):", "1 * MIB):"),
        ("FAR = bytes_per_second(128 * MIB)", "FAR = bytes_per_second(1 * MIB)"),
        ("random.standard_normal((4096, 1024)", "random.standard_normal((64, 1024)"),
        ("B.nbytes // (32 * KIB) * 32 * KIB", "32 * KIB"),
    ],
    6: [("STEPS = 100", "STEPS = 5")],
    8: [("steps=300", "steps=3")],
    9: [("STEPS = 120", "STEPS = 5"), ("_conversations(3000)", "_conversations(1100)")],
    10: [("train(300,", "train(30,"), ("train(400,", "train(60,")],
    11: [
        (
            "FEW_STEPS, REWARD_STEPS, ASKED = 400, 300, 100",
            "FEW_STEPS, REWARD_STEPS, ASKED = 9, 2, 3",
        ),
        ("rows[600:]", "rows[9900:]"),
    ],
}
SOLVED = 1, 3, 4, 5, 6, 7, 8, 11  # lessons that the tests of their exercises run
LEFT_OUT = {
    5: ("2. Where gradients", "Exercises"),
    7: ("6. The proof", "Exercises"),
    8: ("7. Fewer bits", "Exercises"),
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
        script = Path(directory) / f"lesson{number}.py"
        script.write_text(source, encoding="utf-8")
        # Otherwise both would stay with the tests that follow.
        patch.setattr("smallmind.forecast.threads.set_threads", lambda *_: None)
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        return SimpleNamespace(**runpy.run_path(str(script)))


def refused(check, *candidates):
    """Why the check refuses a solution."""
    verdict = judge(lambda: check(*candidates))
    assert verdict.startswith("not right yet: "), verdict
    return verdict


def assert_judged(check, wrong, *right):
    """Right solutions are accepted, wrong ones refused in words that the verdict must contain."""
    for solution in right:
        assert judge(lambda solution=solution: check(solution)) == "solved"
    for solution, words in wrong:
        assert words in refused(check, solution), solution

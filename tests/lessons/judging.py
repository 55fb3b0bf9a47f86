"""Lessons that are run, and the verdicts of their exercises."""

import runpy
from types import SimpleNamespace

import pytest

from smallmind.lessons import judge, lessons


def source_of(number):
    (path,) = (path for path in lessons() if path.stem.startswith(f"lesson{number}_"))
    return path.read_text(encoding="utf-8")


def run_lesson(number, directory, *shortened, leave_out=None):
    """The names a lesson defines, with pairs of old and new code that make slow parts quick.

    The text between two headings may be left out.
    """
    source = source_of(number)
    for old, new in shortened:
        assert source.count(old) == 1, f"lesson {number} has to have {old!r} once"
        source = source.replace(old, new)
    if leave_out:
        first, last = (source.index(f"# ## {heading}") for heading in leave_out)
        source = source[:first] + source[last:]
    script = directory / f"lesson{number}.py"
    script.write_text(source, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise both would stay with the tests that follow.
        patch.setattr("smallmind.runs.threads.set_threads", lambda *_: None)
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

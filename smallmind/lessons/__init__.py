"""Lessons: Python files with text cells, to read, to run and to work on.

Each is a script in the percent format, which opens as a notebook in most editors: `# %%` begins a
cell of code, `# %% [markdown]` one of text, in comments. Its first text is its title.
"""

from collections.abc import Callable
from pathlib import Path


def lessons() -> list[Path]:
    """The files of all lessons, in order."""
    return sorted(Path(__file__).parent.glob("lesson*.py"))


def title(path: Path) -> str:
    """The title of a lesson: its first heading."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# # ") for line in lines if line.startswith("# # "))


def judge(check: Callable[[], object]) -> str:
    """Calls check, which raises until an exercise is solved -> the verdict: "solved" or why not."""
    try:
        check()
    except NotImplementedError:
        return "not tried yet"
    except AssertionError as error:
        return f"not right yet: {error}"
    return "solved"

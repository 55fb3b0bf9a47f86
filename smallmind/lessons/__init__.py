"""Lessons: Python files with text cells, to read, to run and to work on.

Each is a script in the percent format, which opens as a notebook in most editors: `# %%` begins a
cell of code, `# %% [markdown]` one of text, in comments. Its first text is its title, a sentence on
what it is about, and a line that begins with BEFORE: what a reader has to know, and the time.

`solutions/` has a file of the same name for each, with a cell for each exercise.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

CELL, TEXT_CELL = "# %%", "# %% [markdown]"
BEFORE = "**Before:**"
TIMES = re.compile(r"\*\*Time:\*\* (\d+) minutes; the code runs for (\d+ (?:second|minute)s?)")


def lessons() -> list[Path]:
    """Returns the files of all lessons, in order."""
    return sorted(Path(__file__).parent.glob("lesson*.py"))


def pages() -> list[Path]:
    """Returns the files of all lessons, and of pages that answer one question each."""
    every = sorted(Path(__file__).parent.glob("*.py"))
    others = (path for path in every if path not in lessons())
    return [*lessons(), *(path for path in others if _text(path).startswith(TEXT_CELL))]


def short_name(path: Path) -> str:
    """Returns the name of a page in a command: a lesson's number, or another page's name."""
    numbered = re.match(r"lesson(\d+)_", path.stem)
    return str(int(numbered[1])) if numbered else path.stem


def title(path: Path) -> str:
    """Returns the title of a lesson: its first heading."""
    lines = _text(path).splitlines()
    return next(line.removeprefix("# # ") for line in lines if line.startswith("# # "))


def summary(path: Path) -> str:
    """Returns the first sentence below the title."""
    sentence, end, _ = _introduction(path)[1].partition(". ")
    return sentence + end.strip()


def before(path: Path) -> str:
    """Returns what a reader has to know before a lesson; "" if it does not say."""
    lines = [line for line in _introduction(path) if line.startswith(BEFORE)]
    return lines[0].removeprefix(BEFORE).partition("**Time:**")[0].strip() if lines else ""


def minutes(path: Path) -> int | None:
    """Returns how many minutes a lesson takes, to read and to solve; None if it does not say."""
    found = TIMES.search(" ".join(_introduction(path)))
    return int(found[1]) if found else None


def solutions_of(path: Path) -> str:
    """Returns the solutions of a page's exercises: a file with a cell for each."""
    return _text(path.parent / "solutions" / path.name)


def _introduction(path: Path) -> list[str]:
    """Returns the paragraphs of the first text, each as one line."""
    first = next(text for is_text, text in cells(_text(path)) if is_text)
    return [" ".join(paragraph.split()) for paragraph in first.split("\n\n")]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def cells(source: str) -> list[tuple[bool, str]]:
    """A page -> its cells: whether it is text, which is then without comment signs, and its source.

    What comes before the first cell is left out.
    """
    found: list[tuple[bool, list[str]]] = []
    for line in source.splitlines():
        if line.startswith(CELL):
            found.append((line.startswith(TEXT_CELL), []))
        elif found:
            is_text, lines = found[-1]
            lines.append(line.removeprefix("#").removeprefix(" ") if is_text else line)
    return [(is_text, "\n".join(lines).strip("\n")) for is_text, lines in found]


def notebook(source: str) -> str:
    """A page -> the same as a Jupyter notebook: JSON in the format nbformat 4.5."""
    made = []
    for number, (is_text, text) in enumerate(cells(source)):
        cell: dict[str, Any] = {
            "cell_type": "markdown" if is_text else "code",
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        made.append(cell if is_text else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    content = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def judge(check: Callable[[], object]) -> str:
    """Calls check, which raises until an exercise is solved -> the verdict: "solved" or why not."""
    try:
        check()
    except NotImplementedError:
        return "not tried yet"
    except AssertionError as error:
        return f"not right yet: {error}"
    return "solved"

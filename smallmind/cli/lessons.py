"""List the lessons, copy one to work on, with its solutions, or mark those of a class.

A lesson teaches by code that you run and change, from the first gradient to a trained model: a
Python file, or a notebook for Jupyter. Its exercises say whether they are solved.
"""

import argparse
from pathlib import Path

from smallmind.checks import InputError, count_of
from smallmind.cli.console import Console
from smallmind.lessons import (
    before,
    minutes,
    notebook,
    pages,
    short_name,
    solutions_of,
    summary,
    title,
)

INDENT = 4 * " "  # of what a lesson is about


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `smallmind lessons`."""
    parser.add_argument(
        "lesson",
        nargs="?",
        metavar="LESSON",
        help="number of a lesson or name of a page, to copy; default: list all of them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory to copy to, made if it does not exist (the working directory)",
    )
    parser.add_argument(
        "--notebook", action="store_true", help="write a notebook, .ipynb, instead of a .py file"
    )
    parser.add_argument(
        "--solutions", action="store_true", help="copy it with its exercises solved"
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="mark the copies of lessons in a directory, one per student and lesson: which "
        "exercises are solved, and what is wrong with the others",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE.csv", help="also write the marks of --check to a file"
    )
    parser.epilog = (
        "--check runs the code in these files with your permissions, each file in a process of its "
        "own, limited to 2 GB and 60 seconds per exercise: see smallmind guide teachers."
    )


def run(options: argparse.Namespace) -> int:
    """Prints the list, writes a copy and says how to run it, or marks files -> exit status."""
    if options.check:
        return _check(options)
    if options.csv:
        raise InputError("--csv goes with --check: smallmind lessons --check DIR --csv marks.csv")
    console = Console()
    if options.lesson is None:
        if options.out or options.notebook or options.solutions:
            raise InputError("name a lesson to copy: smallmind lessons 1 --out DIR")
        for path in pages():
            time = f" ({minutes(path)} minutes)" if minutes(path) else ""
            console.line(f"{short_name(path)}: {title(path)}{time}")
            console.line(INDENT + summary(path), INDENT)
            if before(path):
                console.line(f"{INDENT}Before: {before(path)}", INDENT)
        first = short_name(pages()[0])
        console.command("Next:", ["smallmind", "lessons", first, "--out", "lessons"])
        return 0
    known = {short_name(path): path for path in pages()}
    if options.lesson not in known:
        raise InputError(f"there is no lesson {options.lesson!r}: choose from {', '.join(known)}")
    path = known[options.lesson]
    copy = _copy(path, options.out or Path(), options.notebook, options.solutions)
    console.line(f"Wrote {title(path)!r} to {copy}")
    program = ["jupyter", "lab"] if options.notebook else ["python"]
    console.command("Next:", [*program, str(copy)])
    return 0


def _copy(path: Path, directory: Path, as_notebook: bool, is_solved: bool) -> Path:
    """Writes a copy -> its place. InputError if something is there already."""
    from smallmind.files import durable
    from smallmind.lessons.exercises import solved

    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out: {directory} is not a directory; name another one")
    name = path.stem + "_solved" * is_solved
    copy = directory / f"{name}{'.ipynb' if as_notebook else '.py'}"
    if copy.is_symlink() or copy.exists():
        raise InputError(
            f"{copy} exists, perhaps with your work in it; move it, or choose another --out"
        )
    source = path.read_text(encoding="utf-8")
    if is_solved:
        source = solved(source, solutions_of(path))
    content = notebook(source) if as_notebook else source
    directory.mkdir(parents=True, exist_ok=True)
    durable.write(copy, [content.encode()])
    return copy


def _check(options: argparse.Namespace) -> int:
    """Marks the files of a class -> exit status."""
    from smallmind.cli.flags import check_writable
    from smallmind.console.table import Table
    from smallmind.lessons.marking import (
        Mark,
        first_failure,
        marks_of,
        numbers_of,
        submissions,
        to_csv,
    )

    if options.lesson or options.out or options.notebook or options.solutions:
        raise InputError("--check marks every lesson that it finds: give only --csv beside it")
    if options.csv:
        check_writable("--csv", options.csv)
    console, found = Console(), submissions(options.check)
    marks: list[Mark] = []
    for page in pages():
        rows: list[list[str]] = []
        failures: list[str] = []
        for each in (each for each in found if each.page == page):
            theirs: list[Mark] = []
            console.live(f"Marking {each.path} ...", "Marking ...")
            for mark in marks_of(each):
                theirs.append(mark)
                console.live(f"Marking {each.path}: exercise {mark.exercise} ...", "Marking ...")
            rows.append([each.student, *(mark.sign for mark in theirs)])
            if failure := first_failure(theirs):
                failures.append(f"{each.student}, exercise {failure.exercise}: {failure.verdict}")
            marks += theirs
        if rows:
            numbers = map(str, numbers_of(page))
            table = Table(f"{short_name(page)}: {title(page)}", rows, ["exercise", *numbers])
            console.drawing(str(table))
            for line in failures:
                console.line(INDENT + line, 2 * INDENT)
    if others := [str(each.path) for each in found if each.page is None]:
        console.line(f"Not copies of a lesson: {', '.join(others)}")
    is_solved = sum(mark.sign == "yes" for mark in marks)
    console.line(f"{count_of(len(marks), 'exercise')}, {is_solved} solved.")
    if options.csv:
        options.csv.write_text(to_csv(marks), encoding="utf-8")
        console.line(f"Wrote the marks to {options.csv}")
    return 0

"""List the lessons, or copy one to work on: as a Python file, or as a notebook for Jupyter.

A lesson teaches by code that you run and change, from the first gradient to a trained model. Its
exercises say whether they are solved.
"""

import argparse
from pathlib import Path

from smallmind.checks import InputError
from smallmind.cli.console import Console
from smallmind.lessons import notebook, pages, short_name, summary, title

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


def run(options: argparse.Namespace) -> int:
    """Prints the list, or writes a copy and says how to run it -> exit status."""
    console = Console()
    if options.lesson is None:
        if options.out or options.notebook:
            raise InputError("name a lesson to copy: smallmind lessons 1 --out DIR")
        for path in pages():
            console.line(f"{short_name(path)}: {title(path)}")
            console.line(INDENT + summary(path), INDENT)
        first = short_name(pages()[0])
        console.command("Next:", ["smallmind", "lessons", first, "--out", "lessons"])
        return 0
    known = {short_name(path): path for path in pages()}
    if options.lesson not in known:
        raise InputError(f"there is no lesson {options.lesson!r}: choose from {', '.join(known)}")
    path = known[options.lesson]
    copy = _copy(path, options.out or Path(), options.notebook)
    console.line(f"Wrote {title(path)!r} to {copy}")
    program = ["jupyter", "lab"] if options.notebook else ["python"]
    console.command("Next:", [*program, str(copy)])
    return 0


def _copy(path: Path, directory: Path, as_notebook: bool) -> Path:
    """Writes a copy -> its place. InputError if something is there already."""
    from smallmind.files import durable

    if directory.exists() and not directory.is_dir():
        raise InputError(f"--out: {directory} is not a directory; name another one")
    copy = directory / path.with_suffix(".ipynb" if as_notebook else ".py").name
    if copy.is_symlink() or copy.exists():
        raise InputError(
            f"{copy} exists, perhaps with your work in it; move it, or choose another --out"
        )
    source = path.read_text(encoding="utf-8")
    content = notebook(source) if as_notebook else source
    directory.mkdir(parents=True, exist_ok=True)
    durable.write(copy, [content.encode()])
    return copy

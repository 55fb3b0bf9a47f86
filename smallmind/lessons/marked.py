"""The program that runs what a student has written: it may fail, hang or take memory.

It takes from a file only the functions and classes of exercises, and what they need that the page
does not define: all else is the page's own, the checks above all. Its standard output gets lines of
JSON, [number, null] before code of the student runs and [number, verdict] after it.
"""

import ast
import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from smallmind.lessons import CELL, judge
from smallmind.lessons.exercises import Exercise, bound, defined, exercises, needed, reads

MAX_LETTERS = 400  # of a verdict
MAX_FILE = 1 << 28  # bytes of a file that it writes
GRACE = 5.0  # seconds after which this ends itself, if nobody else has ended it


def python_of(path: Path) -> str:
    """Returns the code of a file; of a notebook, that of its cells without magic commands."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix != ".ipynb":
        return text
    code = [x["source"] for x in json.loads(text)["cells"] if x["cell_type"] == "code"]
    lines = [line for source in code for line in [CELL, *"".join(source).split("\n")]]
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines)


def verdicts(
    page: str, numbers: list[int], written: str, name: str
) -> Iterator[tuple[int, str | None]]:
    """A page, what a student has written -> the numbers of its exercises, and their verdicts.

    Each number comes twice, first without a verdict. `name` is that of the student's file.
    """
    tree = ast.parse(page)
    chosen = [each for each in exercises(tree) if each.number in numbers]
    try:
        theirs = ast.parse(written, name).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield from ((each.number, reason(error, name)) for each in chosen)
        return
    own = {each.place: _own(tree, theirs, each) for each in chosen}
    wanted = {each.place: {"judge", each.check, *_names(own[each.place])} for each in chosen}
    stubs = {name for each in chosen for name in each.candidates}
    prepared = {id(node) for node in needed(tree.body, wanted) if defined(node) not in stubs}
    at = {each.place: each for each in chosen}
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, node in enumerate(tree.body):
        if exercise := at.get(place):
            yield exercise.number, None
            yield exercise.number, _verdict(exercise, own[place], names, name)
        elif id(node) in prepared:
            _run(node, names, "page")


def _names(statements: list[ast.stmt]) -> set[str]:
    """Returns the names of the module that statements read."""
    return set().union(*(found for node in statements for found in reads(node)))


def _own(page: ast.Module, theirs: list[ast.stmt], exercise: Exercise) -> list[ast.stmt]:
    """Returns the statements of a student that are for an exercise, and not the page's."""
    ours = set().union(*map(bound, page.body)).difference(exercise.candidates)
    found = needed(theirs, {len(theirs): exercise.candidates})
    return [node for node in found if not bound(node) & ours]


def _verdict(exercise: Exercise, own: list[ast.stmt], names: dict[str, Any], name: str) -> str:
    missing = set(exercise.candidates) - set().union(*map(bound, own))
    if missing:
        return f"not right yet: the file has no {' and no '.join(sorted(missing))}"
    try:
        for node in own:
            _run(node, names, name)
        candidates = [names[each] for each in exercise.candidates]
        return " ".join(judge(lambda: names[exercise.check](*candidates)).split())[:MAX_LETTERS]
    except BaseException as error:  # also SystemExit
        return reason(error, name)


def _run(node: ast.stmt, names: dict[str, Any], name: str) -> None:
    exec(compile(ast.Module([node], []), name, "exec"), names)


def reason(error: BaseException, name: str) -> str:
    """Returns what was raised, and on which line of the file, in one line."""
    lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == name]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    where = f"line {lines[-1]} " if lines and lines[-1] else ""
    return f"{where}raised {type(error).__name__}{said and ': '}{said}"[:MAX_LETTERS]


def limit(memory: int) -> None:
    """Makes this process fail, if the system can, when its data or a file take more bytes."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no limits
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))


def main(page: str, file: str, seconds: str, memory: str, *numbers: str) -> None:
    """Judges these exercises of a page in a file."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a file prints must not be taken for a verdict
        os.dup2(nowhere, stream)
    limit(int(memory))
    source = Path(page).read_text(encoding="utf-8")
    name = Path(file).name
    try:
        written = python_of(Path(file))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        for each in map(int, numbers):
            replies.write(json.dumps([each, reason(error, name)]) + "\n")
        return
    for number, verdict in verdicts(source, list(map(int, numbers)), written, name):
        faulthandler.cancel_dump_traceback_later()
        replies.write(json.dumps([number, verdict]) + "\n")
        replies.flush()
        if verdict is None:
            faulthandler.dump_traceback_later(float(seconds) + GRACE, exit=True, file=nowhere)


if __name__ == "__main__":
    main(*sys.argv[1:])

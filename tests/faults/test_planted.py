"""Files in the working directory are never executed: people stand in folders of other people."""

import re
import sys
from pathlib import Path

import pytest

import smallmind
from smallmind.cli.program import COMMANDS
from smallmind.parallel.environment import python
from tests.programs import finished
from tests.runs.small import TEXT, create

PACKAGE = Path(smallmind.__file__).parent
NAMES = (
    *("json", "typing", "random", "socket", "hashlib", "dataclasses", "tempfile", "subprocess"),
    *("numpy", "numba", "psutil", "tabulate", "jinja2", "starlette", "uvicorn", "asyncio"),
)
# Leaves a file beside it if it is ever executed.
PLANTED = 'open(__file__ + ".executed", "w").close()\nraise SystemExit("planted")\n'
MODEL = "--steps 2 --backend numpy --n-embd 8 --n-head 2 --block-size 16 --n-layer"
ARGUMENTS = {
    "train": f"text.txt --out new {MODEL} 1",
    "prepare": "text.txt --out data",
    "check": f"text.txt {MODEL} 1",
    "estimate": f"text.txt {MODEL} 1",
    "plan": "--help",
    "sweep": f"text.txt --out swept {MODEL} 1,2 --jobs 2",
    "chat": "run",
    "serve": "nowhere",
    "generate": "run --max-tokens 3",
    "evaluate": "run text.txt",
    "verify": "run",
    "runs": ".",
    "compare": "run run",
    "plot": "run",
    "export": "run --to html page.html",
    "import": "nowhere",
    "watch": "run",
    "report": "run",
    "export-metrics": "run --out metrics.csv",
    "bench": "--help",
}
# One process runs all commands, and says how each of them has ended.
SCRIPT = """
from smallmind.cli import main
for line in sys.argv[1:]:
    print("command:", line, file=sys.stderr)
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    print("ended:", status, file=sys.stderr)
"""
AS_MODULE = [sys.executable, "-m", "smallmind"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, a text, and files that have the names of modules."""
    path = tmp_path_factory.mktemp("planted")
    create(path / "run").train()
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    for name in NAMES:
        (path / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    return path


def executed(folder):
    return [path.name for path in folder.rglob("*.executed")]


def test_no_command_executes_a_file_of_the_folder(folder):
    lines = [f"{name} {ARGUMENTS.get(name, '')}" for name in COMMANDS]
    result = finished(python(SCRIPT, *lines), cwd=folder)
    assert (executed(folder), "Traceback" in result.stderr) == ([], False), result.stderr
    ends = re.findall(r"^ended: (\w+)$", result.stderr, re.MULTILINE)
    assert len(ends) == len(COMMANDS) and {*ends} <= {"0", "1", "2"}, result.stderr
    assert "planted" not in result.stderr


@pytest.mark.parametrize("command", ["train", "serve"])
def test_the_package_as_a_program_does_not_either(folder, command):
    """But for what Python itself imports before: `python -P -m smallmind` has none of that."""
    words = [
        command,
        *ARGUMENTS[command].replace(" new", " again").split(),
    ]
    result = finished([*AS_MODULE, *words], cwd=folder)
    assert executed(folder) == []
    assert result.returncode == (2 if command == "serve" else 0), result.stderr


PROGRAM = "import json, theirs, smallmind.forecast.compiling; print(sys.argv[1:])"
SERVES = """
import sys
import smallmind
run = smallmind.Run.open("run")
sys.path.insert(0, "")  # as in a notebook
with run.serve() as served:
    print(served.url)
"""


def test_a_run_that_serves_does_not_either(folder):
    result = finished([*python(SERVES)], cwd=folder)
    assert executed(folder) == []
    assert result.stdout.startswith("http://localhost"), result.stderr


def test_a_process_has_the_packages_of_its_parent_and_finds_this_one(folder, monkeypatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "theirs.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(folder)
    others = [path for path in sys.path if not (Path(path) / "smallmind").is_dir()]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", ["", str(folder), str(elsewhere), *others])
        command = python(PROGRAM, "a")
    result = finished(command, cwd=folder)
    assert (result.stdout, executed(folder)) == ("['a']\n", []), result.stderr


def test_no_process_looks_for_modules_in_the_working_directory():
    """`smallmind bench` starts its own in the folder of the package, whatever the person's is."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(r"\bsys\.executable\b", line) and not re.search(r'"-[PI]"', line):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == {"bench/machine.py"}

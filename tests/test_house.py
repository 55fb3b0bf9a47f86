"""The plan of the house: imports point downward, nothing below the command line prints."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import smallmind

ROOT = Path(smallmind.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

# From the ground up: a room may import its own floor and those below.
FLOORS = [
    {"config", "presets", "box", "randomness", "durable"},
    {"kernels", "safetensors"},
    {"memory"},
    {"nn", "linalg", "text"},
    {"optim", "generation"},
    {"training"},
    {"console", "plot"},
    {"display"},
    {"commands"},
    {"cli", "__main__", "__init__"},
]


def floor(module):
    """'smallmind.nn.block' -> the number of its floor."""
    room = module.split(".")[1] if "." in module else "__init__"
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(source):
    parts = source.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_imports_point_downward(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for name in imports(tree):
        if name.split(".")[0] == "smallmind" and name.count("."):
            assert floor(name) <= floor(module_name(source)), name


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_only_the_command_line_prints(source):
    if module_name(source) in ("smallmind.cli", "smallmind.console"):
        return
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        assert not (called and node.func.id == "print")


def test_the_check_of_imports_sees_one_that_points_upward():
    tree = ast.parse("from smallmind.cli import main")
    assert any(floor(name) > floor("smallmind.nn.block") for name in imports(tree))


@pytest.mark.parametrize("name", smallmind.__all__)
def test_public_names_are_there_and_documented(name):
    assert getattr(smallmind, name).__doc__


def test_help_imports_neither_numpy_nor_numba():
    code = (
        "import sys; from smallmind.cli import _parser; _parser().format_help();"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'numba', 'tabulate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

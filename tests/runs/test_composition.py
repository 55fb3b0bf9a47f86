"""A run is composed of three objects, and each alone sets what it holds."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import smallmind
from smallmind.exchange.stored import StoredModel
from smallmind.runs.run import Run
from smallmind.runs.saved import RunFiles
from smallmind.runs.session import Session
from smallmind.runs.source import Source

ROOT = Path(smallmind.__file__).parent
PARTS = (Run, RunFiles, Session)
WORDS = re.compile(r"\b(Run|RunFiles|Session)\b")
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in ROOT.rglob("*.py")
}


def last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def names_of_parts(tree):
    """The names by which a file knows a part of a run: arguments, variables and attributes."""
    found, makers = {"files", "session"}, "Run|RunFiles|Session"
    if any(isinstance(node, ast.ClassDef) and WORDS.fullmatch(node.name) for node in tree.body):
        makers += "|cls"
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and WORDS.fullmatch(
            ast.unparse(node.annotation).strip("'") if node.annotation else ""
        ):
            found.add(node.arg)
        if isinstance(node, ast.Assign) and re.search(
            rf"\b({makers})(\.\w+)?\(", ast.unparse(node.value)
        ):
            found |= {last_name(target) for target in node.targets}
    return found - {None}


def intrusions(source):
    """The lines that set an attribute of a part of a run from outside, or look into its dict."""
    if not (WORDS.search(source) or "__dict__" in source):
        return
    tree = ast.parse(source)
    names = names_of_parts(tree)
    for node in ast.walk(tree):
        sets = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if sets and last_name(node.value) in names:
            yield ast.unparse(node)
        called = isinstance(node, ast.Call) and last_name(node.func) in ("vars", "setattr")
        if called and node.args and last_name(node.args[0]) in names:
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            yield ast.unparse(node)


def test_no_part_of_a_run_is_set_from_outside():
    # Tokenizers drop what their copies have computed.
    files = {name: source for name, source in FILES.items() if not name.startswith("text/")}
    assert {name: found for name in files if (found := [*intrusions(files[name])])} == {}


def test_parts_of_a_run_know_each_other_by_construction_not_by_inheritance():
    assert all(part.__bases__ == (object,) for part in PARTS)
    assert not any(part in other.__subclasses__() for part in PARTS for other in PARTS)
    runs = importlib.import_module("smallmind.runs")
    for module in pkgutil.iter_modules(runs.__path__, "smallmind.runs."):
        assert not hasattr(importlib.import_module(module.name), "SavedRun")


def names_of_kinds(kind):
    """The names of a class and of all that inherit from it."""
    return {kind.__name__}.union(*map(names_of_kinds, kind.__subclasses__()))


def test_nothing_asks_which_kind_of_model_or_source_it_has():
    for module in ("exchange.huggingface", "exchange.gguf", "exchange.peft", "runs.loading"):
        importlib.import_module(f"smallmind.{module}")
    models, sources = names_of_kinds(StoredModel), names_of_kinds(Source)
    assert len(models) == 10 and len(sources) == 6
    for name, source in FILES.items():
        asked = set()
        for node in ast.walk(ast.parse(source)) if "isinstance" in source else ():
            if isinstance(node, ast.Call) and last_name(node.func) == "isinstance":
                asked |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        assert not asked & (models | sources), name


@pytest.mark.parametrize(
    "line",
    [
        "run.settings = 1",
        "run.session.group = 1",
        "self.files.config = 1",
        "run.final, other = 1, 2",
        "del opened.training",
        "setattr(run, 'final', 1)",
        "vars(run)",
        "run.__dict__.get('training')",
    ],
)
def test_the_check_finds_intrusions(line):
    source = f"def f(self, run: 'Run'):\n    opened = Run.open('x')\n    {line}\n"
    assert len(list(intrusions(source))) == 1
    assert list(intrusions(source.replace(line, "self.step = run.settings.run"))) == []

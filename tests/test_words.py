"""Docstrings and comments are sentences or verb phrases."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for name in ("smallmind", "tests", "bench") for path in (ROOT / name).rglob("*.py")
)
CLAUSE = re.compile(r"(What|Whether|Of|Those|That of|The same)\b")


def docstrings(text):
    """The docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and (found := ast.get_docstring(node)):
            yield found


def comments(text):
    """The first lines of the comments."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            stands_alone = not token.line[:column].strip()
            if not (stands_alone and line == last + 1):
                yield token.string.lstrip("#").strip()
            last = line if stands_alone else -1


def clauses(text):
    """The docstrings and comments that begin as a clause without its sentence."""
    return [found for found in (*docstrings(text), *comments(text)) if CLAUSE.match(found)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_or_comment_is_a_sentence_or_verb_phrase(source):
    assert clauses(source.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        'def f():\n    """Whether it ends."""',
        '"""What is here."""',
        "x = 1  # Of the last step",
        "# Those that remain\n# are many.\nx = 1",
        'class A:\n    """The same for a class."""',
    ],
)
def test_a_clause_is_found(planted):
    assert len(clauses(planted)) == 1

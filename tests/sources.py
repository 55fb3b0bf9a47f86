"""Sources, which tests of how they are written read once for all rules."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "smallmind"
LIBRARY = sorted(PACKAGE.rglob("*.py"))


@functools.lru_cache(maxsize=1)
def nodes_of(text):
    """The nodes of a source. Those of the last one are kept: rules are applied file by file."""
    return [*ast.walk(ast.parse(text))]


def broken(rules):
    """(rule, sources) each -> rule -> 'file: what' of all that breaks it."""
    found = {rule: [] for rule, _ in rules}
    chosen = {rule: set(sources) for rule, sources in rules}
    for source in sorted(set().union(*chosen.values())):
        text, name = source.read_text(encoding="utf-8"), source.relative_to(ROOT).as_posix()
        for rule in found:
            if source in chosen[rule]:
                found[rule] += [f"{name}: {what}" for what in rule(text)]
    return found

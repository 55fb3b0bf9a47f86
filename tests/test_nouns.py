"""How many public classes and modules the packages have in which every capability is wired."""

import ast

import pytest

from tests.test_layering import MODULES

# An issue that adds one says so by changing the number, and takes away another if it can.
NOUNS = {"settings": 24, "runs": 53, "training": 75, "cli": 38, "losses": 31, "forecast": 18}


@pytest.mark.parametrize("package", NOUNS)
def test_public_classes_and_modules_are_as_many_as_are_counted(package):
    names = []
    for name, source in MODULES.items():
        if name.startswith(f"smallmind.{package}."):
            names.append(name)
            tree = ast.parse(source.read_text(encoding="utf-8"))
            names += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    public = [name for name in names if not name.rpartition(".")[2].startswith("_")]
    assert len(public) == NOUNS[package], public

"""The modules that a kernel's machine code depends on are found without importing them."""

import ast
import sys
from types import ModuleType

import pytest
from numba.core.dispatcher import Dispatcher

from smallmind.kernels import compiled
from smallmind.kernels.codegen import sources
from smallmind.kernels.description import KERNELS

MODULES = sorted(sources.modules())


def parsed(module):
    """The modules of the kernels that one imports, by its syntax tree."""
    found = set()
    for node in ast.walk(ast.parse(sources.source(module))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_those_of_the_syntax_tree(module):
    assert set(sources._imports(module)) == parsed(module)


def kernels():
    """Every function that is compiled and has a name, of the modules that this CPU can load."""
    for name in KERNELS:
        getattr(compiled, name)
    for module in filter(sys.modules.get, MODULES):
        for function in vars(sys.modules[module]).values():
            if isinstance(function, Dispatcher) and function.py_func.__module__ == module:
                yield module, function.py_func


def test_everything_that_a_kernel_names_is_in_a_module_that_it_imports():
    assert len(list(kernels())) > 150
    for module, function in kernels():
        imported = sources.imported_by(module)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            value = value.py_func if isinstance(value, Dispatcher) else value
            home = value.__name__ if isinstance(value, ModuleType) else origin(value)
            assert home in imported or home not in MODULES, (function, name)


def origin(value):
    return getattr(value, "__module__", None)


def test_imports_are_followed_within_functions_and_over_lines(monkeypatch):
    texts = {
        "smallmind.kernels.a": b"from smallmind.kernels.gemm import (\n    b,\n    x as y,\n)\n",
        "smallmind.kernels.gemm.b": b"def f():\n    from smallmind.kernels.c import (n)  # other\n",
        "smallmind.kernels.c": b"import smallmind.kernels.d\n# from smallmind.kernels import e\n",
        "smallmind.kernels.d": b"from smallmind.kernels import a, f\n",
        "smallmind.kernels.e": b"",
        "smallmind.kernels.f": b"from smallmind.files import durable\n",
    }
    monkeypatch.setattr(sources, "modules", lambda: texts)
    monkeypatch.setattr(sources, "source", texts.get)
    monkeypatch.setattr(sources, "_imports", sources._imports.__wrapped__)
    found = sources.imported_by("smallmind.kernels.a")
    assert found == {f"smallmind.kernels.{name}" for name in ("a", "gemm.b", "c", "d", "f")}

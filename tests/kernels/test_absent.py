"""A kernel is compiled once for an optional array, given or not: compiling takes seconds."""

import pytest

from smallmind.kernels import cases
from smallmind.kernels.codegen.recording import active
from smallmind.kernels.description import KERNELS


class Versions:
    """The compiled versions that calls used: in place of a recording of the calls."""

    def __init__(self):
        self.used = []

    def add(self, function, arguments):
        self.used.append((function, *map(function.typeof_pyval, arguments)))


OPTIONAL = [
    name
    for name, about in KERNELS.items()
    if any(x.is_optional and not x.is_written for x in about.arguments.arrays.values())
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_an_optional_array_needs_no_other_version(monkeypatch, name):
    monkeypatch.setattr(active, "recording", versions := Versions())
    for kind in cases.types(name):
        used = []
        for optional in (False, True):
            versions.used.clear()
            case = cases.Case(name, list(cases.awkward(name))[3], kind, optional)
            versions.used.clear()
            case.run()
            used.append(set(versions.used))
        assert used[0] == used[1] != set(), kind

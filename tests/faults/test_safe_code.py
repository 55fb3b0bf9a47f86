"""Nothing in the package executes data as code."""

import ast

import pytest

from tests.sources import LIBRARY, broken, nodes_of

MODULES = {
    *("pickle", "_pickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib", "yaml"),
    *("jsonpickle", "torch", "tarfile", "runpy", "code"),
}
CALLS = {
    *("eval", "exec", "__import__", "np.load", "numpy.load"),
    *("os.system", "os.popen", "shutil.unpack_archive"),
}
ARGUMENTS = {"allow_pickle", "shell"}
METHODS = {"extract", "extractall"}  # of archives, whose members may have any name


def unsafe(code):
    for node in nodes_of(code):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=function) if ast.unparse(function) in CALLS:
                yield ast.unparse(function)
            case ast.Call(func=ast.Attribute(attr=str(name))) if name in METHODS:
                yield name
            case ast.keyword(arg=str(name)) if name in ARGUMENTS:
                yield name


ALLOWED = {
    # Compiled kernels are code: their cache is unpickled once its owner and digest are checked.
    "kernels/codegen/cache.py": ["pickle"],
    # Shows that a pickle calls functions, with one of its own; runs an exported model in torch.
    "lessons/lesson11_export_and_import.py": ["pickle", "torch"],
    # Students' code runs here, in a process for that alone: marking it means running it.
    "lessons/marked.py": ["exec"],
    # Peers that are measured; arrays that the bench has just written for them, without pickles.
    "bench/peers/job.py": ["np.load"],
    "bench/peers/kernels.py": ["torch"],
    "bench/peers/torch_gpt2.py": ["torch", "torch", "torch.nn"],
    "bench/peers/torch_llama.py": ["torch", "torch", "torch.nn"],
    "bench/peers/torch_step.py": ["torch", "torch"],
}


def test_no_source_makes_an_unsafe_call():
    allowed = [f"smallmind/{name}: {call}" for name, calls in ALLOWED.items() for call in calls]
    assert sorted(broken([(unsafe, LIBRARY)])[unsafe]) == sorted(allowed)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, marshal as m",
        "from yaml import load",
        "import torch.hub",
        "x = eval('1')",
        "f(g(exec(code)))",
        "np.load(path)",
        "load(path, allow_pickle=True)",
        "__import__(name)",
        "os.system('ls')",
        "zipfile.ZipFile(path).extractall()",
        "archive.extract(name, folder)",
    ],
)
def test_unsafe_calls_are_seen(code):
    assert list(unsafe(code))

"""The cache of compiled kernels: it is reused, never stale, and never causes a failure."""

import itertools
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import smallmind
from tests.programs import finished, printed_by, started

PROGRAM = """
import numpy as np
from smallmind.console import activity
from smallmind.kernels.codegen.cache_directory import cache_directory
one = np.ones((1, 1), np.float32)
dx, y = np.empty_like(one), np.empty_like(one)
from smallmind.kernels.elementwise import gelu_backward
gelu_backward(dx, y, one, one)
print(dx[0, 0], activity.compiled()[0] > 0, cache_directory("smallmind.kernels.elementwise"))
"""


VALUE = pytest.approx(1.0829641)


def printed_in(folder, program, **environment):
    """The output of a program that imports the package in this folder."""
    words = [sys.executable, "-W", "error", "-c", program]
    return printed_by(words, cwd=folder, PYTHONPATH=str(folder), **environment)


def run_kernel(package_parent, **environment):
    """Returns gelu'(1), whether a kernel was compiled, and the directory of the cache."""
    value, compiled, cache = printed_in(package_parent, PROGRAM, **environment).split()
    return float(value), compiled == "True", Path(cache)


@pytest.fixture(scope="module")
def compiled_package(tmp_path_factory):
    """A copy of the package, and a cache with the kernel that PROGRAM has compiled."""
    root = tmp_path_factory.mktemp("compiled")
    shutil.copytree(Path(smallmind.__file__).parent, root / "smallmind")
    value, compiled, _ = run_kernel(root, SMALLMIND_CACHE_DIR=str(root / "cache"))
    assert value == VALUE and compiled
    return root


@pytest.fixture
def package(compiled_package, tmp_path):
    """A copy of both that a test can edit."""
    return shutil.copytree(compiled_package, tmp_path / "package")


def test_kernels_are_compiled_once_and_again_after_an_edit_to_another_file(package):
    cache = {"SMALLMIND_CACHE_DIR": str(package / "cache")}
    value, compiled, _ = run_kernel(package, **cache)
    assert value == VALUE and not compiled
    # The kernel calls gelu.py, which calls codegen/simd.py: Numba would not see this edit.
    source = package / "smallmind" / "kernels" / "codegen" / "simd.py"
    text = source.read_text(encoding="utf-8")
    edited = text.replace("scale_by_normal_power(p, n) + ", "scale_by_normal_power(p + p, n) + ")
    assert edited != text
    source.write_text(edited, encoding="utf-8")
    changed, compiled, _ = run_kernel(package, **cache)
    assert compiled
    assert changed != pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("edited", "again"),
    [
        ("gemm/blocked", False),
        ("elementwise", True),
        pytest.param("gelu", True, marks=pytest.mark.slow),
    ],
)
def test_a_comment_recompiles_what_its_file_has_or_lends_and_nothing_else(package, edited, again):
    source = package / "smallmind" / "kernels" / f"{edited}.py"
    with source.open("a", encoding="utf-8") as file:
        file.write("# A comment.\n")
    cache = {"SMALLMIND_CACHE_DIR": str(package / "cache")}
    assert run_kernel(package, **cache)[:2] == (VALUE, again)


def test_a_missing_kernel_is_linked_from_the_cached_functions_that_it_calls(package):
    """They have no machine code of their own, only what LLVM links into the kernel."""
    environment = {"SMALLMIND_CACHE_DIR": str(package / "cache")}
    kernels = list((package / "cache").rglob("elementwise.*gelu_backward-*"))
    called = {*(package / "cache").rglob("*.nbc")} - {*kernels}
    assert kernels and called
    for path in kernels:
        path.unlink()
    written = {path: path.stat().st_mtime_ns for path in called}
    assert run_kernel(package, **environment)[:2] == (VALUE, True)
    assert {path: path.stat().st_mtime_ns for path in called} == written
    assert run_kernel(package, **environment)[:2] == (VALUE, False)


BY_SYMBOL = """
from numba import types
from smallmind.kernels.codegen.jit import jit, native, serial_jit
@native("smallmind_added", types.int64(types.int64, types.int64))
def added(x, y):
    return x + y
@native("smallmind_doubled", types.int64(types.int64))
def doubled(x):
    return added(x, x)
@jit
def sum_of_two(x, y):
    return doubled(x) + y
@serial_jit
def add_doubled(out):
    out[0] = sum_of_two(out[0], 1)
"""
DOUBLED = """
import numpy as np
from smallmind.console import activity
from smallmind.kernels.by_symbol import add_doubled
compiled = [activity.compiled()[0]]
out = np.full(1, 3)
add_doubled(out)
print(out[0], *compiled, activity.compiled()[0])
"""


@pytest.mark.parametrize("missing", ["", "add_doubled", "sum_of_two", "added", "d"])
def test_a_function_behind_a_symbol_is_made_known_once_a_kernel_needs_it(package, missing):
    (package / "smallmind" / "kernels" / "by_symbol.py").write_text(BY_SYMBOL, encoding="utf-8")
    environment = {"SMALLMIND_CACHE_DIR": str(package / "cache")}
    assert printed_in(package, DOUBLED, **environment).split() == ["7", "0", "4"]
    files = [*(package / "cache").rglob("by_symbol.*.nbc")]
    removed = [path for path in files if missing and missing in path.name]
    assert len(files) == 4
    for path in removed:
        path.unlink()
    # A kernel that is there needs no function that was linked into it.
    again = 0 if missing == "sum_of_two" else len(removed)
    for count in (again, 0):
        assert printed_in(package, DOUBLED, **environment).split() == ["7", "0", str(count)]


FROM_CACHE = """
import sys
import numpy as np
from smallmind.kernels.elementwise import gelu_backward
from smallmind.kernels.reduce import sum_of_squares
one = np.ones((1, 1), np.float32)
gelu_backward(np.empty_like(one), np.empty_like(one), one, one)
print(sum_of_squares(one[0]), "numba.np.polynomial.polynomial_core" in sys.modules)
"""


def test_loading_cached_kernels_does_not_initialise_the_compiler(package):
    """And a kernel missing from the cache is compiled and added to it."""

    def compiler_loaded():
        cache = str(package / "cache")
        value, loaded = printed_in(package, FROM_CACHE, SMALLMIND_CACHE_DIR=cache).split()
        assert float(value) == 1.0
        return loaded == "True"

    assert not list((package / "cache").rglob("*square*.nbc"))
    assert compiler_loaded()
    assert list((package / "cache").rglob("*square*.nbc"))
    assert not compiler_loaded()


@pytest.mark.slow  # test_cache.py looks for the directory without compiling anything
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions are those of POSIX")
def test_the_cache_moves_if_home_is_not_a_directory(package):
    (package / "file").touch()
    home = str(package / "file")
    environment = {
        "SMALLMIND_CACHE_DIR": "",
        "XDG_CACHE_HOME": home,
        "HOME": home,
        "TMPDIR": str(package),
    }
    value, _, cache = run_kernel(package, **environment)
    assert value == VALUE
    assert cache.is_relative_to(package)


def test_a_kernel_is_recompiled_if_its_cache_file_is_truncated(package):
    environment = {"SMALLMIND_CACHE_DIR": str(package / "cache")}
    files = list((package / "cache").rglob("*.nbc"))
    assert files
    for path, share in zip(files, itertools.cycle([0.5, 0])):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert run_kernel(package, **environment)[:2] == (VALUE, True)
    assert run_kernel(package, **environment)[:2] == (VALUE, False)


# The result, and the functions that this process has compiled.
LISTED = f"""
from numba.core import event
class Compiled(event.Listener):
    names = []
    def on_start(self, event):
        self.names.append(f"{{event.data['dispatcher'].py_func.__qualname__}}{{event.data['args']}}")
    def on_end(self, event):
        pass
event.register("numba:compile", Compiled())
{PROGRAM}
print("".join(f"{{name}}\\n" for name in Compiled.names), end="")
"""


def test_concurrent_first_starts_all_succeed_and_do_no_work_twice(package):
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "SMALLMIND_CACHE_DIR": str(package / "empty"),
    }
    command = [sys.executable, "-W", "error", "-c", LISTED]
    compiled = []
    with ExitStack() as stack:
        settings = {"env": environment, "cwd": package}
        starts = [stack.enter_context(started(command, **settings)) for _ in range(3)]
        for start in starts:
            output, _ = start.communicate()
            assert start.returncode == 0
            result, *names = output.splitlines()
            assert float(result.split()[0]) == VALUE
            compiled += names
    assert len(set(compiled)) == len(compiled) > 0
    assert run_kernel(package, SMALLMIND_CACHE_DIR=environment["SMALLMIND_CACHE_DIR"])[1] is False


INTERRUPTED = """
import signal
import time
import numpy as np
from numba.core import codegen
from smallmind.console import activity

callback, interrupts, shown = codegen.JITCodeLibrary._object_compiled_hook, [], []

def interrupted(*arguments):
    interrupts.append(1)
    signal.raise_signal(signal.SIGINT)
    return callback(*arguments)

def measure():
    one = np.ones((1, 1), np.float32)
    dx, y = np.empty_like(one), np.empty_like(one)
    from smallmind.kernels.elementwise import gelu_backward
    gelu_backward(dx, y, one, one)
    return dx[0, 0]

codegen.JITCodeLibrary._object_compiled_hook = interrupted
caught = 0
start, before = time.perf_counter(), activity.clock()
with activity.showing_on(lambda phrase, usual: shown.append(phrase)):
    while True:
        try:
            value = measure()
            break
        except KeyboardInterrupt:
            caught += 1
counted, elapsed = activity.clock() - before, time.perf_counter() - start
assert caught and interrupts, (caught, interrupts)
seconds = activity.compiled()[1]
assert seconds > 0 and counted <= elapsed - seconds + 1e-6, (counted, elapsed, seconds)
assert shown[-1] is None and any("Compiling" in phrase for phrase in shown if phrase), shown
print(value)
"""


def test_ctrl_c_while_a_kernel_compiles_is_raised_once_it_is_compiled(package):
    """Python prints and drops an exception in a callback from LLVM, which then finds no code."""
    environment = {"PYTHONPATH": str(package), "SMALLMIND_CACHE_DIR": str(package / "c")}
    result = finished([sys.executable, "-c", INTERRUPTED], package, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert float(result.stdout) == VALUE

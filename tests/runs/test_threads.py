"""Choosing the number of threads from Python, each on a core of its own."""

import os
import subprocess
import sys

import pytest

import smallmind

PIN = """
import os
import smallmind
smallmind.set_threads(2, pin=True)
from smallmind.kernels.codegen.threads import threads
print(threads(), os.environ["OMP_PROC_BIND"], os.environ["OMP_PLACES"])
smallmind.set_threads(1)
print(threads())
try:
    smallmind.set_threads(2, pin=True)
except smallmind.InputError as error:
    print(error)
"""


def test_threads_are_pinned_before_the_first_kernel_runs_only():
    unset = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    result = subprocess.run(
        [sys.executable, "-c", PIN],
        env={**unset, "NUMBA_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, refusal = result.stdout.splitlines()
    assert first == "2 spread cores" and second == "1"
    assert refusal.startswith("the threads are running already: call set_threads(..., pin=True)")


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_number_of_threads_that_cannot_run_is_refused(count):
    with pytest.raises(smallmind.InputError, match=f"threads={count} must be at "):
        smallmind.set_threads(count)

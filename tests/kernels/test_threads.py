"""Same bits on any number of threads, on either threading layer, from any Python thread."""

import pytest

from tests.programs import output_of

# Prints the number of threads, and a digest of what each kernel writes, in every number type.
DIGESTS = """
import hashlib, sys
from smallmind.kernels import cases
from smallmind.kernels.codegen.threads import set_threads

# By the number of axes: many rows, a long sum, a single row or head that all threads share.
SIZES = {
    1: [(40000,)],
    2: [(321, 72), (1100, 40), (1, 600)],
    3: [(321, 72, 144), (40, 1100, 200), (1, 600, 500)],
    4: [(3, 4, 107, 12), (1, 1, 300, 24)],
}
calls = [
    cases.Case(name, cases.fitted(name, sizes, 2**18), kind, optional=True)
    for name in cases.kernels() for kind in cases.types(name) if kind != "float16"
    for sizes in SIZES[len(cases.described(name).arguments.axes)]
]
for count in map(int, sys.argv[1].split(",")):
    set_threads(count)
    shown = []
    for case in calls:
        case.restore()
        outputs = case.outputs(case.run())
        data = b"".join(output.tobytes() for output in outputs.values())
        shown.append(f"{case.label.replace(' ', '-')}={hashlib.sha256(data).hexdigest()[:16]}")
    print(count, *shown)
"""

# Several Python threads that run kernels at once.
CROWD = """
import threading
import numpy as np
from smallmind.kernels.compiled import matmul

a, b = np.ones((300, 200), np.float32), np.ones((200, 300), np.float32)
errors = []


def work():
    out = np.empty((300, 300), np.float32)
    for _ in range(50):
        matmul(out, a, b)
        if (out != 200).any():
            errors.append("wrong")


crowd = [threading.Thread(target=work) for _ in range(4)]
for thread in crowd:
    thread.start()
for thread in crowd:
    thread.join()
print("errors", len(errors))
"""


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_results_do_not_depend_on_the_number_of_threads(layer):
    counts = "1,2,3,5,7,8,13,16"
    output = output_of(DIGESTS, counts, NUMBA_NUM_THREADS="16", NUMBA_THREADING_LAYER=layer)
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    assert list(lines) == counts.split(",")
    for count in lines:
        assert lines[count].split() == lines["1"].split(), f"on {count} threads"
    assert len(lines["1"].split()) >= 200


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_several_python_threads_can_run_kernels_at_once(layer):
    assert output_of(CROWD, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="4") == "errors 0\n"

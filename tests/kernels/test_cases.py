"""Every kernel does what its plain twin does: at awkward sizes, in every number type.

What a kernel takes stands beside its twin, and a new one is tested as soon as it is described.
"""

import itertools

import numpy as np
import pytest

from smallmind.checks import InputError
from smallmind.kernels import cases, compiled
from smallmind.kernels.cases import Case, WrongError
from smallmind.kernels.codegen.threads import max_threads
from smallmind.kernels.description import KERNELS, described

ALL = [
    pytest.param(name, kind, id=f"{name} {kind}") for name in KERNELS for kind in cases.types(name)
]


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_a_kernel_does_what_its_plain_twin_does(name, kind):
    """With and without what may be left out; test_sweep has every other size of the main type."""
    is_main = kind == cases.types(name)[0]
    for sizes in list(cases.awkward(name))[1 :: 1 if is_main else 4]:
        Case(name, sizes, kind, optional=not is_main).check()


def bits(array):
    return array.reshape(-1).view(np.uint8)


def off(array, _):
    """The last element differs."""
    if array.dtype.kind == "f":
        array.reshape(-1)[-1] += max(1, np.abs(array).max()) / 100
    else:
        bits(array)[-1] ^= 1


def beyond(array, _):
    """A byte behind the array is written."""
    np.lib.stride_tricks.as_strided(bits(array), (array.nbytes + 1,))[-1] = 0


def by_threads(array, calls):
    """The second call, on another number of threads, gives another last bit."""
    bits(array)[0] ^= calls > 1


FAULTS = {off: "is wrong", beyond: "writes outside of"} | (
    {by_threads: "has other bits"} if max_threads() > 1 else {}
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_planted_error_is_found_in_every_output(name):
    def check(fault, place):
        case = Case(name, list(cases.awkward(name))[1], cases.types(name)[0])
        calls = itertools.count(1)

        def wrong(*arguments):
            returned = case.run()
            if place is None:
                return 1.01 * returned
            fault(arguments[place], next(calls))
            return returned

        case.check(wrong)

    outputs = range(described(name).writes)
    for fault, message in FAULTS.items() if outputs else ():
        for place in outputs:
            with pytest.raises(WrongError, match=message):
                check(fault, place)
    if not outputs:
        with pytest.raises(WrongError, match="is wrong"):
            check(off, None)


def test_an_input_that_is_changed_is_found():
    case = Case("rmsnorm", (5, 7))

    def wrong(*arguments):
        compiled.rmsnorm(*arguments)
        arguments[3][-1] = 0

    with pytest.raises(WrongError, match="rmsnorm 5x7 is wrong: it changes weight, which is an in"):
        case.check(wrong)


def test_an_output_that_is_left_unwritten_is_found():
    case = Case("gelu", (5, 7))
    with pytest.raises(WrongError, match=r"y\[0, 0\] is nan"):
        case.check(lambda *_: None)


def test_an_output_that_may_be_an_input_is_checked_as_one():
    case = Case("gelu_backward", (5, 7))

    def wrong(dx, y, dy, x):
        compiled.gelu_backward(dx, y, dy.copy(), x)
        if dx is x:
            dx[0] = 0

    with pytest.raises(WrongError, match="other bits where it may be an input: dx, y"):
        case.check(wrong)


def test_sizes_that_a_kernel_cannot_have_are_refused():
    with pytest.raises(InputError, match="matmul needs one size for each of M K N"):
        Case("matmul", (3, 4))
    with pytest.raises(InputError, match="matmul_quantised: K must be a multiple of 32"):
        Case("matmul_quantised", (1, 40, 3), "q8_0")


def test_operations_are_those_of_the_plain_twin():
    """A product has two for each term, any other function one for each element."""
    for name, sizes, expected in (
        ("scale", (3, 4), 12),
        ("mix", (3, 4), 3 * 12),
        ("matmul_transpose_b", (2, 3, 5), 2 * 30),
        ("column_sum", (3, 4), 12 + 4),
        ("copy_columns", (3, 4), 0),
        ("sum_of_squares", (9,), 18),
    ):
        assert Case(name, sizes).exact(count=True)[1] == expected, name


def test_bytes_are_those_that_move():
    assert Case("rmsnorm", (3, 4)).traffic() == (4 * (12 + 4), 4 * (12 + 3), 0)
    assert Case("column_sum", (3, 4)).traffic() == (48, 0, 16)
    assert Case("copy_columns", (3, 4), "bfloat16").traffic() == (24, 24, 0)  # of 36 columns
    assert Case("matmul_quantised", (1, 64, 5), "q8_0").traffic() == (4 * 64 + 5 * 2 * 34, 20, 0)

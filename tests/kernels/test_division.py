"""Kernels divide their work among any number of threads: all of it, once, and evenly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from bench.threads import Step, counting_regions, imbalance, kernel_imbalance, shape_of
from smallmind.bench.peers.job import Sizes
from smallmind.kernels import cases
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import LANES, share
from smallmind.kernels.description import KERNELS
from smallmind.kernels.gemm import blocked, packing
from smallmind.kernels.gemm.packing import PLAIN, TRANSPOSE_A, TRANSPOSE_B
from smallmind.kernels.gemm.tile import TILE_ROWS

WORKERS = st.integers(1, 70)
# Only kernels can call the functions themselves.
is_few, single_columns, product_region, grid_region = (
    njit(function.py_func)
    for function in (
        blocked.is_few,
        blocked.single_columns,
        blocked.product_region,
        packing.grid_region,
    )
)
VARIANTS = st.sampled_from([PLAIN, TRANSPOSE_A, TRANSPOSE_B])


def _owners(shares, size):
    """The number of workers that own each of `size` elements."""
    owners = np.zeros(size, np.int64)
    for first, last in shares:
        assert 0 <= first <= last <= size
        owners[first:last] += 1
    return owners


@given(rows=st.integers(0, 5000), workers=WORKERS)
def test_each_row_belongs_to_one_worker_and_no_worker_has_more_than_one_too_many(rows, workers):
    shares = [row_share(rows, worker, workers) for worker in range(workers)]
    assert (_owners(shares, rows) == 1).all()
    counts = [last - first for first, last in shares]
    assert max(counts) - min(counts) <= 1


@given(size=st.integers(0, 100_000), workers=WORKERS)
def test_each_element_belongs_to_one_worker_in_whole_vectors(size, workers):
    shares = [share.py_func(size, worker, workers) for worker in range(workers)]
    shares = [(min(first, size), max(min(first, size), last)) for first, last in shares]
    assert (_owners(shares, size) == 1).all()
    counts = [last - first for first, last in shares]
    assert max(counts) <= -(-size // workers) + LANES
    assert all(first % LANES == 0 for first, last in shares if first < last)


def _count_owners(M, N, regions):
    owners = np.zeros((M, N), np.int64)
    for own in regions:
        assert 0 <= own.first <= own.last <= M
        owners[own.first : own.last, own.left : own.right] += 1
    return owners


def _regions(M, N, variant, workers):
    """The regions of a product of float32."""
    shape = M, N, single_columns(N, variant)
    return [
        product_region(*shape, variant, TILE_ROWS, worker, workers) for worker in range(workers)
    ]


@given(M=st.integers(1, 400), N=st.integers(1, 400), workers=WORKERS, variant=VARIANTS)
def test_each_element_of_a_product_belongs_to_one_worker(M, N, workers, variant):
    regions = _regions(M, N, variant, workers)
    assert (_count_owners(M, N, regions) == 1).all()
    for own in regions:
        assert own.first % (1 if is_few(M, variant) else TILE_ROWS) == 0 or own.first == M
        assert own.left % LANES == 0


@given(
    M=st.integers(1, 400),
    vectors=st.integers(1, 20),
    workers=WORKERS,
    variant=VARIANTS,
    height=st.sampled_from([1, 6, 16, 32]),
)
def test_so_it_does_in_tiles_of_other_heights(M, vectors, workers, variant, height):
    regions = [
        grid_region(M, vectors, workers, worker, variant, height) for worker in range(workers)
    ]
    assert (_count_owners(M, vectors * LANES, regions) == 1).all()
    for own in regions:
        assert own.first % height == 0 or own.first == M


@pytest.mark.parametrize(("M", "vectors", "variant"), [(2048, 24, PLAIN), (128, 8, TRANSPOSE_A)])
@pytest.mark.parametrize("workers", [3, 5, 6, 7, 11, 13])
def test_all_workers_have_a_part_of_a_product(M, vectors, variant, workers):
    N = vectors * LANES  # how even it can be depends on the number of vectors to divide
    regions = _regions(M, N, variant, workers)
    sizes = [(own.last - own.first) * (own.right - own.left) for own in regions]
    assert min(sizes) > 0
    assert max(sizes) < 1.25 * M * N / workers


@pytest.mark.parametrize("sizes", [Sizes(16, 128, 128, 4, 4), Sizes(8, 256, 384, 6, 6)])
def test_no_thread_has_much_more_than_the_others(sizes):
    found = Step(sizes).count([4, 8, 16])
    assert {"matmul", "attention", "adamw", "column_sum"} <= {name for name, _ in found}
    for (name, shape), calls in found.items():
        assert calls.regions == calls.calls, f"{name} {shape} runs on one thread"
        for workers, busiest in calls.imbalance.items():
            assert busiest <= 1.3, f"{name} {shape} on {workers} threads"


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_runs_on_several_threads_says_how_it_divides_its_work(name):
    sizes = cases.fitted(name, cases.shapes(name)[0], 2**20)
    case = cases.Case(name, sizes, cases.types(name)[0])
    with counting_regions() as regions:
        case.run()
    assert (regions.count == 0) == (KERNELS[name].division[0] == "alone")
    assert 1 <= kernel_imbalance(name, case.arguments, 3) <= 3


@pytest.mark.parametrize(
    ("name", "sizes"), [("matmul_transpose_a", (5, 7, 9)), ("attention", (2, 3, 11, 4))]
)
def test_the_sizes_of_a_call_are_found_by_its_axes(name, sizes):
    assert shape_of(name, cases.Case(name, sizes).arguments) == "x".join(map(str, sizes))


def test_imbalance_is_the_work_of_the_busiest_over_the_mean():
    assert imbalance([4, 4, 4, 4]) == 1
    assert imbalance([8, 0, 0, 0]) == 4
    assert imbalance([6, 6], total=10) == 1.2
    assert imbalance([0, 0]) == 1

"""Run at the rates that bound every kernel: multiply-adds from registers, and arrays in order."""

import numpy as np
from numba import prange

from smallmind.kernels.alignment import aligned_zeros
from smallmind.kernels.codegen.isa import ISA
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    dot_pairs,
    fma,
    lane_sum,
    load,
    store,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.gemm.tile import NULL, Extent, Rows, Strip

if ISA.matrix_unit:
    from smallmind.kernels.gemm import amx

_CHAINS = 12  # independent sums: at least latency times number of the multipliers of any CPU
_ROUNDS = 100_000
_DEPTH = 2048  # words
_NUMBERS = np.repeat(np.array([0.75, 0.125], np.float32), LANES)


@parallel_jit
def _multiply_add(out, numbers, rounds, workers):
    for worker in prange(workers):
        out[worker] = _multiply_add_chains(numbers, rounds)


@jit
def _multiply_add_chains(numbers, rounds):
    # From memory: the compiler would fold constants.
    x, y = load(numbers, 0), load(numbers, LANES)
    a, b, c, d, e, f = y, x, y + y, y + x, x + x, x - y
    g, h, i, j, k, m = a, b, c, d, e, f
    for _ in range(rounds):
        a, b, c = fma(a, x, y), fma(b, x, y), fma(c, x, y)
        d, e, f = fma(d, x, y), fma(e, x, y), fma(f, x, y)
        g, h, i = fma(g, y, x), fma(h, y, x), fma(i, y, x)
        j, k, m = fma(j, y, x), fma(k, y, x), fma(m, y, x)
    return lane_sum(a + b + c + d + e + f + g + h + i + j + k + m)


def multiply_add():
    """Runs multiply-adds at the CPU's peak rate on every thread; returns how many operations."""
    workers = threads()
    _multiply_add(np.empty(workers, np.float32), _NUMBERS, _ROUNDS)
    return 2 * _CHAINS * LANES * _ROUNDS * workers


@parallel_jit
def _multiply_pairs(out, numbers, rounds, workers):
    for worker in prange(workers):
        out[worker] = _multiply_pairs_chains(numbers, rounds)


@jit
def _multiply_pairs_chains(numbers, rounds):
    x, y = load(numbers, 0), load(numbers, LANES)
    a, b, c, d, e, f = y, x, y + y, y + x, x + x, x - y
    g, h, i, j, k, m = a, b, c, d, e, f
    for _ in range(rounds):
        a, b, c = dot_pairs(a, x, y), dot_pairs(b, x, y), dot_pairs(c, x, y)
        d, e, f = dot_pairs(d, x, y), dot_pairs(e, x, y), dot_pairs(f, x, y)
        g, h, i = dot_pairs(g, x, y), dot_pairs(h, x, y), dot_pairs(i, x, y)
        j, k, m = dot_pairs(j, x, y), dot_pairs(k, x, y), dot_pairs(m, x, y)
    return lane_sum(a + b + c + d + e + f + g + h + i + j + k + m)


def multiply_pairs():
    """Runs as multiply_add does, with dot products of bfloat16."""
    workers = threads()
    _multiply_pairs(np.empty(workers, np.float32), _NUMBERS, _ROUNDS)
    return 4 * _CHAINS * LANES * _ROUNDS * workers


@parallel_jit
def _multiply_tiles(operands, rounds, workers):
    for worker in prange(workers):
        # All rows of a are the same one, as are those of b: loads take no time.
        own = operands[worker]
        a, b = Strip(at(own, 0), 0, 0, 1), Rows(at(own, 0), 0)
        c = Rows(at(own, _DEPTH), amx.HEIGHT)
        extent = Extent(amx.HEIGHT, amx.HEIGHT, _DEPTH)
        for _ in range(rounds):
            amx.multiply(c, a, b, extent, Rows(NULL, 0), NULL, NULL)


def multiply_tiles():
    """Runs as multiply_add does, with bfloat16 on the matrix unit."""
    workers, rounds = threads(), 100
    # Aligned: a row of a tile that crosses a cache line is loaded at a third of the speed.
    _multiply_tiles(aligned_zeros((workers, _DEPTH + amx.HEIGHT**2)), rounds)
    return 4 * amx.HEIGHT**2 * _DEPTH * rounds * workers


def multiply_bfloat16():
    """Runs products of bfloat16 at the CPU's peak rate on every thread -> how many operations."""
    if ISA.matrix_unit:
        return multiply_tiles()
    return multiply_pairs() if ISA.bfloat16 else multiply_add()


@parallel_jit
def copy(out, x, workers):
    for worker in prange(workers):
        _copy_part(out, x, np.int64(worker), workers)


@jit
def _copy_part(out, x, worker, workers):
    vectors = x.size // LANES // 4
    for i in range(vectors * worker // workers, vectors * (worker + 1) // workers):
        place = i * 4 * LANES
        a, b = load(x, place), load(x, place + LANES)
        c, d = load(x, place + 2 * LANES), load(x, place + 3 * LANES)
        store(out, place, a)
        store(out, place + LANES, b)
        store(out, place + 2 * LANES, c)
        store(out, place + 3 * LANES, d)


@parallel_jit
def read(sums, x, workers):
    """x (n,) -> sums (workers,): reads all of it."""
    for worker in prange(workers):
        sums[worker] = _read_part(x, np.int64(worker), workers)


@jit
def _read_part(x, worker, workers):
    a = b = c = d = broadcast(np.float32(0))
    vectors = x.size // LANES // 4
    for i in range(vectors * worker // workers, vectors * (worker + 1) // workers):
        place = i * 4 * LANES
        a, b = a + load(x, place), b + load(x, place + LANES)
        c, d = c + load(x, place + 2 * LANES), d + load(x, place + 3 * LANES)
    return lane_sum(a + b + c + d)


@parallel_jit
def update(x, factor, workers):
    """x (n,) -> factor x, in place."""
    for worker in prange(workers):
        _update_part(x, factor, np.int64(worker), workers)


@jit
def _update_part(x, factor, worker, workers):
    vectors, f = x.size // LANES // 4, broadcast(factor)
    for i in range(vectors * worker // workers, vectors * (worker + 1) // workers):
        place = i * 4 * LANES
        for j in range(place, place + 4 * LANES, LANES):
            store(x, j, load(x, j) * f)

"""Rotary position embedding (Su et al. 2021), in place, with Llama's pairing of channels."""

import functools
from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import LANES, load_up_to, store_up_to
from smallmind.kernels.reference import rotary_angles


class Rotation(NamedTuple):
    """Which columns rotate, and in which direction."""

    T: int
    heads: int
    D: int
    half: int  # pairs of channels that rotate
    sign: np.float32  # -1 rotates back


BEGINNING = np.zeros(1, np.int64)


def rope(x, frequencies, T, heads, D, starts=None, positions=0, inverse=False):
    starts = BEGINNING if starts is None else starts
    cosines, sines = rotation_tables(frequencies, T, starts, positions)
    rotation = Rotation(T, heads, D, len(frequencies), np.float32(-1 if inverse else 1))
    _rope(x, cosines, sines, starts, rotation)


def rotation_tables(frequencies, T, starts, positions):
    """Cosines and sines, a row per position, for `rope` with these arguments. They are kept."""
    positions = max(positions, int(starts.max()) + T)
    return _tables(1 << (positions - 1).bit_length(), frequencies)


def _make_tables(positions, frequencies):
    """Cosines and sines (positions, pairs) of the angles."""
    angles = rotary_angles(positions, frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


_tables = functools.lru_cache(maxsize=16)(_make_tables)


@inline_jit
def start_of(starts, b):
    """Returns the position of the first token of a sequence: starts (B,), or (1,) for all."""
    return starts[b] if starts.size > 1 else starts[0]


@parallel_jit
def _rope(x, cosines, sines, starts, rotation, workers):
    for worker in prange(workers):
        first, last = row_share(x.shape[0], np.int64(worker), workers)
        _rope_rows(x, cosines, sines, starts, rotation, first, last)


@jit
def _rope_rows(x, cosines, sines, starts, rotation, first, last):
    W = x.shape[1]
    D, half = rotation.D, rotation.half
    for r in range(first, last):
        b = r // rotation.T
        angle = (start_of(starts, b) + r - b * rotation.T) * half
        for i in range(0, half, LANES):
            count = min(LANES, half - i)
            cosine = load_up_to(cosines, angle + i, count)
            sine = load_up_to(sines, angle + i, count) * rotation.sign
            for head in range(rotation.heads):
                place = r * W + head * D + i
                a, b = load_up_to(x, place, count), load_up_to(x, place + half, count)
                store_up_to(x, place, a * cosine - b * sine, count)
                store_up_to(x, place + half, b * cosine + a * sine, count)

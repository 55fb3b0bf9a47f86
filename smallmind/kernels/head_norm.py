"""RMS normalisation of queries and keys (Henry et al. 2020), head by head, and their rotation.

All in one pass over the heads, which would otherwise be read and written once for each.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import inline_jit, jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, row_share
from smallmind.kernels.codegen.scratch import absent, scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    fma,
    lane_sum,
    line_elements,
    load,
    load_first,
    load_up_to,
    prefetch,
    prefetch_to_write,
    store,
    store_first,
    store_up_to,
)
from smallmind.kernels.reduce import add_chunks
from smallmind.kernels.rope import BEGINNING, rotation_tables, start_of

CHUNK_ROWS = 16  # whose heads stay in the first-level cache, and that a partial sum is of


def norm_heads(
    x,
    kept,
    rstd,
    query_gain,
    key_gain,
    queries,
    T,
    frequencies=None,
    starts=None,
    positions=0,
    epsilon=1e-5,
):
    D = query_gain.size
    layout = NormLayout(T, rstd.shape[1], queries, D, x.shape[1], frequencies is not None)
    starts = BEGINNING if starts is None else starts
    cosines, sines = _tables(frequencies, T, starts, positions)
    scales, epsilon = rstd.reshape(-1), np.float32(epsilon)
    _norm_heads(x, kept, scales, query_gain, key_gain, cosines, sines, starts, layout, epsilon)


class NormLayout(NamedTuple):
    """The heads of each row."""

    T: int  # rows of a sequence
    heads: int
    queries: int  # the first ones of them
    D: int
    width: int  # of a row
    rotates: bool


class HeadInputs(NamedTuple):
    """Pointers to what heads are computed from."""

    kept: Any
    rstd: Any
    gain: Any
    cosines: Any
    sines: Any


class HeadPart(NamedTuple):
    """The heads begin..end, all of queries or all of keys, of the rows first..last."""

    begin: int
    end: int
    first: int
    last: int


def _tables(frequencies, T, starts, positions):
    if frequencies is None:
        return absent(np.float32, 2), absent(np.float32, 2)
    return rotation_tables(frequencies, T, starts, positions)


@parallel_jit
def _norm_heads(
    x, kept, rstd, query_gain, key_gain, cosines, sines, starts, layout, epsilon, workers
):
    for worker in prange(workers):
        # Pointers, whose users are not counted.
        target, heads = at(x, 0), at(kept, 0)
        outputs = heads, at(rstd, 0)
        tables = at(cosines, 0), at(sines, 0)
        queries = HeadInputs(*outputs, at(query_gain, 0), *tables)
        keys = HeadInputs(*outputs, at(key_gain, 0), *tables)
        first, end = row_share(x.shape[0], np.int64(worker), workers)
        for row in range(first, end, CHUNK_ROWS):
            last = min(end, row + CHUNK_ROWS)
            _keep_heads(target, *outputs, layout, epsilon, row, last)
            _write_heads(target, queries, starts, layout, HeadPart(0, layout.queries, row, last))
            part = HeadPart(layout.queries, layout.heads, row, last)
            _write_heads(target, keys, starts, layout, part)


@jit
def _keep_heads(x, kept, rstd, layout, epsilon, first, last):
    """Writes kept and rstd of the rows first..last."""
    heads, D = layout.heads, layout.D
    tail = D % LANES
    whole = D - tail
    for r in range(first, last):
        # Rows end too soon for the CPU to see which ones follow.
        following = r + CHUNK_ROWS
        for c in range(0, heads * D, line_elements(x)):
            prefetch(x, following * layout.width + c)
            prefetch_to_write(kept, following * heads * D + c)
        for head in range(heads):
            source, target = r * layout.width + head * D, (r * heads + head) * D
            squares = broadcast(np.float32(0))
            for c in range(0, whole, LANES):
                value = load(x, source + c)
                store(kept, target + c, value)
                squares = fma(value, value, squares)
            if tail:
                value = load_first(x, source + whole, tail)
                store_first(kept, target + whole, value, tail)
                squares = fma(value, value, squares)
            s = np.float32(1) / np.sqrt(lane_sum(squares) / np.float32(D) + epsilon)
            rstd[r * heads + head] = s


@jit
def _write_heads(x, inputs, starts, layout, part):
    """Writes the results of some heads to x."""
    D, half = layout.D, layout.D // 2
    whole = half - half % LANES
    for i in range(0, whole, LANES):
        _write_columns(x, inputs, starts, layout, part, i, LANES)
    if whole < half:
        _write_columns(x, inputs, starts, layout, part, whole, half - whole)
    if D % 2:
        gain = load_first(inputs.gain, D - 1, 1)
        for r in range(part.first, part.last):
            for head in range(part.begin, part.end):
                n = r * layout.heads + head
                y = load_first(inputs.kept, n * D + D - 1, 1) * inputs.rstd[n] * gain
                store_first(x, r * layout.width + head * D + D - 1, y, 1)


@inline_jit
def _write_columns(x, inputs, starts, layout, part, i, count):
    """Computes the pairs of channels from i on."""
    D, half, heads = layout.D, layout.D // 2, layout.heads
    gain_a = load_up_to(inputs.gain, i, count)
    gain_b = load_up_to(inputs.gain, half + i, count)
    sequence = part.first // layout.T
    t = part.first - sequence * layout.T
    for r in range(part.first, part.last):
        position = start_of(starts, sequence) + t
        cosine, sine = _angle(inputs, position * half + i, layout.rotates, count)
        t += 1
        if t == layout.T:
            sequence, t = sequence + 1, 0
        source, target = r * heads * D + i, r * layout.width + i
        for head in range(part.begin, part.end):
            s = inputs.rstd[r * heads + head]
            a = load_up_to(inputs.kept, source + head * D, count) * s * gain_a
            b = load_up_to(inputs.kept, source + head * D + half, count) * s * gain_b
            if layout.rotates:
                a, b = a * cosine - b * sine, b * cosine + a * sine
            store_up_to(x, target + head * D, a, count)
            store_up_to(x, target + head * D + half, b, count)


@inline_jit
def _angle(inputs, place, rotates, count):
    """Cosines and sines from a place on, if heads rotate."""
    if rotates:
        return load_up_to(inputs.cosines, place, count), load_up_to(inputs.sines, place, count)
    return broadcast(np.float32(1)), broadcast(np.float32(0))


def norm_heads_backward(
    dx, dquery_gain, dkey_gain, kept, rstd, query_gain, key_gain, queries, T, frequencies=None
):
    D, heads = query_gain.size, rstd.shape[1]
    layout = NormLayout(T, heads, queries, D, dx.shape[1], frequencies is not None)
    cosines, sines = _tables(frequencies, T, BEGINNING, 0)
    partial = scratch(ceil_div(len(rstd), CHUNK_ROWS), 2 * D + CHUNK_ROWS * heads)
    rstd, gains = rstd.reshape(-1), (query_gain, key_gain)
    _norm_heads_backward(
        dx, dquery_gain, dkey_gain, partial, kept, rstd, *gains, cosines, sines, layout
    )


@parallel_jit
def _norm_heads_backward(
    dx, dquery_gain, dkey_gain, partial, kept, rstd, query_gain, key_gain, cosines, sines, layout
):
    D = layout.D
    for chunk in prange(partial.shape[0]):
        row = chunk * CHUNK_ROWS
        last = min(kept.shape[0], row + CHUNK_ROWS)
        # Pointers, whose users are not counted.
        target, own = at(dx, 0), at(partial, chunk * partial.shape[1])
        means, tables = at(own, 2 * D), (at(cosines, 0), at(sines, 0))
        inputs = HeadInputs(at(kept, 0), at(rstd, 0), at(query_gain, 0), *tables)
        part = HeadPart(0, layout.queries, row, last)
        _norm_heads_backward_part(target, own, means, inputs, layout, part)
        inputs = HeadInputs(at(kept, 0), at(rstd, 0), at(key_gain, 0), *tables)
        part = HeadPart(layout.queries, layout.heads, row, last)
        _norm_heads_backward_part(target, at(own, D), means, inputs, layout, part)
    add_chunks(dquery_gain, partial, 0)
    add_chunks(dkey_gain, partial, D)


@jit
def _norm_heads_backward_part(dx, dgain, means, inputs, layout, part):
    """Writes dx of some heads, and to dgain (D,) their share of the gain's gradient."""
    # forward: xhat = x rstd, y = rotation (xhat gain)
    # backward, with dxhat = (rotation^-1 dy) gain and the mean over a head:
    #   dx = rstd (dxhat - xhat mean(dxhat xhat))
    D, half = layout.D, layout.D // 2
    whole = half - half % LANES
    _means(means, dx, inputs, layout, part)
    for i in range(0, whole, LANES):
        _backward_columns(dx, dgain, means, inputs, layout, part, i, LANES)
    if whole < half:
        _backward_columns(dx, dgain, means, inputs, layout, part, whole, half - whole)
    if D % 2:
        gain, total = load_first(inputs.gain, D - 1, 1), broadcast(np.float32(0))
        for r in range(part.first, part.last):
            for head in range(part.begin, part.end):
                n, target = r * layout.heads + head, r * layout.width + head * D + D - 1
                s, mean = inputs.rstd[n], means[n - part.first * layout.heads]
                d, xhat = load_first(dx, target, 1), load_first(inputs.kept, n * D + D - 1, 1) * s
                total = fma(d, xhat, total)
                store_first(dx, target, (d * gain - xhat * mean) * s, 1)
        store_first(dgain, D - 1, total, 1)


@inline_jit
def _backward_columns(dx, dgain, means, inputs, layout, part, i, count):
    """Computes the pairs of channels from i on."""
    D, half, heads = layout.D, layout.D // 2, layout.heads
    gain_a = load_up_to(inputs.gain, i, count)
    gain_b = load_up_to(inputs.gain, half + i, count)
    sum_a = sum_b = broadcast(np.float32(0))
    t = part.first % layout.T
    for r in range(part.first, part.last):
        cosine, sine = _angle(inputs, t * half + i, layout.rotates, count)
        t = t + 1 if t + 1 < layout.T else 0
        source, target = r * heads * D + i, r * layout.width + i
        for head in range(part.begin, part.end):
            s, mean = inputs.rstd[r * heads + head], means[(r - part.first) * heads + head]
            place = target + head * D
            a, b = _rotated_back(dx, place, half, cosine, sine, layout.rotates, count)
            xhat_a = load_up_to(inputs.kept, source + head * D, count) * s
            xhat_b = load_up_to(inputs.kept, source + head * D + half, count) * s
            sum_a, sum_b = fma(a, xhat_a, sum_a), fma(b, xhat_b, sum_b)
            store_up_to(dx, place, (a * gain_a - xhat_a * mean) * s, count)
            store_up_to(dx, place + half, (b * gain_b - xhat_b * mean) * s, count)
    store_up_to(dgain, i, sum_a, count)
    store_up_to(dgain, half + i, sum_b, count)


@jit
def _means(means, dx, inputs, layout, part):
    """Computes the means (CHUNK_ROWS heads,) of dxhat xhat over each head."""
    heads, D, half = layout.heads, layout.D, layout.D // 2
    whole = half - half % LANES
    t = part.first % layout.T
    for r in range(part.first, part.last):
        following = r + CHUNK_ROWS
        for c in range(part.begin * D, part.end * D, line_elements(dx)):
            prefetch(dx, following * layout.width + c)
            prefetch(inputs.kept, following * heads * D + c)
        angle = t * half
        t = t + 1 if t + 1 < layout.T else 0
        for head in range(part.begin, part.end):
            n = r * heads + head
            place = HeadPlace(n * D, r * layout.width + head * D, angle, half, layout.rotates)
            total = broadcast(np.float32(0))
            for i in range(0, whole, LANES):
                total = _add_products(total, dx, inputs, place, i, LANES)
            if whole < half:
                total = _add_products(total, dx, inputs, place, whole, half - whole)
            if D % 2:
                d = load_first(dx, place.target + D - 1, 1) * load_first(inputs.gain, D - 1, 1)
                total = fma(d, load_first(inputs.kept, place.source + D - 1, 1), total)
            means[n - part.first * heads] = lane_sum(total) * inputs.rstd[n] / np.float32(D)


class HeadPlace(NamedTuple):
    """Where a head begins in kept and in dx, and its angles in their tables."""

    source: int
    target: int
    angle: int
    half: int
    rotates: bool


@inline_jit
def _add_products(total, dx, inputs, place, i, count):
    """Adds to total the products dxhat x of the pairs of channels from i on."""
    half, source, target = place.half, place.source + i, place.target + i
    cosine, sine = _angle(inputs, place.angle + i, place.rotates, count)
    a, b = _rotated_back(dx, target, half, cosine, sine, place.rotates, count)
    a, b = a * load_up_to(inputs.gain, i, count), b * load_up_to(inputs.gain, half + i, count)
    total = fma(a, load_up_to(inputs.kept, source, count), total)
    return fma(b, load_up_to(inputs.kept, source + half, count), total)


@inline_jit
def _rotated_back(dx, place, half, cosine, sine, rotates, count):
    """Returns a pair of vectors of the gradient before the rotation."""
    a, b = load_up_to(dx, place, count), load_up_to(dx, place + half, count)
    if rotates:
        a, b = a * cosine + b * sine, b * cosine - a * sine
    return a, b

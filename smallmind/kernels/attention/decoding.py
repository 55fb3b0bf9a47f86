"""Attention of new tokens to the keys and values of all tokens before them, which are kept.

The keys of a head are kept in panels of PANEL positions, (panels, D, PANEL): the scores of a query
for a panel are then D multiply-adds of whole vectors. Values are rows.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.attention.layout import score_scale
from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import ceil_div, round_up
from smallmind.kernels.codegen.scratch import scratch
from smallmind.kernels.codegen.simd import (
    LANES,
    at,
    broadcast,
    element,
    exp,
    first_or,
    fma,
    keep_first,
    lane_maximum,
    lane_sum,
    load,
    load_up_to,
    maximum,
    prefetch,
    store,
    store_up_to,
)
from smallmind.kernels.codegen.threads import threads
from smallmind.kernels.reference import PANEL

_NO_FIRSTS = np.empty((0, 0), np.int32)


class CacheSizes(NamedTuple):
    """T new tokens of B sequences; H heads of queries, G of keys and values; room for S tokens.

    And the scale of scores.
    """

    B: int
    T: int
    H: int
    G: int
    D: int
    S: int
    scale: np.float32


def keep_keys_values(keys, values, qkv, starts, slots):
    _, G, S, D = values.shape
    B = len(slots)
    sizes = CacheSizes(B, len(qkv) // B, qkv.shape[1] // D - 2 * G, G, D, S, np.float32(0))
    _keep(keys, values, qkv, starts, slots, sizes)


@parallel_jit
def _keep(keys, values, qkv, starts, slots, sizes):
    B, T, H, G, D, S, _ = sizes
    width, kept = (H + 2 * G) * D, min(T, S)
    for number in prange(B * G * kept):
        index = np.int64(number)
        b, g, t = index // (G * kept), index // kept % G, T - kept + index % kept
        place, source = (starts[b] + t) % S, (b * T + t) * width + (H + g) * D
        head = slots[b] * G + g
        panel = (head * ceil_div(S, PANEL) + place // PANEL) * D * PANEL + place % PANEL
        row = (head * S + place) * D
        _keep_one(at(keys, panel), at(values, row), at(qkv, source), at(qkv, source + G * D), D)


@jit
def _keep_one(panel, row, key, value, D):
    """Keeps one token of a head. Takes pointers."""
    for d in range(D):
        panel[d * PANEL] = element(key, d)
    for d in range(0, D, LANES):
        store_up_to(row, d, load_up_to(value, d, min(LANES, D - d)), min(LANES, D - d))


def cached_attention(out, qkv, keys, values, starts, slots, firsts=None, scale=None):
    _, G, S, D = values.shape
    B, H = len(slots), out.shape[1] // D
    rows = scratch(threads(), round_up(S, PANEL) + 2 * round_up(D, LANES))
    firsts = _NO_FIRSTS if firsts is None else firsts
    sizes = CacheSizes(B, len(out) // B, H, G, D, S, score_scale(scale, D))
    _attention(out, qkv, keys, values, starts, slots, firsts, rows, sizes)


@parallel_jit
def _attention(out, qkv, keys, values, starts, slots, firsts, scratch, sizes):
    B, T, H, G, D, S, _ = sizes
    workers, heads = scratch.shape[0], B * T * H
    for worker in prange(workers):
        own = at(scratch, worker * scratch.shape[1])
        begin, end = heads * np.int64(worker), heads * (np.int64(worker) + 1)
        for index in range(begin // workers, end // workers):
            row, h = index // H, index % H
            b, t = row // T, row % T
            group = slots[b] * G + h // (H // G)
            last = starts[b] + t + 1
            first = max(0, last - S)
            if firsts.size > 0:
                first = max(np.int64(firsts[b, t]), first)
            query = row * (H + 2 * G) * D + h * D
            head_keys = at(keys, group * ceil_div(S, PANEL) * D * PANEL)
            head_values = at(values, group * S * D)
            target = row * H * D + h * D
            _attend(
                at(out, target), at(qkv, query), head_keys, head_values, first, last, own, sizes
            )


@jit
def _attend(out, query, keys, values, first, last, own, sizes):
    """Computes one query of a head, over the tokens first..last. Takes pointers."""
    D, S = sizes.D, sizes.S
    q, total = at(own, round_up(S, PANEL)), at(own, round_up(S, PANEL) + round_up(D, LANES))
    for d in range(0, D, LANES):
        count = min(LANES, D - d)
        store(q, d, load_up_to(query, d, count) * sizes.scale)
        store(total, d, broadcast(np.float32(0)))
    # The places of the tokens, which may continue at the beginning.
    begin, end = first % S, first % S + last - first
    wrapped = max(0, end - S)
    end = min(end, S)
    top = _scores(own, keys, q, begin, end, D)
    if wrapped:
        top = max(top, _scores(own, keys, q, 0, wrapped, D))
    denominator = _add_values(total, own, values, begin, end, top, D)
    if wrapped:
        denominator += _add_values(total, own, values, 0, wrapped, top, D)
    factor = np.float32(1) / denominator
    for d in range(0, D, LANES):
        store_up_to(out, d, load(total, d) * factor, min(LANES, D - d))


@jit
def _scores(scores, keys, q, begin, end, D):
    """Writes the scores of the places begin..end -> the largest."""
    top, fours = broadcast(np.float32(-np.inf)), D // 4 * 4
    for place in range(begin // LANES * LANES, end, LANES):
        panel = at(keys, place // PANEL * PANEL * D + place % PANEL)
        s0 = s1 = s2 = s3 = broadcast(np.float32(0))
        for d in range(0, fours, 4):
            # The next panel: it begins on another page, which the CPU would not fetch by itself.
            for i in range(4):
                prefetch(panel, (D + d + i) * PANEL)
            s0 = fma(broadcast(q[d]), load(panel, d * PANEL), s0)
            s1 = fma(broadcast(q[d + 1]), load(panel, (d + 1) * PANEL), s1)
            s2 = fma(broadcast(q[d + 2]), load(panel, (d + 2) * PANEL), s2)
            s3 = fma(broadcast(q[d + 3]), load(panel, (d + 3) * PANEL), s3)
        for d in range(fours, D):
            s0 = fma(broadcast(q[d]), load(panel, d * PANEL), s0)
        score = (s0 + s1) + (s2 + s3)
        store(scores, place, score)
        if place < begin:
            score = first_or(broadcast(np.float32(-np.inf)), begin - place, score)
        if place + LANES > end:
            score = first_or(score, end - place, broadcast(np.float32(-np.inf)))
        top = maximum(score, top)
    return lane_maximum(top)


@jit
def _add_values(total, scores, values, begin, end, top, D):
    """total += exp(score - top) value, for the places begin..end -> the sum of exponentials.

    Writes the exponentials over the scores, but only of these places: the others may be next.
    """
    denominator = broadcast(np.float32(0))
    for place in range(begin // LANES * LANES, end, LANES):
        score = load(scores, place)
        e = exp(score - top)
        kept, counted = e, e
        if place < begin:
            kept = first_or(score, begin - place, kept)
            counted = first_or(broadcast(np.float32(0)), begin - place, counted)
        if place + LANES > end:
            kept, counted = first_or(kept, end - place, score), keep_first(counted, end - place)
        denominator = denominator + counted
        store(scores, place, kept)
    d = 0
    while d + 4 * LANES <= D:
        t0, t1 = load(total, d), load(total, d + LANES)
        t2, t3 = load(total, d + 2 * LANES), load(total, d + 3 * LANES)
        for place in range(begin, end):
            e, x = broadcast(scores[place]), at(values, place * D + d)
            t0, t1 = fma(e, load(x, 0), t0), fma(e, load(x, LANES), t1)
            t2, t3 = fma(e, load(x, 2 * LANES), t2), fma(e, load(x, 3 * LANES), t3)
        store(total, d, t0)
        store(total, d + LANES, t1)
        store(total, d + 2 * LANES, t2)
        store(total, d + 3 * LANES, t3)
        d += 4 * LANES
    while d < D:
        even, odd, count = load(total, d), broadcast(np.float32(0)), min(LANES, D - d)
        for place in range(begin, end - 1, 2):
            x, y = at(values, place * D + d), at(values, (place + 1) * D + d)
            even = fma(broadcast(scores[place]), load_up_to(x, 0, count), even)
            odd = fma(broadcast(scores[place + 1]), load_up_to(y, 0, count), odd)
        if (end - begin) % 2:
            x = at(values, (end - 1) * D + d)
            even = fma(broadcast(scores[end - 1]), load_up_to(x, 0, count), even)
        store(total, d, even + odd)
        d += LANES
    return lane_sum(denominator)

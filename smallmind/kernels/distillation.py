"""The loss of a student that learns from a teacher's logits as well as from the text."""

from typing import NamedTuple

import numpy as np
from numba import prange

from smallmind.kernels.codegen.jit import jit, parallel_jit
from smallmind.kernels.codegen.rounding import row_share
from smallmind.kernels.codegen.simd import (
    LANES,
    broadcast,
    element,
    exp,
    fma,
    keep_first,
    lane_sum,
    load_up_to,
    store_up_to,
)
from smallmind.kernels.cross_entropy import row_maximum, row_weight, row_weights, scale_row


class Scalars(NamedTuple):
    """The arguments of `distillation` that are the same in every pass, as float32."""

    alpha: np.float32
    temperature: np.float32


def distillation(
    losses,
    dlogits,
    dtemperatures,
    logits,
    teacher_logits,
    targets,
    alpha,
    temperature,
    scale,
    weights=None,
):
    scalars = Scalars(np.float32(alpha), np.float32(temperature))
    scale, weights = np.asarray(scale, np.float32), row_weights(weights)
    _distillation(
        losses, dlogits, dtemperatures, logits, teacher_logits, targets, scalars, scale, weights
    )


@parallel_jit
def _distillation(
    losses,
    dlogits,
    dtemperatures,
    logits,
    teacher_logits,
    targets,
    scalars,
    scale,
    weights,
    workers,
):
    factor = scale[()]
    for worker in prange(workers):
        first, last = row_share(logits.shape[0], np.int64(worker), workers)
        for r in range(first, last):
            weight = row_weight(weights, r)
            losses[r], dtemperatures[r] = _row(
                dlogits, logits, teacher_logits, targets[r], r, scalars, factor, weight
            )


@jit
def _row(dlogits, logits, teacher_logits, target, r, scalars, scale, weight):
    """Row r -> its loss, and the derivative of the loss by the temperature; writes its gradient."""
    alpha, T = scalars.alpha, scalars.temperature
    one = np.float32(1)
    inverse = one / T
    V = logits.shape[1]
    row = r * V
    # z and u: logits less the largest, q and p: exp(z / T) and exp(u / T).
    z_top, u_top = row_maximum(logits, r, target), row_maximum(teacher_logits, r, target)
    target_z = logits[r, target] - z_top
    zero = broadcast(np.float32(0))
    sum_e, sum_q, sum_qz, sum_p, sum_pu, sum_pw, sum_puw = zero, zero, zero, zero, zero, zero, zero
    for v in range(0, V, LANES):
        count = min(LANES, V - v)
        z = load_up_to(logits, row + v, count) - z_top
        u = load_up_to(teacher_logits, row + v, count) - u_top
        q = keep_first(exp(z * inverse), count)
        p = keep_first(exp(u * inverse), count)
        sum_e = sum_e + keep_first(exp(z), count)
        sum_q = sum_q + q
        sum_qz = fma(q, z, sum_qz)
        sum_p = sum_p + p
        pu, w = p * u, u - z
        sum_pu = sum_pu + pu
        # The differences are summed, not their terms: a student near its teacher loses no digits.
        sum_pw = fma(p, w, sum_pw)
        sum_puw = fma(pu, w, sum_puw)
    e, q_total, p_total = lane_sum(sum_e), lane_sum(sum_q), lane_sum(sum_p)
    u_mean, w_mean = lane_sum(sum_pu) / p_total, lane_sum(sum_pw) / p_total
    # The mean under p of log p - log q = w / T + log(q_total / p_total); its derivative by 1 / T.
    divergence = w_mean * inverse + np.log(q_total / p_total)
    covariance = lane_sum(sum_puw) / p_total - u_mean * w_mean
    by_inverse = covariance * inverse - (u_mean - w_mean - lane_sum(sum_qz) / q_total)
    # backward: d loss / d logit = (1 - alpha) (softmax - onehot) + alpha T (q - p)
    factor_e, factor_q, factor_p = (one - alpha) / e, alpha * T / q_total, alpha * T / p_total
    for v in range(0, V, LANES):
        count = min(LANES, V - v)
        z = load_up_to(logits, row + v, count) - z_top
        u = load_up_to(teacher_logits, row + v, count) - u_top
        soft = exp(z * inverse) * factor_q - exp(u * inverse) * factor_p
        gradient = exp(z) * factor_e + soft
        store_up_to(logits, row + v, gradient, count)
    logits[r, target] -= one - alpha
    scale_row(dlogits, logits, r, scale * weight)
    loss = (one - alpha) * (np.log(e) - target_z) + alpha * T * T * divergence
    return weight * loss, weight * alpha * (np.float32(2) * T * divergence - by_inverse)


@parallel_jit
def top_k_logits(logits, indices, log_probabilities, workers):
    for worker in prange(workers):
        first, last = row_share(logits.shape[0], np.int64(worker), workers)
        for r in range(first, last):
            _top_k_row(logits, indices, log_probabilities, r)


@jit
def _top_k_row(logits, indices, log_probabilities, r):
    V, K = logits.shape[1], indices.shape[1]
    place = r * (K + 1)
    others = broadcast(element(log_probabilities, place + K))
    for v in range(0, V, LANES):
        store_up_to(logits, r * V + v, others, min(LANES, V - v))
    for i in range(K):
        logits[r, indices[r, i]] = element(log_probabilities, place + i)

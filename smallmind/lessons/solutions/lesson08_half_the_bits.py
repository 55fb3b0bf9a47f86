"""Solutions of "Half the bits"."""

import math

import numpy as np


# %% Exercise 1
def to_bfloat16(values):
    bits = values.view(np.uint32)
    # Half a step less one, and one more if the last bit that stays is 1: ties go to even.
    last = bits >> 16 & np.uint32(1)
    rounded = bits + np.uint32(0x7FFF) + last >> 16
    # Adding may carry a NaN into infinity or into the sign: cut it, and set a bit of its fraction.
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


# %% Exercise 2
def scaled_step(weights, gradient, scaler, learning_rate, max_norm):
    gradient = gradient / np.float32(scaler.scale)  # before it is clipped
    norm = float(np.linalg.norm(gradient))
    overflowed = not math.isfinite(norm)
    scaler.update(overflowed)
    if overflowed:
        return weights
    return weights - learning_rate * gradient * min(1.0, max_norm / max(norm, 1e-30))


# %% Exercise 3
def round_at_random(values, random):
    # If f of 65,536 are cut off, they carry into the bit above with the probability f / 65,536.
    noise = random.integers(0, 2**16, values.shape, dtype=np.uint32)
    return (values.view(np.uint32) + noise & np.uint32(0xFFFF0000)).view(np.float32)

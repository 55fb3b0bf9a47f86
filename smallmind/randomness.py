"""Counter-based random numbers, so that runs resume, recompute and parallelise to the same bits."""

import numpy as np

_WORD = 2**64 - 1


def hash64(*words: int) -> int:
    """Integers -> one 64-bit hash of them all (SplitMix64; Steele et al. 2014)."""
    x = 0
    for word in words:
        x = (x + word + 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        x ^= x >> 31
    return x


def hash64_each(words: tuple[int, ...], last: np.ndarray) -> np.ndarray:
    """words, last (n,) from 0 on -> hash64(*words, word) for each word in last (n,), uint64."""
    x = last.astype(np.uint64) + np.uint64((hash64(*words) + 0x9E3779B97F4A7C15) & _WORD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_words(words: np.ndarray, key: int) -> np.ndarray:
    """words (n,), integers -> a 64-bit hash of each word and key (n,), uint64."""
    x = words.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permuted(places: np.ndarray, n: int, key: int) -> np.ndarray:
    """places (k,) below n -> where a permutation of range(n) takes them (k,), int64.

    A Feistel network (Luby and Rackoff 1988): any part of the permutation is computed by itself.
    """
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    low, keys = np.uint64(2 ** int(half) - 1), [hash64(key, i) for i in range(4)]
    x = places.astype(np.uint64)
    outside = np.ones(len(x), bool)
    # It permutes the numbers of 2 half bits: those that land above n are permuted again.
    while outside.any():
        left, right = x[outside] >> half, x[outside] & low
        for round_key in keys:
            left, right = right, left ^ (hash_words(right, round_key) & low)
        x[outside] = (left << half) | right
        outside = x >= n
    return x.astype(np.int64)

"""Random numbers that follow from counters, so that runs resume, recompute and parallelise."""

_WORD = 2**64 - 1


def mix(*words: int) -> int:
    """Some integers -> 64 bits that depend on all of them (SplitMix64; Steele et al. 2014)."""
    x = 0
    for word in words:
        x = (x + word + 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        x ^= x >> 31
    return x

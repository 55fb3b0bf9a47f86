"""Which row of an embedding each pair of tokens has."""

import numpy as np

from smallmind.kernels.codegen.jit import called_jit
from smallmind.kernels.reference import BIGRAM_FACTOR


@called_jit
def bigrams(rows, ids, vocab_size, count, document_token):
    """ids (B, T) -> rows (B, T), one of `count` for each token and the one before. Writes rows.

    Before the first token, and before each document_token (-1: none), comes token 0. Row
    V previous + token or, of fewer rows, a hash of that.
    """
    B, T = ids.shape
    is_hashed = count < vocab_size * vocab_size
    for b in range(B):
        previous = np.int64(0)
        for t in range(T):
            if ids[b, t] == document_token:
                previous = np.int64(0)
            row = previous * vocab_size + ids[b, t]
            if is_hashed:
                row = (row * BIGRAM_FACTOR & 0xFFFFFFFF) * count >> 32
            rows[b, t] = row
            previous = np.int64(ids[b, t])

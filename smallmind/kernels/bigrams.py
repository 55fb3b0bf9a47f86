"""Which row of an embedding each pair of tokens has."""

import numpy as np

from smallmind.kernels.codegen.jit import serial_jit
from smallmind.kernels.reference import BIGRAM_FACTOR

_NO_IDS = np.empty(0, np.int32)


def bigrams(rows, ids, vocab_size, count, document_token, before=None):
    """ids (B, T) -> rows (B, T), one of `count` for each token and the one before. Writes rows.

    Before the first token comes that of `before` (B,), or token 0, which also comes before each
    document_token (-1: none). Row V previous + token or, of fewer rows, a hash of that.
    """
    before = _NO_IDS if before is None else before
    _bigrams(rows, ids, vocab_size, count, document_token, before)


@serial_jit
def _bigrams(rows, ids, vocab_size, count, document_token, before):
    B, T = ids.shape
    is_hashed = count < vocab_size * vocab_size
    for b in range(B):
        previous = np.int64(before[b]) if before.size > 0 else np.int64(0)
        for t in range(T):
            if ids[b, t] == document_token:
                previous = np.int64(0)
            row = previous * vocab_size + ids[b, t]
            if is_hashed:
                row = (row * BIGRAM_FACTOR & 0xFFFFFFFF) * count >> 32
            rows[b, t] = row
            previous = np.int64(ids[b, t])

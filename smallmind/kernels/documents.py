"""Where documents begin in windows of tokens."""

import numpy as np

from smallmind.kernels.codegen.jit import called_jit


@called_jit
def document_starts(firsts, ids, token):
    """ids (B, T) -> firsts (B, T), the last place of `token` up to each place, or 0. Writes firsts.

    A document begins at its token, and the first of a window with the window.
    """
    B, T = ids.shape
    for b in range(B):
        first = 0
        for t in range(T):
            if ids[b, t] == token:
                first = t
            firsts[b, t] = np.int32(first)

"""Where documents begin in windows of tokens."""

import numpy as np

from smallmind.kernels.codegen.jit import serial_jit

_NO_IDS = np.empty(0, np.int32)
_BEGINNING = np.zeros((), np.int64)


def document_starts(firsts, ids, token, begun=None, start=None):
    """ids (B, T) -> firsts (B, T), the last place of `token` up to each place, or 0. Writes firsts.

    A document begins at its token, and the first of a window with the window. The ids may continue
    sequences of start () tokens, whose last documents began at `begun` (B,): places are then those
    in the whole sequences, and begun is kept up to date.
    """
    if begun is None:
        _document_starts(firsts, ids, token, _NO_IDS, _BEGINNING)
    else:
        _document_starts(firsts, ids, token, begun, start)


@serial_jit
def _document_starts(firsts, ids, token, begun, start):
    B, T = ids.shape
    for b in range(B):
        first = begun[b] if begun.size > 0 else np.int32(0)
        for t in range(T):
            if ids[b, t] == token:
                first = np.int32(start[()] + t)
            firsts[b, t] = first
        if begun.size > 0:
            begun[b] = first

"""Arrays made from the numbers of tokens: rows of bigrams, places in documents."""

import numpy as np

from smallmind.kernels.codegen.jit import inline_jit, serial_jit
from smallmind.kernels.reference import BIGRAM_FACTOR
from smallmind.kernels.rope import start_of

_NO_IDS, _NO_FIRSTS = np.empty(0, np.int32), np.empty((0, 0), np.int32)
_NO_STARTS = np.empty(0, np.int64)


def bigrams(rows, ids, vocab_size, count, document_token, before=None, firsts=None):
    before = _NO_IDS if before is None else before
    firsts = _NO_FIRSTS if firsts is None else firsts
    _bigrams(rows, ids, vocab_size, count, document_token, before, firsts)


@serial_jit
def _bigrams(rows, ids, vocab_size, count, document_token, before, firsts):
    B, T = ids.shape
    is_hashed = count < vocab_size * vocab_size
    for b in range(B):
        previous = _known(before[b], vocab_size) if before.size > 0 else np.int64(0)
        for t in range(T):
            token = _known(ids[b, t], vocab_size)
            begins = firsts.size > 0 and firsts[b, t] == t
            if ids[b, t] == document_token or begins:
                previous = np.int64(0)
            row = previous * vocab_size + token
            if is_hashed:
                row = (row * BIGRAM_FACTOR & 0xFFFFFFFF) * count >> 32
            rows[b, t] = row
            previous = token


@inline_jit
def _known(token, vocab_size):
    """Returns a token, or 0 for one from vocab_size on."""
    return np.int64(token) if token < vocab_size else np.int64(0)


def document_starts(firsts, ids, token, begun=None, starts=None):
    if begun is None:
        _document_starts(firsts, ids, token, _NO_IDS, _NO_STARTS)
    else:
        _document_starts(firsts, ids, token, begun, starts)


@serial_jit
def _document_starts(firsts, ids, token, begun, starts):
    B, T = ids.shape
    for b in range(B):
        first = begun[b] if begun.size > 0 else np.int32(0)
        start = starts[b] if starts.size > 0 else np.int64(0)
        for t in range(T):
            if ids[b, t] == token:
                first = np.int32(start + t)
            firsts[b, t] = first
        if begun.size > 0:
            begun[b] = first


def window_firsts(firsts, window, starts, documents=None):
    _window_firsts(firsts, window, starts, _NO_FIRSTS if documents is None else documents)


@serial_jit
def _window_firsts(firsts, window, starts, documents):
    B, T = firsts.shape
    for b in range(B):
        start = start_of(starts, b)
        for t in range(T):
            first = max(0, start + t - window + 1)
            if documents.size > 0:
                first = max(first, np.int64(documents[b, t]))
            firsts[b, t] = first


@serial_jit
def document_positions(positions, firsts):
    B, T = firsts.shape
    for b in range(B):
        for t in range(T):
            positions[b, t] = t - firsts[b, t]

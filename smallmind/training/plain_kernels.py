"""The memory that NumPy's kernels allocate besides the arrays that they are given."""

from collections.abc import Callable
from typing import Any

import numpy as np

from smallmind.nn.backend import NoKernels

# The most that a kernel holds at a time, in sizes of its output. Measured with tracemalloc.
TEMPORARIES = {
    "matmul": 2,
    "matmul_gelu": 3,
    "gelu": 3,
    "gelu_backward": 7,
    "matmul_transpose_a": 2,
    "matmul_transpose_b": 2,
    "layernorm": 3,
    "layernorm_backward": 4,
    "norm_heads": 3,
    "norm_heads_backward": 6,
    "rmsnorm": 2,
    "rmsnorm_backward": 4,
    "rope": 2,
    "relu2": 2,
    "relu2_backward": 3,
    "swiglu": 2,
    "swiglu_backward": 3,
    "softcap": 2,
    "softcap_backward": 3,
    "mix": 2,
    "mix_backward": 1,
    "embedding": 2,
    "bigrams": 6,
    "document_starts": 2,
    "dropout": 3,
    "cross_entropy": 2,
    "distillation": 10,
    "adamw": 4,
}
MUON = 7  # the most that muon holds at a time, in sizes of the largest matrix
CACHING = 10  # of top_k_log_probabilities, in sizes of the logits: it computes in float64


class CountedKernels(NoKernels):
    """Kernels that do nothing but note the temporary arrays that NumPy's would need.

    `nbytes` is what the hungriest call so far needs.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def __getattr__(self, name: str) -> Callable[..., float]:
        def count(*arguments: Any, **named: Any) -> float:
            self.nbytes = max(self.nbytes, _temporaries(name, *arguments, **named))
            return 0.0

        return count


def _temporaries(name: str, *arguments: Any, **named: Any) -> int:
    if name == "attention":
        out, logsumexp, qkv = arguments[:3]
        product = max(0, int(out.nbytes) - _scores(logsumexp, 1), _seen(*arguments[3:], **named))
        mask = _mask(logsumexp, *arguments[3:], **named)
        return _scores(logsumexp, 2) + _repeated(out, qkv) + max(product, mask)
    if name == "attention_backward":
        _dqkv, _dout, out, logsumexp, qkv = arguments[:5]
        mask = _mask(logsumexp, *arguments[5:], **named)
        gradients = 3 * int(out.nbytes)
        return _scores(logsumexp, 3) + _repeated(out, qkv) + max(gradients, mask)
    if name == "muon":
        parameters, blocks = arguments[0], arguments[3]
        return MUON * int((blocks.rows * blocks.columns).max()) * int(parameters.itemsize)
    # These two write their losses first, a column.
    output = arguments[1 if name in ("cross_entropy", "distillation") else 0]
    return TEMPORARIES.get(name, 0) * int(output.nbytes)


def _repeated(out: np.ndarray, qkv: np.ndarray) -> int:
    """The bytes of keys and values repeated for each head of queries, if some share them."""
    return 2 * int(out.nbytes) if qkv.shape[1] < 3 * out.shape[1] else 0


def _seen(
    _key: int = 0,
    _probability: float = 0.0,
    _first_row: int = 0,
    firsts: np.ndarray | None = None,
) -> int:
    """The bytes of the mask of documents (B, 1, T, T), as it is computed."""
    return 0 if firsts is None else 2 * firsts.size * firsts.shape[1]


def _mask(
    logsumexp: np.ndarray,
    _key: int = 0,
    probability: float = 0.0,
    _first_row: int = 0,
    _firsts: np.ndarray | None = None,
) -> int:
    """The bytes that computing the dropout mask of one head takes, whose positions are 64-bit."""
    return 5 * logsumexp.shape[2] ** 2 * int(logsumexp.itemsize) if probability else 0


def _scores(logsumexp: np.ndarray, count: int) -> int:
    """logsumexp (B, H, T) -> the bytes of `count` arrays (B, H, T, T)."""
    return count * int(logsumexp.nbytes) * logsumexp.shape[2]

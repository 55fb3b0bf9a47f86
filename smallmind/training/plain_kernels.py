"""The memory that NumPy's kernels allocate besides the arrays that they are given."""

from collections.abc import Callable
from typing import Any

from smallmind.kernels.description import described
from smallmind.nn.backend import NoKernels

CACHING = 10  # of top_k_log_probabilities, in sizes of the logits: it computes in float64


class CountedKernels(NoKernels):
    """Kernels that do nothing but note the temporary arrays that NumPy's would need.

    `nbytes` is what the hungriest call so far needs.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def __getattr__(self, name: str) -> Callable[..., float]:
        def count(*arguments: Any, **named: Any) -> float:
            self.nbytes = max(self.nbytes, described(name).temporary_bytes(*arguments, **named))
            return 0.0

        return count

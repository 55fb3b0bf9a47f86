"""The choice between our own products and those of NumPy's BLAS, by timing both."""

import functools
import sys

import numpy as np

from smallmind.console import activity
from smallmind.forecast.threads import use_threads
from smallmind.settings.config import Precision
from smallmind.settings.settings import Settings

WORTH = 1.15  # times faster that BLAS must be: with it no passes are recorded, nor bits promised
MOST_ROWS = 2048  # of the product that is timed
TRIES = 5


def fastest_products(settings: Settings) -> str | None:
    """Returns "blas" or "numba", whichever multiplies a layer of this model faster, on macOS.

    Elsewhere None: there our own products are as fast or faster. The same where they are not of
    float32, or not compiled.
    """
    run, training = settings.run, settings.training
    is_float32 = training.requested_precision == Precision.FLOAT32
    if sys.platform != "darwin" or run.backend != "numba" or not is_float32:
        return None
    from smallmind.kernels import blas, compiled
    from smallmind.kernels.timing import Contestant, turn

    model = settings.model
    rows = min(run.batch_size * model.block_size, MOST_ROWS)
    a = np.ones((rows, model.n_embd), np.float32)
    b = np.ones((model.n_embd, model.hidden_size), np.float32)
    out = np.empty((rows, model.hidden_size), np.float32)
    with activity.doing("Timing products", usual=True):
        use_threads(run)
        own, of_blas = (
            min(turn(Contestant(functools.partial(kernels.matmul, out, a, b)), 0.0, 1 + TRIES))
            for kernels in (compiled, blas)
        )
    return "blas" if WORTH * of_blas < own else "numba"

"""Tests. Imported before NumPy, whose BLAS reads its number of threads only then."""

import os

# Threads of two processes that share their cores wait for each other in every product.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

"""Kernels, in plain NumPy and compiled with Numba."""

from smallmind.checks import environment_number

environment_number("NUMBA_NUM_THREADS", 1)  # Numba reads it when a kernel's module imports it

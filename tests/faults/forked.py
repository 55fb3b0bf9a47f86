"""Runs a module of faults whose children are made by fork, in a process of its own."""

import sys

from tests.programs import printed_by


def counts(module, directory, what, number=0):
    """The numbers that python -m tests.faults.MODULE DIRECTORY WHAT NUMBER prints."""
    words = [sys.executable, "-m", f"tests.faults.{module}", str(directory), what, str(number)]
    return tuple(map(int, printed_by(words, OPENBLAS_NUM_THREADS="1").split()))

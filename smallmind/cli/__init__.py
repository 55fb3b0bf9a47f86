"""The command line: a thin caller of the library."""

from smallmind.cli.program import main

__all__ = ["main"]

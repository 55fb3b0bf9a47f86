"""Measurements. Tests assert, these measure: `python -m bench`."""

"""Losses that training minimises: each is a file, and a line in `parts.LOSSES`."""

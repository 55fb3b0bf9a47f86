"""Models for other programs, and theirs for this one: a format per file, listed in `parts`."""

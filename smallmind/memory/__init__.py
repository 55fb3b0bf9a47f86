"""A pool of reusable arrays, and how much memory is used and available."""

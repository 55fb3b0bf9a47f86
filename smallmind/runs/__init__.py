"""A run on disk: create, open, resume, load and verify it."""

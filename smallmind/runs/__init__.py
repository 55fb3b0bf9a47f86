"""A run on disk: created, opened, resumed, verified."""

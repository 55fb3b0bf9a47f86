"""Writes text with a model: one token after the other, for one text or many at once."""

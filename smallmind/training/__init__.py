"""The loop that trains a model, and what it leaves on disk."""

"""One training step in several libraries: same weights, same batches, same optimizer."""

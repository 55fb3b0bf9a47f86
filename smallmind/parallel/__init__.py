"""Data parallel training: several processes, called ranks, that share the batches of a run."""

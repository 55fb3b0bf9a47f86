"""Measurements that need a clone: `python -m bench`."""

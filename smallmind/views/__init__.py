"""Runs seen from outside: read while they train, without a lock, and never written to."""

"""Faults of disk, power, process and foreign files, injected one after another."""

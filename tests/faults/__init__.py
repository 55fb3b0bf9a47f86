"""Injected faults: disks, power, signals, consoles and malformed files."""

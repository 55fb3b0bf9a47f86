"""Contestants of commands that the package does not have, each in a process of its own."""

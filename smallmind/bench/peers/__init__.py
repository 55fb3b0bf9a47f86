"""Contestants of `bench step`, each in a process of its own; they answer commands."""

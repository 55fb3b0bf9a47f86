"""Forecasts of a run: its memory, time, compiling and loss, before it has been trained."""

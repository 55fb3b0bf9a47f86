"""Optimizers, learning-rate schedules, gradient clipping and loss scaling."""

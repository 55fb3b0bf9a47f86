"""The loop that trains a model, and everything around it: state, evaluation, health, memory."""

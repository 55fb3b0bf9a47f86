"""Tasks that show what a model can do: pairs of sentences, choices, answers word for word."""

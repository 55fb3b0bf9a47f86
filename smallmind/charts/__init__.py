"""Curves and their drawings, whoever has them: a run, a page, a notebook."""

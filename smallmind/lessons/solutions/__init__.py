"""Solutions of the exercises, a file for each page with exercises, a cell for each of them.

`smallmind lessons 3 --solutions` writes a copy of a lesson with its solutions in their places.
"""

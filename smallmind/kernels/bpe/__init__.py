"""Byte-pair encoding (Sennrich et al. 2016) of bytes: splitting a text, learning merges, merging.

`reference` says the same in plain Python.
"""

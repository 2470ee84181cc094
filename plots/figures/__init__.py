"""Figures of runs as PDF and PNG files, a function per kind of figure.

Not here: which runs belong together (`plots/run_sets.py`).
"""

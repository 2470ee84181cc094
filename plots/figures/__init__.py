"""Figures of runs as PDF, PNG and SVG files: declared (`declared.py`), valued (`rows.py`) and drawn (`chart.py`).

Not here: which runs belong together (`plots/run_sets.py`).
"""

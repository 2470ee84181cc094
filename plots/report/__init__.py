"""The report: every finished run on one HTML page that works offline.

Not here: statistics (`plots/stats.py`).
"""

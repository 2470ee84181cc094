"""Tables of runs, next to published ones where a paper has them, as Markdown, LaTeX and CSV.

Not here: statistics (`plots/stats.py`).
"""

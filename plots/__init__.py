"""Tables and figures: they read `runs/` and the published figures, and nothing else.

Not here yet: tables and figures over many runs. A run's own pictures are its task's (`evals/heatmap.py`).
"""

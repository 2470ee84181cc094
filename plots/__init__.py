"""Tables, figures and a report over many runs, from what stands in their folders; no model is loaded.

Not here: a single run's own pictures, which are its task's (`evals/tasks/needle/heatmap.py`).
"""

"""Studies without a model: what a variant would cost on other hardware, what a cache would have caught.

Not here: measurements, which are tasks (`evals/tasks/latency.py`).
"""

"""Studies without a model: what a variant would cost on other hardware, how much a cache would have saved.

Not here: measurements, which are tasks (`tasks/latency.py`).
"""

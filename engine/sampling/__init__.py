"""How an answer's tokens are chosen: the likeliest, or drawn.

Not here: the steps (`engine/batch.py`).
"""

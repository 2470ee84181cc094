"""Methods that drop tokens for good. What most of them are made of: `methods/scorers.py`, `allocators.py`.

Not here: what all methods share (`methods/base.py`), methods that keep every token (`methods/retrieving`).
"""

"""Rules of the methods in `methods/ranking`, a file for each.

Not here: what all methods share (`methods/rules/base.py`).
"""

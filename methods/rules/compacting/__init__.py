"""Rules of compacting methods.

Not here: the methods (`methods/compacting`).
"""

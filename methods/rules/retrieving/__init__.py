"""Rules of methods that keep every token and fetch some.

Not here: the methods (`methods/retrieving`).
"""

"""Methods that put a few keys and values of their own making in the place of the prompt's.

Not here: what all methods share (`methods/base.py`), methods that keep tokens as they are (`methods/dropping`).
"""

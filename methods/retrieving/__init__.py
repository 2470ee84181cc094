"""Methods that keep every token on the host and fetch, at each step, those that the query asks for.

Not here: what all methods share (`methods/base.py`), methods that drop tokens (`methods/dropping`).
"""

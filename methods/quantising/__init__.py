"""Methods that keep every token and make it smaller: codes of a few bits in place of numbers.

Not here: methods that drop or fetch tokens (`methods/dropping`, `methods/retrieving`).
"""

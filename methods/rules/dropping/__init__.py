"""Rules of methods that drop tokens.

Not here: the methods (`methods/dropping`).
"""

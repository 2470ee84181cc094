"""Rules of the methods in `methods/decoding`, a file for each, and the schedule that all of them share.

Not here: rules of methods that compress a prompt.
"""

"""Samples with several turns, as tasks write them.

Not here: how turns become tokens and are asked (`evals/turns`).
"""

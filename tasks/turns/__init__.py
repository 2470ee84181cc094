"""Samples with several turns, as tasks write them.

Not here: how turns are asked (`evals/batch/answers.py`).
"""

"""A context that is compressed once and asked many times: feeds of several tokens, answers, and the way back.

Not here: which tokens are fed, and what is done with answers (`evals/batch/answers.py`).
"""

"""SCBench's rules: what an answer is worth (`scores.py`, `functions.py`, `kvzip.py`), how turns read (`prompts.py`).

Not here: rows, generators and the conversation itself (the task), turns in the engine.
"""

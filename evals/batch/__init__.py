"""One batch: cells that answer a sample after one pass over its prompt.

`reading.py` reads the prompt and builds a row for each cell; the rows answer by `answers.py`. What a cell gives is a
`Reply` (`reply.py`).

Not here: which cells share a pass, and what happens where memory runs out (`evals/answer.py`).
"""

"""Benchmarks: what is asked, where samples come from, and what an answer is worth; a file or folder per benchmark.

`base.py` has the interface, `prompt.py` turns a sample into tokens, `rows.py`, `texts.py` and `sources.py` read data.

Not here: the loop over samples (`evals/loop.py`), and what is kept of a run (`results`).
"""

from kvbench.engine.terminal import refuse_without_packages

refuse_without_packages()

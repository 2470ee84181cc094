"""Instructions in a system prompt that gets compressed: are they followed, and can they be got out?

`checks.py` says whether an answer follows an instruction (IFEval's 25 types), in the worker of `grade.py`; `leakage.py`
how much of a system prompt an answer repeats; `task.py` asks.

Not here: turns in the engine, figures.
"""

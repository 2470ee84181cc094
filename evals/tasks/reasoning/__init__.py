"""Reasoning tasks: short questions, long answers, and the graders that judge them (`math500`, `aime`, thinking GSM8K).

`judge.py` grades in a worker process with a hard limit; `grade.py` is what runs in there, `rkv_*.py` and `latex.py`
one of its graders. `draws.py` has pass@1 and pass@k, `task.py` what the tasks share.

Not here: sampling and budgets of an answer (the engine), GSM8K with exemplars (`evals/tasks/gsm8k.py`).
"""

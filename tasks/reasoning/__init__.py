"""Reasoning tasks: short questions, long answers, and the graders that judge them (`math500`, `aime`, thinking GSM8K).

`judge.py` grades in a worker process with a hard limit; `grade.py` is what runs in there, `rkv_*.py` and `latex.py`
one of its graders. `answers.py` has prompts, room and grades, `task.py` a task of one file.

Not here: sampling and budgets of an answer (the engine), pass@k (`results`), GSM8K with exemplars
(`tasks/gsm8k.py`).
"""

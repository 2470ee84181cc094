"""LongProc: procedures that are to be written out in full; `scores.py` judges, `countdown.py` has one task's search.

Not here: its tasks that need web pages, run generated programs, or whose data are not published with the others.
"""

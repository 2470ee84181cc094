"""LongProc: procedures that are to be written out in full; `scores.py` judges, `countdown.py` has one task's search."""

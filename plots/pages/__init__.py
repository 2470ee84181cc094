"""Pages of docs/ that are made of kept answers alone: `register.py` writes docs/register.md.

Not here: older pages (`plots/findings.py`, `plots/cited.py`), tables of any runs (`plots/tables`).
"""

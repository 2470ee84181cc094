"""Kernels that work for the rows of several variants at once, on a GPU: to append, search, and fetch for all of them.

`collisions.py` is the search that stays on the host, a row at a time: hash tables are larger than what they find.

Not here: attention over what they find (`kernels/select_attend.py`).
"""

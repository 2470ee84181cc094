"""Kernels that work for the rows of several variants at once, on a GPU: to append, search, and fetch for all of them.

Not here: attention over what they find (`kernels/select_attend.py`).
"""

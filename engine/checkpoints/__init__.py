"""The way from a name, a folder or a file to a loaded model: looking up, checking, converting, loading.

Not here: the model while it runs (`engine/model.py`).
"""

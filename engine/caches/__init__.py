"""What lies on the device of tokens that were fetched before: whole blocks, or the tokens of the last steps.

Not here: bytes (`engine/books/meter.py`).
"""

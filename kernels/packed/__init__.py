"""Codes in place of numbers: packing them, and attention that reads them packed.

Not here: when what is packed (`engine/caches/quantized.py`, `methods/quantising`).
"""

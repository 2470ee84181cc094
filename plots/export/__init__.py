"""Finished runs in formats of others: Parquet and CSV, Every Eval Ever's records, cards of the MBE protocol.

Not here: what the columns mean (`results/keys.py`), tables for people (`kvbench table`).
"""

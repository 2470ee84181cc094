"""What was counted and timed: entries of the ledger, the meter that makes them, spans of time.

Not here: what is moved (`engine/layouts`).
"""

"""Samples with several turns: as tokens, and asked.

Not here: the tasks that have them (`tasks`), how rows read and answer (`engine/turns`).
"""

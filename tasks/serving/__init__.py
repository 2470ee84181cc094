"""Requests to a serving engine: the task (`task.py`), traces from files (`traces.py`), prompts that share text
(`prompts.py`).

Not here: the engine and what is measured (`serving/`).
"""

"""RULER: the task and its generators."""

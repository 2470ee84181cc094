"""LongBench: the task, its scores and an embedded set in its shape."""

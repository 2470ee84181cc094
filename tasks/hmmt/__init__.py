"""HMMT: 30 competition problems a set; the task alone, all else is in `tasks/reasoning`."""

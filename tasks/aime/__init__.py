"""AIME: 30 competition problems a year; the task alone, all else is in `tasks/reasoning`."""

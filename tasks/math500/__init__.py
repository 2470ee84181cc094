"""MATH-500: competition problems; the task alone, all else is in `tasks/reasoning`."""

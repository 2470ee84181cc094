"""GPQA Diamond: hard questions with four choices; the task alone, all else is in `tasks/reasoning`."""

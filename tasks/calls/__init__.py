"""Calls of tools in answers, for all tasks that ask for them."""

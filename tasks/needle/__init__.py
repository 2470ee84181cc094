"""Needle in a haystack: the task, its haystacks and its map."""

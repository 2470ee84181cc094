"""Oolong: counts over all lines of a long list."""

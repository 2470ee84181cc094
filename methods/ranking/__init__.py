"""Dropping methods that only rank a prompt's tokens, a file for each. What they share is `ScoringMethod`.

Not here: methods that watch, evict or divide in ways of their own (`methods/dropping`).
"""

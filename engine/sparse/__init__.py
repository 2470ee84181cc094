"""Prefills that compute a part of the causal attention: one file for each rule of what is computed."""

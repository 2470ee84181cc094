"""Passes over a prompt that come after its prefill."""

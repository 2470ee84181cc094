"""The machine that runs a model with a compressed cache and keeps the books.

Not here: which tokens to keep or fetch (`methods`), what is asked and how answers are scored (`evals`), fast ops
(`kernels`). The engine is handed method objects and knows none of them by name.
"""

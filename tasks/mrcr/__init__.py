"""MRCR: the i-th of several alike pieces out of a long dialogue, word for word."""

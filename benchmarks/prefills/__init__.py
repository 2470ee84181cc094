"""Sparse prefills: their times on a CPU, their launches on a pretended device."""

"""What methods have to know of a model before they see a prompt: measured once on a text, kept in a file for all runs.

A kind of calibration is a file here and a line in `kinds.py`; a method asks for one of its arrays as an observation
(`known.py`), and reads it where it reads those of the prefill.

Not here: what a method makes of it; the command, `kvbench calibrate`.
"""

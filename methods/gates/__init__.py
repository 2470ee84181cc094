"""Gates: small networks, one for each layer, that foretell from the attention's input what each token will be worth.

A gate is a file that somebody trained for one model. It is believed by what stands in it: its kind, the model's digest,
the shapes of its weights.

Not here: what a method makes of the numbers (`methods/ranking/kvzap.py`, `methods/ranking/fastkvzip.py`); training
(`methods/gates/training.py` has the steps, `kvbench calibrate gate` is the command).
"""

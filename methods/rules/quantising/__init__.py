"""What each quantising method may be asked for, without torch.

Not here: the methods (`methods/quantising`).
"""

"""A second engine, of pages: the same method files over blocks that come from a pool and go back to it.

It stands for a serving engine, whose memory belongs to somebody else: a method is told from the same values where its
tokens go, and finds the same `Layer` there. What differs is one memory and one home. On a CPU, in plain torch.

Not here: speed, GPUs, several requests in one step, layouts without pages (heads with different counts, codes).
"""

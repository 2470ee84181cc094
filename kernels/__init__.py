"""Fast ops, one file each: a plain reference, its fast paths, and one public function that picks between them.

Fast paths are C++ on a CPU (`native/`, compiled by `build.py`) and Triton on a GPU (`jit.py`); without them, torch.

Not here: anything that knows a method or a model.
"""

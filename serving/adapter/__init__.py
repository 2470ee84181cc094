"""All that knows vLLM, of the version in `VERSION` alone: attention, blocks, workers, the front end.

What is most likely to move with a version: `customize_spec` (temporary, as vLLM says), the order in which specs
register, the signatures of `SingleTypeKVCacheManager`, and the model runner's `input_batch`.

Not here: what a method does (`serving/reader.py`).
"""

VERSION = "0.32."


def known(version: str) -> bool:
    """Whether this version of vLLM is the one that was tested."""
    return version.startswith(VERSION)

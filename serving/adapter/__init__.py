"""All that knows vLLM: attention, blocks, workers, the front end; and which vLLM that is (`versions`).

What is most likely to move with a version: `customize_spec` (temporary, as vLLM says), the order in which specs
register, the signatures of `SingleTypeKVCacheManager`, and the model runner's `input_batch`.

Not here: what a method does (`serving/reader.py`).
"""

"""vLLM's attention on a GPU by FlashInfer, with a method inside. Nobody has run it on one.

FlashInfer's wrappers are planned for a step, all layers alike, so that no layer can ask for pages of its own:
`rung=pages` is refused.

Not here: what all backends share (`serving/adapter/attention.py`).
"""
# pyright: reportMissingImports=false

from typing import ClassVar

from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadataBuilder

from kvbench.serving.adapter.attention import Attending, Ours, Planning


class Builder(Planning, FlashInferMetadataBuilder): ...


class Impl(Attending, FlashInferImpl):
    reads_tables: ClassVar[bool] = False


class Backend(Ours, FlashInferBackend):
    parts = Impl, Builder

"""vLLM's attention on a GPU by FlashAttention or by its Triton kernel, with a method inside. Nobody has run it on one:
tests have kernels of their own on a CPU in place of these.

Not here: FlashInfer (`serving/adapter/infer.py`), what all backends share (`serving/adapter/attention.py`).
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from kvbench.serving.adapter.attention import Attending, Ours, Planning


def of_one_head(lengths: Tensor, tables: Tensor) -> dict[str, Any]:
    """What the metadata of both say of requests with one query and one KV head each."""
    n = len(lengths)
    return {
        "num_actual_tokens": n, "max_query_len": 1, "max_seq_len": int(lengths.max()), "seq_lens": lengths,
        "query_start_loc": torch.arange(n + 1, dtype=torch.int32, device=lengths.device), "block_table": tables,
        "slot_mapping": lengths, "causal": True,
    }  # fmt: skip


class FlashBuilder(Planning, FlashAttentionMetadataBuilder):
    supports_update_block_table = False  # a copy for another group of layers would have this one's turns


class FlashImpl(Attending, FlashAttentionImpl):
    def alone(self, queries: Tensor, lengths: Tensor, tables: Tensor) -> Any:
        return FlashAttentionMetadata(**of_one_head(lengths, tables))


class FlashBackend(Ours, FlashAttentionBackend):
    parts = FlashImpl, FlashBuilder


class TritonBuilder(Planning, TritonAttentionMetadataBuilder): ...


class TritonImpl(Attending, TritonAttentionImpl):
    def alone(self, queries: Tensor, lengths: Tensor, tables: Tensor) -> Any:
        segments = dict.fromkeys(("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"))
        never = {"seq_threshold_3D": 0, "num_par_softmax_segments": 0}  # its kernel that divides a request is not asked
        return TritonAttentionMetadata(**of_one_head(lengths, tables), **never, **segments)


class TritonBackend(Ours, TritonAttentionBackend):
    parts = TritonImpl, TritonBuilder

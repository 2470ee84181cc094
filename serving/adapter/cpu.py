"""vLLM's attention on a CPU, with a method inside.

Not here: what all backends share (`serving/adapter/attention.py`).
"""
# pyright: reportMissingImports=false

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvbench.serving.adapter.attention import Attending, Ours, Planning
from kvbench.serving.pages import Layout, vec


class Builder(Planning, CPUAttentionMetadataBuilder): ...


class Impl(Attending, CPUAttentionBackendImpl):
    def alone(self, queries: Tensor, lengths: Tensor, tables: Tensor) -> Any:
        n, heads, width = queries.shape
        starts = torch.arange(n + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=n, num_heads=heads, num_kv_heads=1, head_dim=width, seq_lens=lengths, dtype=queries.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=False,
            dynamic_causal=None, kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip
        return CPUAttentionMetadata(n, 1, starts, int(lengths.max()), lengths, tables, lengths, plan)


class Backend(Ours, CPUAttentionBackend):
    parts = Impl, Builder
    layout: ClassVar[Layout] = staticmethod(vec)

    @classmethod
    def unknown_layout(cls, layer: Any) -> str | None:
        isa = getattr(layer, "isa", None)
        return None if isa == "vec" else f"{isa}, of which only vec (dtype=float32) is known"

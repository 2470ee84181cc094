"""Kernels that vLLM has on a GPU alone, in plain torch: attention over a table of blocks, and writing to slots.

They take what FlashAttention's take, so that tables, lengths and slots that reach them are proven without a GPU.
"""

from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, block_table: Tensor,
    softmax_scale: float, causal: bool, max_seqlen_q: int, max_seqlen_k: int, **_: Any,
) -> Tensor:  # fmt: skip
    """q (tokens, h, d), k and v (blocks, block, h_kv, d): a request's last tokens over all of its own."""
    assert causal and int(seqused_k.max()) <= max_seqlen_k
    block, g = k.shape[1], q.shape[1] // k.shape[2]
    for i, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        n, m = int(seqused_k[i]), stop - start
        assert m <= max_seqlen_q
        blocks = block_table[i, : -(-n // block)].long()
        keys, values = (x[blocks].flatten(0, 1)[:n].repeat_interleave(g, 1).transpose(0, 1).float() for x in (k, v))
        logits = q[start:stop].transpose(0, 1).float() @ keys.mT * softmax_scale
        seen = torch.ones(m, n, dtype=torch.bool, device=q.device).tril(n - m)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:stop] = (weights @ values).transpose(0, 1).to(out.dtype)
    return out


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *_: Any
) -> None:
    """K and V (tokens, h_kv, d) into slots of the caches (blocks, block, h_kv, d); those below 0 are nobody's."""
    there = slot_mapping >= 0
    block, place = slot_mapping[there] // key_cache.shape[1], slot_mapping[there] % key_cache.shape[1]
    key_cache[block, place], value_cache[block, place] = (x[: len(slot_mapping)][there] for x in (key, value))


class Wrapper:
    """FlashInfer's wrappers: planned once a step, and run by every layer."""

    is_cuda_graph_enabled = False

    def __init__(self, workspace: Tensor, kv_layout: str, **_: Any) -> None:
        self.kv_layout = kv_layout

    def plan(self, **said: Any) -> None:
        self.said = {name.removeprefix("paged_kv_"): value for name, value in said.items()}
        self._sm_scale, self._window_left = said["sm_scale"], said["window_left"]
        self._logits_soft_cap, self._causal = said["logits_soft_cap"] or 0.0, said.get("causal", True)

    def run(self, query: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor, **_: Any) -> Tensor:
        said, at = self.said, self.said["indptr"].tolist()
        spans = [range(start, stop) for start, stop in pairwise(at)]
        tables = torch.nn.utils.rnn.pad_sequence([said["indices"][[*span]] for span in spans], batch_first=True)
        lengths = torch.tensor([(len(span) - 1) * said["page_size"] for span in spans]) + said["last_page_len"]
        k, v = (x.transpose(1, 2) if self.kv_layout == "HND" else x for x in kv)
        starts = said.get("qo_indptr", torch.arange(len(at)))
        return flash_attn_varlen_func(
            query, k, v, out=out, cu_seqlens_q=starts, seqused_k=lengths, block_table=tables,
            softmax_scale=self._sm_scale, causal=self._causal, max_seqlen_q=len(query), max_seqlen_k=int(lengths.max()),
        )  # fmt: skip


class CopyIndices:
    """vLLM's kernel that writes all requests' tables behind each other, for FlashInfer."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(indices: Tensor, tables: Tensor, stride: int, starts: Tensor, **_: Any) -> None:
            assert stride == tables.stride(0)
            for i, (start, stop) in enumerate(pairwise(starts.tolist())):
                if i < grid[0]:
                    indices[start:stop] = tables[i, : stop - start]

        return launch


def flashinfer() -> dict[str, ModuleType]:
    """Modules that stand in for the package `flashinfer`."""
    package = ModuleType("flashinfer")
    package.__spec__, package.__path__ = ModuleSpec("flashinfer", None), []
    wanted = {
        "": ("BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
             "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"),
        ".decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
        ".prefill": ("trtllm_batch_context_with_kv_cache",),
        ".utils": ("FP4Tensor",),
    }  # fmt: skip
    made = {"flashinfer": package} | {f"flashinfer{name}": ModuleType(f"flashinfer{name}") for name in wanted if name}
    for name, names in wanted.items():
        for one in names:
            setattr(made[f"flashinfer{name}"], one, type(one, (), {}))
    package.BatchPrefillWithPagedKVCacheWrapper = type("Prefill", (Wrapper,), {})  # type: ignore[attr-defined]
    package.BatchDecodeWithPagedKVCacheWrapper = type("Decode", (Wrapper,), {})  # type: ignore[attr-defined]
    package.get_seq_lens = lambda *_: None  # type: ignore[attr-defined]
    for one in ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"):  # vLLM 0.33 asks
        setattr(made["flashinfer.utils"], one, lambda *_: 0)
    return made

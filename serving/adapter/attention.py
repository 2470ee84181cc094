"""vLLM's attention on a CPU with a method inside: `Backend`, its `Builder` of a step and its `Impl` of a layer.

Where no desk stands (`serving/adapter/worker.py`), such as while vLLM warms up, all is vLLM's own.

Not here: which blocks are free (`serving/adapter/blocks.py`).
"""
# pyright: reportMissingImports=false

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvbench.serving.adapter.blocks import own_spec
from kvbench.serving.order import DROPPING, PAGES, Note, Order
from kvbench.serving.pagetable import tables_of
from kvbench.serving.reader import Asked, Desk, Turn, folded


class Builder(CPUAttentionMetadataBuilder):
    """Plans each step once: what each request does, and on the dropping rung where its tokens lie."""

    desk: Desk | None = None
    runner: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        if self.desk is None:
            return super().build(common_prefix_len, common, fast_build)
        turns = self.turns(self.desk, common)
        if self.desk.order.rung == DROPPING:
            common = moved(common, turns)
        made = super().build(common_prefix_len, common, fast_build)
        made.turns, made.desk = turns, self.desk
        return made

    def turns(self, desk: Desk, common: Any) -> list[Turn]:
        names = self.runner.input_batch.req_ids[: common.num_reqs]
        requests = {name: self.runner.requests[name] for name in names}
        room = self.runner.max_model_len if desk.order.chains else None
        who = [
            Asked(name, one.prompt_token_ids, room or one.sampling_params.max_tokens, Note.of(one.sampling_params))
            for name, one in requests.items()
        ]
        starts, seen = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        return desk.turns(who, starts, seen, common.block_table_tensor, self.runner.requests)


def moved(common: Any, turns: Sequence[Turn]) -> Any:
    """The step as vLLM is to see it: lengths, tables and slots of what survived. Positions stay the true ones."""
    made = copy.copy(common)
    made.seq_lens, made.slot_mapping = common.seq_lens.clone(), common.slot_mapping.clone()
    made.block_table_tensor = common.block_table_tensor.clone()
    for i, turn in enumerate(turns):
        if turn.slots is None:
            continue
        table = turn.reader.trace.table
        made.block_table_tensor[i, : len(table)] = table
        made.slot_mapping[turn.rows] = turn.slots
        made.seq_lens[i] = turn.n_attended
    made.max_seq_len = int(made.seq_lens.max())
    return made


class Impl(CPUAttentionBackendImpl):
    """A layer."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        found = get_forward_context().attn_metadata
        own = found[layer.layer_name] if isinstance(found, dict) else found
        if hasattr(own, "turns"):  # vLLM hands on the slots that the step had before the builder
            slot_mapping = own.slot_mapping
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
    ) -> Tensor:  # fmt: skip
        def usual() -> Tensor:
            return super(Impl, self).forward(layer, query, key, value, kv_cache, attn_metadata, output)

        if not hasattr(attn_metadata, "turns"):
            return usual()
        turns: list[Turn] = attn_metadata.turns
        desk: Desk = attn_metadata.desk
        at = number_of(layer.layer_name)
        alone = [turn.is_step and not turn.reader.is_still for turn in turns]
        if not all(alone):
            usual()
        if desk.order.rung == PAGES and (steps := [turn for turn in turns if turn.is_step]):
            self.attend_pages(desk, steps, at, query, key, value, kv_cache, output)
        for turn in turns:
            if turn.is_step and turn.reader.is_still:
                turn.reader.count(at)
            elif not (turn.is_step and desk.order.rung == PAGES):
                desk.read(at, turn, *(x[turn.rows] for x in (query, key, value, output)))
        return output

    def attend_pages(
        self, desk: Desk, turns: Sequence[Turn], at: int, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        """vLLM's kernel over the pages that each request's KV heads attend to: each is a request of one head to it."""
        blocks, h_kv, block, width = cache.shape
        found = []
        for turn in turns:
            one = [folded(x[turn.rows]) for x in (q, k, v)]
            found.append(tables_of(turn.reader.parts(at, *one), turn.reader.trace.table, h_kv, block))
        rows = [turn.rows.start for turn in turns]
        most = max(table.shape[1] for table, _ in found)
        tables = torch.cat([torch.nn.functional.pad(table, (0, most - table.shape[1])) for table, _ in found])
        lengths = torch.cat([n for _, n in found]).int()
        n, heads = len(tables), torch.arange(h_kv).repeat(len(turns)).unsqueeze(1)
        alone = cache.view(blocks * h_kv, 1, 2 * block, width // 2).chunk(2, 2)
        queries = q[rows].reshape(n, -1, width // 2)
        made, starts = torch.empty_like(queries), torch.arange(n + 1, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=n, num_heads=queries.shape[1], num_kv_heads=1, head_dim=width // 2, seq_lens=lengths,
            dtype=q.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa="vec",
            enable_kv_split=False, dynamic_causal=None, kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query=queries, key_cache=alone[0], value_cache=alone[1], output=made, query_start_loc=starts,
            seq_lens=lengths, scale=self.scale, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=(tables * h_kv + heads).int(), softcap=self.logits_soft_cap, scheduler_metadata=plan,
            s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0, kv_cache_dtype=self.kv_cache_dtype,
        )  # fmt: skip
        out[rows] = made.view(len(turns), -1, width // 2).view(len(turns), *out.shape[1:])
        for turn in turns:
            turn.reader.behind(at, folded(out[turn.rows].view(1, -1, width // 2)))


class Backend(CPUAttentionBackend):
    """The backend in place of vLLM's own."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        order = Order.given()
        return spec if order is None else own_spec(spec)

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


def number_of(name: str) -> int:
    """The number of a layer such as `model.layers.3.self_attn.attn`."""
    return int(name.split(".layers.")[1].split(".")[0])

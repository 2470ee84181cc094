"""vLLM's attention with a method inside, whichever kernel it has: what `Planning` adds to a backend's builder of a
step, `Attending` to its layer, and `Ours` to the backend itself.

Where no desk stands (`serving/adapter/worker.py`), such as while vLLM warms up, all is vLLM's own.

Not here: a backend's own (`serving/adapter/cpu.py`, `gpu.py`, `infer.py`), which one is used (`backends.py`), which
blocks are free (`blocks.py`).
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from kvbench.serving.adapter.blocks import own_spec
from kvbench.serving.order import DROPPING, PAGES, Note, Order
from kvbench.serving.pages import Layout, beside
from kvbench.serving.pagetable import of_one_head
from kvbench.serving.reader import Asked, Desk, Turn, folded


class Planning:
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
        # The upper bound is exact but for drafts, which are refused; what lies on an accelerator would be waited for.
        starts, seen = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
        return desk.turns(who, starts, seen, common.block_table_tensor, self.runner.requests)


def moved(common: Any, turns: Sequence[Turn]) -> Any:
    """The step as vLLM is to see it: lengths, tables and slots of what survived. Positions stay the true ones."""
    made = copy.copy(common)
    made.seq_lens, made.slot_mapping = common.seq_lens.clone(), common.slot_mapping.clone()
    made.block_table_tensor = common.block_table_tensor.clone()
    made.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound.clone()  # FlashInfer plans by it
    for i, turn in enumerate(turns):
        if turn.slots is None:
            continue
        table = turn.reader.trace.table
        made.block_table_tensor[i, : len(table)] = table
        made.slot_mapping[turn.rows] = turn.slots
        made.seq_lens[i] = made.seq_lens_cpu_upper_bound[i] = turn.n_attended
    made.max_seq_len = int(made.seq_lens_cpu_upper_bound.max())
    return made


class Attending:
    """A layer."""

    reads_tables: ClassVar[bool] = True  # whether its kernel can be asked for heads by themselves (`alone`)

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
            return super(Attending, self).forward(layer, query, key, value, kv_cache, attn_metadata, output)

        if not hasattr(attn_metadata, "turns"):
            return usual()
        turns: list[Turn] = attn_metadata.turns
        desk: Desk = attn_metadata.desk
        at = number_of(layer.layer_name)
        alone = [turn.is_step and not turn.reader.is_still for turn in turns]
        if not all(alone):
            usual()
        if desk.order.rung == PAGES and (steps := [turn for turn in turns if turn.is_step]):
            self.attend_pages(layer, steps, at, query, key, value, kv_cache, output)
        for turn in turns:
            if turn.is_step and turn.reader.is_still:
                turn.reader.count(at)
            elif not (turn.is_step and desk.order.rung == PAGES):
                desk.read(at, turn, *(x[turn.rows] for x in (query, key, value, output)))
        return output

    def attend_pages(
        self, layer: Any, turns: Sequence[Turn], at: int, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, out: Tensor
    ) -> None:
        """vLLM's kernel over the pages that each request's KV heads attend to: each is a request of one head to it."""
        chosen = []
        for turn in turns:
            one = [folded(x[turn.rows]) for x in (q, k, v)]
            chosen.append((turn.reader.parts(at, *one), turn.reader.trace.table))
        blocks, tables, lengths = of_one_head(chosen, cache)
        rows, width = [turn.rows.start for turn in turns], cache.shape[3] // 2
        queries = q[rows].reshape(len(tables), -1, width)
        made = torch.empty_like(queries)
        one = copy.copy(self)
        one.num_heads, one.num_kv_heads = queries.shape[1], 1
        plan = one.alone(queries, lengths, tables)
        super(Attending, one).forward(layer, queries, queries, queries, blocks, plan, made)
        out[rows] = made.view(len(turns), *out.shape[1:])
        for turn in turns:
            turn.reader.behind(at, folded(out[turn.rows].view(1, -1, width)))

    def alone(self, queries: Tensor, lengths: Tensor, tables: Tensor) -> Any:
        """The backend's metadata of requests with one query and one KV head each."""
        raise NotImplementedError


class Ours:
    """A backend in place of vLLM's own."""

    parts: ClassVar[tuple[type[Attending], type[Planning]]]  # its layer and its builder
    layout: ClassVar[Layout] = staticmethod(beside)
    supports_kv_cache_update_bypass = False  # some models would write to pages by themselves, where tokens lay before

    @classmethod
    def get_impl_cls(cls) -> type[Attending]:
        return cls.parts[0]

    @classmethod
    def get_builder_cls(cls) -> type[Planning]:
        return cls.parts[1]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        spec = super().customize_spec(spec)
        return spec if Order.given() is None else own_spec(spec)

    @classmethod
    def unknown_layout(cls, layer: Any) -> str | None:
        """What pages a layer lies in, where these are not known, and what is."""
        kind = layer.kv_cache_dtype
        return None if kind in ("auto", "float16", "bfloat16", "float32") else f"{kind}, of which codes are not known"


def number_of(name: str) -> int:
    """The number of a layer such as `model.layers.3.self_attn.attn`."""
    return int(name.split(".layers.")[1].split(".")[0])

"""The scheduler's side of the dropping rung: `DroppingManager` gives blocks back to vLLM's pool.

Worker and scheduler count with the same arithmetic (`Order.most_slots`), each for itself: nothing is sent between
them. The worker's table of blocks only grows, and leaves out what is free by itself.

Not here: what survives (`serving/reader.py`).
"""
# pyright: reportMissingImports=false

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvbench.serving.order import Order


class DroppingManager(FullAttentionManager):
    """Full attention's blocks until a prompt was read; those of what survives from then on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order = Order.given()
        assert order is not None, "a spec of ours without an order"
        if self.enable_caching:
            raise ValueError("rung=dropping writes over pages that prefix caching hands on; turn prefix caching off")
        self.order = order
        self.prompts: dict[str, int] = {}  # of requests that gave blocks back

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        n, s = processed_computed_tokens, num_prompt_tokens
        if s is None or request_id in self.prompts or n < s:
            return
        self.prompts[request_id] = s
        blocks = self.req_to_blocks[request_id]
        first, stay = -(-n // self.block_size), -(-self.order.most_slots(s, n) // self.block_size)
        gone = blocks[stay:first]
        del blocks[stay:first]
        self.block_pool.free_blocks(reversed(gone))

    def short(self, request_id: str, num_tokens: int) -> int:
        """Slots in place of tokens."""
        s = self.prompts.get(request_id)
        return num_tokens if s is None else self.order.most_slots(s, num_tokens)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        return super().get_num_blocks_to_allocate(request_id, self.short(request_id, num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        return super().allocate_new_blocks(request_id, self.short(request_id, num_tokens), num_tokens_main_model)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self.prompts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def free(self, request_id: str) -> None:
        self.prompts.pop(request_id, None)
        super().free(request_id)


@dataclass(frozen=True, kw_only=True)
class DroppingSpec(FullAttentionSpec):
    """Full attention's pages, of which some come back."""


def own_spec(spec: Any) -> Any:
    """The spec under which a layer's blocks are managed."""
    if type(spec) is not FullAttentionSpec:
        raise ValueError(f"layers of {type(spec).__name__} are not known to rung=dropping; use a model without them")
    return DroppingSpec(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})


def register_manager() -> None:
    KVCacheSpecRegistry._ensure_registered()  # vLLM registers its own only while nobody else has
    KVCacheSpecRegistry.register(DroppingSpec, DroppingManager, uniform_type_base_spec=FullAttentionSpec)

"""The scheduler's side: which of vLLM's blocks a request has, with vLLM's prefix cache and with chains of turns.

What the prefix cache hands on is what an exact prefill has read: blocks of prompts alone, and no more of them than
those whose queries the method can do without (`Order.most_shared`). On the dropping rung what survives moves, and the
prompt's blocks go back by vLLM's own count of who else holds them. With the prefix cache it moves to blocks of its own,
without it to the prompt's first ones.

Worker and scheduler count with the same arithmetic (`Order.most_slots`), each for itself: nothing that a worker finds
is waited for. The worker's table of blocks only grows, and leaves out what is free by itself.

Not here: what survives (`serving/reader.py`).
"""
# pyright: reportMissingImports=false

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import RequestStatus

from kvbench.engine.errors import ConfigError
from kvbench.serving.order import Note, Order


@dataclass
class Chain:
    """A conversation that is over for now: what its last turn left."""

    name: str  # of the request that left it
    tokens: list[int]  # that were read
    s_prompt: int  # of them exactly
    blocks: list[Any]
    owner: Any  # whose it is alone

    def begins(self, request: Any) -> bool:
        """Whether a request goes on from here."""
        n, ids = len(self.tokens), request.all_token_ids
        alike = n < len(ids) and ids[n - 1] == self.tokens[-1] and [*ids[:n]] == self.tokens
        return alike and self.owner == owner(request)


def owner(request: Any) -> Any:
    """What vLLM keeps prefixes of requests apart by, besides their tokens."""
    return request.cache_salt, request.lora_request


@dataclass
class Held:
    """What is known of a request's blocks."""

    s_prompt: int  # tokens that are read exactly
    going: slice | None = None  # of the blocks: those that go once the pass is over that ends the prompt, as planned
    is_placed: bool = False  # a later pass was planned: the request's blocks are those of what survives
    leaving: list[Any] = field(default_factory=list)  # blocks of the prompt, while a step in flight reads them
    chain: Chain | None = None  # that it goes on from


class Manager(FullAttentionManager):
    """Full attention's blocks until a prompt was read; on the dropping rung those of what survives from then on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        order = Order.given()
        assert order is not None, "a spec of ours without an order"
        self.order = order
        self.held: dict[str, Held] = {}

    def n_stay(self, held: Held, n_tokens: int) -> int:
        """Blocks of what survives of so many tokens."""
        n = self.order.most_slots(held.s_prompt, n_tokens) if self.order.moves(held.s_prompt) else n_tokens
        return -(-n // self.block_size)

    def ends(self, held: Held, n_tokens: int) -> bool:
        """Whether a pass up to so many tokens moves what survives."""
        return not held.is_placed and n_tokens >= held.s_prompt and self.order.moves(held.s_prompt)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Asked before each pass of a request is planned."""
        held = self.held[request_id]
        if held.going is not None:
            blocks = self.req_to_blocks[request_id]
            held.leaving, held.is_placed = blocks[held.going], True
            del blocks[held.going]
            held.going = None
        if held.leaving and processed_computed_tokens >= held.s_prompt:
            self.block_pool.free_blocks(reversed(held.leaving))
            held.leaving = []

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any], *args: Any, **kwargs: Any
    ) -> int:
        held = self.held[request_id]
        if held.chain is not None:
            return max(0, self.n_stay(held, num_tokens) - len(held.chain.blocks))
        stay = self.n_stay(held, num_tokens)
        n = stay * self.block_size if held.is_placed else num_tokens
        own = stay if self.enable_caching and self.ends(held, num_tokens) else 0
        return own + super().get_num_blocks_to_allocate(request_id, n, new_computed_blocks, *args, **kwargs)

    def add_local_computed_blocks(self, request_id: str, new_computed_blocks: Sequence[Any], *args: Any) -> None:
        held = self.held[request_id]
        if held.chain is None:
            return super().add_local_computed_blocks(request_id, new_computed_blocks, *args)
        held.is_placed = True
        self.req_to_blocks[request_id].extend(new_computed_blocks)  # the chain's, which end with it
        self.num_cached_block[request_id] = len(new_computed_blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        held = self.held[request_id]
        stay = self.n_stay(held, num_tokens)
        n = stay * self.block_size if held.is_placed else num_tokens
        made = super().allocate_new_blocks(request_id, n, num_tokens_main_model)
        if not self.ends(held, num_tokens):
            return made
        blocks = self.req_to_blocks[request_id]
        held.going = slice(0 if self.enable_caching else stay, len(blocks))
        own = self.block_pool.get_new_blocks(stay) if self.enable_caching else []
        if self.records_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in own)
        blocks.extend(own)
        return made + own

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Hand on the prompt's blocks alone: what follows has been made by a method."""
        held = self.held.get(request.request_id)
        if held is not None and not held.is_placed:
            super().cache_blocks(request, min(num_tokens, held.s_prompt), *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        held = self.held.pop(request_id, None)
        leaving = [] if held is None else held.leaving
        return leaving + super().pop_blocks_for_free(request_id)


class Blocks(KVCacheManager):
    """vLLM's account of blocks, which knows of methods and chains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        (self.manager,) = self.coordinator.single_type_managers
        self.chains: list[Chain] = []  # the oldest first

    @property
    def order(self) -> Order:
        return self.manager.order

    def s_prompt(self, request: Any) -> int:
        """Tokens that are read exactly: the prompt's, or those of the first turn."""
        return Note.of(request.sampling_params).s_prompt or request.num_prompt_tokens

    def get_computed_blocks(self, request: Any, *limits: Any) -> tuple[Any, ...]:
        held = self.manager.held[request.request_id] = Held(self.s_prompt(request))
        fits = [one for one in self.chains if one.begins(request)]
        if fits and not request.num_preemptions:
            held.chain = chain = max(fits, key=lambda one: len(one.tokens))
            held.s_prompt = chain.s_prompt
            return self.create_kv_cache_blocks((chain.blocks,)), len(chain.tokens), 0
        blocks, n, *rest = super().get_computed_blocks(request, *limits)
        if n > (most := self.order.most_shared(held.s_prompt)):
            k = most // self.manager.block_size
            blocks, n = (
                self.create_kv_cache_blocks(tuple([*group[:k]] for group in blocks.blocks)),
                k * self.manager.block_size,
            )
        return blocks, n, *rest

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        held = self.manager.held.setdefault(request.request_id, Held(self.s_prompt(request)))
        while (made := super().allocate_slots(request, *args, **kwargs)) is None:
            oldest = next((one for one in self.chains if one is not held.chain), None)
            if oldest is None:
                return None
            self.drop(oldest)
        if held.chain is not None:
            self.chains.remove(held.chain)
        if self.order.chains and request.status == RequestStatus.WAITING:
            chain = None if held.chain is None else held.chain.name
            Note(held.s_prompt, chain, [one.name for one in self.chains]).write(request.sampling_params)
        held.chain = None
        return made

    def drop(self, chain: Chain) -> None:
        self.chains.remove(chain)
        self.block_pool.free_blocks(reversed(chain.blocks))

    def drop_chains(self) -> None:
        while self.chains:
            self.drop(self.chains[0])

    def reset_prefix_cache(self) -> bool:
        self.drop_chains()
        return super().reset_prefix_cache()

    def free(self, request: Any) -> None:
        held = self.manager.held.get(request.request_id)
        is_over = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        n = request.num_computed_tokens
        if held is None or not (self.order.chains and is_over and n > held.s_prompt):
            return super().free(request)
        self.block_pool.free_blocks(reversed(held.leaving))
        held.leaving = []
        blocks = self.manager.pop_blocks_for_free(request.request_id)
        ids = [*request.all_token_ids[:n]]
        self.chains.append(Chain(request.request_id, ids, held.s_prompt, blocks, owner(request)))
        while len(self.chains) > self.order.chains:
            self.drop(self.chains[0])


@dataclass(frozen=True, kw_only=True)
class Spec(FullAttentionSpec):
    """Full attention's pages, of which some come back."""

    def max_num_blocks_per_req(self, *args: Any, **kwargs: Any) -> int:
        """A worker's table has the prompt's blocks and after them those of what survives."""
        return 2 * super().max_num_blocks_per_req(*args, **kwargs)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What a request of the greatest length needs: with the prefix cache what survives beside the prompt."""
        n, longest = super().max_memory_usage_bytes(vllm_config), vllm_config.model_config.max_model_len
        order = Order.given() if vllm_config.cache_config.enable_prefix_caching else None
        try:
            if order is None or not order.moves(longest):
                return n
        except ConfigError:  # vLLM looks for a length that fits, and tries some that no budget has a token of
            return n
        return n + -(-order.most_slots(longest, longest) // self.block_size) * self.page_size_bytes


def own_spec(spec: Any) -> Any:
    """The spec under which a layer's blocks are managed."""
    if type(spec) is not FullAttentionSpec:
        raise ValueError(f"layers of {type(spec).__name__} are not known to KVBench's plugin; use a model without them")
    return Spec(**{field.name: getattr(spec, field.name) for field in fields(spec) if field.init})


def register_manager() -> None:
    KVCacheSpecRegistry._ensure_registered()  # vLLM registers its own only while nobody else has
    KVCacheSpecRegistry.register(Spec, Manager, uniform_type_base_spec=FullAttentionSpec)
    scheduler.KVCacheManager = Blocks


def take_back_manager() -> None:
    scheduler.KVCacheManager = KVCacheManager

"""How many variants are decoded at once: `sweep.max_variants`, or as many as the free memory holds.

What a variant will hold is bounded from its budget, as its ledger will count it: K and V of the tokens that stay on the
device and of all that is generated, and for one that retrieves what its method says of what it finds tokens with; of
one that says nothing as much as the prompt's keys. Variants that do not fit next to each other are decoded one wave
after the other, from the same prefill.

Not here: what happens when memory runs out all the same (`evals/answer.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbench.engine.budget import ELEMENT_BYTES
from kvbench.engine.errors import ConfigError
from kvbench.engine.machine import free_bytes
from kvbench.engine.row import Variant
from kvbench.engine.shapes import ModelShape

SHARE = 0.8  # of the free memory that is planned with; the rest is for allocators and estimates
PASS_VALUES = 24  # values per token and dimension of the model at a layer's widest point: MLP, queries, float32 copies
WHOLE_VALUES = 6  # of those that a pass in chunks has of all tokens: input, queries, K and V, attention, output


def waves(n_bytes: Sequence[int], room_bytes: int, limit: int | None) -> list[slice]:
    """Variants of these sizes in order, in runs that fit into the room; `limit` alone decides where it is given."""
    found, start, used = [], 0, 0
    for i, size in enumerate(n_bytes):
        is_full = i - start == limit if limit is not None else used + size > room_bytes
        if i > start and is_full:
            found.append(slice(start, i))
            start, used = i, 0
        used += size
    return [*found, slice(start, len(n_bytes))]


def answers_bytes(variants: Sequence[Variant], shape: ModelShape, n_new: int, element_bytes: int) -> list[int]:
    """Bytes that each variant needs at least: K and V of all that it generates, where nothing of that is dropped."""
    token = len(shape.kept_layers) * shape.h_kv * shape.width * element_bytes
    return [0 if variant.budget.counts is not None else token * n_new for variant in variants]


def most_at_once(n_bytes: Sequence[int], limit: int | None) -> int:
    """Bytes of the wave that takes most, where `limit` variants are decoded at once; by default each may be alone."""
    return sum(sorted(n_bytes, reverse=True)[: limit or 1])


def variant_bytes(variant: Variant, shape: ModelShape, n_new: int, element_bytes: int) -> int:
    """Bound of what a variant allocates on its device besides the prompt's own K and V."""
    budget = variant.budget
    of_heads = len(shape.kept_layers) * shape.h_kv * element_bytes
    token, key = of_heads * shape.width, of_heads * shape.d_h
    if variant.is_full:
        return token * n_new
    if budget.counts is not None:  # K and V, what a cut copies, and the similarity of one head's keys to each other
        room = min(budget.s_prompt + n_new, 2 * budget.tokens + n_new if budget.most is None else 2 * budget.most)
        return token * room + 4 * room * room
    if variant.method.traits.drops:
        return token * (budget.tokens + 2 * n_new)
    # A step's scores and keys of all tokens, of one layer at a time; where a token's copy is, and who asked for it.
    step = (STEP_BYTES * shape.h + COPY_BYTES * shape.h_kv) * (budget.s_prompt + n_new)
    try:
        held = variant.method.footprint(variant.params, variant.plan, budget, shape)
    except ConfigError:
        return token * (budget.tokens + 2 * n_new) + key * budget.s_prompt + step
    # What it finds tokens with is counted at 16 bits and may lie there in 32, its integers in 64.
    least = replace(held, index_bytes=0).total(shape, budget.s_prompt)
    index = (len(shape.attention_layers) - held.n_whole) * (2 * held.index_bytes + held.uncounted_bytes)
    return least * element_bytes // ELEMENT_BYTES + index + 2 * token * n_new + step


STEP_BYTES = 12  # of a token and query head: a score, and an integer to choose by
COPY_BYTES = 8  # of a token and KV head


def room_bytes(devices: Sequence[torch.device]) -> int:
    """Memory for a prompt and its variants; `devices` has that of each layer, or of all."""
    # Of several GPUs the first that is full ends it.
    return int(SHARE * min(free_bytes(device) * len(devices) // devices.count(device) for device in {*devices}))


def prompt_bytes(shape: ModelShape, s_prompt: int, element_bytes: int, chunk: int | None = None) -> int:
    """The prompt's K and V, and what the pass over it needs at its widest point.

    In chunks of tokens that is for these alone, and a layer's input, output and queries are whole.
    """
    token = len(shape.kept_layers) * shape.h_kv * shape.width
    d_model = shape.d_model or shape.h * shape.d_h
    wide = min(s_prompt, chunk or s_prompt)
    passing = d_model * (PASS_VALUES * wide + WHOLE_VALUES * (s_prompt - wide))
    return element_bytes * (s_prompt * token + passing)

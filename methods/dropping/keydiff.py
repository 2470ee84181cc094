"""KeyDiff (Park et al., 2025): keep the keys that are least like the average key. No queries, no attention, no values.

Keys that point where most others point are taken to be redundant. Every key is brought to length 1, the mean of them
all is the anchor, and a token's score is minus the cosine of its key to the anchor. The paper reads a prompt block by
block under a hard limit of memory; after each block only the best tokens stay.

Paper     arXiv:2504.15364, 2025; Park, Junyoung; KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
          Inference in Resource-Constrained Environments
Symbols   paper: cache budget N, block size B, anchor = `tokens`, `block_len`, `anchor`.
Per step  moved: nothing; resident: h_kv * (tokens + t) tokens at step t, with `evict: always` h_kv * (tokens + 1); no
          metadata. Reading the prompt costs (s - tokens) / block_len rounds over tokens + block_len keys.
Differs   - `blocks: simulated` goes through blocks of finished keys, as kvpress does (method=keydiff_kvpress), after
            an exact prefill. In the paper a block attends to what survived before it, so that later keys are already
            made from a compressed past. Label and memory say which it is: the peak of the prefill is not compressed.
          - `blocks: none` compares all keys of the prompt at once.
          - the paper evicts while it generates, too: `evict: always`, a block of one after every step's attention.
            kvpress does not, nor does the default.
          - of equal keys the lower position stays. No token is protected.
          - of latents that all heads share, the mean over the keys that each head makes of them.
Fails     where attention sinks have ordinary keys, and on texts whose answer is phrased like everything around it. In
          blocks, a token that was dropped early does not come back when later ones would have made it stand out.
Figures   drop by keys and values: #B48805, circle, --
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvbench.engine.budget import BudgetRequest
from kvbench.engine.declared import Count, Named
from kvbench.engine.placement import Change, Evict, Kept, Placement
from kvbench.kernels.gather import gather_tokens
from kvbench.methods.dropping.allocators import Counts
from kvbench.methods.scorers import keep_top, lowest_slot
from kvbench.methods.scoring import ScoringMethod
from kvbench.methods.traits import Traits

LABELS = {"simulated": "simulated blocks", "none": "one-shot", "read": "blocks"}

LEAST_LENGTH, LEAST_FACTOR = 1e-12, 1e-8  # of a key that is brought to length 1, and of each length in a cosine


def anchor(keys: Tensor) -> Tensor:
    """Mean of the keys (..., n, d_h) at length 1, itself shorter: (..., d_h) float32."""
    return torch.nn.functional.normalize(keys.float(), dim=-1, eps=LEAST_LENGTH).mean(-2)


def unlikeness(keys: Tensor) -> Tensor:
    """Minus the cosine of each key (..., n, d_h) to the anchor of them all: (..., n) float32.

    Sums are row by row, because a matrix product may round equal keys unequally, and then ties are none.
    """
    towards, keys = anchor(keys), keys.float()
    length = towards.norm(dim=-1).clamp(min=LEAST_FACTOR).unsqueeze(-1)
    products = (keys * towards.unsqueeze(-2)).sum(-1)
    return -products / (keys.norm(dim=-1).clamp(min=LEAST_FACTOR) * length)


def survivors(keys: Tensor, n: int, block_len: int, score: Callable[[Tensor], Tensor] = unlikeness) -> Tensor:
    """Ascending positions of the `n` keys of (1, h_kv, s, d_h) that stay after all blocks that follow the first `n`."""
    heads, s = keys.shape[1], keys.shape[2]
    every = torch.arange(s, device=keys.device).expand(1, heads, -1)
    kept = every[..., :n]
    for start in range(n, s, block_len):
        candidates = torch.cat([kept, every[..., start : start + block_len]], -1)
        kept = candidates.gather(-1, keep_top(score(gather_tokens(keys, candidates)), n))
    return kept


class KeyDiff(ScoringMethod):
    title = "KeyDiff"
    in_chunks = MappingProxyType({"blocks": "read"})
    comparable = "heads"  # defined, but unpublished: where all keys of a head point one way, pooling starves it

    @dataclass(frozen=True)
    class Params:
        blocks: Annotated[str, Named((*LABELS,))]
        block_len: Count
        evict: Literal["prompt", "always"]

    params: Params
    score = staticmethod(unlikeness)

    @classmethod
    def traits_of(cls, params: Params) -> Traits:
        goes_on = "KeyDiff evicts while it decodes; use method.evict=prompt with it"
        return replace(
            super().traits_of(params),
            evicts=goes_on if params.evict == "always" else "",
            reads_in_chunks=params.blocks == "read",
        )

    @classmethod
    def label(cls, params: Params, request: BudgetRequest) -> str:
        """Says how the prompt was read: `simulated` blocks compress keys that an exact prefill has made."""
        return super().label(params, request).replace(cls.title, f"{cls.title} ({LABELS[params.blocks]})")

    def scorer(self) -> Hashable:
        return "unlikeness of keys"

    def keep_best(self, layer: int, n: Counts) -> Placement:
        if self.params.blocks != "simulated":
            return super().keep_best(layer, n)
        counts, keys = self.of_heads(layer, n) if isinstance(n, int) else n, self.trace.keys(layer)
        if isinstance(counts, int):
            return self.place(layer, survivors(keys, counts, self.params.block_len, partial(self.worth, layer)))
        heads = zip(keys.split(1, 1), counts, strict=True)
        return self.place_ragged(layer, [survivors(each, k, self.params.block_len)[0, 0] for each, k in heads])

    def place(self, layer: int, best: Tensor) -> Placement:
        """Keep what was chosen, with room for the answer, or for one token of it where another then leaves."""
        room = self.store.n_new
        return Kept(best, capacity=min(room, 1) if self.params.evict == "always" else room)

    @property
    def is_still(self) -> bool:
        return self.variant.is_full or self.params.evict != "always"

    def behind(self, layer: int, weights: Tensor | None) -> Change | None:
        """Evict from each head, with `evict: always`, the key that is most like the average."""
        if self.is_still:
            return None
        at = self.store[layer]
        return Evict(lowest_slot(self.worth(layer, at.keys()), at.positions()))

    def protected(self, layer: int) -> Sequence[int]:
        n = self.store[layer].n_seen
        return range(n - 1 if self.params.evict == "always" else self.trace.s_prompt, n)

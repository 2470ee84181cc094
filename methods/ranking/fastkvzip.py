"""Fast KVzip (Kim et al., 2026): a gate foretells KVzip's scores in the pass over the prompt; one order over all heads.

A token's small key, normalised, stands in a softmax with a few learned keys, and the token's own small queries ask
them: the mean of its weights over the group is its score. The lowest of all layers and heads go.

Paper     arXiv:2601.17668, 2026; Kim, Jang-Hyun; Fast KVzip: Efficient and Accurate LLM Inference with Gated KV
          Eviction
Symbols   code dim, sink, n_kv_groups = e and m of the file, g; `n_sink`, `window`.
Budget    pairs of token and head over all layers, the prompt's first `n_sink` and its last tokens within: in every head
          as many of those, so that at small budgets they are most of it.
Per step  moved: nothing; resident: the counts of all heads, 4 * d_h bytes a token, and offsets. The gate computes
          D * h_kv * e * (g + 1) products for each token and layer of the prompt; there is no second pass.
Differs   - exactly as many pairs as the budget has. `match: kvpress` has its integers: the fewest whole pairs that go;
          `match: paper` keeps what is strictly above the n-th highest score, as KVzip's authors do.
          - float32, where kvpress computes in the model's dtype; protected tokens stand outside of the order, where
            kvpress gives them 1, which half precision's scores reach too.
          - kvpress' window is 4,096 from 32,000 tokens on; here `window_share` of any prompt.
          - a gate is a safetensors file that names its model; published ones are pickles, which are not read.
Fails     where the template's tokens matter: repeating a text asks for few of them.
Figures   drop for any question: #7B4CE3, diamond, -.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from kvbench.engine.budget import Budget
from kvbench.engine.declared import Filled, Share, Tokens
from kvbench.engine.errors import ConfigError
from kvbench.engine.shapes import ModelShape
from kvbench.methods.allocator import Allocator
from kvbench.methods.dropping.allocators import Counts, best_of
from kvbench.methods.dropping.kvzip import above_threshold
from kvbench.methods.ranking.kvzap import Gated


class FastKVzip(Gated):
    title = "Fast KVzip"
    allocator = Allocator("global")
    gate_kind = "fastkvzip"

    @dataclass(frozen=True)
    class Params:
        gate: Annotated[str, Filled("a file, a hub name or auto")]
        n_sink: Tokens
        window_share: Share
        match: Literal["budget", "kvpress", "paper"]

    @dataclass(frozen=True)
    class Plan:
        n_sink: int
        window: int
        n_pairs: int | None  # that stay of all layers and heads, protected ones included; None: the budget's

    params: Params
    plan: Plan

    @classmethod
    def plan_for(cls, params: Params, budget: Budget, shape: ModelShape) -> Plan:
        s, n = budget.s_prompt, budget.tokens
        window = max(1, int(params.window_share * s))
        if not budget.attends_all:
            window = max(1, min(window, n // 4))
            if n <= params.n_sink + window:
                raise ConfigError(
                    f"a budget of {n} tokens for a prompt of {s} leaves nothing beside method.n_sink={params.n_sink} "
                    f"and the last {window}; raise ratio or budget"
                )
        pairs = None
        if params.match == "kvpress":
            every = len(shape.attention_layers) * shape.h_kv * s
            pairs = every - int(every * (1 - budget.ratio))
        return FastKVzip.Plan(params.n_sink, window, pairs)

    def counts(self) -> Sequence[Counts]:
        is_own = self.variant.allocator.of_layers == "global"
        if not is_own or (self.plan.n_pairs is None and self.params.match != "paper"):
            return super().counts()
        layers = self.scored_layers()
        table = torch.cat(self.trace.gathered(self.shared_scores(layer)[0] for layer in layers))
        protected = len(table) * sum(self.ends())
        if self.plan.n_pairs is None:
            counts = above_threshold(table, len(table) * self.n_free()).sum(-1).tolist()
        else:
            counts = best_of(table, max(0, min(self.plan.n_pairs - protected, table.numel())))
        heads = self.trace.shape.h_kv
        return [counts[first : first + heads] for first in range(0, len(counts), heads)]

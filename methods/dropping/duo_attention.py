"""DuoAttention (Xiao et al., 2024): some heads keep everything, the others sinks and a window.

Heads are told apart once per model: "retrieval" heads need the whole prompt, "streaming" heads look at its first and
latest tokens alone. What a prompt says changes nothing.

Symbols   paper retrieval and streaming heads = `full` and the others of `Plan`; alpha = a table's `scores`; sink and
          recent size = `n_sink`, `recent`; the share of streaming heads = `sparsity`.
Per step  moved: nothing; resident: F full heads of s + t tokens and the others' sinks and recent tokens, which stay
          as many while the answer grows, 4 * d_h bytes each, and 4 * (h_kv + 1) bytes of offsets per layer.
Budget    F is the largest number of full heads whose mean over all heads is within the budget; tokens that are left
          over widen the streaming heads' windows. Layers differ, so only the mean over layers is within.
          `sparsity` fixes the share of streaming heads instead, as published, whatever the budget: their windows are
          as large behind a short prompt too, and streaming heads grow until theirs are full.
Differs   - the prompt is read in one exact pass, as in the authors' evaluation with a chunk as long as the prompt.
          - equal numbers in a table are ordered by layer and head; the authors add noise to them, and kvpress leaves
            the order to the sort. In one of the authors' tables 110 of 256 heads are exactly 1.
          - without a table of trained gates one is made of KVzip's scores (`python -m methods.calibrate heads`), which
            its authors recommend.
          - `evict: prompt` is kvpress' form: generated tokens stay in every head.
Fails     where a streaming head holds what is asked for; where a table was made on text of another kind.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from methods.base import SelectiveAttention
from methods.rules.dropping.duo_attention import DuoAttentionRules


class DuoAttention(DuoAttentionRules, SelectiveAttention):
    params: DuoAttentionRules.Params
    plan: DuoAttentionRules.Plan

    def arrange(self, layer: int) -> None:
        s, heads = self.trace.s_prompt, range(self.trace.shape.h_kv)
        windows = [self.plan.recent.get((layer, head), -1) for head in heads]
        if max(windows) < 0:
            self.store.keep_all(layer)
            return
        recent = [self.n_recent(n) for n in windows]
        self.store.keep_ragged(layer, [self.kept(layer, n) for n in recent])
        if self.params.evict == "always":
            room = [max(0, self.plan.n_sink + n - s) for n in windows]
            self.store[layer].roll(recent, room, max(0, self.plan.n_sink - s))

    def n_recent(self, window: int) -> int:
        """How many of the prompt's latest tokens a head with such a window keeps; below 0, as it is: all."""
        return min(window, max(0, self.trace.s_prompt - self.plan.n_sink))

    def kept(self, layer: int, n_recent: int) -> Tensor:
        """Positions that a head keeps of the prompt: all, or its latest tokens, oldest first, and sinks behind them."""
        s = self.trace.s_prompt
        places = range(s) if n_recent < 0 else [*range(s - n_recent, s), *range(min(self.plan.n_sink, s))]
        return torch.tensor(places, device=self.trace.device_of(layer))

    def protected(self, layer: int) -> Sequence[int]:
        n, s = self.store[layer].n_seen, self.trace.s_prompt
        if self.variant.is_full:
            return range(n)
        n_recent = min((self.plan.recent.get((layer, head), s) for head in range(self.trace.shape.h_kv)), default=s)
        end = s if self.params.evict == "prompt" else n - 1
        return [*range(min(self.plan.n_sink, n)), *range(max(self.plan.n_sink, end - n_recent), n)]

    def report(self) -> dict[str, Any]:
        """How many heads keep everything, and what the others keep of the prompt."""
        if self.variant.is_full:
            return {}
        recent = [self.n_recent(n) for n in self.plan.recent.values()]
        n_sink = min(self.plan.n_sink, self.trace.s_prompt)
        sizes = {"n_sink": n_sink, "n_recent": [min(recent), max(recent)]} if recent else {}
        return {"full_heads": len(self.plan.full), "heads": self.plan.table.path.name} | sizes

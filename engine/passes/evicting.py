"""A prompt that is read in chunks, between which its method drops tokens: `Evicting`.

A chunk's tokens see what is held of those before it, and each other as ever. After a layer's attention the method
chooses among all that the layer holds, as it does after a whole prompt; what it drops is gone for the chunks to come.
So the layer never holds more than the budget and a chunk, and what is kept was made from a compressed past. That is
another thing than compression after an exact pass, and is named so wherever results are.

The method sees a prompt of as many tokens as the layer holds, numbered from 0 on (`Trace.as_held`). What the layer is
made of knows the true positions again (`Layer.stand`).

Not here: which methods can (`Traits.unreadable`), what they choose (`methods`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.attend import attend_own_past
from kvbench.engine.books.spans import span
from kvbench.engine.causal import Chunk, over_past, whole
from kvbench.engine.layouts.kept import kept_mask
from kvbench.engine.observe import Observation
from kvbench.engine.passes.second_pass import joined
from kvbench.engine.passes.trace import Trace
from kvbench.engine.placement import Placement
from kvbench.engine.row import Variant
from kvbench.engine.softmax import Softmax
from kvbench.kernels.column_sums import rows_per_block
from kvbench.kernels.gather import gather_tokens, move_both
from kvbench.kernels.scratch import finest

if TYPE_CHECKING:
    from kvbench.engine.model import Model

NOWHERE = -1  # the position of a slot without a token


class Evicting:
    """Stands in the model's attention while a prompt is read for one variant."""

    def __init__(
        self, trace: Trace, variant: Variant, observations: Sequence[Observation],
        on_layer: Callable[[Trace, int], None] | None,
    ) -> None:  # fmt: skip
        self.trace, self.variant, self.observations, self.on_layer = trace, variant, observations, on_layer
        self.compressed = frozenset(trace.shape.attention_layers)
        self.pairs: dict[int, int] = {}  # of query and key, by layer: what was computed

    def read(self, model: "Model", ids: Tensor, n_chunk: int) -> Tensor:
        """Read the prompt (1, s): logits of the token after it, (vocabulary,) float32."""
        s, self.trace.latents = ids.shape[1], model.latents
        for start in range(0, s, n_chunk):
            self.start, self.is_last = start, start + n_chunk >= s
            self.row = self.variant.row(self.trace, 0)  # which says what stays, and stores nothing
            logits = model.forward(ids[:, start : start + n_chunk], start, self.trace.rest, self)[0]
        every = s * (s + 1) // 2
        for layer, n in sorted(self.pairs.items()):
            on = self.trace.device_of(layer)
            share = torch.tensor(n / every, dtype=finest(on), device=on)
            self.trace.shares.append(share)
        return logits

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, window: int | Chunk | None
    ) -> Tensor:
        if layer not in self.compressed:
            return attend_own_past(q, k, v, softmax, window, self.start)
        assert window is None, f"layer {layer} has a window of its own"
        held = self.take_in(layer, k, v, softmax)
        delay = self.row.delay
        if delay is None:
            with span("attention", layer):
                out, lse = self.over_held(layer, held, q, k, v, softmax)
            self.observe(layer, q, softmax, lse)
        else:
            self.observe(layer, q, softmax, None)
            with span("attention", layer):
                out, _ = self.over_seen(layer, q, softmax, self.goes(layer), delay)
        self.evict(layer)
        if self.is_last and self.on_layer is not None:
            with span("build", layer):
                self.on_layer(self.trace, layer)
            if not self.trace.is_held(layer):
                self.trace.forget(layer)
        return out

    def take_in(self, layer: int, k: Tensor, v: Tensor, softmax: Softmax) -> int:
        """Put a chunk's K and V after what the layer holds: how many slots that is."""
        trace, m = self.trace, k.shape[2]
        new = torch.arange(self.start, self.start + m, device=k.device).expand(1, trace.shape.h_kv, -1)
        held = trace.slots.get(layer)
        if held is not None:
            k, v = (torch.cat(pair, 2) for pair in ((trace.keys(layer), k), (trace.values(layer), v)))
            new = torch.cat([held, new], -1)
        trace.slots[layer] = new
        trace.add(layer, k, v, softmax)
        return k.shape[2] - m

    def over_held(
        self, layer: int, n_held: int, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Attention of a chunk over all that is held before it, and over its own past."""
        m, parts = q.shape[2], [over_past(q, k, v, softmax)]
        if n_held:
            keys, values = self.trace.keys(layer)[:, :, :n_held], self.trace.values(layer)[:, :, :n_held]
            parts.insert(0, whole(q, keys, values, softmax))
        self.count(layer, m * n_held + m * (m + 1) // 2)
        return softmax.finish(*joined(parts))

    def goes(self, layer: int) -> Tensor:
        """Which of the tokens held will leave, (h_kv, n) bool."""
        with self.trace.as_held(layer), self.trace.apart():
            return self.row.goes(layer)

    def over_seen(self, layer: int, q: Tensor, softmax: Softmax, goes: Tensor, delay: int) -> tuple[Tensor, Tensor]:
        """Attention of a chunk where tokens that go are hidden once more than `delay` newer ones are there."""
        keys, values, positions = self.trace.keys(layer), self.trace.values(layer), self.trace.slots[layer]
        (_, h, m, _), (_, h_kv, n, _) = q.shape, keys.shape
        g, n_rows = h // h_kv, rows_per_block(h // h_kv, n, q.device)
        out, lse = q.new_empty(1, h, m, values.shape[3]), torch.empty(1, h, m, device=q.device)
        asking = torch.arange(self.start, self.start + m, device=q.device).unsqueeze(1)
        n_pairs = torch.zeros((), dtype=torch.long, device=q.device)
        for head in range(h_kv):
            group, age = slice(head * g, (head + 1) * g), asking - positions[0, head]
            hidden = (age < 0) | (positions[0, head] == NOWHERE) | (goes[head] & (age > delay))  # (m, n)
            n_pairs += (~hidden).sum()
            for start in range(0, m, n_rows):
                rows = slice(start, start + n_rows)
                logits = softmax.logits(q[:, group, rows], keys[:, head : head + 1])
                logits = logits.masked_fill_(hidden[rows], -torch.inf)
                off = logits.logsumexp(-1)
                weights = (logits - off.unsqueeze(-1)).exp()
                out[:, group, rows] = (weights @ values[:, head : head + 1].float()).to(q.dtype)
                lse[:, group, rows] = off
        self.count(layer, int(n_pairs) // h_kv)
        return softmax.finish(out, lse)

    def count(self, layer: int, pairs: int) -> None:
        self.pairs[layer] = self.pairs.get(layer, 0) + pairs

    def observe(self, layer: int, q: Tensor, softmax: Softmax, lse: Tensor | None) -> None:
        """What methods asked to see, of this chunk and of what is held of earlier ones."""
        trace = self.trace
        with span("observe", layer):
            for what in self.observations:
                before = trace.seen(what, layer)
                trace.observe(layer, what, q, trace.keys(layer), softmax, lse)
                if what.of_tokens:
                    trace.see(what, layer, what.grown(before, trace.observed(what, layer)))
            trace.inputs.pop(layer, None)

    def evict(self, layer: int) -> None:
        """Let go of what the method keeps no longer."""
        trace, n = self.trace, self.trace.keys(layer).shape[2]
        most = 0 if self.row.delay is not None else getattr(self.row.plan, "tokens", self.row.budget.tokens)
        if n <= most or layer in self.row.skipped:
            return
        with trace.as_held(layer), trace.apart():
            placement = self.row.arrange(layer)
        assert isinstance(placement, Placement), f"layer {layer} waits for others"
        mask = kept_mask(placement, trace.shape.h_kv, n, trace.device_of(layer))
        if mask is None:
            return
        most = int(mask.sum(-1).max())
        slots = mask.byte().sort(dim=-1, stable=True).indices[None, :, n - most :]  # what stays is last, in order
        positions = trace.slots[layer].gather(-1, slots)
        trace.slots[layer] = positions.where(mask[None].gather(-1, slots), NOWHERE)
        trace.keep(layer, *move_both(lambda x: gather_tokens(x, slots), trace.keys(layer), trace.values(layer)))
        for what in self.observations:
            if what.of_tokens:
                found = trace.observed(what, layer)
                trace.see(what, layer, found.gather(-1, slots.repeat_interleave(found.shape[1] // slots.shape[1], 1)))

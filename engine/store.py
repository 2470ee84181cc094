"""K and V of one variant on one sample, in two tiers; the only place that moves them, and so the place that counts.

Of each layer's tokens some are *kept* on the device (sinks, or what a dropping method chose), the latest ones lie in a
*window* behind them, and the rest is either gone or on the *host*, from where chosen tokens are *fetched*. The prompt's
K and V in the trace are shared by all variants and never written to; a variant that keeps everything holds a view of
them. Without an accelerator both tiers are the same RAM, and the accounting is the same.

Layout of a layer on the device: kept tokens first, then the window, a ring where it slides. Order is irrelevant to
attention, so nothing is ever shifted: where a method evicts while decoding, the newest token takes the slot.

Not here: which tokens (`methods`), what a cached block is (`engine/blocks.py`), what the counts mean
(`engine/ledger.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attend import Part
from engine.blocks import BlockCache, BlockCacheSpec
from engine.budget import token_bytes
from engine.ledger import Entry, Ledger
from engine.prefill import Trace
from engine.recent import RecentTokens
from kernels.gather import flat_rows, gather_tokens


@dataclass
class _Layer:
    k: Tensor  # (1, h_kv, n_kept + capacity, d_h); without the kept tokens where `whole`
    v: Tensor
    n_kept: int
    kept: Tensor | None  # (1, h_kv, n_kept) positions; None: the first n_kept
    whole: bool  # the kept tokens are the prompt, held as a view of the trace
    capacity: int  # slots of the window
    first: int  # position that lies in the window's first slot
    n_window: int  # tokens in the window
    tail: tuple[Tensor, Tensor] | None  # generated tokens on the host, (1, h_kv, n_new, d_h); None: nothing is fetched
    cache: BlockCache | None
    n: int  # tokens seen so far
    fetched: list[Tensor]  # positions fetched in this step
    evicted: Tensor | None = None  # (1, h_kv, m) positions that left behind this step's attention
    recent: RecentTokens | None = None  # what the last selections left on the device
    leaving: int = 0  # oldest tokens of the window that go to the host before the next token comes
    mask: Tensor | None = None  # (1, h, n_kept + capacity) bool, where query heads of a group see tokens of their own
    n_hidden: int = 0  # pairs of query head and kept slot that the mask hides
    n_spare: int = 0  # pairs of KV head and kept slot that hold no token: the unions of KV heads differ in size


@dataclass(frozen=True)
class Access:
    """One fetch, as `evals/studies/accesses.py` keeps and replays it."""

    step: int
    layer: int
    n: int  # tokens seen, the current one included
    n_kept: int  # tokens before the first that may be fetched
    n_host: int  # tokens on the host that are complete
    idx: Sequence[Any]  # positions per KV head or query head, -1 where padded


class Store:
    """All compressed layers of one variant on one sample."""

    def __init__(self, trace: Trace, n_new: int, cache: BlockCacheSpec | None = None) -> None:
        self.trace = trace
        self.shape = trace.shape
        self.n_new = n_new  # tokens that may be appended
        self.cache_spec = cache
        self.ledger = Ledger()
        self.layers: dict[int, _Layer] = {}
        self.token_bytes = token_bytes(self.shape) // self.shape.h_kv  # K and V of one token of one KV head
        self.counts = dict.fromkeys(COUNTED, 0)
        self.accesses: list[Access] | None = None  # a list: every fetch is noted in it

    # Where the prompt's tokens go, once per layer.

    def keep_all(self, layer: int) -> None:
        """Every token stays on the device, generated ones too."""
        s = self.trace.s_prompt
        self.trace.hold(layer)
        self._place(layer, n_kept=s, kept=None, whole=True, capacity=self.n_new, window=(s, s), host=False)

    def keep_reached(self, layer: int) -> None:
        """Every token that reached the layer stays, generated ones too; the others were never there."""
        if layer not in self.trace.positions:
            return self.keep_all(layer)
        reached, s = self.trace.positions[layer], self.trace.s_prompt
        self.trace.hold(layer)
        self._place(
            layer, n_kept=len(reached), kept=reached.expand(1, self.shape.h_kv, -1), whole=True,
            capacity=self.n_new, window=(s, s), host=False,
        )  # fmt: skip

    def keep(self, layer: int, chosen: Tensor | int, n_window: int = 0, capacity: int | None = None) -> None:
        """Only the `chosen` tokens and the last `n_window` stay; the rest of the prompt is gone for good.

        `chosen` holds positions (1, h_kv or h, k), or says how many of the first. Where query heads choose, their KV
        head keeps the union and each of them sees its own. The window behind them slides at `capacity` tokens, and
        grows without one.
        """
        s, mask = self.trace.s_prompt, None
        capacity = n_window + self.n_new if capacity is None else capacity
        if isinstance(chosen, int):
            n_kept, kept = chosen, None
        elif chosen.shape[1] == self.shape.h_kv:
            n_kept, kept = chosen.shape[-1], chosen
        else:
            kept, mask = union_of(chosen, self.shape.h_kv, s)
            n_kept = kept.shape[-1]
        self._place(
            layer, n_kept, kept, whole=False, capacity=capacity, window=(s - n_window, s), host=False
        )  # fmt: skip
        if mask is not None:
            at = self.layers[layer]
            at.mask = torch.nn.functional.pad(mask, (0, capacity), value=True)
            at.n_hidden = int((~mask).sum())
            at.n_spare = int((~mask.unflatten(1, (self.shape.h_kv, -1)).any(2)).sum())

    def offload(self, layer: int, n_sink: int, n_window: int, capacity: int | None = None) -> None:
        """Sinks and the last `n_window` tokens stay on the device, everything else can be fetched from the host."""
        s = self.trace.s_prompt
        self.trace.offload(layer)
        capacity = n_window + self.n_new if capacity is None else capacity
        self._place(layer, n_sink, None, whole=False, capacity=capacity, window=(s - n_window, s), host=True)

    def keep_recent(self, layer: int, n_steps: int) -> None:
        """Leave what is fetched on the device for `n_steps` steps more: only tokens that are not there move."""
        at = self.layers[layer]
        assert at.tail is not None and at.cache is None, f"layer {layer}: no host, or a block cache"
        at.recent = RecentTokens(n_steps, self.trace.s_prompt + self.n_new)

    def _place(
        self,
        layer: int,
        n_kept: int,
        kept: Tensor | None,
        whole: bool,
        capacity: int,
        window: tuple[int, int],
        host: bool,
    ) -> None:
        assert layer not in self.layers, f"layer {layer} is placed twice"
        keys, values = self.trace.keys(layer), self.trace.values(layer)
        start, stop = window
        assert whole or (n_kept <= start <= stop and stop - start <= max(capacity, 0)), (
            n_kept,
            window,
            capacity,
        )
        heads, d_h = keys.shape[1], keys.shape[3]
        in_buffer = 0 if whole else n_kept
        buffers = []
        for source in (keys, values):
            buffer = source.new_empty(1, heads, in_buffer + capacity, d_h)
            if in_buffer:
                buffer[:, :, :n_kept] = source[:, :, :n_kept] if kept is None else gather_tokens(source, kept)
            buffer[:, :, in_buffer : in_buffer + stop - start] = source[:, :, start:stop]
            buffers.append(buffer)
        tail = None
        if host:
            home = self.trace.host_device
            shape = (1, heads, self.n_new, d_h)
            tail = (
                torch.empty(shape, dtype=keys.dtype, device=home),
                torch.empty(shape, dtype=keys.dtype, device=home),
            )
        cached = host and self.cache_spec is not None and self.cache_spec.tokens > 0
        self.layers[layer] = _Layer(
            k=buffers[0], v=buffers[1], n_kept=n_kept, kept=kept, whole=whole, capacity=capacity, first=start,
            n_window=stop - start, tail=tail, cache=BlockCache(self.cache_spec) if cached and self.cache_spec else None,
            n=self.trace.s_prompt, fetched=[],
        )  # fmt: skip

    # A decode step.

    def append(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Take in the current token, (1, h_kv, 1, d_h); where the window is full, its oldest token leaves."""
        at = self.layers[layer]
        if at.leaving:
            self._leave(at)
        if at.tail is not None:
            t = at.n - self.trace.s_prompt
            at.tail[0][:, :, t : t + 1] = k_new
            at.tail[1][:, :, t : t + 1] = v_new
        if at.capacity:
            slot = (0 if at.whole else at.n_kept) + (at.n - at.first) % at.capacity
            at.k[:, :, slot : slot + 1] = k_new
            at.v[:, :, slot : slot + 1] = v_new
        at.n += 1
        at.fetched.clear()
        at.evicted = None
        if at.n_window < at.capacity:
            at.n_window += 1
        elif at.tail is not None:
            self.counts["released_bytes"] += self.shape.h_kv * self.token_bytes

    def resident(self, layer: int) -> list[Part]:
        """Kept tokens and window as parts to attend to."""
        at = self.layers[layer]
        if at.whole:
            prompt = Part(self.trace.keys(layer), self.trace.values(layer))
            return [prompt, Part(at.k[:, :, : at.n_window], at.v[:, :, : at.n_window])]
        stop = at.n_kept + at.n_window
        mask = None if at.mask is None else at.mask[..., :stop]
        return [Part(at.k[:, :, :stop], at.v[:, :, :stop], mask)]

    def kept_and_window(self, layer: int) -> tuple[Part, Part]:
        """As `resident`, apart: for methods that turn the query for one of the two."""
        at = self.layers[layer]
        stop = at.n_kept + at.n_window
        kept, window = slice(0, at.n_kept), slice(at.n_kept, stop)
        return Part(at.k[:, :, kept], at.v[:, :, kept]), Part(at.k[:, :, window], at.v[:, :, window])

    def positions(self, layer: int) -> Tensor:
        """Positions of kept tokens and window, slot by slot as `resident` has them: (1, h_kv, n)."""
        at = self.layers[layer]
        heads, device = self.shape.h_kv, at.k.device
        kept = at.kept
        if kept is None:
            kept = torch.arange(at.n_kept, device=device).expand(1, heads, -1)
        # A ring's slot holds the latest token that was written to it.
        newest = at.n - 1
        age = (newest - at.first - torch.arange(at.n_window, device=device)) % max(1, at.capacity)
        return torch.cat([kept, (newest - age).expand(1, heads, -1)], -1)

    def evict(self, layer: int, slots: Tensor) -> None:
        """After attention, drop one token per KV head for good, by its slot (1, h_kv, 1); the newest token takes it.

        What stays is kept from then on, all other slots are as they were, and the window begins anew behind them. The
        step's books still have the dropped token, because the step attended to it.
        """
        at = self.layers[layer]
        assert not at.whole and at.tail is None, f"layer {layer} does not drop tokens"
        assert at.evicted is None and at.mask is None, f"layer {layer} cannot evict"
        positions = self.positions(layer)  # (1, h_kv, n)
        last = positions.shape[-1] - 1
        assert at.n_window == at.n - at.first > 0, f"layer {layer} has a window that slid"
        rows = flat_rows(slots, self.shape.h_kv, at.k.shape[2])
        for buffer in (at.k, at.v):
            moved = buffer[0, :, last].clone()  # (h_kv, d_h)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, rows, moved)
        at.evicted = positions.gather(-1, slots)
        at.kept = positions.scatter(-1, slots, at.n - 1)[..., :last]
        at.capacity += at.n_kept - last
        at.n_kept, at.first, at.n_window = last, at.n, 0

    def drop_but(self, layer: int, stay: Tensor) -> None:
        """After attention, drop for good all but the tokens in these ascending slots (k,), for all KV heads alike.

        As with `evict`, the step's books still have those that leave.
        """
        at = self.layers[layer]
        assert at.tail is None and at.evicted is None and at.mask is None, f"layer {layer}"
        positions, room = self.positions(layer), at.capacity - at.n_window
        leaving = torch.ones(positions.shape[-1], dtype=torch.bool, device=stay.device)
        leaving[stay] = False
        parts = self.resident(layer)
        empty = at.k.new_empty(1, at.k.shape[1], room, at.k.shape[3])
        at.k = torch.cat([torch.cat([part.k for part in parts], 2)[:, :, stay], empty], 2)
        at.v = torch.cat([torch.cat([part.v for part in parts], 2)[:, :, stay], empty], 2)
        at.evicted, at.kept = positions[..., leaving], positions[..., stay]
        at.n_kept, at.first, at.n_window = len(stay), at.n, 0
        at.capacity, at.whole = room, False

    def release(self, layer: int, n: int | None = None) -> None:
        """After attention, send the window's oldest `n` tokens (None: all) to the host; the next step can ask."""
        at = self.layers[layer]
        assert at.tail is not None and not at.leaving, f"layer {layer}: no host, or released twice"
        at.leaving = at.n_window if n is None else n
        assert at.leaving <= at.n_window, f"layer {layer} has {at.n_window} tokens to release"
        self.counts["released_bytes"] += at.leaving * self.shape.h_kv * self.token_bytes

    def _leave(self, at: _Layer) -> None:
        """Let released tokens go; what stays moves to the window's first slots."""
        stay = at.n_window - at.leaving
        if stay:
            assert at.n_window == at.n - at.first, "a window that slid is released as a whole"
            start = at.n_kept + at.leaving
            for buffer in (at.k, at.v):
                kept = buffer[:, :, start : start + stay].clone()
                buffer[:, :, at.n_kept : at.n_kept + stay] = kept
        at.first, at.n_window, at.leaving = at.n - stay, stay, 0

    def n_seen(self, layer: int) -> int:
        """Tokens so far, the current one included."""
        return self.layers[layer].n

    def n_window(self, layer: int) -> int:
        """Tokens in the window, the current one included."""
        return self.layers[layer].n_window

    def can_fetch(self, layer: int) -> bool:
        """Whether the layer has a host tier."""
        return self.layers[layer].tail is not None

    def fetch(self, layer: int, idx: Tensor, padded: bool = False) -> Part:
        """Bring the tokens at `idx` (1, h_kv or h, k) from the host; where `padded`, -1 stands for no token.

        Without an accelerator they stay where they are, and the part says which they are.
        """
        at = self.layers[layer]
        assert at.tail is not None, f"layer {layer} has nothing on the host"
        assert idx.shape[1] in (self.shape.h, self.shape.h_kv), f"idx has {idx.shape[1]} heads"
        at.fetched.append(idx)
        if self.accesses is not None:
            step, n_host = at.n - self.trace.s_prompt, at.n - at.n_kept - at.n_window
            noted = Access(step, layer, at.n, at.n_kept, n_host, list(idx[0].cpu().numpy()))
            self.accesses.append(noted)
        mask = idx >= 0 if padded else None
        self._count_fetch(at, idx, idx.numel() if mask is None else int(mask.sum()))
        home = self.trace.host_device
        has_late = at.n - self.trace.s_prompt > at.n_window  # generated tokens on the host
        k, v = self.trace.host(layer)
        asked = Part(k, v, mask, idx=idx.to(home).contiguous(), late=at.tail if has_late else None)
        if idx.device == home:
            return asked
        found = asked.gathered()
        k, v = (x.to(idx.device, non_blocking=True) for x in (found.k, found.v))
        return Part(k, v, mask)

    def _count_fetch(self, at: _Layer, idx: Tensor, n_real: int) -> None:
        heads = idx.shape[1]
        self.counts["attended"] += n_real * (self.shape.h // heads)
        if at.recent is not None:
            distinct, hits, hits_of_heads = at.recent.access(idx, self.shape.h_kv, padded=n_real < idx.numel())
            self.counts["cache_hits"] += hits
            self.counts["cache_lookups"] += distinct
            self.counts["moved_kv_bytes"] += (distinct - hits) * self.token_bytes
            self.counts["moved_kv_heads_bytes"] += (n_real - hits_of_heads) * self.token_bytes
            return
        shared = heads == self.shape.h_kv
        distinct = n_real if shared else self._distinct(at, idx)
        hits = hits_of_heads = 0
        if at.cache is not None:
            if not shared:
                asked = at.cache.count_blocks(idx[idx >= 0] - at.n_kept)
                hits_of_heads = at.cache.count_hits(asked)
            per_kv_head = idx if shared else self._union(idx)
            middle = per_kv_head[per_kv_head >= 0] - at.n_kept
            n_host = at.n - at.n_kept - at.n_window
            hits, filled = at.cache.access(middle, n_complete=n_host // at.cache.spec.block_len)
            self.counts["cache_hits"] += hits
            self.counts["cache_lookups"] += distinct
            self.counts["filled_bytes"] += filled * at.cache.spec.block_len * self.shape.h_kv * self.token_bytes
            hits_of_heads = hits if shared else hits_of_heads
        self.counts["moved_kv_bytes"] += (distinct - hits) * self.token_bytes
        self.counts["moved_kv_heads_bytes"] += (n_real - hits_of_heads) * self.token_bytes

    def _distinct(self, at: _Layer, idx: Tensor) -> int:
        """Tokens that the query heads of `idx` (1, h, k) ask for, each once per KV head."""
        asked = torch.zeros(self.shape.h_kv, at.n + 1, dtype=torch.bool, device=idx.device)
        asked.scatter_(1, idx[0].reshape(self.shape.h_kv, -1) % (at.n + 1), True)  # -1 lands in the last column
        return int(asked[:, : at.n].sum())

    def _union(self, idx: Tensor) -> Tensor:
        """The distinct tokens of `_distinct`, of all KV heads behind each other."""
        return torch.cat([torch.unique(tokens) for tokens in idx[0].reshape(self.shape.h_kv, -1)])

    def prompt_keys(self, layer: int) -> Tensor:
        """The prompt's keys for a search, (1, h_kv, s_prompt, d_h); what a search reads is to be counted by `count`."""
        return self.trace.keys(layer)

    def prompt_values(self, layer: int) -> Tensor:
        """The prompt's values, (1, h_kv, s_prompt, d_h)."""
        return self.trace.values(layer)

    def generated(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the generated tokens in order, the current one included, of a layer with a host tier."""
        at = self.layers[layer]
        assert at.tail is not None, f"layer {layer} has no host tier"
        t = at.n - self.trace.s_prompt
        return at.tail[0][:, :, :t], at.tail[1][:, :, :t]

    def count(self, field: str, amount: int) -> None:
        """Add bytes that a method moved or read in this step beside K and V."""
        assert field in COUNTED, f"{field} is not counted per step"
        self.counts[field] += amount

    def close(self, layer: int, step: int) -> None:
        """End the layer's step: its entry goes into the ledger."""
        at, counts = self.layers[layer], self.counts
        left = 0 if at.evicted is None else at.evicted.shape[-1]
        resident = at.n_kept + at.n_window + left
        # A cache's room is taken whether it is full or not.
        cached = 0 if at.cache is None else at.cache.capacity * at.cache.spec.block_len
        held = 0 if at.recent is None else at.recent.n_held * self.token_bytes
        per_token = self.shape.h_kv * self.token_bytes
        self.ledger.entries.append(
            Entry(
                step, layer, at.n, counts["attended"] + resident * self.shape.h - at.n_hidden,
                (resident + cached) * per_token - at.n_spare * self.token_bytes + held,
                counts["resident_meta_bytes"], (at.n - resident) * per_token if at.tail is not None else 0,
                counts["moved_kv_bytes"], counts["moved_kv_heads_bytes"], counts["moved_meta_bytes"],
                counts["searched_bytes"], counts["filled_bytes"], counts["released_bytes"],
                counts["cache_hits"], counts["cache_lookups"],
            )
        )  # fmt: skip
        for field in counts:
            counts[field] = 0

    # For checks and reports, never on the hot path.

    def attended(self, layer: int) -> Tensor:
        """Which of the tokens seen so far the last step attended to: (h, n) bool."""
        at = self.layers[layer]
        seen = torch.zeros(self.shape.h, at.n, dtype=torch.bool)
        if at.kept is None:
            seen[:, : at.n_kept] = True
        elif at.mask is not None:
            slots = at.kept[0].repeat_interleave(self.shape.g, 0)  # (h, n_kept)
            seen.scatter_(1, slots.cpu(), at.mask[0, :, : at.n_kept].cpu())
        else:
            seen.scatter_(1, at.kept[0].cpu().repeat_interleave(self.shape.h // at.kept.shape[1], 0), True)
        seen[:, at.n - at.n_window :] = True
        if at.evicted is not None:
            seen.scatter_(1, at.evicted[0].cpu().repeat_interleave(self.shape.g, 0), True)
        for idx in at.fetched:
            for head, tokens in enumerate(idx[0].cpu().repeat_interleave(self.shape.h // idx.shape[1], 0)):
                seen[head, tokens[tokens >= 0]] = True
        return seen

    def allocated_bytes(self) -> int:
        """Bytes that the device tier really occupies, shared prompt tensors included where they are held."""
        total = 0
        for layer, at in self.layers.items():
            total += at.k.nbytes + at.v.nbytes
            if at.whole:
                total += self.trace.keys(layer).nbytes + self.trace.values(layer).nbytes
        return total


COUNTED = (
    "attended", "resident_meta_bytes", "moved_kv_bytes", "moved_kv_heads_bytes", "moved_meta_bytes", "searched_bytes",
    "filled_bytes", "released_bytes", "cache_hits", "cache_lookups",
)  # fmt: skip


def union_of(chosen: Tensor, h_kv: int, s: int) -> tuple[Tensor, Tensor]:
    """Of tokens that query heads chose (1, h, k) those that their KV head has to keep, and who sees which of them.

    Ascending positions (1, h_kv, n), filled up with tokens that nobody chose, and (1, h, n) bool.
    """
    h = chosen.shape[1]
    asked = torch.zeros(h, s, dtype=torch.bool, device=chosen.device).scatter_(1, chosen[0], True)
    wanted = asked.view(h_kv, -1, s).any(1)  # (h_kv, s)
    n = int(wanted.sum(-1).max())
    kept = wanted.int().sort(dim=-1, descending=True, stable=True).indices[:, :n]  # (h_kv, n)
    mask = asked.gather(1, kept.repeat_interleave(h // h_kv, 0))
    return kept.unsqueeze(0), mask.unsqueeze(0)

"""K and V of one variant on one sample: places each layer's tokens in the two tiers, and has the ledger of all layers.

The prompt's K and V in the trace are shared by all variants and never written to; a variant that keeps everything holds
a view of them. Once a layer is placed, `store[layer]` is what moves its tokens (`engine/layer.py`) and counts what it
moves (`engine/books/meter.py`); nothing else does, so that the ledger cannot be bypassed.

Not here: which tokens (`methods`), what a cached block is (`engine/caches/blocks.py`), what the counts mean
(`engine/books/ledger.py`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.attend import Part
from engine.books.audit import check_kept, correct_entry
from engine.books.ledger import Ledger
from engine.books.meter import Access, Meter, owe
from engine.budget import token_bytes
from engine.caches.blocks import BlockCache, BlockCacheSpec
from engine.caches.coded import Codec, CodedLayer
from engine.caches.copies import Shelf
from engine.caches.host import Host
from engine.caches.packed_host import host_of
from engine.caches.recent import RecentTokens
from engine.caches.token_code import TokenCode
from engine.caches.unions import union_of
from engine.layer import Layer
from engine.prefill import Trace
from kernels.gather import gather_tokens
from kernels.select_attend import Spans

Coder = Callable[[Tensor, Tensor, int], Codec]  # from K and V (1, h_kv, n, d_h) and how many tokens may follow


class Store:
    """All compressed layers of one variant on one sample."""

    def __init__(self, trace: Trace, n_new: int, cache: BlockCacheSpec | None = None, checked_for: str = "") -> None:
        self.trace = trace
        self.shape = trace.shape
        self.n_new = n_new  # tokens that may be appended
        self.cache_spec = cache
        self.ledger = Ledger()
        self.checked_for = checked_for  # whom errors name; empty: the row is believed
        self.layers: dict[int, Layer] = {}
        self.coder: Coder | None = None  # of a composition: what a method keeps becomes codes
        self.host_code: TokenCode | None = None  # or what it sends to the host
        self.shelves: dict[torch.device, Shelf] = {}  # one for all layers of a GPU: each needs it until its attention
        self.token_bytes = token_bytes(self.shape) // self.shape.h_kv  # of one token of one KV head
        self.accesses: list[Access] | None = None  # a list: layers that are placed from then on note fetches in it

    def __getitem__(self, layer: int) -> Layer:
        return self.layers[layer]

    # Where the prompt's tokens go, once per layer.

    def keep_all(self, layer: int) -> None:
        """Every token stays on the device, generated ones too."""
        self._keep_view(layer, None)

    def keep_until_full(self, layer: int, room: int) -> None:
        """Every token stays, and of those that are generated the first `room`: then `Layer.retain` has to drop some."""
        self._keep_view(layer, None, room)

    def keep_reached(self, layer: int) -> None:
        """Every token that reached the layer stays, generated ones too; the others were never there."""
        positions = self.trace.positions.get(layer)
        expanded = None if positions is None else positions.expand(1, self.shape.h_kv, -1)
        self._keep_view(layer, expanded)

    def _keep_view(self, layer: int, positions: Tensor | None, room: int | None = None) -> None:
        self.trace.hold(layer)
        self._place(layer, self._part(layer, slice(None)), 0, room, positions, is_view=True)

    def keep(self, layer: int, chosen: Tensor | int, n_window: int = 0, capacity: int | None = None) -> None:
        """Only the `chosen` tokens and the last `n_window` stay; the rest of the prompt is gone for good.

        `chosen` holds positions (1, h_kv or h, k), or says how many of the first. Where query heads choose, their KV
        head keeps the union and each of them sees its own; -1 stands for no token. The window behind them slides at
        `capacity` tokens, and grows without one.
        """
        if isinstance(chosen, int):
            return self._place(layer, self._part(layer, slice(chosen)), n_window, capacity)
        mask, prompt = None, self._part(layer, slice(None))
        check_kept(self, layer, [chosen])
        if chosen.shape[1] != self.shape.h_kv:
            chosen, mask = union_of(chosen, self.shape.h_kv, self.trace.s_prompt)
        kept = Part(gather_tokens(prompt.k, chosen), gather_tokens(prompt.v, chosen), mask)
        return self._place(layer, kept, n_window, capacity, chosen)

    def keep_ragged(self, layer: int, chosen: Sequence[Tensor]) -> None:
        """Of each KV head only its own `chosen` positions (n,) stay, as many as they are; generated tokens come on top.

        They lie head behind head, in the order given: nothing is spent on heads that keep fewer.
        """
        heads, s, d_h = self.shape.h_kv, self.trace.s_prompt, self.shape.d_h
        assert len(chosen) == heads, (len(chosen), heads)
        check_kept(self, layer, chosen)
        rows = torch.cat([positions + head * s for head, positions in enumerate(chosen)])
        prompt = self._part(layer, slice(None))
        k, v = (x.view(heads * s, d_h)[rows].view(1, 1, -1, d_h) for x in (prompt.k, prompt.v))
        counts = [len(positions) for positions in chosen]
        starts = [0, *accumulate(counts)][:-1]
        spans = Spans(torch.tensor(starts, device=k.device), torch.tensor(counts, device=k.device), max(counts))
        positions = torch.nn.utils.rnn.pad_sequence([*chosen], batch_first=True, padding_value=-1)
        self._place(layer, Part(k, v, spans=spans), 0, None, positions.unsqueeze(0), is_view=True)

    def offload(self, layer: int, n_sink: int, n_window: int, capacity: int | None = None) -> None:
        """Sinks and the last `n_window` tokens stay on the device, everything else can be fetched from the host."""
        host = host_of(self.trace, layer, self.host_code, self.n_new)
        self._place(layer, self._part(layer, slice(n_sink)), n_window, capacity, host=host)
        self[layer].shelf = self.shelf_of(layer)

    def offload_values(self, layer: int, chosen: Tensor, n_window: int) -> None:
        """The `chosen` tokens (1, h_kv, n) and the last `n_window` stay; of all others the host has the values alone.

        Their keys are the method's to keep in a form of its own, and to make again when they are fetched. Generated
        tokens stay on the device.
        """
        self.trace.offload(layer)
        check_kept(self, layer, [chosen])
        prompt = self._part(layer, slice(None))
        kept = Part(gather_tokens(prompt.k, chosen), gather_tokens(prompt.v, chosen))
        values = self.trace.host(layer)[1]
        self._place(layer, kept, n_window, None, chosen, host=Host(values[..., :0], values, self.n_new))
        n_values = self.shape.h_kv * chosen.shape[-1]  # that are in both tiers
        self[layer].meter.hold_on_host(n_values * self.token_bytes // 2)

    def replace(self, layer: int, made: Part, positions: Tensor) -> None:
        """K and V that a method has made stand for the prompt's, with a bias each; generated tokens come on top.

        `made` has h_kv heads, in the model's dtype, and a mask where a head has fewer; the tokens count as those at
        `positions` (1, h_kv, n), -1 where there is none.
        """
        self._place(layer, made, 0, None, positions)

    def keep_searchable(self, layer: int, chosen: Tensor | None, on_device: bool) -> None:
        """Only the `chosen` positions (1, h_kv, n) stay (None: all), and a step attends to what it fetches of them.

        They are numbered as they stand in `chosen`, and generated tokens go on behind them, the current one included:
        `select` returns such numbers. They lie on the device, where a fetch moves nothing, or on the host.
        """
        check_kept(self, layer, [chosen])
        prompt = self._part(layer, slice(None))
        far = not on_device and self.trace.device != self.trace.host_device
        if chosen is None:
            if far:
                self.trace.offload(layer)
            else:
                self.trace.hold(layer)
            k, v = self.trace.host(layer) if far else (prompt.k, prompt.v)
        else:
            k, v = (gather_tokens(x, chosen) for x in (prompt.k, prompt.v))
            if far:
                k, v = (
                    torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (k, v)
                )
        host = Host(k, v, self.n_new, chosen, near=on_device)
        self._place(layer, self._part(layer, slice(0)), 0, 0, host=host)
        self[layer].shelf = self.shelf_of(layer)

    def keep_coded(self, layer: int, make: Coder, chosen: Tensor | None = None) -> None:
        """Only the `chosen` positions (1, h_kv, n), ascending, stay (None: all), in the form that `make` gives them."""
        check_kept(self, layer, [chosen])
        prompt = self._part(layer, slice(None))
        k, v = (x if chosen is None else gather_tokens(x, chosen) for x in (prompt.k, prompt.v))
        self._place_coded(layer, make(k, v, self.n_new), chosen)

    def _place_coded(self, layer: int, codec: Codec, positions: Tensor | None) -> None:
        assert layer not in self.layers, f"layer {layer} is placed twice"
        meter, like = Meter(self.shape), self.trace.keys(layer)
        self.layers[layer] = CodedLayer(layer, self.trace.s_prompt, codec, self.n_new, meter, like, positions)

    def keep_recent(self, layer: int, n_steps: int) -> None:
        """Leave what is fetched on the device for `n_steps` steps more: only tokens that are not there move."""
        meter = self[layer].meter
        assert self[layer].can_fetch, f"layer {layer} has no host"
        assert not meter.has_cache, f"layer {layer} has a block cache, or keeps recent ones already"
        meter.recent = RecentTokens(n_steps, self.trace.s_prompt + self.n_new)
        self[layer].shelf = Shelf(self.trace.s_prompt + self.n_new, n_steps)

    def shelf_of(self, layer: int) -> Shelf:
        return self.shelves.setdefault(self.trace.device_of(layer), Shelf(self.trace.s_prompt + self.n_new, 0))

    def _part(self, layer: int, tokens: slice) -> Part:
        return Part(self.trace.keys(layer)[:, :, tokens], self.trace.values(layer)[:, :, tokens])

    def _place(
        self,
        layer: int,
        kept: Part,
        n_window: int,
        capacity: int | None,
        positions: Tensor | None = None,
        host: Host | None = None,
        is_view: bool = False,
    ) -> None:
        """Make the layer; its window may grow by all new tokens where there is no `capacity`."""
        assert layer not in self.layers, f"layer {layer} is placed twice"
        s, spec = self.trace.s_prompt, self.cache_spec
        if self.coder is not None:
            assert host is None and kept.spans is None and kept.mask is None, f"layer {layer} cannot become codes"
            assert capacity is None or capacity >= n_window + self.n_new, f"layer {layer} has a window that slides"
            if is_view and positions is None:
                return self._place_coded(layer, self.coder(kept.k, kept.v, self.n_new), None)
            at = torch.arange(s, device=kept.k.device).expand(1, self.shape.h_kv, -1)
            first = at[..., : kept.n_tokens()] if positions is None else positions
            chosen = torch.cat([first, at[..., s - n_window :]], -1).sort(dim=-1).values
            return self.keep_coded(layer, self.coder, chosen)
        window = self._part(layer, slice(s - n_window, s))
        blocks = BlockCache(spec) if host is not None and spec is not None and spec.tokens else None
        meter = Meter(self.shape, blocks, self.accesses)
        capacity = n_window + self.n_new if capacity is None else capacity
        self.layers[layer] = Layer(layer, s, kept, window, capacity, meter, positions, host, is_view)
        self.layers[layer].checked_for = self.checked_for

    # The books.

    def close(self, layer: int, step: int | None = None) -> None:
        """End the layer's step, by default that of its newest token: its entry goes into the ledger."""
        at = self.layers[layer]
        self.ledger.append(at.close(at.n_seen - at.s_prompt if step is None else step))
        if at.meter.owed is not None:
            owe(self.ledger, at.meter)
        correct_entry(self, layer)

    def attended(self, layer: int) -> Tensor:
        """Which of the tokens seen so far the last step attended to: (h, n) bool."""
        return self.layers[layer].attended()

    def allocated_bytes(self) -> int:
        """Bytes that the device tier really occupies, shared prompt tensors included where they are held."""
        return sum(layer.allocated_bytes() for layer in self.layers.values())

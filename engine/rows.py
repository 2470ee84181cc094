"""What a step does for all rows of a layer at once: taking in the current token, and fetching.

Without an accelerator host and device are one memory: rows take turns, and what is fetched stays where it is. On an
accelerator each is one launch for all rows, and nothing waits: the GPU reads pinned memory of the host by itself.
Without kernels (`kernels/fast.py`) rows take turns there too, and what is fetched is gathered on the host and sent.
Tokens that are asked for once are read by attention where they lie. Where several query heads of a KV head ask, some
ask for none, or what was fetched stays for a while, every KV head's distinct tokens are brought first
(`engine/caches/staging.py`), from a cache of blocks (`engine/caches/held.py`) where it has them, and the counts stay on
the device until the ledger is read. A cache of blocks in front of a host that has codes is an exception: it is in the
books alone, they are kept on the host, and a step waits for every layer's positions.

Not here: one layer's tokens (`engine/layouts`), attention (`engine/attend.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.attend import Part
from kvbench.engine.caches.blocks import BlockCache
from kvbench.engine.caches.quantized import QuantizedCache
from kvbench.engine.caches.staging import StagedTokens
from kvbench.engine.layouts.fetching import Fetching
from kvbench.engine.layouts.layer import Layer
from kvbench.engine.layouts.quantized import QuantizedLayer
from kvbench.kernels.clock import Since
from kvbench.kernels.fast import LEFT_OUT, OF_PROMPTS, STEP, takes
from kvbench.kernels.rows.append import Place, append_rows_triton
from kvbench.kernels.rows.blocks import Cached, fill_rows_triton, look_up_rows_triton
from kvbench.kernels.rows.union import Ask, Far, FetchLaunch, fetch_rows_triton, union_rows_triton


def leave_kernels_out(device: torch.device, why: str) -> None:
    """From now on rows take turns there, and torch does all ops' work."""
    if device.type == "cuda":
        LEFT_OUT[device] = dict.fromkeys((STEP, *OF_PROMPTS), why)


def append_rows(layers: Sequence[Layer], k_new: Tensor, v_new: Tensor) -> None:
    """Every row's layer takes in its current token of k_new and v_new (n, h_kv, 1, d_h)."""
    if not takes(STEP, k_new.device):
        for i, layer in enumerate(layers):
            layer.append(k_new[i : i + 1], v_new[i : i + 1])
        return
    places: list[list[Place]] = []
    coded: dict[type[QuantizedCache], dict[int, QuantizedCache]] = {}
    for i, layer in enumerate(layers):
        k, v = k_new[i : i + 1], v_new[i : i + 1]
        if isinstance(layer, QuantizedLayer):
            coded.setdefault(type(layer.quantized), {})[i] = layer.quantized
        elif layer.packs:
            layer.append(k, v)
            places.append([])
            continue
        places.append(layer.places(k, v))
    for kind, caches in coded.items():
        k, v = ([x[i : i + 1] for i in caches] for x in (k_new, v_new))
        for i, found in zip(caches, kind.append_rows([*caches.values()], k, v), strict=True):
            places[i] = found
    append_rows_triton(k_new, v_new, places)


def fetch_rows(layers: Sequence[Fetching], selections: Sequence[Tensor], padded: bool) -> list[Part]:
    """What each row's layer fetches at its positions (1, h_kv or h, k); where `padded`, -1 stands for no token."""
    parts, brought = [], dict[int, list[tuple[Fetching, Ask, StagedTokens]]]()  # by how long what is fetched stays
    for layer, idx in zip(layers, selections, strict=True):
        if layer.packs:
            parts.append(layer.fetch(idx.int().long(), padded))
            continue
        if not layer.is_far:
            parts.append(layer.fetch(idx, padded))
            continue
        if not takes(STEP, idx.device) or (
            isinstance(layer.meter.cache, BlockCache) and not takes("blocks", idx.device)
        ):
            parts.append(layer.fetch(idx.int().long(), padded))
            continue
        part = layer.reach(idx, padded)
        if layer.copies_first(idx, padded):
            copies = layer.staging.room_for(idx, (layer.k, layer.v))
            brought.setdefault(layer.n_recent, []).append((layer, copies.ask(idx), copies))
            part.near = copies.near
        else:
            layer.meter.count_fetch(idx, idx.numel(), layer.n_seen, layer.n_ahead, layer.n_host)
        parts.append(part)
    for ages, some in brought.items():
        fetch_distinct(some, ages)
    return parts


def fetch_distinct(brought: Sequence[tuple[Fetching, Ask, StagedTokens]], ages: int) -> None:
    """Copy each KV head's distinct tokens to the device, and leave the counts there.

    Those of the last `ages` selections are there: what lies longer in a row's copies may be of another layer.
    """
    asks, far, cached = [ask for _, ask, _ in brought], list[Far](), dict[int, Cached]()
    for i, (layer, ask, copies) in enumerate(brought):
        held = layer.held_blocks()
        far.append(far_of(layer, copies, held and (held.k, held.v)))
        if held is not None:
            cached[i] = held.cached(ask, layer.n_host)
    counts = union_rows_triton(asks, brought[0][0].meter.shape.h_kv, ages)
    rows, found = [*cached.values()], dict[int, Tensor]()
    if rows:
        found = dict(zip(cached, look_up_rows_triton(rows, counts, [*cached]), strict=True))
    fetch_rows_triton(asks, far, counts)
    if rows:
        fill_rows_triton(rows, [far[i] for i in cached])
    for i, (layer, ask, _) in enumerate(brought):
        layer.meter.count_on_device(counts[i], ask.idx.shape[1], found.get(i))


def far_of(layer: Fetching, copies: StagedTokens, held: tuple[Tensor, Tensor] | None = None) -> Far:
    """Where a layer's tokens lie on the host, and where their copies come to lie."""
    assert layer.host.has_keys, f"layer {layer.index} has values alone on the host"
    return Far(layer.host.k, layer.host.v, layer.host.late, copies.k, copies.v, held)


class FetchPlan:
    """`fetch_distinct` at steps that are alike: rows without a cache of blocks ask from where they asked before.

    Where all layers of a row share its copies, each asks once a step: as many epochs pass as there are layers.
    """

    def __init__(self, layers: Sequence[Fetching], selections: Sequence[Tensor], ages: int, ahead: int) -> None:
        """`selections` are where the positions of the steps to come lie, `ahead` of them at most."""
        self.layers, self.ages = layers, ages
        self.copies = [
            layer.staging.room_for(idx, (layer.k, layer.v)) for layer, idx in zip(layers, selections, strict=True)
        ]
        self.starts = [copies.epoch for copies in self.copies]
        self.epochs = max(layer.staging.n_layers for layer in layers)  # from step to step
        asks = [copies.asked(idx) for copies, idx in zip(self.copies, selections, strict=True)]
        far = [far_of(layer, copies) for layer, copies in zip(layers, self.copies, strict=True)]
        self.planned = FetchLaunch(asks, far, ages, self.epochs, ahead)

    def holds(self, age: int) -> bool:
        """Whether copies lie where they lay, and nobody has asked with the epoch of the step that is so many later."""
        for layer, copies, start in zip(self.layers, self.copies, self.starts, strict=True):
            last, next_one = copies.epoch, start + self.epochs * age
            if layer.staging.copies is not copies or last >= next_one or (self.ages and last != next_one - 1):
                return False
        return True

    def take(self, since: Since) -> None:
        """Bring what rows ask for by now."""
        self.planned.take(since)

    def enter(self, age: int) -> None:
        """Note that the rows have asked at that step."""
        for copies, start in zip(self.copies, self.starts, strict=True):
            copies.epoch = start + self.epochs * age

    def counts(self, age: int) -> Tensor:
        """Counts of each row at that step, on the device."""
        return self.planned.counts[age]

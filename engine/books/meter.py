"""What one layer of one variant attends to and moves in a step, and what its device cache spares it.

A meter counts from one `close` to the next, which makes a ledger's entry of its counts. What methods hold, move or read
besides K and V comes as a `Cost`. A layer has at most one cache, of blocks or of recent tokens; the meter asks it which
tokens need not move. An accelerator keeps some counts to itself (`DeviceCounts`), and gives them all at once when the
ledger is read: asking at every step would wait for it.

Not here: moving (`engine/layouts`), what the counts mean (`engine/books/ledger.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.books.ledger import Entry, Ledger
from kvbench.engine.budget import token_bytes, value_bytes
from kvbench.engine.caches.device import DeviceCache, HostTokens, LookUp
from kvbench.engine.caches.recent import mark_tokens
from kvbench.engine.selection import FREE, Cost, Reads
from kvbench.engine.shapes import ModelShape

COUNTS = (  # in the order of `Entry`
    "attended",
    "resident_meta_bytes",
    "moved_kv_bytes",
    "moved_kv_heads_bytes",
    "moved_meta_bytes",
    "searched_bytes",
    "filled_bytes",
    "released_bytes",
    "cache_hits",
    "cache_lookups",
    "pseudo_tokens",
    "made_kv_bytes",
    "read_meta_bytes",
)


@dataclass(frozen=True)
class Access:
    """One fetch, as `evals/studies/accesses.py` keeps and replays it."""

    step: int
    layer: int
    n: int  # tokens seen, the current one included
    n_kept: int  # tokens before the first that may be fetched
    n_host: int  # tokens on the host that are complete
    idx: Sequence[Any]  # positions per KV head or query head, -1 where padded
    is_counted: bool = True  # False: the step attended to everything, and a cache only took in what was selected


@dataclass(slots=True)
class DeviceCounts:
    """Counts of one fetch that are still on an accelerator (`kernels/rows/union.py`)."""

    counts: Tensor  # (h_kv, 3 + ages) int32
    heads: int  # that asked
    read: Reads | None  # to find them
    blocks: Tensor | None  # (3,) int32 of a cache of blocks, as `kernels/rows/blocks.py` counts
    is_passed_by: bool = False  # True: what moved and was attended to is counted already

    def tensors(self) -> list[Tensor]:
        """All tensors that are still on the accelerator."""
        return [x for x in (self.counts, self.read and self.read.n, self.blocks) if x is not None]


class Meter:
    """The counts of a layer's step."""

    def __init__(
        self,
        shape: ModelShape,
        cache: DeviceCache | None = None,
        accesses: list[Access] | None = None,
    ) -> None:
        self.shape = shape
        self.token_bytes = token_bytes(shape) // shape.h_kv  # K and V of one token of one KV head
        self.value_bytes = value_bytes(shape, 1) // shape.h_kv  # of its V
        self.far_bytes = self.token_bytes  # the same on the host: fewer where it has values alone, or codes
        self.cache = cache
        self.moves = True  # False: what can be fetched lies on the device
        self.rebuilds = False  # True: the host has codes, of which a fetch makes numbers on the device
        self.beside_bytes = 0  # on the device in addition to K and V of kept tokens, for attention
        self.host_meta_bytes = 0  # on the host in addition to tokens that are there alone
        self.accesses = accesses  # a list: every fetch is noted in it
        self.has_noted = False  # a fetch of this step
        self.zeros = dict.fromkeys(COUNTS, 0)
        self.counts = self.zeros.copy()
        self.device_counts: DeviceCounts | None = None  # of this step
        self.read: Reads | None = None  # of this step

    def spend(self, cost: Cost) -> None:
        """Add what a method held, read or moved in this step besides K and V."""
        if cost is FREE:
            return
        counts = self.counts
        counts["resident_meta_bytes"] += cost.held_bytes
        counts["moved_meta_bytes"] += cost.moved_bytes
        counts["read_meta_bytes"] += cost.read_bytes
        counts["searched_bytes"] += cost.searched_bytes
        counts["released_bytes"] += cost.released_bytes
        counts["made_kv_bytes"] += cost.made_bytes
        if cost.reads is not None:
            self.read = cost.reads

    def hold(self, n_bytes: int) -> None:
        """Add what a layer has on the device in this step besides K and V."""
        self.counts["resident_meta_bytes"] += n_bytes

    def count_pseudo(self, n: int) -> None:
        """Add pseudo-tokens, summed over query heads."""
        self.counts["pseudo_tokens"] += n

    def count_on_device(self, counts: Tensor, heads: int, blocks: Tensor | None = None) -> None:
        """Leave on the accelerator what `heads` of a selection fetched, until the ledger is read."""
        self.device_counts, self.read = DeviceCounts(counts, heads, self.read, blocks), None

    def lie_far(self, of_token: int, moves: bool = True, rebuilds: bool = False) -> None:
        """A token of a KV head has so many bytes on the host; `moves`: a fetch has to bring it to the device."""
        self.far_bytes, self.moves, self.rebuilds = of_token, moves, rebuilds

    def hold_beside(self, n_bytes: int) -> None:
        """From now on so many bytes lie on the device in addition to K and V of kept tokens, for attention."""
        self.beside_bytes = n_bytes

    def hold_on_host(self, n_bytes: int) -> None:
        """From now on so many bytes lie on the host in addition to the tokens that are there alone."""
        self.host_meta_bytes = n_bytes

    def count_whole(self, n_host: int) -> None:
        """The step attends to all `n_host` tokens of the host, in place of what it fetched.

        They move past the device cache, which serves nobody in this step and takes in what the selection gives it.
        """
        counts, shape = self.counts, self.shape
        counts["attended"] = n_host * shape.h
        counts["moved_kv_bytes"] = n_host * shape.h_kv * self.far_bytes * self.moves
        counts["moved_kv_heads_bytes"] = n_host * shape.h * self.far_bytes * self.moves
        counts["cache_hits"] = counts["cache_lookups"] = 0
        if self.rebuilds:
            counts["made_kv_bytes"] = n_host * shape.h_kv * (self.token_bytes - self.far_bytes)
        if self.device_counts is not None:
            self.device_counts.is_passed_by = True
        if self.accesses and self.has_noted:
            self.accesses[-1] = replace(self.accesses[-1], is_counted=False)

    def count_released(self, n: int) -> None:
        """`n` tokens go from the window to the host."""
        self.counts["released_bytes"] += n * self.shape.h_kv * self.far_bytes * self.moves

    def count_fetch(self, idx: Tensor, n_tokens: int, n_seen: int, n_kept: int, n_host: int) -> None:
        """Fetch the `n_tokens` at `idx` (1, h_kv or h, k), where -1 stands for none.

        Of `n_seen` tokens the first `n_kept` may not be fetched, and the next `n_host` are complete on the host.
        """
        counts, h_kv, heads = self.counts, self.shape.h_kv, idx.shape[1]
        if self.read is not None:  # here an accelerator is waited for anyway
            (n_read, element_bytes), self.read = self.read, None
            counts["moved_meta_bytes"] += int(n_read.sum()) * element_bytes
        if not self.moves:
            counts["attended"] += n_tokens * (self.shape.h // heads)
            return
        if self.cache is not None:
            found = self.cache.look_up(idx, h_kv, HostTokens(n_seen, n_kept, n_host), padded=n_tokens < idx.numel())
            counts["filled_bytes"] += found.filled * h_kv * self.far_bytes
            counts["cache_hits"] += found.hits
            counts["cache_lookups"] += found.distinct
        elif heads == h_kv:
            found = LookUp(n_tokens, 0, 0)
        else:
            marks, _ = mark_tokens(idx, h_kv, n_seen, padded=n_tokens < idx.numel())
            found = LookUp(int(marks.count_nonzero()), 0, 0)
        counts["attended"] += n_tokens * (self.shape.h // heads)
        counts["moved_kv_bytes"] += (found.distinct - found.hits) * self.far_bytes
        counts["moved_kv_heads_bytes"] += (n_tokens - found.hits_of_heads) * self.far_bytes
        if self.rebuilds:
            counts["made_kv_bytes"] += self.made_bytes(found.distinct, found.hits)

    def made_bytes(self, n_distinct: int, hits: int) -> int:
        """Bytes of the numbers that codes of fetched tokens become, besides what moved; cached ones are codes too."""
        return n_distinct * self.token_bytes - (n_distinct - hits) * self.far_bytes

    def note(self, step: int, layer: int, n: int, n_kept: int, n_host: int, idx: Tensor) -> None:
        """Keep a fetch for a replay."""
        assert self.accesses is not None, "fetches are not kept"
        home = idx[0]
        if home.device.type == "cuda":  # the numbers are there once the GPU has come so far
            positions = home.int().long()
            home = torch.empty(home.shape, dtype=home.dtype, pin_memory=True).copy_(positions, non_blocking=True)
        access = Access(step, layer, n, n_kept, n_host, list(home.cpu().numpy()))
        self.accesses.append(access)
        self.has_noted = True

    def close(
        self,
        step: int,
        layer: int,
        n_seen: int,
        n_resident: int,
        n_host: int,
        n_hidden: int = 0,
        n_spare: int = 0,
    ) -> Entry:
        """The step's entry; all counts begin again.

        Of `n_seen` tokens every KV head has `n_resident` on the device and `n_host` on the host. `n_hidden` pairs of
        query head and resident token are not attended to, `n_spare` of KV head and token do not exist.
        """
        self.has_noted = False
        attended, meta_bytes, *moved = self.counts.values()
        if attended or meta_bytes or any(moved):
            self.counts = self.zeros.copy()
        attended += n_resident * self.shape.h - n_hidden
        kv_bytes = (n_resident * self.shape.h_kv - n_spare) * self.token_bytes + self.beside_bytes
        if self.cache is not None:
            kv_bytes += self.cache.n_held(self.shape.h_kv) * self.far_bytes
        host_bytes = n_host * self.shape.h_kv * self.far_bytes + self.host_meta_bytes
        # By position: names would take 2 us of every layer and step.
        return Entry(step, layer, n_seen, attended, kv_bytes, meta_bytes, host_bytes, *moved)

    def with_counts(
        self, entry: Entry, heads: int, counts: Sequence[int], read_bytes: int, blocks: Sequence[int],
        is_passed_by: bool = False,
    ) -> Entry:  # fmt: skip
        """The entry with what its fetch counted; for the entries of a layer in their order."""
        n_tokens, n_distinct, n_there, *by_age = counts
        found = LookUp(n_distinct, 0, n_there)
        if self.cache is not None:
            found = self.cache.read_counts(n_distinct, n_there, by_age, blocks)
        entry = entry._replace(
            resident_kv_bytes=entry.resident_kv_bytes + found.late * self.far_bytes,
            filled_bytes=entry.filled_bytes + found.filled * self.shape.h_kv * self.far_bytes,
            moved_meta_bytes=entry.moved_meta_bytes + read_bytes,
        )
        if is_passed_by:
            return entry
        return entry._replace(
            attended=entry.attended + n_tokens * (self.shape.h // heads),
            moved_kv_bytes=entry.moved_kv_bytes + (n_distinct - found.hits) * self.far_bytes,
            moved_kv_heads_bytes=entry.moved_kv_heads_bytes + (n_tokens - found.hits_of_heads) * self.far_bytes,
            cache_hits=entry.cache_hits + found.hits,
            cache_lookups=entry.cache_lookups + n_distinct * (self.cache is not None),
            made_kv_bytes=entry.made_kv_bytes + (self.made_bytes(n_distinct, found.hits) if self.rebuilds else 0),
        )


@dataclass
class PendingCounts:
    """Counts that an accelerator owes to a ledger."""

    device_counts: list[tuple[int, Meter, DeviceCounts]] = field(default_factory=list)  # by entry

    def fill(self, entries: list[Entry]) -> None:
        """Fill in the entries; one transfer, which waits."""
        home = self.device_counts[0][2].counts.device  # of a model on several GPUs, one brings what all counted
        tensors = [x for _, _, device_counts in self.device_counts for x in device_counts.tensors()]
        flat = iter(torch.cat([x.flatten().to(home) for x in tensors]).tolist())
        for i, meter, device_counts in self.device_counts:
            mine = [*islice(flat, device_counts.counts.numel())]
            read_bytes = (
                0
                if device_counts.read is None
                else device_counts.read.element_bytes * sum(islice(flat, device_counts.read.n.numel()))
            )
            counts = [sum(mine[j :: device_counts.counts.shape[1]]) for j in range(device_counts.counts.shape[1])]
            blocks = [] if device_counts.blocks is None else [*islice(flat, device_counts.blocks.numel())]
            entries[i] = meter.with_counts(
                entries[i], device_counts.heads, counts, read_bytes, blocks, device_counts.is_passed_by
            )
        self.device_counts.clear()


def add_pending(ledger: Ledger, meter: Meter) -> None:
    """The ledger's newest entry lacks what an accelerator counted in the meter's step."""
    assert meter.device_counts is not None, "the accelerator counted nothing"
    if ledger.pending_counts is None:
        ledger.pending_counts = PendingCounts()
    assert isinstance(ledger.pending_counts, PendingCounts), type(ledger.pending_counts)
    ledger.pending_counts.device_counts.append((len(ledger.written) - 1, meter, meter.device_counts))
    meter.device_counts = None

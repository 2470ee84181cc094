"""Choices that layers hand on: what an anchor found at a step, and the layers behind it attend to as well.

A layer behind an anchor is placed as the anchor is, fetches its own K and V of the positions that the anchor chose, and
lets tokens leave its window when the anchor does. Its method is asked for nothing but the keys that only it can make
(`take`): so nothing is read there to find tokens, and no index is made. A choice lives until the last layer behind its
anchor has attended; each row has its own.

Not here: which layers are anchors (`methods/reuse.py`), the step (`engine/step.py`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.errors import ConfigError
from kvbench.engine.placement import Change, Placement, Release, Whole
from kvbench.engine.selection import Found, Reuse, Selection, selection
from kvbench.kernels.jit import constants


class Handed:
    """What one row's anchors handed on, by anchor and the tokens so far."""

    def __init__(self, reuse: Reuse) -> None:
        self.reuse = reuse
        self.behind = {each.layer: each for each in reuse.behind}
        self.last = {each.anchor: each.layer for each in reuse.behind}
        self.placements: dict[int, Placement] = {}  # of anchors
        self.silent = {*self.behind, *reuse.dense}  # layers in which a method is asked for nothing after attention
        self.chosen: dict[tuple[int, int], tuple[Tensor | None, int]] = {}  # and the tokens of the window
        self.released: dict[tuple[int, int], Change] = {}

    def place(self, layer: int, row: Any) -> Placement | None:
        """Where the prompt's tokens of a layer go; None as of `arrange`."""
        if layer in self.reuse.dense:
            return Whole()
        if layer not in self.behind:
            placement = row.arrange(layer)
            if placement is None:
                return None
            self.placements[layer] = placement
            return replace(placement, near=True) if layer in self.reuse.all_too else placement
        placement = self.placements.get(self.behind[layer].anchor)
        if placement is None:  # the method says it once it has seen all layers
            return None
        row.follow(layer)
        if isinstance(chosen := getattr(placement, "chosen", None), Tensor):
            placement = replace(placement, chosen=self.of_heads(layer, chosen))
        return replace(placement, index_bytes=0) if getattr(placement, "index_bytes", 0) else placement

    def of_heads(self, layer: int, idx: Tensor) -> Tensor:
        """An anchor's positions (1, h_kv or h, k) for the heads of a layer behind it."""
        if not (heads := self.behind[layer].heads):
            return idx
        return idx.unflatten(1, (len(heads), -1)).index_select(1, constants(heads, idx.device)).flatten(1, 2)


def follows(row: Any, layer: int) -> bool:
    """Whether the row's layer attends to another one's choice."""
    return row.store.handed is not None and layer in row.store.handed.behind


def is_silent(row: Any, layer: int) -> bool:
    """Whether the row's method has nothing to say of the layer's step."""
    return row.store.handed is not None and layer in row.store.handed.silent


def hand_on(row: Any, layer: int, found: Found) -> Found:
    """Note what an anchor found: what it attends to itself."""
    handed: Handed | None = row.store.handed
    if handed is None:
        return found
    chosen = selection(found)
    if chosen.bias is not None or chosen.stand_ins:
        raise ConfigError(
            f"{row.title} weighs the tokens that a layer chose by what that layer estimates, and no other layer can "
            "attend to them; leave reuse out"
        )
    at = row.store.placed[layer]
    if layer in handed.last:
        handed.chosen[layer, at.n_seen] = chosen.idx, at.n_window
    if layer not in handed.reuse.all_too:
        return chosen
    return selection(row.take(layer, others(at)))._replace(cost=chosen.cost)


def take_over(row: Any, layer: int) -> Selection:
    """What a layer fetches of its anchor's choice."""
    handed: Handed = row.store.handed
    at, anchor = row.store.placed[layer], handed.behind[layer].anchor
    idx, n_window = handed.chosen[anchor, at.n_seen]
    assert at.n_window == n_window, f"the windows of layers {layer} and {anchor} differ"
    return row.take(layer, None if idx is None else handed.of_heads(layer, idx.to(at.device)))


def others(at: Any) -> Tensor | None:
    """All positions of a layer that are not resident, (1, h_kv, k)."""
    h_kv, stop = at.meter.shape.h_kv, at.n_seen - at.n_window
    if at.kept_positions is None:
        idx = torch.arange(at.n_kept, stop, device=at.device).expand(1, h_kv, -1)
    else:
        is_free = torch.ones(h_kv, stop, dtype=torch.bool, device=at.device).scatter_(1, at.kept_positions[0], False)
        idx = is_free.nonzero()[:, 1].view(1, h_kv, -1)
    return idx if idx.shape[2] else None


def hand_on_change(row: Any, layer: int, change: Change | None) -> None:
    """Note which of its tokens an anchor lets go."""
    if (handed := row.store.handed) is not None and layer in handed.last and isinstance(change, Release):
        handed.released[layer, row.store.placed[layer].n_seen] = Release(change.n)


def take_over_change(row: Any, layer: int) -> Change | None:
    """The same tokens leave a layer behind it; what was handed on is forgotten behind the last one."""
    handed: Handed = row.store.handed
    key = handed.behind[layer].anchor, row.store.placed[layer].n_seen
    if handed.last[key[0]] != layer:
        return handed.released.get(key)
    handed.chosen.pop(key, None)
    return handed.released.pop(key, None)

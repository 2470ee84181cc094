"""A model's rotary embedding as tables, found by turning unit vectors: whatever formula it has, pairs of numbers turn.

Checks    tests/kernels/test_landmarks.py, tests/engine/test_observe.py.

Not here: the model's own formula (`engine/model.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors that turn a key to a position: number * own + its partner's number * other, float32."""

    partners: Tensor  # (d_h,) int64
    own: Tensor  # (s, d_h)
    other: Tensor  # (s, d_h)
    is_halves: bool = False  # a number's partner lies half of d_h further


def rotation_of(turn: Callable[[Tensor, Tensor], Tensor], s: int, d_h: int, device: torch.device) -> Rotation | None:
    """The tables of a model's rotation for positions below s; None where it does more than turn pairs of numbers."""
    images = turn(torch.eye(d_h, device=device)[None, None], torch.ones(1, d_h, dtype=torch.int64, device=device))[0, 0]
    others = images - images.diagonal().diag()  # row by row what a number adds to the others
    places = torch.arange(d_h, device=device)
    partners = torch.where((others != 0).any(0), others.abs().argmax(0), places)
    if bool(((others != 0).sum(0) > 1).any()) or not torch.equal(partners[partners], places):
        return None
    is_first, every = places <= partners, torch.arange(s, device=device).unsqueeze(0)
    first, second = (turn(x.float().expand(1, 1, s, d_h), every)[0, 0] for x in (is_first, ~is_first))
    own, other = torch.where(is_first, first, second), torch.where(is_first, second, first)
    return Rotation(partners, own, other, torch.equal(partners, places.roll(-(d_h // 2))))


def turned_back(x: Tensor, rotation: Rotation, start: int) -> Tensor:
    """Tokens x (…, n, d_h) float32 from position `start` on, as they were before they were turned there."""
    half, n = x.shape[-1] // 2, x.shape[-2]
    own, other = rotation.own[start : start + n], rotation.other[start : start + n]
    if rotation.is_halves:
        partner = torch.cat([x[..., half:], x[..., :half]], -1)
    else:
        partner = x.index_select(-1, rotation.partners)
    return (x * own).addcmul_(partner, other, value=-1)

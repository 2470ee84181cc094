"""Copies on an accelerator of tokens that were fetched: of the step's own, and of the last steps where these stay.

A selection's distinct tokens lie in one of `n_steps` + 1 stretches, which take turns; a token that is asked for again
moves from its stretch to the newest, within the device. It is what `engine/caches/recent.py` counts, in memory that is
there. Without steps to stay for, one such object serves all layers of a row: each needs it only until its attention.

Not here: the copying (`kernels/rows/union.py`).
"""

import torch
from torch import Tensor

from kvbench.kernels.gather import bytes_of_both, move_both
from kvbench.kernels.rows.union import Ask
from kvbench.kernels.select_attend import Near


class StagedTokens:
    """The stretches of one row, with room for `room` tokens of a KV head each."""

    def __init__(self, like: tuple[Tensor, Tensor], n_tokens: int, room: int, n_steps: int) -> None:
        """K and V `like` (1, h_kv, …) have heads, widths, type and device; `n_tokens` may be seen in the end."""
        h_kv, device = like[0].shape[1], like[0].device
        self.n_steps, self.room, self.epoch = n_steps, room, n_steps
        n = (n_steps + 1) * room
        self.k, self.v = move_both(lambda x: x.new_empty(1, h_kv, n, x.shape[3]), *like)
        self.stamps = torch.zeros(h_kv, n_tokens, dtype=torch.int32, device=device)
        self.slots = torch.zeros_like(self.stamps)
        self.tokens, self.sources = self.slots.new_empty(h_kv, room), self.slots.new_empty(h_kv, room)

    def ask(self, idx: Tensor) -> Ask:
        """A selection to come, (1, h_kv or h, k)."""
        self.epoch += 1
        return self.asked(idx)

    def asked(self, idx: Tensor) -> Ask:
        """The selection of this epoch."""
        return Ask(idx, self.stamps, self.slots, self.tokens, self.sources, self.epoch, self.n_steps + 1)

    @property
    def near(self) -> Near:
        return Near(self.k, self.v, self.slots)

    @property
    def nbytes(self) -> int:
        return bytes_of_both(self.k, self.v)


class StagingBuffer:
    """The copies of a layer whose fetched tokens stay, or of all layers of a row; made when the first are asked for."""

    def __init__(self, n_tokens: int, n_steps: int, n_layers: int = 1) -> None:
        """Make room for copies of tokens where `n_layers` ask at a step at most."""
        self.n_tokens, self.n_steps, self.n_layers = n_tokens, n_steps, n_layers
        self.copies: StagedTokens | None = None

    def room_for(self, idx: Tensor, like: tuple[Tensor, Tensor]) -> StagedTokens:
        """Room for the distinct tokens of a selection (1, h_kv or h, k); K and V `like` are of the device tier."""
        room = min(idx.shape[1] // like[0].shape[1] * idx.shape[2], self.n_tokens)
        if self.copies is None or self.copies.room < room:
            assert self.copies is None or not self.n_steps, "a selection larger than those before, whose tokens stay"
            self.copies = StagedTokens(like, self.n_tokens, room, self.n_steps)
        return self.copies

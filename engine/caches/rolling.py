"""KV heads that hold their latest tokens alone next to heads that grow: `Rolling`.

Not here: the rows themselves (`engine/layouts`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kernels.select_attend import Spans

AHEAD = 64  # steps whose rows are worked out at once


@dataclass(frozen=True)
class Rolling:
    """KV heads of a layer that hold their first and latest tokens alone, and which rows that leaves them.

    Of the window the first `n_late` tokens stay: those that were first tokens still to come when the prompt ended.
    """

    n_recent: Tensor  # (h_kv,) int64: as `Layer.roll` says
    room: Tensor  # (h_kv,) int64: tokens that a head takes in before its oldest leaves
    rooms: tuple[int, ...]  # the same, of the heads that roll
    n_late: int
    ahead: dict[int, Tensor] = field(default_factory=dict)  # by the first window: (AHEAD, 6, h_kv), as `tables` says

    def n_losing(self, n_window: int) -> int:
        """How many heads have lost a row as the window came to hold so many tokens."""
        return sum(room < n_window - 1 for room in self.rooms)  # the current token's own comes after the step

    def gone(self, n_window: int | Tensor) -> tuple[Tensor, Tensor]:
        """How many rows each head has lost of those it kept, and of the window, (h_kv,) each."""
        n_gone = (self.n_recent >= 0) * (n_window - 1 - self.room).clamp(min=0)
        of_kept = torch.minimum(n_gone, self.n_recent.clamp(min=0))
        return of_kept, n_gone - of_kept

    def spans(self, kept: Spans, n_window: int) -> tuple[Spans, Spans | None, Spans]:
        """What is left of the rows that each head kept, which of the window stay for good, and what else is left of it.

        No row stays for good where `n_late` is 0.
        """
        first = n_window - n_window % AHEAD
        if first not in self.ahead:
            self.ahead.clear()
            self.ahead[first] = self.tables(kept, first)
        table = self.ahead[first]
        starts, counts, late_starts, late_counts, window_starts, window_counts = table[n_window - first]
        step = table.stride(0)
        late = Spans(late_starts, late_counts, min(self.n_late, n_window), step) if self.n_late else None
        return Spans(starts, counts, kept.longest, step), late, Spans(window_starts, window_counts, n_window, step)

    def n_ahead(self, n_window: int) -> int:
        """For how many windows after this one spans follow each other, as long as late tokens are as many."""
        left = AHEAD - 1 - n_window % AHEAD
        return min(left, self.n_late - n_window) if n_window < self.n_late else left

    def tables(self, kept: Spans, first: int) -> Tensor:
        """Starts and counts of kept rows, of late first tokens, and of the window, for windows from `first` on."""
        n_window = torch.arange(first, first + AHEAD, device=self.n_recent.device).unsqueeze(1)
        of_kept, of_window = self.gone(n_window)
        late = (self.n_recent >= 0) * n_window.clamp(max=self.n_late)
        start = late + of_window
        parts = [kept.starts + of_kept, kept.counts - of_kept, late * 0, late, start, n_window - start]
        return torch.stack(parts, 1)

    def left(self, kept: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (1, h_kv, n) with -1 in place of those that have left."""
        of_kept, of_window = self.gone(window.shape[-1])
        rows, slots = (torch.arange(x.shape[-1], device=x.device) for x in (kept, window))
        has_left = (slots >= self.n_late) & (slots < self.n_late + of_window[:, None])
        return kept.masked_fill(rows < of_kept[:, None], -1), window.masked_fill(has_left, -1)

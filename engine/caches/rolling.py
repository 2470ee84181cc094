"""KV heads that hold their latest tokens alone beside heads that grow: `Rolling`.

Not here: the rows themselves (`engine/layer.py`).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.select_attend import Spans

AHEAD = 64  # steps whose rows are worked out at once


@dataclass(frozen=True)
class Rolling:
    """KV heads of a layer that hold their latest tokens alone, and which rows that leaves them."""

    n_recent: Tensor  # (h_kv,) int64: as `Layer.roll` says
    n_heads: int  # that roll
    ahead: dict[int, Tensor] = field(default_factory=dict)  # by the first window: (AHEAD, 4, h_kv), as `tables` says

    def gone(self, n_window: int) -> tuple[Tensor, Tensor]:
        """How many rows each head has lost of those it kept, and of the window, (h_kv,) each."""
        n_gone = (self.n_recent >= 0) * max(0, n_window - 1)  # the current token's own comes after the step
        of_kept = torch.minimum(n_gone, self.n_recent.clamp(min=0))
        return of_kept, n_gone - of_kept

    def spans(self, kept: Spans, n_window: int) -> tuple[Spans, Spans]:
        """What is left of the rows that each head kept, and of the window."""
        first = n_window - n_window % AHEAD
        if first not in self.ahead:
            self.ahead.clear()
            self.ahead[first] = self.tables(kept, first)
        starts, counts, window_starts, window_counts = self.ahead[first][n_window - first]
        return Spans(starts, counts, kept.longest), Spans(window_starts, window_counts, n_window)

    def tables(self, kept: Spans, first: int) -> Tensor:
        """Starts and counts of kept rows and of the window, for windows from `first` on."""
        n_window = torch.arange(first, first + AHEAD, device=self.n_recent.device).unsqueeze(1)
        n_gone = (self.n_recent >= 0) * (n_window - 1).clamp(min=0)
        of_kept = torch.minimum(n_gone, self.n_recent.clamp(min=0))
        of_window = n_gone - of_kept
        return torch.stack([kept.starts + of_kept, kept.counts - of_kept, of_window, n_window - of_window], 1)

    def left(self, kept: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (1, h_kv, n) with -1 in place of those that have left."""
        return tuple(
            x.masked_fill(torch.arange(x.shape[-1], device=x.device) < gone[:, None], -1)
            for x, gone in zip((kept, window), self.gone(window.shape[-1]), strict=True)
        )  # type: ignore[return-value]

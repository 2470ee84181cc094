"""The x axis of a figure: what runs cost, as their ledgers measured it, not as it was asked for.

Not here: what is drawn over it (`plots/figures/scores.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator

from kvbench.plots.read import measured
from kvbench.results import SampleRow


@dataclass(frozen=True)
class Axis:
    """One kind of cost: a mean over samples of what their ledgers counted."""

    name: str
    label: str
    words: str  # in a title
    unit: float
    keys: tuple[str, ...]  # of a sample's ledger, added up
    hides: str = ""  # of what the Oracle takes, what is not on this axis

    def of(self, rows: Sequence[SampleRow]) -> float | None:
        parts = [measured(rows, key) for key in self.keys]
        known = [part for part in parts if part is not None]
        return sum(known) / self.unit if len(known) == len(parts) else None


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            "device", "K, V and what finds them on the device, MB", "bytes on the device", 1e6,
            ("bytes_resident_device",), "its reading of all keys",
        ),
        Axis(
            "moved", "moved or read per step, MB", "bytes moved per step", 1e6,
            ("bytes_moved_kv_per_step", "bytes_index_read_per_step", "bytes_searched_per_step"),
        ),
        Axis(
            "attended", "tokens attended to per head, step and layer", "tokens attended to", 1,
            ("tokens_attended_mean",), "its reading of all keys",
        ),
        Axis("share", "share of the full cache", "bytes on the device", 1, ("resident_share",)),
        Axis(
            "reads", "device + moved, MB", "bytes that a step can read", 1e6,
            ("bytes_resident_device", "moved_bytes_per_step"), "its reading of all keys",
        ),
        Axis(
            "find", "read per step to find tokens, KB", "bytes read to find tokens", 1e3,
            ("bytes_index_read_per_step",), "its reading of all keys",
        ),
    )
}  # fmt: skip
CHOICES = ("device", "moved", "attended")


def scale(ax: Any, axis: Axis, values: Sequence[float]) -> None:
    """Doublings are as wide as each other where values are far apart and none is 0."""
    low, high = min(values), max(values)
    if low > 0 and high > 4 * low:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        ax.minorticks_off()
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(tick)
    ax.set_xlabel(axis.label)


def tick(value: float, _: Any = None) -> str:
    """A number without powers of ten: figures draw dollar signs as they are, so no formula is set."""
    return f"{value / 1000:.4g}k" if value >= 10_000 else f"{value:g}"

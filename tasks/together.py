"""As many requests as fit into a memory, decoded at once: copies of one that was read, each with memory of its own.

Where memory runs out all the same, an eighth fewer are tried, and so on. The copies have one prompt, so that a mixture
of experts asks the same experts for all of them.

Not here: how many fit (`tasks/memory.py`).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.engine.decode import decode
from kvbench.engine.machine import free_memory, is_out_of_memory
from kvbench.engine.model import Model
from kvbench.engine.turns.state import request_like
from kvbench.tasks.memory import Reading, collect, limited, most_on_host, watch_peak

MOST_ROWS = 64  # that are decoded at once without a GPU, where a step of hundreds takes seconds


@dataclass
class Together:
    """Figures of so many requests decoded together."""

    largest: int  # that fit
    n_rows: int = 0  # that were decoded
    bound: str | None = None  # what lets it be fewer than fit
    tpot_s: float | None = None
    peak_bytes: int | None = None  # of the GPUs
    tried: list[int] = field(default_factory=list)  # more requests, for which memory ran out

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tpot_s is None else self.n_rows / self.tpot_s

    def columns(self, full: "Together") -> dict[str, Any]:
        """Figures of the largest batch, with those of full attention at its own largest batch."""
        ours, theirs = self.tokens_per_s, full.tokens_per_s
        return {
            "batch_run": self.n_rows,
            "batch_bound": self.bound,
            "largest_batch_tried": self.tried,
            "tokens_per_s_at_largest": ours,
            "tpot_s_at_largest": self.tpot_s,
            "peak_bytes_at_largest": self.peak_bytes,
            "full_largest_batch": full.largest,
            "full_batch_run": full.n_rows,
            "full_tokens_per_s_at_largest": theirs,
            "throughput_ratio": None if ours is None or theirs is None else ours / theirs,
        }


def decode_together(
    model: Model, reading: Reading, feed: Sequence[int], largest: int, most: int | None, memory: int
) -> Together:  # fmt: skip
    """`largest` requests, or `most` of them, or as many as there is memory for."""
    if most is None and model.device.type != "cuda":
        most = MOST_ROWS
    done, n = Together(largest), min(largest, most or largest)
    while n:
        try:
            with limited(model.devices, memory):
                done.n_rows, done.tpot_s, done.peak_bytes = run_copies(model, reading, feed, n)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            done.tried.append(n)
        else:
            if done.n_rows < largest:
                limit = "out of memory" if done.tried else "task.most_rows"
                done.bound = limit if done.n_rows == n else "memory of the host"
            return done
        free_memory()
        n -= max(1, n // 8)
    return done


def run_copies(model: Model, reading: Reading, feed: Sequence[int], n: int) -> tuple[int, float, int | None]:
    """Read a prompt once, copy the request and go on with all of them: how many, the middle step, the peak on GPUs.

    Fewer than `n` where the host has no room for more.
    """
    collect(model.devices)
    read_peak = watch_peak(model.devices)
    trace, row = reading()
    n = min(n, most_on_host(row))
    rows = [row, *(request_like(row) if row.traits.rolls_back else reading()[1] for _ in range(n - 1))]
    seconds = decode(model, trace, rows, max_new_tokens=0, feed=feed).step_seconds
    return n, statistics.median(seconds[1:]), read_peak() if model.device.type == "cuda" else None

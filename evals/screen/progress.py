"""Progress of a run on standard error: a live view on a terminal, a line per sample elsewhere.

The view has a table of the variants with their scores so far, a bar over the work with the time that is left, and one
over what the present sample is at. The time left is rich's in both: the work ahead at the speed of the run so far.

Not here: what a sample costs (`evals/screen/expect.py`); results, which whoever reads a log file finds in the run's
folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from time import monotonic
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from kvbench.engine import terminal
from kvbench.engine.terminal import printable

LONGEST_ID = 80  # characters of a sample's id
ROOM = 10  # lines of a terminal that are left to bars and the table's frame
PAGE_SECONDS = 4  # that variants are seen which a terminal has no room for at once
NOTCHES = 900  # moves of a whole bar: rich takes the speed from the last 1000, which are to be all


@dataclass(frozen=True)
class Standing:
    """A variant so far."""

    method: str
    budget: str
    n_samples: int  # answered, those that ran out of memory included
    score: float | None  # None: no answer yet, or all ran out of memory; shares in percent
    scores_later: bool = False  # its answers have no scores while the run goes on

    @property
    def shown(self) -> str:
        if self.score is not None:
            return f"{self.score:.1f}"
        if self.scores_later:
            return "scored later"
        return "out of memory" if self.n_samples else "none"


def in_words(standings: Sequence[Standing]) -> str:
    """Scores on one line, those of a method next to each other: `full 100.0  snapkv 50.0 75.0`."""
    if len(standings) == 1:
        return standings[0].shown
    by_method: dict[str, list[str]] = {}
    for one in standings:
        by_method.setdefault(one.method, []).append(one.shown)
    return "  ".join(" ".join([method, *shown]) for method, shown in by_method.items())


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Progress:
    """The progress of one group of variants; `n_done` of `n_samples` were there before.

    `work` is what it costs to read each of the others and to answer it, in any unit; without it all count alike.
    """

    def __init__(
        self,
        title: str,
        n_samples: int,
        n_done: int,
        standings: Sequence[Standing] = (),
        work: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.title, self.n_samples, self.n_done, self.n_before = title, n_samples, n_done, n_done
        self.standings = standings
        self.work = [(1.0, 0.0)] * (n_samples - n_done) if work is None else work
        costs = [*map(sum, self.work)]
        before = n_done * sum(costs) / max(1, len(costs))
        self.ends = [*accumulate(costs, initial=before)]  # work that is done before each of them, and in the end
        self.batches, self.waves, self.span = (0, 1), (0, 1), (0.0, 1.0)
        self.console = terminal.console(stderr=True)
        self.live: Live | None = None
        self.bars = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"), console=self.console,
            speed_estimate_period=inf, get_time=monotonic,
        )  # fmt: skip
        self.samples = self.bars.add_task(printable(title), total=self.ends[-1], count="")
        self.bars.advance(self.samples, before)  # rich takes the speed from after the first move
        self.inner = self.bars.add_task("", total=1, visible=False, count="")
        self.started, self.speed = monotonic(), ""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live = Live(get_renderable=self.view, console=self.console, transient=True, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def view(self) -> Group:
        """The lines that a terminal shows, as high as it is."""
        inner = self.bars.tasks[self.inner]
        self.bars.update(self.samples, count=f"{self.n_done}/{self.n_samples}{self.speed}")
        self.bars.update(self.inner, count=f"{inner.completed:.0f}/{inner.total:.0f}")
        return Group(*([self.table()] if self.standings else []), self.bars)

    def table(self) -> Table:
        """All variants side by side as far as the terminal is wide; where it is too small, one page after the other."""
        rows = [(one.method, one.budget, one.shown, str(one.n_samples)) for one in self.standings]
        names = ("variant", "", "score so far", "samples")
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        n_beside = max(1, self.console.width // (sum(widths) + 2 * len(widths)))
        n_lines = max(1, self.console.height - ROOM)
        n_pages = -(-len(rows) // (n_beside * n_lines))
        n_lines = -(-len(rows) // (n_beside * n_pages))  # evenly filled
        first = int((monotonic() - self.started) / PAGE_SECONDS) % n_pages * n_beside * n_lines
        page = rows[first : first + n_beside * n_lines]
        n_beside = -(-len(page) // n_lines)
        table = Table(*names * n_beside, box=box.SIMPLE_HEAD)
        for i in range(n_lines):
            beside = [page[at] for at in range(i, len(page), n_lines)]
            if beside:
                table.add_row(*(cell for row in beside for cell in row))
        if n_pages > 1:
            table.caption = f"variants {first + 1} to {first + len(page)} of {len(rows)}; the others follow"
        return table

    def say(self, line: str) -> None:
        """A line above the view, or in the log."""
        if self.live is not None:
            self.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        else:
            say(line)

    def batch(self, n_done: int, n: int) -> None:
        """The present sample is asked in so many batches, each with passes of its own, and the next one begins."""
        self.batches, self.waves = (n_done, n), (0, 1)

    def wave(self, n_done: int, n: int) -> None:
        """Variants of the present batch answer in so many waves after its pass, and the next one begins."""
        self.waves = n_done, n

    def reading(self, id: str, n_tokens: int, n_layers: int) -> None:
        """The present sample begins to read its prompt."""
        self.stage(f"{id}: reading {n_tokens} tokens", n_layers, 0.0, self.read_share)

    def answering(self, id: str, n_rows: int, n_steps: int) -> None:
        """The present sample begins to decode so many variants at once."""
        begun, (n_done, n) = self.read_share, self.waves
        each = (1 - begun) / n
        self.stage(f"{id}: answering, {n_rows} at once", n_steps, begun + n_done * each, begun + (n_done + 1) * each)

    @property
    def read_share(self) -> float:
        """Which part of the present sample's work is reading."""
        reading, answering = self.work[self.n_done - self.n_before]
        return reading / (reading + answering)

    def stage(self, what: str, total: int, begun: float = 0.0, ended: float = 1.0) -> None:
        """The present sample begins something that has so many parts, and takes it from one share to another."""
        self.span = begun, ended
        self.bars.reset(self.inner, description=f"  {printable(what)}", total=total, visible=True, count="")
        self.bars.advance(self.inner, 0)

    def advance(self) -> None:
        """Count one layer read, one step decoded, or another part done."""
        self.bars.advance(self.inner)
        (n_done, n), (begun, ended) = self.batches, self.span
        part = begun + (ended - begun) * self.bars.tasks[self.inner].percentage / 100
        before, after = self.ends[self.n_done - self.n_before :][:2]
        self.move(before + (after - before) * (n_done + part) / n)

    def move(self, to: float) -> None:
        """Bring the bar over the work there, where that is a notch or the end; never back, as for a second try."""
        bar, end = self.bars.tasks[self.samples], self.ends[-1]
        if to - bar.completed >= end / NOTCHES or to == end:
            self.bars.advance(self.samples, to - bar.completed)

    def sample_done(self, id: str, standings: Sequence[Standing]) -> None:
        """A sample has ended; in a log this is a line with what is left."""
        self.batch(0, 1)
        self.n_done, self.standings = self.n_done + 1, standings
        self.speed = f", {60 * (self.n_done - self.n_before) / max(1e-3, monotonic() - self.started):.2g}/min"
        self.move(self.ends[self.n_done - self.n_before])
        if self.live is not None:
            return
        left = self.bars.tasks[self.samples].time_remaining
        ahead = f", about {duration(left)} left" if left and self.n_done < self.n_samples else ""
        which = f"{self.n_done}/{self.n_samples} {id[:LONGEST_ID]}"
        self.say(f"{self.title}: {which}  {in_words(standings)}  {duration(monotonic() - self.started)}{ahead}")


def say(line: str) -> None:
    """A line on standard error, where nothing is in progress; on one line: what it names may hold any character."""
    terminal.say(printable(line), file=sys.stderr)

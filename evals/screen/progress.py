"""Progress of a run on standard error: a live view on a terminal, a line per sample elsewhere.

The view has a table of the variants with their scores so far, a bar over the work with the time that is left, and one
over what the present sample is at. The time is the same in both: `evals/screen/estimate.py` foretells it, where rich
would only know it for samples shorter than half a minute.

Not here: results. Whoever reads a log file finds them in the run's folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from kvbench.engine import terminal
from kvbench.engine.terminal import printable
from kvbench.evals.screen.estimate import ANSWERING, PART, READING, Estimate, Load

LONGEST_ID = 80  # characters of a sample's id
ROOM = 10  # lines of a terminal that are left to bars and the table's frame
PAGE_SECONDS = 4  # that variants are seen which a terminal has no room for at once


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

    Without an `estimate` all samples count alike.
    """

    def __init__(
        self,
        title: str,
        n_samples: int,
        n_done: int,
        standings: Sequence[Standing] = (),
        estimate: Estimate | None = None,
    ) -> None:
        self.title, self.n_samples, self.n_done, self.n_before = title, n_samples, n_done, n_done
        self.standings = standings
        self.estimate = estimate or Estimate([Load(1, 0)] * (n_samples - n_done))
        self.console = terminal.console(stderr=True)
        self.live: Live | None = None
        self.bars = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=self.console,
        )  # fmt: skip
        self.samples = self.bars.add_task(printable(title), total=1.0, count="", left="")
        self.inner = self.bars.add_task("", total=1, visible=False, count="", left="")
        self.started = monotonic()
        self.estimate.begin(self.started)

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
        now = monotonic()
        left, n_here = self.estimate.left(now), self.n_samples - self.n_before
        self.bars.update(
            self.samples,
            completed=(self.n_before + n_here * self.estimate.share(now)) / max(1, self.n_samples),
            count=f"{self.n_done}/{self.n_samples}",
            left=f"about {duration(left)} left" if left else "",
        )
        inner = self.bars.tasks[self.inner]
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
        """A line above the view, or in the log; what it names may hold any character."""
        line = printable(line)  # on one line: a sample's id may hold newlines
        if self.live is not None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            terminal.say(line, file=sys.stderr)

    def reading(self, id: str, n_tokens: int, n_layers: int) -> None:
        """The present sample begins to read its prompt."""
        self.stage(f"{id}: reading {n_tokens} tokens", n_layers, READING)

    def answering(self, id: str, n_rows: int, n_steps: int) -> None:
        """The present sample begins to decode so many variants at once."""
        self.stage(f"{id}: answering, {n_rows} at once", n_steps, ANSWERING)

    def stage(self, what: str, total: int, kind: str = PART) -> None:
        """The present sample begins something that has so many parts."""
        self.estimate.stage(kind, total, monotonic())
        if self.live is not None:
            self.bars.reset(self.inner, description=f"  {printable(what)}", total=total, visible=True)

    def advance(self) -> None:
        """Count one layer read, one step decoded, or another part done."""
        self.estimate.advance(monotonic())
        if self.live is not None:
            self.bars.advance(self.inner)

    def sample_done(self, id: str, standings: Sequence[Standing]) -> None:
        """A sample has ended; in a log this is a line with what is left."""
        now = monotonic()
        self.estimate.sample_done(now)
        self.n_done += 1
        self.standings = standings
        if self.live is not None:
            return
        left = self.estimate.left(now)
        ahead = f", about {duration(left)} left" if left and self.n_done < self.n_samples else ""
        which = f"{self.n_done}/{self.n_samples} {id[:LONGEST_ID]}"
        self.say(f"{self.title}: {which}  {in_words(standings)}  {duration(now - self.started)}{ahead}")


def say(line: str) -> None:
    """A line on standard error, where nothing is in progress."""
    Progress("", 0, 0).say(line)

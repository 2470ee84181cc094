"""Progress of a run on standard error: a live view on a terminal, a line per sample elsewhere.

The view has a table of the variants with their scores so far, a bar over the samples with the time that is left, and
one over what the present sample is at.

Not here: results. Whoever reads a log file finds them in the run's folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from evals.foreign import printable

LONGEST_ID = 80  # characters of a sample's id
ROOM = 10  # lines of a terminal that are left to bars and the table's frame


@dataclass(frozen=True)
class Standing:
    """A variant so far."""

    method: str
    budget: str
    n_samples: int  # answered, those that ran out of memory included
    score: float | None  # None: no answer yet, or all ran out of memory
    scores_later: bool = False  # its answers have no scores while the run goes on

    @property
    def shown(self) -> str:
        if self.score is not None:
            return f"{self.score:.3f}"
        if self.scores_later:
            return "scored later"
        return "out of memory" if self.n_samples else "none"


def in_words(standings: Sequence[Standing]) -> str:
    """Scores on one line, those of a method beside each other: `full 1.000  snapkv 0.500 0.750`."""
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
    """Of one group of variants; `done` of `n_samples` were there before."""

    def __init__(self, title: str, n_samples: int, n_done: int, standings: Sequence[Standing] = ()) -> None:
        self.title, self.n_samples, self.n_done, self.n_before = title, n_samples, n_done, n_done
        self.standings = standings
        self.console = Console(stderr=True, markup=False, emoji=False)
        self.live: Live | None = None
        self.bars = Bars(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self.samples = self.inner = TaskID(0)
        self.started = monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.samples = self.bars.add_task(self.title, total=self.n_samples, completed=self.n_done)
            self.inner = self.bars.add_task("", total=1, visible=False)
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
        """What a terminal shows, as high as it is."""
        table = Table("variant", "", "score so far", "samples", box=box.SIMPLE_HEAD)
        shown = max(1, self.console.height - ROOM)
        for one in self.standings[:shown]:
            table.add_row(one.method, one.budget, one.shown, str(one.n_samples))
        if len(self.standings) > shown:
            table.add_row(f"… and {len(self.standings) - shown} more")
        return Group(*([table] if self.standings else []), self.bars)

    def say(self, line: str) -> None:
        """A line above the view, or in the log; what it names may hold any character."""
        line = printable(line)
        if self.live is not None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def stage(self, what: str, total: int) -> None:
        """The present sample begins to read its prompt, or to decode."""
        if self.live is not None:
            what = f"  {printable(what)}"
            self.bars.reset(self.inner, description=what, total=total, visible=True)

    def advance(self) -> None:
        """One layer read, or one step decoded."""
        if self.live is not None:
            self.bars.advance(self.inner)

    def sample_done(self, id: str, standings: Sequence[Standing]) -> None:
        """A sample has ended; in a log this is a line with what is left."""
        self.n_done += 1
        self.standings = standings
        if self.live is not None:
            self.bars.update(self.samples, completed=self.n_done)
            return
        spent = monotonic() - self.started
        left = spent / (self.n_done - self.n_before) * (self.n_samples - self.n_done)
        ahead = f", about {duration(left)} left" if self.n_done < self.n_samples else ""
        which = f"{self.n_done}/{self.n_samples} {id[:LONGEST_ID]}"
        self.say(f"{self.title}: {which}  {in_words(standings)}  {duration(spent)}{ahead}")

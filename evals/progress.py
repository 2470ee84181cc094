"""Progress of a run on standard error: bars on a terminal, a line per sample elsewhere.

Not here: results. Whoever reads a log file finds them in the run's folder.
"""

import sys
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """A bar over the samples and one over what the present sample is at."""

    def __init__(self, title: str, n_samples: int, n_done: int) -> None:
        self.title, self.n_samples, self.n_done = title, n_samples, n_done
        self.console = Console(stderr=True)
        self.bars: Bars | None = None
        self.samples = self.inner = TaskID(0)
        self.started = monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
            self.bars = Bars(*columns, console=self.console, transient=True)
            self.bars.start()
            self.samples = self.bars.add_task(
                self.title, total=self.n_samples, completed=self.n_done
            )
            self.inner = self.bars.add_task("", total=1, visible=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bars is not None:
            self.bars.stop()

    def say(self, line: str) -> None:
        """A line above the bars, or in the log."""
        if self.bars is not None:
            self.bars.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def stage(self, what: str, total: int) -> None:
        """The present sample begins to read its prompt, or to decode."""
        if self.bars is not None:
            self.bars.reset(self.inner, description=f"  {what}", total=total, visible=True)

    def advance(self) -> None:
        """One layer read, or one step decoded."""
        if self.bars is not None:
            self.bars.advance(self.inner)

    def sample_done(self, id: str, scores: str) -> None:
        """A sample has ended; in a log this is a line with what is left."""
        self.n_done += 1
        if self.bars is not None:
            self.bars.update(
                self.samples, completed=self.n_done, description=f"{self.title}  {scores}"
            )
            return
        spent = monotonic() - self.started
        self.say(f"{self.title}: {self.n_done}/{self.n_samples} {id}  {scores}  {spent:.0f} s")

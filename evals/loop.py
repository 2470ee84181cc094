"""The loop over samples: each is prepared, answered and written once, for all cells that share it.

Cells that agree on model, task, data, prefill, dtype and seed form a group. Per sample, the group's unfinished cells
share one prefill and decode as rows of one batch. A cell's folder holds the same as if the cell had run alone: exactly
in float32 on a CPU; elsewhere the order of sums, and so a close decision, may depend on the other rows of the batch.

Not here: what a cell is (`evals/cells.py`), samples as tokens (`evals/prepare.py`), how they are answered
(`evals/answer.py`), what is written (`evals/write.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kvbench.engine.model import Model
from kvbench.evals.answer import Answering
from kvbench.evals.cells import Cell, check_loaded, is_finished
from kvbench.evals.models import Models
from kvbench.evals.prepare import PreparedSample, prepared
from kvbench.evals.refusals import CellRefused, leave_out, staying
from kvbench.evals.screen.expect import Pace, how_many, is_worth_while, timed
from kvbench.evals.screen.progress import Progress, say
from kvbench.evals.write import Began, Writer
from kvbench.results import RunFolder, RunResult
from kvbench.results.opened import open_folders, results_of


class Group:
    """Cells with one model, one task and the same samples; `cells` are those without a result."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        # One task for all: what it learns with the samples, such as a tokenizer, their scores and pictures need too.
        self.cells = self.every = [replace(cell, task=cells[0].task) for cell in cells]
        self.samples: list[PreparedSample] | None = None  # every one that is asked, in the task's order
        self.began = Began()

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def n(self) -> int:
        return len(self.samples or ())

    def prepare(self) -> None:
        """Prepare each sample once. Where all cells have a result, nothing is read."""
        if unfinished := [cell for cell in self.cells if not is_finished(cell.path)]:
            self.samples, refused = prepared(unfinished)
            self.without(refused)

    def without(self, refused: Iterable[Cell]) -> None:
        """Go on without some cells."""
        gone = {id(cell) for cell in refused}
        self.cells, self.every = ([cell for cell in some if id(cell) not in gone] for some in (self.cells, self.every))

    def enter(
        self, folders: dict[Path, RunFolder], elsewhere: Mapping[Path, frozenset[str]] = MappingProxyType({})
    ) -> list[PreparedSample]:
        """Go on in these folders: the samples that some cell has not answered."""
        self.writer = Writer(folders, elsewhere)
        self.cells = [cell for cell in self.cells if folders[cell.path].finished is None]
        if self.cells and self.samples is None:  # a result was there, and is damaged
            self.prepare()
        return self.writer.missing(self.samples or (), self.cells)

    def run(self, models: Models, waiting: Sequence[PreparedSample]) -> None:
        """Let every cell answer the samples that it has not answered yet."""
        model = models.get(self.first.settings)
        check_loaded(self.cells, model.checkpoint)
        work = self.work(waiting, self.pace(model, waiting))
        standings = self.writer.standings(self.cells)
        with Progress(self.title(), self.n, self.n - len(waiting), standings, work) as progress:
            self.ask_all(waiting, Answering(model, self.first, progress))
        self.finish()

    def ask_all(self, waiting: Iterable[PreparedSample], answering: Answering) -> None:
        with answering.model.hooked(), staying(cell.settings.method.target for cell in self.cells):
            for one in waiting:
                self.ask(one, answering)

    def ask(self, one: PreparedSample, answering: Answering) -> None:
        """Let all cells answer; one that is refused on the way is left out of its sweep, and the others answer."""
        is_answered = False
        while not is_answered:
            draws = [draw for cell in self.cells for draw in cell.draws()]
            try:
                for reply in answering.answer(one, [draw for draw in draws if self.writer.missing_lines(one, draw)]):
                    self.writer.write(one, reply)
                is_answered = True
            except CellRefused as refusal:
                self.leave_out(refusal)
        answering.progress.sample_done(one.sample.id, self.writer.standings(self.cells))

    def leave_out(self, refusal: CellRefused) -> None:
        """Go on without the cell that is refused, and without its folder."""
        refused = next(cell for cell in self.cells if cell.settings is refusal.settings)
        self.without([refused])
        leave_out(refusal.settings, refusal, lambda cell: cell, self.cells)
        self.writer.folders.pop(refused.path).discard()

    def finish(self) -> None:
        """Write each cell's result."""
        for cell in self.cells:
            self.writer.finish(cell, self.every, self.samples or (), self.began)

    def pace(self, model: Model, waiting: Sequence[PreparedSample]) -> Pace | None:
        """What the model takes here, where that is worth timing; says how long the samples will take then."""
        loads, limit = [one.load for one in waiting], self.first.settings.limit
        if self.first.task.is_timed or not is_worth_while(loads):
            return None
        pace = timed(model, waiting[0].prompt.context_ids, len(self.cells))
        asked = "limit=N asks fewer" if limit is None else f"limit={limit}"
        say(f"{self.title()}: {how_many(len(waiting), self.n)} ({asked}), {pace.words(loads)}")
        return pace

    def work(self, waiting: Sequence[PreparedSample], pace: Pace | None = None) -> list[tuple[float, float]]:
        """What it takes to read each sample and to answer it."""
        pace = pace or Pace(self.first.shape.d_model)
        return [pace.work(one.load) for one in waiting]

    def title(self) -> str:
        names = list(dict.fromkeys(cell.settings.method.name for cell in self.cells))
        return f"{self.first.task.name} {','.join(names) if len(names) <= 3 else f'{len(self.cells)} variants'}"


def run_group(group: Group, models: Models) -> dict[Path, RunResult]:
    """Run the cells of one group: each cell's result."""
    cells = group.cells
    with staying([cell.settings.method.target for cell in cells]), ExitStack() as stack:
        folders = open_folders(cells, stack, say)
        waiting = group.enter(folders)
        if group.cells:
            group.run(models, waiting)
        return results_of(cells, folders)

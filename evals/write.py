"""Writes what cells give: lines into their folders, files next to them, and the result once all are there.

Not here: what a line and a result say (`evals/lines.py`), how files are written (`results`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any

from kvbench.evals.batch.reply import Profile, Reply
from kvbench.evals.cells import Cell
from kvbench.evals.lines import facts, line_of, standing
from kvbench.evals.models import made_with
from kvbench.evals.prepare import PreparedSample
from kvbench.evals.screen.progress import Standing
from kvbench.evals.studies import accesses
from kvbench.methods.full import Full
from kvbench.results import RunFolder, SampleRow, environment, summarise
from kvbench.results.files import file_stem

Written = tuple[SampleRow, dict[str, list[int]] | None]  # a line, and its ledger as columns


class Began:
    """When the work on a group began."""

    def __init__(self) -> None:
        self.at, self.cpu_s = datetime.now(UTC), process_time()

    def times(self) -> dict[str, Any]:
        """Times of the group's work, for env.json."""
        return {
            "started": self.at.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu_s": round(process_time() - self.cpu_s, 1),
        }


class Writer:
    """The folders of a group's cells, locked.

    `elsewhere` are lines of cells that stand in no folder of this process.
    """

    def __init__(
        self, folders: dict[Path, RunFolder], elsewhere: Mapping[Path, frozenset[str]] = MappingProxyType({})
    ) -> None:
        self.folders, self.elsewhere = folders, elsewhere
        self.turns: dict[tuple[Path, str], dict[int, Written]] = {}  # of conversations that are not over

    def missing(self, samples: Iterable[PreparedSample], cells: Iterable[Cell]) -> list[PreparedSample]:
        """The samples that some cell has not answered."""
        waiting = []
        for one in samples:
            for cell in cells:
                for id in one.lines[cell.draw]:
                    self.folders[cell.path].check_prompt(id, one.sha)
            if any(self.missing_lines(one, cell) for cell in cells):
                waiting.append(one)
        return waiting

    def missing_lines(self, one: PreparedSample, cell: Cell) -> list[str]:
        """The ids of a cell's lines that are not there yet."""
        there, folder = self.elsewhere.get(cell.path, ()), self.folders[cell.path]
        return [id for id in one.lines[cell.draw] if id not in there and not folder.has(id)]

    def write(self, one: PreparedSample, reply: Reply | Profile) -> None:
        """Write what a cell gave. The lines of a conversation are written once all its turns are there."""
        folder = self.folders[reply.cell.path]
        if isinstance(reply, Profile):
            with folder.placing() as beside:
                reply.record.write_chrome_trace(beside / f"trace-{file_stem(one.sample.id)}.json")
            return
        line, ledger = line_of(one, reply)
        if reply.row is not None:
            n_before = 0 if reply.turn is None else reply.turn.n_before
            accesses.keep(folder.placing, file_stem(line.id), reply.row.store, n_before)
        lines, key = [(line, ledger)], (reply.cell.path, one.sample.id)
        if reply.turn is not None:
            turns = self.turns.setdefault(key, {})
            turns[reply.turn.index] = line, ledger  # asked a second time, if memory ran out after it
            if reply.turn.index + 1 < one.n_lines:
                return
            lines = [turns[i] for i in sorted(self.turns.pop(key))]
        elif reply.lost is not None:
            lines = [(replace(line, id=id), None) for id in one.lines[reply.cell.draw]]
        missing = self.missing_lines(one, reply.cell)
        for line, ledger in lines:
            if line.id in missing:
                folder.append(line, ledger)

    def finish(self, cell: Cell, cells: Iterable[Cell], samples: Iterable[PreparedSample], began: Began) -> None:
        """Summarise a cell's samples, which are put into the task's order; its result is written last.

        Where full attention is among the `cells`, the result compares with it.
        """
        folder, settings = self.folders[cell.path], cell.settings
        folder.sort([id for one in samples for id in one.lines[cell.draw]])
        full = next((self.folders[other.path].rows for other in cells if other.rules is Full), ())
        result = summarise(folder.rows, facts(cell, folder.rows), full)
        title = f"{cell.label}, {settings.budget.label()}, {settings.model.name}"
        with folder.placing() as beside:
            cell.task.artifacts(beside, [row.to_dict() for row in folder.rows], title)
        folder.finish(result, environment() | made_with(settings) | began.times())

    def standings(self, cells: Iterable[Cell]) -> list[Standing]:
        """Scores so far, for whoever watches."""
        return [standing(cell, self.folders[cell.path].rows) for cell in cells]

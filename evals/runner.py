"""Runs cells: checked, grouped by what can share a prefill, each group's samples asked here or on a pool of workers.

Everything that can be wrong with a cell is found before weights are loaded; what only prompts can tell, before the
first prefill.

Not here: what a cell is (`evals/cells.py`), the loop over samples (`evals/loop.py`), workers (`evals/shards.py`).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from evals.cells import Cell, grouped, prepare
from evals.logger import Copies
from evals.loop import Group, open_folders, results_of
from evals.models import Models
from evals.results import RunResult
from evals.settings import Settings
from evals.shards import run_groups


def run_cells(cells: Sequence[Settings]) -> list[tuple[Path, RunResult]]:
    """Run cells, or pick up where an earlier process stopped: each cell's folder and result, in their order."""
    ready = prepare(cells)
    copies = Copies(cells, [cell.path for cell in ready])
    results: dict[Path, RunResult] = {}
    if cells and cells[0].pool is not None:
        results = run_groups(grouped(ready), cells[0].pool)
    else:
        models = Models()
        for group in grouped(ready):
            results.update(run_group(group, models))
            copies.send(results)
    copies.send(results)
    return [(cell.path, results[cell.path]) for cell in ready]


def run_group(cells: Sequence[Cell], models: "Models") -> dict[Path, RunResult]:
    """Run the cells of one group."""
    with ExitStack() as stack:
        folders = open_folders(cells, stack)
        todo = [cell for cell in cells if folders[cell.path].finished is None]
        if todo:
            Group(todo, folders).run(models)
        return results_of(cells, folders)

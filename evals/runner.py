"""Runs cells: checked, grouped by what can share a prefill, each group's samples asked here or on a pool of workers.

Whatever can be refused is refused before the first folder is made, for all cells: what settings and a model's header
tell before torch is loaded, what only prompts tell before weights are loaded.

Not here: what is asked for (`evals/cells.py`), what a cell is (`evals/cells.py`), the loop over samples
(`evals/loop.py`), workers (`evals/shards.py`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.engine.lazy import load_torch
from kvbench.engine.machine import leave_busy_cores
from kvbench.engine.terminal import say
from kvbench.evals.cells import RUNS, ask
from kvbench.evals.logger import Copies, check_logger
from kvbench.evals.refusals import check_pool, refuse_nothing_left
from kvbench.evals.settings import Settings
from kvbench.results import RunResult
from kvbench.results.files import refuse_closed

if TYPE_CHECKING:
    from kvbench.evals.cells import Cell


def prepare(cells: Sequence[Settings]) -> "list[Cell]":
    """A cell for each of the settings, checked as far as that goes without weights."""
    asked = ask(cells)
    load_torch()  # which waited for the checks
    from kvbench.evals.cells import ready_cells

    return ready_cells(asked)


def run_cells(cells: Sequence[Settings]) -> list[tuple[Path, RunResult]]:
    """Run cells, or pick up where an earlier process stopped: each cell's folder and result, in their order."""
    check_logger(cells)
    check_pool(cells)
    for out in {cell.out for cell in cells}:
        refuse_closed(out or RUNS)
    ready = prepare(cells)
    from kvbench.evals.cells import distinct, grouped
    from kvbench.evals.loop import Group, run_group
    from kvbench.evals.models import Models
    from kvbench.evals.prepare import refuse_folders
    from kvbench.evals.shards import run_groups

    groups = [Group(each) for each in grouped(distinct(ready))]
    for group in groups:
        group.prepare()
    own = {cell.path: cell for group in groups for cell in group.cells}  # less those that a prompt leaves out
    refuse_nothing_left(own)
    refuse_folders((group.cells, group.samples or ()) for group in groups)
    groups = [group for group in groups if group.cells]
    copies = Copies([cell.settings for cell in own.values()], list(own))
    results: dict[Path, RunResult] = {}
    if cells and cells[0].pool is not None:
        results = run_groups(groups, cells[0].pool)
    else:
        if words := leave_busy_cores():
            say(words, file=sys.stderr)
        models = Models()
        for group in groups:
            results.update(run_group(group, models))
            copies.send(results)
    copies.send(results)
    refuse_nothing_left(results)
    return [(cell.path, results[cell.path]) for cell in ready if cell.path in results]

"""The folders of a group's cells, locked while it works on them.

Not here: what a folder holds (`results/folder.py`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import yaml

from kvbench.results.folder import RunFolder
from kvbench.results.lock import Holder
from kvbench.results.schema import RunResult


class HasFolder(Protocol):
    """What a cell says of its folder."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...


def open_folders(cells: Sequence[HasFolder], stack: ExitStack, say: Callable[[str], None]) -> dict[Path, RunFolder]:
    """The cells' folders, locked until the stack is left, with all that earlier processes answered.

    `say` is told what is noted, and who is waited for.
    """
    folders: dict[Path, RunFolder] = {}
    for cell in sorted(cells, key=lambda cell: cell.path):  # in one order: two processes must not wait for each other
        text = yaml.safe_dump(cell.config, sort_keys=False, allow_unicode=True)
        folder = RunFolder.open(cell.path, cell.config, text, on_wait=waiting(cell.path, say))
        folders[cell.path] = stack.enter_context(folder)
        for shard in folder.shards():
            folder.take(shard, on_wait=waiting(shard, say))
        for note in folder.notes:
            say(note)
    return folders


def results_of(cells: Sequence[HasFolder], folders: dict[Path, RunFolder]) -> dict[Path, RunResult]:
    """The result of each cell that was not left out; all are finished."""
    results: dict[Path, RunResult] = {}
    for cell in cells:
        if cell.path not in folders:
            continue  # left out on the way
        result = folders[cell.path].finished
        assert result is not None, f"{cell.path} was run and has no result"
        results[cell.path] = result
    return results


def waiting(path: Path, say: Callable[[str], None]) -> Callable[[Holder], None]:
    """What to say while another process works on the same folder."""
    return lambda holder: say(f"{path} is in use by {holder}; waiting for it to end")

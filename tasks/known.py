"""Every task by its name, found through the files of conf/task.

A task is a file or folder here and a file there: its class says which data and which packages it needs.

Not here: which task a run asks (`evals/settings.py`).
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from kvbench.engine.errors import one_line
from kvbench.engine.terminal import say

CONF = Path(__file__).resolve().parents[1] / "conf" / "task"


@cache
def known_tasks() -> dict[str, Any]:
    """The class of every task, by its name; a file that leads to none is named on standard error, and left out."""
    found: dict[str, Any] = {}
    for file in sorted(CONF.glob("*.yaml")):
        try:
            tree = yaml.safe_load(file.read_text())
            if "_target_" in tree:
                module, _, name = tree["_target_"].rpartition(".")
                kind = getattr(import_module(module), name)
                found.setdefault(kind.name, kind)
        except (Exception, SystemExit) as error:  # whatever a user's file raises, the others are asked
            say(f"task={file.stem} is left out: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
    return found


def own_data() -> dict[str, Any]:
    """The data of each task that has some; what a task shares with the one that it is made of is that one's."""
    return {name: kind.data for name, kind in known_tasks().items() if vars(kind).get("data") is not None}

"""Every task by its name, found through the files of conf/task.

A task is a file or folder here and a file there: its class says which data and which packages it needs.

Not here: which task a run asks (`evals/settings.py`).
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf" / "task"


@cache
def known_tasks() -> dict[str, Any]:
    """The class of every task, by its name."""
    trees = [yaml.safe_load(file.read_text()) for file in sorted(CONF.glob("*.yaml"))]
    targets = dict.fromkeys(tree["_target_"] for tree in trees if "_target_" in tree)
    kinds = [getattr(import_module(target.rpartition(".")[0]), target.rpartition(".")[2]) for target in targets]
    return {kind.name: kind for kind in kinds}


def own_data() -> dict[str, Any]:
    """The data of each task that has some; what a task shares with the one that it is made of is that one's."""
    return {name: kind.data for name, kind in known_tasks().items() if vars(kind).get("data") is not None}

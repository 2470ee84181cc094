"""What readers call a task: its own name, or another one where a set of ours stands in for a published benchmark.

Scores of a stand-in say nothing about the benchmark, so no table, figure or page shows them under the benchmark's name.
Commands and files go on saying `task=longbench`, with `task.source=embedded` beside it.

A method of ours is a file of methods/ and one of conf/method/ of its name; further files there are presets, whose names
begin with their method's.

Not here: which set is asked (each task's `source`).
"""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = "embedded"  # what `data_source` says of a set of ours
STAND_INS = {
    "longbench": "embedded texts",
    "infinitebench": "rows like InfiniteBench's",
    "ruler": "rows like RULER's",
    "scbench": "conversations like SCBench's",
    "pg19": "embedded prose",
}
LENGTHS = ("short", "brief")  # behind a task's name: the same in fewer or shorter samples


def shown_task(task: str, data_source: str) -> str:
    """The name of what was asked."""
    if data_source != EMBEDDED:
        return task
    base, length = without_length(task)
    return f"{STAND_INS[base]}, {length}" if length and base in STAND_INS else STAND_INS.get(task, task)


def without_length(task: str) -> tuple[str, str]:
    """A task's name, or what readers call it, without the word that says that it is shorter; and that word."""
    for sign in ("_", ", "):
        base, _, length = task.rpartition(sign)
        if base and length in LENGTHS:
            return base, length
    return task, ""


@cache
def own_methods() -> dict[str, Path]:
    """The file of each method of ours, by its name."""
    files = sorted((ROOT / "methods").rglob("*.py"))
    return {file.stem: file for file in files if (ROOT / "conf" / "method" / f"{file.stem}.yaml").is_file()}


def known(name: str) -> str | None:
    """The method whose setting a configuration's name says: `h2o` of `h2o_paper`; None where that is none of ours."""
    parts = name.split("_")
    heads = ("_".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((head for head in heads if head in own_methods()), None)

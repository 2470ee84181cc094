"""What readers call a task: its own name, or another one where a set of ours stands in for a published benchmark.

Scores of a stand-in say nothing about the benchmark, so no table, figure or page shows them under the benchmark's name.
Commands and files go on saying `task=longbench`, with `task.source=embedded` added.

A method of ours is a file of methods/ and one of conf/method/ of its name; further files there are presets, whose names
begin with their method's.

What a task is called, and how it is described in a line, stands in its own file as a card: lines of its docstring that
begin with a word of `CARD`.

Not here: which set is asked (each task's `source`).
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = "embedded"  # what `data_source` says of a set of ours
FIRST = frozenset(  # methods of evidence_docs; docs/results.md asks the others less
    "pqcache kvzip quest sparq snapkv adakv pyramidkv tova streamingllm expected_attention keydiff random".split()
)
LENGTHS = ("short", "brief")  # after a task's name: the same in fewer or shorter samples

CARD = ("Names", "Asks", "Lengths", "Answers", "Licence")


@dataclass(frozen=True)
class TaskCard:
    """What a task says of itself in its file."""

    title: str  # of the benchmark, as readers call it
    stand_in: str  # of the set of ours that can take its place; "" where there is none
    asks: str
    lengths: str
    answers: str
    licence: str  # of its data


@cache
def own_tasks() -> dict[str, TaskCard]:
    """The card of each task, by its name."""
    files = sorted((ROOT / "conf" / "task").glob("*.yaml"))
    targets = {
        file.stem: re.search(r"^_target_: kvbench\.(tasks[\w.]+)\.\w+$", file.read_text(), re.MULTILINE)
        for file in files
    }
    modules = {name: target[1].replace(".", "/") for name, target in targets.items() if target}
    found = {name: (ROOT / f"{module}.py", ROOT / module / "__init__.py") for name, module in modules.items()}
    return {name: card_of(file) for name, files in found.items() for file in files if file.is_file()}


def card_of(file: Path) -> TaskCard:
    """The card in a task's docstring; a word that it lacks is left empty."""
    text = file.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    lines = dict(reversed(re.findall(rf"^({'|'.join(CARD)}) +(.+)$", text, re.MULTILINE)))  # the first of each counts
    title, _, stand_in = lines.get("Names", "").partition("; ")
    return TaskCard(title, stand_in, *(lines.get(word, "") for word in CARD[1:]))


STAND_INS = {name: card.stand_in for name, card in own_tasks().items() if card.stand_in}


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

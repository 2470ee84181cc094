"""What bytes buy, as a page of its own and a part of docs/hour.md: every method at several shares of all bytes.

    python -m kvbench.plots.frontier [RUNS] [--out docs]    docs/frontier.md and its figures alone

Not here: the figure (`plots/figures/frontier.py`), the page's other parts, by `ratio` (`plots/results.py`).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import matplotlib

from kvbench.engine.budget import Bytes
from kvbench.plots import style
from kvbench.plots.command import Page
from kvbench.plots.figures.frontier import Height, frontier, height_of, sets_with_bytes
from kvbench.plots.figures.results import SVG, save
from kvbench.plots.looks import LOOKS, told_apart
from kvbench.plots.read import Run, measured, over_budget
from kvbench.plots.run_sets import Estimate, RunSet
from kvbench.plots.style import Canvas, Picture
from kvbench.results.sheet import ABSENT, Sheet, markdown, plain_markdown

NAME = "frontier"
HEAD = """\
## What bytes buy

`memory` is the share of the full cache's bytes that may lie on the device behind the prompt: codes, scales, index and
the buffer for what is fetched included ([one byte budget](byte-budget.md)). A method that needs more is left out. On
the figures' axes stands what the ledgers measured, over all steps; beside it what a step can read: what lies on the
device, and what is moved. Made by

    python run.py -m experiment=frontier out=runs/results
    python run.py -m experiment=frontier_needle out=runs/results
    python run.py -m experiment=frontier_composed out=runs/results
"""


@dataclass(frozen=True)
class Table:
    """One set of runs: a row for each method, by its label, which names who makes codes."""

    run_set: RunSet
    height: Height
    runs: dict[str, dict[Fraction | Bytes, Run]]
    full: Run | None

    @property
    def shares(self) -> list[Fraction | Bytes]:
        """Shares from the largest; bytes stand after them."""
        every = {share for of in self.runs.values() for share in of}
        shares = sorted((one for one in every if isinstance(one, Fraction)), reverse=True)
        return [*shares, *sorted((one for one in every if isinstance(one, Bytes)), reverse=True)]

    def scores(self) -> str:
        """Methods down, shares across."""
        rows = [] if self.full is None else [["Full", *[self.said(self.full)] * len(self.shares)]]
        for label, of in self.runs.items():
            rows.append([label, *(self.said(of[share]) if share in of else ABSENT for share in self.shares)])
        return markdown(Sheet(["memory", *map(str, self.shares)], rows))

    def said(self, run: Run) -> str:
        found = self.height.of(run.rows)
        return ABSENT if found is None else spanned(found, self.height) + (" †" if over_budget(run.rows) else "")

    def costs(self) -> str:
        """Bytes that each method holds and moves at the share that most of them meet, the smaller one of two."""
        share = max(reversed(self.shares), key=lambda share: sum(share in of for of in self.runs.values()))
        head = ["method", "attended", "resident share", "device, MB", "moved a step, KB", "host, MB", "whole layers"]
        rows = [[label, *cost_of(of[share])] for label, of in self.runs.items() if share in of]
        return f"At memory {share}:\n\n" + markdown(Sheet([*head, "bytes"], rows))


def cost_of(run: Run) -> Iterator[str]:
    for key, unit, form in (
        ("tokens_attended_mean", 1, ",.0f"), ("resident_share", 1, ".3f"), ("bytes_resident_device", 1e6, ",.1f"),
        ("moved_bytes_per_step", 1e3, ",.1f"), ("bytes_resident_host", 1e6, ",.1f"),
    ):  # fmt: skip
        value = measured(run.rows, key)
        yield ABSENT if value is None else f"{value / unit:{form}}"
    yield str(run.whole_layers)
    yield "simulated" if run.result.simulated else "held"


def spanned(found: Estimate, height: Height) -> str:
    form = ".3f" if height.falls else ".0f"
    ends = "" if found.low is None or found.high is None else f" ({found.low:{form}} to {found.high:{form}})"
    return f"{found.mean:{form}}{ends}"


def tables(runs: Sequence[Run]) -> list[Table]:
    """A table for each set of runs with byte budgets; ValueError where a method has two runs at one share."""
    made = []
    for run_set in sets_with_bytes(runs):
        found: dict[str, dict[Fraction | Bytes, Run]] = {}
        places = {name: i for i, name in enumerate(LOOKS)}
        for run in sorted(run_set.runs, key=lambda run: (places.get(run.method, len(places)), run.result.method_label)):
            share = run.result.memory
            if run.is_full or share is None:
                continue
            at = found.setdefault(run.result.method_label, {})
            if share in at:
                raise ValueError(
                    f"{run_set.name} has several runs of {run.result.method_label} at memory {share}; give a folder "
                    "with one of them"
                )
            at[share] = run
        full = next((run for run in run_set.runs if run.is_full), None)
        made.append(Table(run_set, height_of(run_set), found, full))
    return made


def pictures(runs: Sequence[Run]) -> dict[str, Picture]:
    """The figures by their files' names."""
    return {f"frontier-{i}": picture for i, picture in enumerate(frontier(runs, Canvas()), 1)}


def part(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The page's part, with the figures of these files; "" without runs with a byte budget."""
    found = tables(runs)
    if not found:
        return ""
    parts = [HEAD]
    for table, name in zip(found, names, strict=True):
        n = max(len(run.rows) for of in table.runs.values() for run in of.values())
        better = "lower is better" if table.height.falls else "0 to 100"
        parts += [
            f"### {plain_markdown(table.run_set.name)}: {table.height.label}",
            f"{plain_markdown(table.run_set.about)} · n = {n} · {better}",
            f"![{table.height.label} against bytes]({name}.svg)",
            table.scores(),
            table.costs(),
        ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def write(out: Path, runs: Sequence[Run]) -> list[Path]:
    """The page and its figures; nothing where no run has a byte budget."""
    if not tables(runs):
        return []
    folder, path = out / NAME, out / f"{NAME}.md"
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**style.RC, **SVG}), told_apart(run.method for run in runs):
        drawn = pictures(runs)
        for name, picture in drawn.items():
            save(picture, folder / f"{name}.svg")
    text = part(runs, [f"{NAME}/{name}" for name in drawn])
    made_by = "    python -m kvbench.plots.frontier runs/results\n"
    last = "experiment=frontier_composed out=runs/results\n"
    path.write_text(text.removeprefix("#").replace(last, last + made_by, 1), encoding="utf-8")
    return [path, *(folder / f"{name}.svg" for name in drawn)]


NOTHING = "{} has no runs with memory=; experiment=frontier makes some"
main = Page(
    "kvbench.plots.frontier", "Write docs/frontier.md from runs.", write, NOTHING, runs=Path("runs/results")
).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs inside a serving engine at the same memory: requests at once, goodput and score, and the pool step by step.

    python -m kvbench.plots.serving [RUNS] [--out outputs/serving]

A table has a row for each engine of `task=serving`: full attention as shipped, with a method's restrictions and through
our backend, and each method. A figure has the blocks that are in use after each step; where requests came at several
rates, another one has goodput against the rate. Wall times are those of the machine that ran: on a CPU they say nothing
of a GPU's.

Not here: the table itself (`results/served.py`), who measures (`serving/`).
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path

from kvbench.plots.command import Page
from kvbench.plots.figures.chart import Chart, Scale, written
from kvbench.plots.figures.rows import Row
from kvbench.plots.read import Run
from kvbench.plots.style import PAGE
from kvbench.results.served import Served, differing, groups, served, sheet_of
from kvbench.results.sheet import as_csv, markdown
from kvbench.results.sheet import write as write_texts

POOL = Chart("Blocks in use", Scale("step"), Scale("blocks in use"), 2.4, PAGE, legend=3)
GOODPUT = Chart("Goodput against the rate", Scale("requests that arrive per second"), Scale("goodput, requests/s"), 2.4)


def lines_of(some: Sequence[Served]) -> Iterator[tuple[Served, str, Row]]:
    """Engines, the values of keys that were swept, and the look of their lines: budgets of a method are told apart."""
    keys, seen = [key for key in differing(some) if key != "rate"], dict[str, list[str]]()
    for one in some:
        label = one.label if one.is_full else f"{one.label}, {one.budget}"
        labels = seen.setdefault(one.result.method, [])
        if label not in labels:
            labels.append(label)
        swept = ", ".join(f"{key} {one.params.get(key)}" for key in keys)
        yield one, swept, {"line": label, "look": one.result.method, "nth": labels.index(label)}


def of_pool(some: Sequence[Served]) -> list[Row]:
    """Blocks in use after each step; a panel for each rate, and for each value of other keys."""
    return [
        row | {"mark": "rule", "panel": ", ".join(filter(None, (rate(one), swept))), "x": step, "y": y}
        for one, swept, row in lines_of(some)
        for step, y in enumerate(one.figures["blocks_over_time"])
    ]


def rate(one: Served) -> str:
    return f"{one.rate:g} requests/s" if isfinite(one.rate) else "all there at once"


def of_goodput(some: Sequence[Served]) -> list[Row]:
    """Goodput at each rate, a panel for each value of other keys; [] where there is one rate."""
    rated = [(one, swept, row) for one, swept, row in lines_of(some) if isfinite(one.rate) and one.bench("goodput")]
    if len({one.rate for one, _, _ in rated}) < 2:
        return []
    return [row | {"panel": swept, "x": one.rate, "y": one.bench("request_goodput")} for one, swept, row in rated]


def write_page(out: Path, runs: Sequence[Run]) -> list[Path]:
    """serving.md, serving.csv and figures; nothing without runs in an engine."""
    some = groups([one for run in runs for one in served(run.folder, run.result)])
    made = [sheet_of(group) for group in some]
    if not made:
        return []
    records = [
        {"method": one.label, "budget": one.budget, **one.params, **shown(one)} for group in some for one in group
    ]  # fmt: skip
    texts = {"md": "\n".join(map(markdown, made)), "csv": as_csv(records)}
    drawn = list[list[Path]]()
    for i, (sheet, group) in enumerate(zip(made, some, strict=True), 1):
        own = [run for run in runs if any(one.result == run.result for one in group)]
        for chart, rows, name in ((POOL, of_pool(group), "pool"), (GOODPUT, of_goodput(group), "goodput")):
            if rows:
                drawn.append(written(chart, rows, f"{sheet.about}", own, out, f"{name}-{i}", ""))
    return [*write_texts(out, "serving", texts), *chain(*drawn)]


def shown(one: Served) -> dict[str, object]:
    """All figures, those of `vllm bench serve` by its names, but for the pool step by step."""
    own = {key: value for key, value in one.figures.items() if not isinstance(value, dict | list)}
    return own | {key: value for key, value in one.figures.get("bench", {}).items() if not isinstance(value, dict)}


NOTHING = "no run below {} is of task=serving"
about = (__doc__ or "").partition("\n")[0]
main = Page("kvbench.plots.serving", about, write_page, NOTHING, "outputs/serving", shows=True).main


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The figure of budgets that count the answer: scores against what answers cost, relative to full attention's.

A method's budgets are one line, a point each. The cost is a sum of entries over prefill and decode, so that a method
whose answers grow longer pays for it. How long answers are stands in the caption.

Not here: scores against a step's cost (`plots/figures/scores.py`).
"""

from collections.abc import Sequence
from math import fsum

from kvbench.plots.figures.axes import Axis
from kvbench.plots.figures.scores import panels, scored
from kvbench.plots.read import Run, measured
from kvbench.plots.run_sets import RunSet, asked, other_setting, run_sets
from kvbench.plots.style import Canvas, Picture


def score_vs_footprint(runs: Sequence[Run], canvas: Canvas) -> list[Picture]:
    """A figure of each set of runs with a run of full attention and budgets of prompt and answer together."""
    made = []
    for run_set in run_sets(runs, scored):
        here = run_set.only(lambda run: run.is_full or run.result.budget_counts is not None)
        entries = full_entries(here)
        if entries is None:
            continue
        axis = Axis(
            "footprint", "entries of an answer, relative to Full's", "entries of an answer", entries,
            ("footprint_entries",),
        )  # fmt: skip
        picture = panels(canvas, here, f"Score by {axis.words}", axis, other_setting(here))
        if picture is not None:
            picture.said.append(lengths(here))
            made.append(picture)
    return made


def full_entries(run_set: RunSet) -> float | None:
    """Entries of an answer of full attention, mean over its answers."""
    found = [measured(run.rows, "footprint_entries") for run in run_set.runs if run.is_full]
    return next((entries for entries in found if entries), None)


def lengths(run_set: RunSet) -> str:
    """How long answers are, in words."""
    said = []
    for run in run_set.runs:
        tokens = [row.generated_tokens for row in run.rows if row.status == "ok"]
        if tokens:
            budget = "" if run.is_full else f" {asked(run)}"
            said.append(f"{run.result.method_label}{budget} {fsum(tokens) / len(tokens):.0f}")
    return f"Tokens of an answer: {', '.join(said)}"

"""The heat map of a needle run: mean score per depth and context length, as table and picture.

Not here: anything that reads several runs (`plots/`), and a line at the model's training window,
since longer prompts are refused.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pivot:
    lengths: list[int]
    depths: list[float]
    scores: list[list[float]]  # one row per depth; NaN where a cell has none


def pivot(rows: Sequence[Mapping[str, Any]]) -> Pivot:
    """The mean score of each cell; rows are depths, columns are lengths, both ascending."""
    cells: dict[tuple[float, int], list[float]] = {}
    for row in rows:
        scores = cells.setdefault((row["depth"], row["length"]), [])
        if row["score"] is not None:  # None: out of memory
            scores.append(row["score"])
    depths = sorted({depth for depth, _ in cells})
    lengths = sorted({length for _, length in cells})
    means = {cell: sum(scores) / len(scores) for cell, scores in cells.items() if scores}
    table = [[means.get((depth, length), math.nan) for length in lengths] for depth in depths]
    return Pivot(lengths, depths, table)


def write_table(path: Path, table: Pivot) -> None:
    """The pivot table as CSV; a cell without score is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["depth_percent", *table.lengths])
        for depth, scores in zip(table.depths, table.scores, strict=True):
            out.writerow([depth, *("" if math.isnan(score) else score for score in scores)])


def draw_heatmap(path: Path, table: Pivot, title: str) -> None:
    """The pivot table as a picture; fixed colours, so that pictures of two runs can be compared."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to load; evals does without
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    colours = LinearSegmentedColormap.from_list("needle", ["#F0496E", "#EBB839", "#0CD79F"])
    figure = Figure(figsize=(max(5, 2 + 0.5 * len(table.lengths)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    image = ax.imshow(table.scores, cmap=colours, vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(table.lengths)), [str(n) for n in table.lengths], rotation=45)
    ax.set_yticks(range(len(table.depths)), [f"{depth:g}" for depth in table.depths])
    ax.set(xlabel="Token limit", ylabel="Depth percent", title=title)
    figure.colorbar(image, ax=ax, label="Score")
    figure.savefig(path, dpi=120)

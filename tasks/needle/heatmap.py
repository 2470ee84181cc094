"""The heat map of a needle run: mean score per depth and context length, as table and picture.

Not here: anything that reads several runs (`plots/`), and a line at the model's training window,
since longer prompts are refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.engine.foreign import one_line, write_csv


@dataclass(frozen=True)
class Pivot:
    lengths: list[int]
    depths: list[float]
    scores: list[list[float]]  # one row per depth; NaN where a cell has none
    tokens: list[int]  # that the prompts of each length had, on average; the lengths are what was asked for


def pivot(rows: Sequence[Mapping[str, Any]]) -> Pivot:
    """The mean score of each cell; rows are depths, columns are lengths, both ascending."""
    cells: dict[tuple[float, int], list[float]] = {}
    tokens: dict[int, list[int]] = {}
    for row in rows:
        tokens.setdefault(row["length"], []).append(row["prompt_tokens"])
        scores = cells.setdefault((row["depth"], row["length"]), [])
        if row["score"] is not None:  # None: out of memory
            scores.append(row["score"])
    depths = sorted({depth for depth, _ in cells})
    lengths = sorted({length for _, length in cells})
    means = {cell: sum(scores) / len(scores) for cell, scores in cells.items() if scores}
    table = [[means.get((depth, length), math.nan) for length in lengths] for depth in depths]
    return Pivot(lengths, depths, table, [round(sum(tokens[n]) / len(tokens[n])) for n in lengths])


def write_table(path: Path, table: Pivot) -> None:
    """The pivot table as CSV, under the lengths that were asked for; a cell without score is empty."""
    lines = (
        [depth, *("" if math.isnan(score) else score for score in scores)]
        for depth, scores in zip(table.depths, table.scores, strict=True)
    )
    write_csv(path, ["depth_percent", *table.lengths], lines)


def draw_heatmap(path: Path, table: Pivot, title: str) -> None:
    """The pivot table as a picture; fixed colours, so that pictures of two runs can be compared."""
    figure, ax, image = frame(tuple(table.tokens), tuple(table.depths))
    image.set_data([[100 * score for score in scores] for scores in table.scores])
    ax.set_title(one_line(title), parse_math=False)
    figure.savefig(path, dpi=120)
    figure.set_layout_engine("none")  # as it was laid out: that takes most of the time


@lru_cache(maxsize=1)
def frame(tokens: tuple[int, ...], depths: tuple[float, ...]) -> tuple[Any, Any, Any]:
    """All of the picture but its scores and title, which the runs of a sweep share: figure, axes and image."""
    from matplotlib import colormaps  # slow to load; evals does without
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = colormaps["cividis"].with_extremes(bad="#FFFFFF")  # ends that all eyes tell apart, as in all figures
    figure = Figure(figsize=(max(5, 2 + 0.5 * len(tokens)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    blank = [[0.0] * len(tokens)] * len(depths)
    image = ax.imshow(blank, cmap=colours, vmin=0, vmax=100, aspect="auto")
    ax.set_xticks(range(len(tokens)), [str(n) for n in tokens], rotation=45)
    ax.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    ax.set(xlabel="tokens of the prompt", ylabel="depth in %", title=" ")
    figure.colorbar(image, ax=ax, label="score, %")
    return figure, ax, image

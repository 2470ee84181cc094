"""The papers' figures from the runs at hand, as PDF and PNG.

    python -m plots.figures [RUNS] [--out FOLDER] [--only NAME …]     or: make paper-figures

A figure is drawn for each set of runs that share task, parameters, model, data and machine; the largest set has
the plain name, the others `NAME_2`, `NAME_3` and so on. What the runs cannot fill is not drawn: the command that would
make it is printed instead. Files hold no date, so the same runs make the same bytes.

Not here: how lines look (`plots/style.py`), which runs go together (`plots/run_sets.py`).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from plots import style
from plots.figures import costs as cost_figures
from plots.figures import layers as layer_figures
from plots.figures import scores as score_figures
from plots.read import Run, default_root, load


@dataclass(frozen=True)
class Drawing:
    """One kind of figure and the experiments that make its runs."""

    draw: Callable[[Sequence[Run]], list[Figure]]
    title: str
    experiments: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.draw.__name__

    @property
    def missing(self) -> str:
        commands = [
            f"    python run.py -m experiment={name}    (scale=smoke: minutes, embedded model and data)"
            for name in self.experiments
        ]
        return "\n".join([f"{self.name}: not drawn, no runs of {self.title}; make some with", *commands])


DRAWINGS = (
    Drawing(
        score_figures.score_vs_ratio, "two budgets or more",
        ("pqcache_figure10a", "pqcache_figure10c", "clusterkv_figure9", "xkv_figure11", "xkv_figure12"),
    ),
    Drawing(score_figures.score_vs_comm, "two values of comm or more", ("pqcache_figure10d",)),
    Drawing(score_figures.mxb_bars, "PQCache with several m and b", ("pqcache_figure10b",)),
    Drawing(score_figures.needle_heatmaps, "a needle by two methods", ("pqcache_figure9",)),
    Drawing(cost_figures.tt2t_vs_length, "several lengths", ("pqcache_figure11a",)),
    Drawing(
        cost_figures.tpot_vs_length, "several lengths",
        ("pqcache_figure11b", "clusterkv_figure13a", "clusterkv_figure13b"),
    ),
    Drawing(cost_figures.tpot_vs_cache, "several caches", ("pqcache_figure11c",)),
    Drawing(cost_figures.hit_rate_vs_k_cache, "several values of k_cache", ("pqcache_figure11d",)),
    Drawing(cost_figures.prefill_parts, "time by part", ("pqcache_figure8", "pqcache_figure12a")),
    Drawing(cost_figures.decode_parts, "time by part", ("pqcache_figure12b",)),
    Drawing(cost_figures.answer_time, "time by length", ("clusterkv_figure12",)),
    Drawing(
        score_figures.iterations, "several rounds of clustering, scored and timed",
        ("pqcache_figure12c", "pqcache_figure12c_latency"),
    ),
    Drawing(
        score_figures.recall_vs_budget, "recall at several budgets",
        ("clusterkv_figure11a", "clusterkv_figure11b"),
    ),
    Drawing(score_figures.perplexity_vs_length, "perplexity", ("clusterkv_figure10",)),
    Drawing(layer_figures.xkv_retention, "XKV with uniform allocation", ("xkv_figure3",)),
    Drawing(layer_figures.xkv_tokens_at_retention, "XKV with profiles", ("xkv_figure4",)),
    Drawing(layer_figures.xkv_allocation, "XKV with exact allocation", ("xkv_figure10",)),
    Drawing(layer_figures.xkv_ddid, "XKV with profiles", ("xkv_figure2",)),
    Drawing(layer_figures.xkv_score_vs_retention, "XKV with several allocations", ("xkv_figure5",)),
    Drawing(layer_figures.attention_distribution, "exact mass by budget", ("pqcache_figure6",)),
    Drawing(cost_figures.memory_vs_transfer, "full attention", ("pqcache_figure1",)),
    Drawing(
        score_figures.pareto, "three methods or more",
        ("pqcache_table2", "clusterkv_table1", "xkv_table3"),
    ),
)  # fmt: skip


def draw(drawing: Drawing, runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw all figures of one kind, and remove files of run sets that are no longer there."""
    with matplotlib.rc_context(style.RC):
        figures = drawing.draw(sorted(runs, key=lambda run: run.folder.as_posix()))
        paths = []
        for i, figure in enumerate(figures, start=1):
            name = drawing.name if i == 1 else f"{drawing.name}_{i}"
            paths += style.save(figure, folder, name)
    for old in folder.glob(f"{drawing.name}*"):
        rest = old.stem.removeprefix(drawing.name)
        if old not in paths and (not rest or rest[1:].isdecimal()):
            old.unlink()
    return paths


def main(arguments: Sequence[str]) -> int:
    names = [drawing.name for drawing in DRAWINGS]
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m plots.figures", description=about)
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/figures"), help="where to write")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    options = parser.parse_args(arguments)
    runs = load(options.runs)
    n_drawn = 0
    for drawing in DRAWINGS:
        if options.only and drawing.name not in options.only:
            continue
        try:
            paths = draw(drawing, runs, options.out)
        except OSError as error:
            print(f"plots.figures: {options.out}: {error.strerror}; choose another --out", file=sys.stderr)
            return 2
        n_drawn += len(paths)
        pdfs = [str(path) for path in paths if path.suffix == ".pdf"]
        print(f"{drawing.name}: {', '.join(pdfs)}" if pdfs else drawing.missing)
    return 0 if n_drawn else 2

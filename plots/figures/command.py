"""The papers' figures from the runs at hand, as PDF and PNG, each with its caption as text.

    python -m kvbench.plots.figures [RUNS] [--out FOLDER] [--only NAME …]     or: make paper-figures
    python -m kvbench.plots.figures RUNS --methods pqcache,snapkv,full --width column --no-title --format pdf,svg

A figure is drawn for each set of runs that share task, parameters, model, data and machine; the largest set has
the plain name, the others `NAME_2`, `NAME_3` and so on. What the runs cannot fill is not drawn: the command that would
make it is printed instead. `--width` is that of the page it will stand on, where its text is then of 7 to 8 points.
`manifest.json` says which runs each figure was drawn from. Files hold no date, so the same runs make the same bytes.

Not here: how lines look (`plots/style.py`), which runs go together (`plots/run_sets.py`).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import matplotlib

from kvbench.engine.terminal import say
from kvbench.plots import style
from kvbench.plots.figures import answers as answer_figures
from kvbench.plots.figures import costs as cost_figures
from kvbench.plots.figures import frontier, manifest, maps
from kvbench.plots.figures import layers as layer_figures
from kvbench.plots.figures import scores as score_figures
from kvbench.plots.figures.axes import CHOICES
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run, default_root, load
from kvbench.plots.style import Canvas, Picture

WIDTHS = {"column": 3.25, "text": 6.75}  # inches, of a conference's two columns
NARROWEST, WIDEST = 2.0, 12.0


@dataclass(frozen=True)
class Drawing:
    """One kind of figure and the experiments that make its runs."""

    draw: Callable[[Sequence[Run], Canvas], list[Picture]]
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
    Drawing(frontier.frontier, "byte budgets", ("frontier", "frontier_needle", "frontier_composed")),
    Drawing(score_figures.score_vs_comm, "two values of comm or more", ("pqcache_figure10d",)),
    Drawing(score_figures.mxb_bars, "PQCache with several m and b", ("pqcache_figure10b",)),
    Drawing(maps.needle_heatmaps, "a needle by two methods", ("pqcache_figure9",)),
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
    Drawing(answer_figures.score_vs_footprint, "two budgets of prompt and answer, and full attention", ("answers",)),
    Drawing(
        score_figures.pareto, "three methods or more",
        ("pqcache_table2", "clusterkv_table1", "xkv_table3"),
    ),
)  # fmt: skip


def draw(
    drawing: Drawing, runs: Sequence[Run], folder: Path, canvas: Canvas, formats: Sequence[str]
) -> dict[str, manifest.Entry]:
    """Draw all figures of one kind, and remove files of run sets that are no longer there."""
    drawn: dict[str, manifest.Entry] = {}
    with matplotlib.rc_context(style.RC):
        pictures = drawing.draw(sorted(runs, key=lambda run: run.folder.as_posix()), canvas)
        for i, picture in enumerate(pictures, start=1):
            name = drawing.name if i == 1 else f"{drawing.name}_{i}"
            drawn[name] = manifest.entry(picture, style.save(picture, folder, name, formats))
    kept = {file for entry in drawn.values() for file in entry["files"]}
    for old in folder.glob(f"{drawing.name}*"):
        rest = old.stem.removeprefix(drawing.name)
        if old.name not in kept and (not rest or rest[1:].isdecimal()):
            old.unlink()
    return drawn


def width(text: str) -> float:
    """Inches of what `--width` says."""
    try:
        inches = WIDTHS[text] if text in WIDTHS else float(text)
    except ValueError:
        inches = 0.0
    if not NARROWEST <= inches <= WIDEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no width; give inches, {NARROWEST:g} to {WIDEST:g}, or {' or '.join(WIDTHS)}"
        )
    return inches


def formats(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if unknown := [one for one in found if one not in style.FORMATS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no format; use some of {','.join(style.FORMATS)}")
    return found


def of_methods(runs: Sequence[Run], names: str | None) -> list[Run]:
    """The runs of these methods or presets; ValueError for one that has none."""
    if names is None:
        return list(runs)
    there = {run.method for run in runs} | {run.result.method for run in runs}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in there:
            near = get_close_matches(name, there, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"no run is of method {name!r}; {hint}(there are: {', '.join(sorted(there))})")
    return [run for run in runs if {run.method, run.result.method} & set(wanted)]


def main(arguments: Sequence[str]) -> int:
    names = [drawing.name for drawing in DRAWINGS]
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m kvbench.plots.figures", description=about)
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/figures"), help="where to write")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--methods", metavar="A,B", help="only these methods or presets")
    parser.add_argument("--axis", choices=CHOICES, help="what scores are drawn over (default: as each figure has it)")
    parser.add_argument("--width", type=width, metavar="W", help="of the page: inches, column (3.25) or text (6.75)")
    parser.add_argument("--no-title", action="store_true", help="titles and settings in the caption's file only")
    parser.add_argument("--format", type=formats, default=["pdf", "png"], metavar="F,G", help="pdf, png, svg")
    options = parser.parse_args(arguments)
    try:
        loaded = load(options.runs)
        runs = of_methods(loaded, options.methods)
    except ValueError as error:
        say(f"kvbench.plots.figures: {error}", file=sys.stderr)
        return 2
    canvas = Canvas(options.width, not options.no_title, options.axis)
    drawn: dict[str, manifest.Entry] = {}
    chosen = [drawing for drawing in DRAWINGS if not options.only or drawing.name in options.only]
    try:
        with told_apart(run.method for run in loaded):  # whatever is chosen of them looks the same
            for drawing in chosen:
                found = draw(drawing, runs, options.out, canvas, options.format)
                drawn |= found
                first = [str(options.out / entry["files"][0]) for entry in found.values()]
                say(f"{drawing.name}: {', '.join(first)}" if first else drawing.missing)
        if drawn:
            say(manifest.write(options.out, drawn))
    except OSError as error:
        say(f"kvbench.plots.figures: {options.out}: {error.strerror}; choose another --out", file=sys.stderr)
        return 2
    return 0 if drawn else 2

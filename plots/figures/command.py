"""The papers' figures from the runs at hand, as PDF and PNG, each with its caption as text.

    python -m kvbench.plots.figures [RUNS] [--out FOLDER] [--only NAME …]     or: make paper-figures
    python -m kvbench.plots.figures RUNS --methods pqcache,snapkv,full --width column --no-title --format pdf,svg

    python -m kvbench.plots.figures RUNS --width phone --theme dark --format svg           390 pixels wide, for a page

A figure is drawn for each set of runs that share task, parameters, model, data and machine; the largest set has
the plain name, the others `NAME_2`, `NAME_3` and so on. What the runs cannot fill is not drawn: the command that would
make it is printed instead. `--width` is that of the page it will stand on, where its text is then of 7 to 8 points.
`manifest.json` says which runs each figure was drawn from. Files hold no date, so the same runs make the same bytes.

Not here: how lines look (`plots/style.py`), which runs go together (`plots/run_sets.py`).
"""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import matplotlib

from kvbench.engine.terminal import say
from kvbench.plots import style
from kvbench.plots.figures import manifest
from kvbench.plots.figures.declared import FIGURES, Figure
from kvbench.plots.figures.rows import CHOICES, Data
from kvbench.plots.looks import told_apart
from kvbench.plots.read import Run, default_root, load
from kvbench.plots.style import Canvas

WIDTHS = {"column": 3.25, "text": 6.75, "phone": style.PHONE}  # inches: a conference's two columns, 390 pixels
NARROWEST, WIDEST = 2.0, 12.0
PHONE_TEXT = 1.25  # times that of paper


def draw(figure: Figure, data: Data, folder: Path, canvas: Canvas, formats: Sequence[str]) -> dict[str, manifest.Entry]:
    """Draw all figures of one kind, and remove files of run sets that are no longer there."""
    drawn: dict[str, manifest.Entry] = {}
    with matplotlib.rc_context(canvas.rc):
        for i, picture in enumerate(figure.draw(data, canvas), start=1):
            name = figure.name if i == 1 else f"{figure.name}_{i}"
            drawn[name] = manifest.entry(picture, style.save(picture, folder, name, formats))
    kept = {file for entry in drawn.values() for file in entry["files"]}
    for old in folder.glob(f"{figure.name}*"):
        rest = old.stem.removeprefix(figure.name)
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
            f"{text!r} is no width; give inches, {NARROWEST:g} to {WIDEST:g}, or {', '.join(WIDTHS)}"
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
    names = [figure.name for figure in FIGURES]
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m kvbench.plots.figures", description=about)
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/figures"), help="where to write")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--methods", metavar="A,B", help="only these methods or presets")
    parser.add_argument("--axis", choices=CHOICES, help="what scores are drawn over (default: as each figure has it)")
    parser.add_argument("--width", type=width, metavar="W", help=f"of the page: inches, {', '.join(WIDTHS)}")
    parser.add_argument("--theme", choices=("light", "dark"), default="light", help="of the page")
    parser.add_argument("--no-title", action="store_true", help="titles and settings in the caption's file only")
    parser.add_argument("--format", type=formats, default=["pdf", "png"], metavar="F,G", help="pdf, png, svg")
    options = parser.parse_args(arguments)
    try:
        loaded = load(options.runs)
        data = Data(of_methods(loaded, options.methods))
    except ValueError as error:
        say(f"kvbench.plots.figures: {error}", file=sys.stderr)
        return 2
    larger = PHONE_TEXT if options.width == style.PHONE else 1
    canvas = Canvas(options.width, not options.no_title, options.axis, options.theme == "dark", larger)
    drawn: dict[str, manifest.Entry] = {}
    chosen = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    try:
        with told_apart(run.method for run in loaded):  # whatever is chosen of them looks the same
            for figure in chosen:
                found = draw(figure, data, options.out, canvas, options.format)
                drawn |= found
                first = [str(options.out / entry["files"][0]) for entry in found.values()]
                say(f"{figure.name}: {', '.join(first)}" if first else figure.missing)
        if drawn:
            say(manifest.write(options.out, drawn))
    except OSError as error:
        say(f"kvbench.plots.figures: {options.out}: {error.strerror}; choose another --out", file=sys.stderr)
        return 2
    return 0 if drawn else 2

"""`make report`: every finished run on one HTML page that opens from disk and asks no network.

    kvbench report [RUNS] [--out FILE]

The page holds its data as packed JSON: what the runs say, which is read at once, and where they come from, their
samples and the chart script, which are unpacked when they are wanted. Predictions, references and names are untrusted:
the page's scripts write them as text only, and its content policy runs no script but the page's own, by their hashes.

Charts are Vega-Lite's, specified with Altair. Its scripts are 0.9 MB (0.3 MB packed, as they stand in the page),
Bokeh's 1.3 MB and Plotly's 4.8 MB; its marks are SVG, so they print, scale and carry labels for screen readers; and a
specification is data, so that filters need no code per chart.

Not here: statistics (`plots/stats.py`), tables and figures for a paper (`plots/tables/`), the page's behaviour
(`plots/report/js/`).
"""

import argparse
import base64
import hashlib
import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.foreign import one_line
from kvbench.engine.terminal import say
from kvbench.plots.read import Run, default_root, load
from kvbench.plots.report.charts import heatmap_chart, score_chart, vega_script
from kvbench.plots.report.origin import provenance
from kvbench.plots.report.overview import full_once, overview
from kvbench.plots.report.samples import compact, in_columns, iter_pieces, pack_samples, packed, short
from kvbench.results import METRICS

ASSETS = Path(__file__).resolve().parent
# In the order in which they need each other; all of them are one script.
SCRIPTS = (
    *("dom", "state", "theme", "filters", "card", "downloads", "charts", "sheet", "results", "matrix", "needle"),
    *("words", "samples", "budgets", "origins", "main"),
)


CHARTS = {"linear": score_chart(), "log": score_chart("log"), "heatmap": heatmap_chart()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvbench report", description="Write every finished run into one HTML page.")
    parser.add_argument("runs", nargs="?", type=Path, default=default_root(), help="folder of runs")
    parser.add_argument("--out", type=Path, help="the page; RUNS/report.html where not given")
    given = parser.parse_args(argv)
    out: Path = given.out or given.runs / "report.html"
    runs = load(given.runs)
    if not runs:
        return refuse(
            f"{given.runs} holds no finished run; make some first, for example with "
            "python run.py -m method=full,snapkv,quest task=needle ratio=0.2"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A name may hold bytes that are no character.
        out.write_text(page(runs, given.runs), encoding="utf-8", errors="replace")
    except OSError as error:
        return refuse(f"{out} cannot be written ({error.strerror}); choose another file with --out")
    say(f"{one_line(str(out))}: {len(runs)} run{'s' * (len(runs) != 1)}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def refuse(sentence: str) -> int:
    say("kvbench report:", one_line(sentence), file=sys.stderr)
    return 2


def page(runs: Sequence[Run], root: Path) -> str:
    """The whole page."""
    once, same = full_once(runs)
    script = page_script()
    packed_samples = pack_samples(once)
    data = {
        "data-overview": packed(compact(as_page_reads(overview(once, root), packed_samples.starts))),
        "data-charts": packed(compact(CHARTS)),
        "data-origins": packed(compact([provenance(run, same.get(run.folder, ())) for run in once])),
        "data-vega": packed(vega_script()),
        **dict(iter_pieces(packed_samples)),
    }
    repeated = f" ({len(runs) - len(once)} of full attention stand for others)" if len(runs) > len(once) else ""
    filled = {
        "policy": html.escape(policy(script)),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "summary": html.escape(f"{len(runs)} run{'s' * (len(runs) != 1)} in {root.resolve().name}/{repeated}"),
        "cut": html.escape(packed_samples.cut),
        "data": "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in data.items()),
    }
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    # In one pass over the template: what is filled in may itself contain what looks like a place.
    pieces = text.split("@@")
    assert len(pieces) % 2, "page.html has a place that does not end"
    return "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def in_page_units(part: dict[str, Any]) -> dict[str, Any]:
    """A part whose scores are 0 to 100 where they are shares."""
    by = METRICS[part["metric"]].scale

    def times(value: Any) -> Any:
        return [times(one) for one in value] if isinstance(value, list) else None if value is None else by * value

    pair = part["paired"]
    if pair and not pair["unit"]:
        pair = pair | {"mean": times(pair["mean"]), "ci": times(pair["ci"])}
    heat = part["heat"] and [[length, depth, by * score, *rest] for length, depth, score, *rest in part["heat"]]
    return part | {"score": times(part["score"]), "ci": times(part["ci"]), "paired": pair, "heat": heat}


def as_page_reads(told: dict[str, Any], starts: Sequence[int]) -> dict[str, Any]:
    """The overview in the page's units, rounded, objects in columns, and the first runs of the pieces of samples."""
    runs = [
        run | {"n_parts": len(run["parts"]), "parts": [in_page_units(part) for part in run["parts"]]}
        for run in told["runs"]
    ]
    parts = [part | {"paired": None, "of": part.get("of")} for run in runs for part in run["parts"]]
    pairs = [part["paired"] for run in runs for part in run["parts"]]
    found = [pair for pair in pairs if pair]
    return short(
        {
            **told,
            "starts": list(starts),
            "runs": in_columns([{k: v for k, v in run.items() if k != "parts"} for run in runs]),
            "parts": in_columns([{k: v for k, v in part.items() if k != "paired"} for part in parts]),
            "has_pair": [int(pair is not None) for pair in pairs],
            "pairs": in_columns(found),
        }
    )


def page_script() -> str:
    """All scripts of the page as one function, so that nothing of them is global."""
    texts = [(ASSETS / "js" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return "\n".join(['(() => {\n"use strict";', *texts, "})();"])


def policy(script: str) -> str:
    """A policy that allows no network, and no script but the page's own and Vega's, which it unpacks.

    Unpacked scripts and the expressions of charts, which Vega compiles, are ours; data are never expressions.
    """
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{own}' 'unsafe-eval'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )

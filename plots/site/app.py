"""The application that site and report are: one page, one style, one script, and data that the script unpacks.

Data are packed text, each in a place of its own: a file that the page loads when it is wanted (`build.py`), or an
element of the page itself (`report.py`). Names, answers and references are untrusted: scripts write them as text only,
and the content policy runs no script but the page's own and loads nothing from elsewhere.

Not here: which data (`plots/site/build.py`), what the page does with them (`plots/site/js`).
"""

import base64
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.engine.terminal import lines_of
from kvbench.plots import looks
from kvbench.plots.site.samples import compact, in_columns, packed, short
from kvbench.results import METRICS

ASSETS = Path(__file__).resolve().parent
# In the order in which they need each other; what the first view needs is one script, the rest another.
MORE = ("downloads", "words", "samples", "tables", "method", "which")
FIRST = ("dom", "state", "theme", "chart", "filters", "card", "sheet", "picture", "main")
DASHES = {"-": "", "--": "6 4", ":": "2 3", "-.": "7 3 2 3"}  # of `kvbench.plots.looks`
WHITE = "#FFFFFF"  # of full attention on the dark page


def look(method: str) -> dict[str, Any]:
    """Colours on the light and the dark page, shape and dash of a method: those of all figures."""
    found = looks.look(method)
    return {
        "light": found.colour,
        "dark": WHITE if found.colour == looks.INK else found.colour,
        "shape": found.path,
        "dash": DASHES[found.dash],
    }


def script_text(names: Sequence[str]) -> str:
    """Scripts as one, without indentation and lines of comment."""
    texts = [(ASSETS / "js" / f"{name}.js").read_text(encoding="utf-8") for name in names]
    lines = (line.strip() for text in texts for line in text.splitlines())
    return "\n".join(['"use strict";', *(line for line in lines if line and not line.startswith("//")), ""])


def page(data: str = "") -> str:
    """The page. With data it is whole, and its script is let run by its hash; without, script and data are files."""
    script, source = "", "'self'"
    if data:
        script = script_text((*MORE, *FIRST))
        source = f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src {source}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    filled = {
        "policy": html.escape(policy),
        "style": (ASSETS / "app.css").read_text(encoding="utf-8"),
        "data": data,
        "script": f"<script>{script}</script>" if data else '<script src="site.js"></script>',
    }
    # In one pass over the template: what is filled in may itself contain what looks like a place.
    pieces = (ASSETS / "app.html").read_text(encoding="utf-8").split("@@")
    assert len(pieces) % 2, "app.html has a place that does not end"
    return "".join(filled[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def data(tree: Any) -> str:
    """Data as the page unpacks them."""
    return packed(compact(harmless(tree)))


def harmless(tree: Any) -> Any:
    """Texts in which whatever a terminal or a page might obey is escaped: controls, changes of direction."""
    if isinstance(tree, str):
        return lines_of(tree)
    if isinstance(tree, Mapping):
        return {harmless(str(key)): harmless(value) for key, value in tree.items()}
    return [harmless(value) for value in tree] if isinstance(tree, list | tuple) else tree


def in_page_units(part: dict[str, Any]) -> dict[str, Any]:
    """A part whose scores are 0 to 100 where they are shares."""
    by = METRICS[part["metric"]].scale

    def times(value: Any) -> Any:
        return [times(one) for one in value] if isinstance(value, list) else None if value is None else by * value

    pair = part["paired"]
    if pair and not pair["unit"]:
        pair = pair | {"mean": times(pair["mean"]), "ci": times(pair["ci"])}
    heat = part["heat"] and [[length, depth, by * score, *rest] for length, depth, score, *rest in part["heat"]]
    scaled = {key: times(part[key]) for key in ("score", "ci", "base")}
    return part | scaled | {"paired": pair, "heat": heat}


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

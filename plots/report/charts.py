"""The charts of the report, as Vega-Lite specifications made and checked by Altair, and the script that draws them.

The page fills in the named data sources and the words that start with `@`; see `charts` in plots/report/page.js.

Not here: data, colours of the page's two themes.
"""

import hashlib
import importlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import altair as alt

from engine.checkpoints.digests import cache_home, read_own, write_own
from plots import looks

SCORE = "@score"  # title of the axis that scores are on
COST = "@cost"  # title of the axis of bytes or tokens
LARGEST_SCRIPT = 16 << 20  # bytes; today's has 0.9 MB


def look(method: str) -> dict[str, str | None]:
    """Colour and shape of a method, those of all figures; None: the page's own black."""
    found = looks.look(method)
    return {"colour": None if found.colour == looks.INK else found.colour, "shape": found.path}


def pareto_chart() -> dict[str, Any]:
    """Scores over what they cost: `points` with their intervals, and the `front` that no other point beats."""
    x = alt.X("cost:Q", title=COST, scale=alt.Scale(zero=False, nice=True), axis=alt.Axis(format="~s"))
    y = alt.Y("score:Q", title=SCORE, scale=alt.Scale(zero=False, nice=True))
    legend = alt.selection_point(name="legend", fields=["method"], bind="legend")
    tooltip = [
        alt.Tooltip("variant:N", title="variant"),
        alt.Tooltip("score:Q", title="score", format=".4~g"),
        alt.Tooltip("interval:N", title="95 %"),
        alt.Tooltip("n:Q", title="n"),
        alt.Tooltip("cost:Q", title="cost", format=",.4~g"),
        alt.Tooltip("against_full:N", title="against Full"),
    ]
    front = (
        alt.Chart(alt.NamedData("front"))
        .mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, opacity=0.7, color="@muted",
                   aria=False)
        .encode(x=x, y=y, order="cost:Q")
    )  # fmt: skip
    points = alt.Chart(alt.NamedData("points"))
    faded = alt.when(legend)
    bars = points.mark_rule(strokeWidth=1.5, aria=False).encode(
        x=x, y=alt.Y("low:Q", title=SCORE), y2="high:Q", color=colour(),
        opacity=faded.then(alt.value(0.45)).otherwise(alt.value(0.06)),
    )  # fmt: skip
    marks = points.mark_point(filled=True, size=95, cursor="pointer", strokeWidth=1).encode(
        x=x, y=y, color=colour(),
        shape=alt.Shape("method:N", title="method", scale=alt.Scale(domain=["@methods"], range=["@shapes"])),
        opacity=faded.then(alt.value(1)).otherwise(alt.value(0.12)), tooltip=tooltip, description="description:N",
    ).add_params(legend)  # fmt: skip
    return plain((front + bars + marks).properties(width="container", height=340))


def colour() -> alt.Color:
    """One colour per method, whatever the filters leave: that of `look`."""
    return alt.Color("method:N", title="method", scale=alt.Scale(domain=["@methods"], range=["@colours"]))


def heatmap_chart() -> dict[str, Any]:
    """Score by length and depth, a panel per variant; `cells` of all of them."""
    cells = (
        alt.Chart(alt.NamedData("cells"))
        .mark_rect(stroke="@surface", strokeWidth=1)
        .encode(
            x=alt.X("length:O", title="context length in tokens", axis=alt.Axis(labelAngle=-45)),
            y=alt.Y("depth:O", title="depth in %"),
            color=alt.Color("score:Q", title="score", scale=alt.Scale(domain=[0, 1], scheme="cividis")),
            tooltip=[
                alt.Tooltip("variant:N", title="variant"),
                alt.Tooltip("length:O", title="length"),
                alt.Tooltip("depth:O", title="depth"),
                alt.Tooltip("score:Q", title="score", format=".3~f"),
                alt.Tooltip("n:Q", title="n"),
            ],
        )
        .properties(width=190, height=130)
    )
    header = alt.Header(title=None, labelLimit=235, labelFontSize=10)
    return plain(cells.facet(facet=alt.Facet("variant:N", header=header, sort=["@variants"]), columns=3))


def plain(chart: Any) -> dict[str, Any]:
    """The specification without Altair's own theme and address; the page brings its own of both."""
    spec = chart.to_dict()
    return {key: value for key, value in spec.items() if key not in ("config", "$schema")}


def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed of the version that Altair writes for, as one script without imports.

    Putting it together takes two seconds, so each version is kept in the user's cache folder, behind its own hash.
    """
    file = cache_home() / f"vega-{alt.SCHEMA_VERSION}-{metadata.version('vl-convert-python')}.js"
    script = kept_script(file)
    if script is None:
        script = bundled_script()
        with suppress(OSError):  # without a cache folder it is put together again next time
            write_own(file, f"{digest_line(script)}\n{script}")
    return script


def kept_script(file: Path) -> str | None:
    """The script in a file of `vega_script`; None where there is none, or one that is not as it was written."""
    try:
        line, _, script = read_own(file, LARGEST_SCRIPT).partition("\n")
    except (OSError, ValueError):
        return None
    return script if line == digest_line(script) else None


def digest_line(script: str) -> str:
    return f"// sha256 {hashlib.sha256(script.encode()).hexdigest()}"


def bundled_script() -> str:
    vl_convert = importlib.import_module("vl_convert")  # compiled; its types leave out a default
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(vl_version=version)

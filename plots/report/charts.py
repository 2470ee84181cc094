"""The charts of the report, as Vega-Lite specifications made and checked by Altair, and the script that draws them.

The page fills in the named data sources and the words that start with `@`; see plots/report/js/charts.js.

Not here: data, colours of the page's two themes.
"""

import hashlib
import importlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import altair as alt

from kvbench.engine.checkpoints.digests import cache_home, read_own, write_own
from kvbench.plots import looks

SCORE = "@score"  # title of the axis that scores are on
COST = "@cost"  # title of the axis of bytes or tokens
FORMAT = "@format"  # of the numbers on that axis
LARGEST_SCRIPT = 16 << 20  # bytes; today's has 0.9 MB


DASHES = {"-": [1, 0], "--": [6, 4], ":": [2, 3], "-.": [7, 3, 2, 3]}  # of `kvbench.plots.looks`
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


def score_chart(scale: Literal["linear", "log"] = "linear") -> dict[str, Any]:
    """Scores over what they cost: `points` with their intervals, lines that join a method's budgets, the `front`.

    A hollow mark is outside its budget; costs that lie far apart need the scale `log`. `full` is the score of full
    attention, drawn across.
    """
    of_cost = alt.Scale(type="log", nice=False, padding=18) if scale == "log" else alt.Scale(zero=False, nice=True)
    x = alt.X("cost:Q", title=COST, scale=of_cost, axis=alt.Axis(format=FORMAT))
    y = alt.Y("score:Q", title=SCORE, scale=alt.Scale(zero=False, nice=True))
    tooltip = [
        alt.Tooltip("variant:N", title="variant"),
        alt.Tooltip("score:Q", title="score", format=".4~g"),
        alt.Tooltip("interval:N", title="95 %"),
        alt.Tooltip("n:Q", title="n"),
        alt.Tooltip("cost:Q", title="cost", format=",.4~g"),
        alt.Tooltip("against_full:N", title="Δ vs full attention"),
        alt.Tooltip("p:N", title="p (Holm)"),
    ]
    full = (
        alt.Chart(alt.NamedData("full"))
        .mark_rule(strokeDash=[3, 3], strokeWidth=1, opacity=0.6, color="@text", aria=False)
        .encode(y=y)
    )
    front = (
        alt.Chart(alt.NamedData("front"))
        .mark_line(interpolate="step-after", strokeWidth=7, opacity=0.18, color="@text", aria=False)
        .encode(x=x, y=y, order="cost:Q")
    )
    points = alt.Chart(alt.NamedData("points"))
    lines = points.mark_line(strokeWidth=1.6, aria=False).encode(
        opacity=faint(0.8),
        x=x, y=y, order="cost:Q", detail="series:N", color=colour(),
        strokeDash=alt.StrokeDash("method:N", scale=by_method("@dashes"), legend=None),
    )  # fmt: skip
    bars = points.mark_rule(strokeWidth=1.6, aria=False).encode(
        opacity=faint(0.75), x=x, y=alt.Y("low:Q", title=SCORE), y2="high:Q", color=colour()
    )
    marks = points.mark_point(size=85, cursor="pointer", strokeWidth=2).encode(
        opacity=faint(1),
        x=x, y=y, stroke=alt.Stroke("method:N", scale=by_method("@colours"), legend=None),
        fill=alt.when("datum.hollow").then(alt.value("@surface")).otherwise(
            alt.Fill("method:N", scale=by_method("@colours"), legend=None)
        ),
        shape=alt.Shape("method:N", scale=by_method("@shapes"), legend=None),
        tooltip=tooltip, description="description:N",
    )  # fmt: skip
    return plain((full + front + lines + bars + marks).properties(width="container", height=320))


def colour() -> alt.Color:
    """One colour per method, whatever the filters leave: that of `look`."""
    return alt.Color("method:N", scale=by_method("@colours"), legend=None)


def faint(usual: float) -> Any:
    """Opacity by which all others are faint next to a method that stands out."""
    return alt.when("datum.faint").then(alt.value(0.12)).otherwise(alt.value(usual))


def by_method(values: str) -> alt.Scale:
    return alt.Scale(domain=["@methods"], range=[values])


def heatmap_chart() -> dict[str, Any]:
    """Score by length and depth, a panel per variant; `cells` of all of them."""
    cells = (
        alt.Chart(alt.NamedData("cells"))
        .mark_rect(stroke="@surface", strokeWidth=1)
        .encode(
            x=alt.X("length:O", title="prompt in tokens", sort=["@lengths"], axis=alt.Axis(labelAngle=-45)),
            y=alt.Y("depth:O", title="depth in %"),
            color=alt.Color("score:Q", title="score", scale=alt.Scale(domain=[0, 100], scheme="cividis")),
            tooltip=[
                alt.Tooltip("variant:N", title="variant"),
                alt.Tooltip("tokens:Q", title="tokens, mean", format=",.0f"),
                alt.Tooltip("asked:O", title="length asked"),
                alt.Tooltip("depth:O", title="depth"),
                alt.Tooltip("score:Q", title="score", format=".1f"),
                alt.Tooltip("n:Q", title="n"),
            ],
        )
        .properties(width=190, height=130)
    )
    header = alt.Header(title=None, labelLimit=250, labelFontSize=12)
    return plain(cells.facet(facet=alt.Facet("variant:N", header=header, sort=["@variants"]), columns=3))


def plain(chart: Any) -> dict[str, Any]:
    """The specification without Altair's own theme and address; the page brings its own of both."""
    spec = chart.to_dict()
    return {key: value for key, value in spec.items() if key not in ("config", "$schema")}


def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed of the version that Altair writes for, as one script without imports.

    Putting it together takes two seconds, so each version is kept in the user's cache folder, named after its own hash.
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

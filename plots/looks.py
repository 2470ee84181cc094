"""The look of every method: colour, marker and dash for figures, report and heat maps alike, as its card says them.

Families share a hue, and no two methods a colour. Methods share a marker only where their colours are far apart in
any colour vision, and then their dashes differ: points are told by marker and colour, lines by marker and dash even in
black and white. All colours can be seen on white paper and on the report's dark page, as
`tests/plots/test_style.py` measures.

A method whose card says none, such as one of a user's own file, has a look that follows from its name, with a marker
that none of ours has. Names may lead to one marker: what is made of many runs says which methods it draws
(`told_apart`), and of two such methods the second by name takes the next marker that is free.

Not here: matplotlib (`plots/style.py`), the pages (`plots/site/app.py`).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from math import cos, pi, sin

from kvbench.results.names import own_methods

Polygon = tuple[tuple[float, float], ...]

INK = "#000000"  # of full attention; the dark page draws it in its own white


@dataclass(frozen=True)
class Look:
    """How one method is drawn: a colour as #RRGGBB, a name in `SHAPES`, a dash of `DASHES`."""

    colour: str
    shape: str
    dash: str

    @property
    def path(self) -> str:
        """The marker as an SVG path within -1 to 1; "circle" for the one without corners. Vega takes either."""
        corners = SHAPES[self.shape]
        return "M" + "L".join(f"{x:.3g},{-y:.3g}" for x, y in corners) + "Z" if corners else "circle"


def turned(corners: Sequence[tuple[float, float]], quarters: int) -> Polygon:
    """A shape after so many quarter turns to the left."""
    for _ in range(quarters):
        corners = [(-y, x) for x, y in corners]
    return tuple(corners)


def star(n: int, inner: float) -> Polygon:
    radii = [inner if i % 2 else 1.0 for i in range(2 * n)]
    return tuple((r * sin(pi * i / n), r * cos(pi * i / n)) for i, r in enumerate(radii))


DIAMOND: Polygon = ((0, 1), (1, 0), (0, -1), (-1, 0))
UP: Polygon = ((0, 0.9), (0.95, -0.75), (-0.95, -0.75))
BOWTIE: Polygon = ((-0.95, 0.85), (0, 0.2), (0.95, 0.85), (0.95, -0.85), (0, -0.2), (-0.95, -0.85))
BAR: Polygon = ((-1, 0.4), (1, 0.4), (1, -0.4), (-1, -0.4))
PLUS: Polygon = (
    *((-0.35, 1), (0.35, 1), (0.35, 0.35), (1, 0.35), (1, -0.35), (0.35, -0.35)),
    *((0.35, -1), (-0.35, -1), (-0.35, -0.35), (-1, -0.35), (-1, 0.35), (-0.35, 0.35)),
)
HALF = 0.5**0.5
# Corners of the markers, upwards is positive; as large to the eye as each other.
SHAPES: dict[str, Polygon] = {
    "circle": (),
    "square": ((-0.8, 0.8), (0.8, 0.8), (0.8, -0.8), (-0.8, -0.8)),
    "diamond": DIAMOND,
    "thin diamond": tuple((0.55 * x, 1.1 * y) for x, y in DIAMOND),
    "kite": ((0, 1), (0.8, 0.3), (0, -1.1), (-0.8, 0.3)),
    "up": UP,
    "left": turned(UP, 1),
    "down": turned(UP, 2),
    "right": turned(UP, 3),
    "bowtie": BOWTIE,
    "hourglass": turned(BOWTIE, 1),
    "bar": BAR,
    "pillar": turned(BAR, 1),
    "slant": ((-0.45, 0.8), (1.1, 0.8), (0.45, -0.8), (-1.1, -0.8)),
    "plus": PLUS,
    "cross": tuple((HALF * (x - y), HALF * (x + y)) for x, y in PLUS),
    "star": star(5, 0.42),
}
OWN = frozenset({"star", "cross"})  # of one method each: full attention's, the Oracle's
# Of methods that are not in `LOOKS`.
OTHER_SHAPES: dict[str, Polygon] = {
    "house": ((0, 1.1), (0.9, 0.2), (0.9, -0.9), (-0.9, -0.9), (-0.9, 0.2)),
    "chevron": ((0, 0.9), (1, 0), (1, -0.9), (0, 0), (-1, -0.9), (-1, 0)),
    "tee": (
        (-0.95, 0.95),
        (0.95, 0.95),
        (0.95, 0.3),
        (0.35, 0.3),
        (0.35, -0.95),
        (-0.35, -0.95),
        (-0.35, 0.3),
        (-0.95, 0.3),
    ),
    "ell": ((-0.9, 0.9), (-0.2, 0.9), (-0.2, -0.2), (0.9, -0.2), (0.9, -0.9), (-0.9, -0.9)),
    "trefoil": star(3, 0.35),
    "six points": star(6, 0.5),
}
SHAPES |= OTHER_SHAPES
DASHES = ("-", "--", ":", "-.")

FAMILIES = (  # panels of figures that show one family each
    "drop after the prompt, by its last queries",
    "drop while decoding",
    "skip while decoding",
    "drop for any question",
    "drop by keys and values",
    "drop by place or chance",
    "retrieve pages, blocks, clusters",
    "retrieve single tokens",
    "keep fewer bits, or made keys",
)
OTHERS = "others"  # the family of Oracle, of prefills and of a user's own methods
CARD = re.compile(r"^Figures   (?P<family>.+): (?P<colour>#[0-9A-F]{6}), (?P<shape>[a-z ]+), (?P<dash>[-.:]+)$", re.M)


def cards() -> Iterator[tuple[str, str, Look]]:
    """Name, family and look of our methods, as each one's own file says them; one that does not say gets a look."""
    for name, file in own_methods().items():
        if card := CARD.search(file.read_text(encoding="utf-8")):
            yield name, card["family"], Look(card["colour"], card["shape"], card["dash"])


def family_of(method: str) -> str:
    """The family in whose panel a method's line is coloured."""
    return MEMBERS.get(method.partition("+")[0], OTHERS)


# Colours are all about as bright, which makes them fit white paper and dark page.
CARDS = sorted(cards(), key=lambda card: [OTHERS, *FAMILIES].index(card[1]))
MEMBERS = {name: family for name, family, _ in CARDS}
LOOKS = {
    "full": Look(INK, "star", "--"),
    **{name: found for name, _, found in CARDS},
    "minference": Look("#876455", "diamond", "-"),  # brown: a prefill of its own
}

# Colours of a heat map from low to high: cividis, even in lightness and nearly the same for all colour vision.
HEAT = "cividis"


SHOWN: ContextVar[Mapping[str, Look]] = ContextVar("SHOWN")  # looks of the user's own methods within `told_apart`


def look(method: str) -> Look:
    """The look of a method by its name, of ours or of a user's own."""
    return LOOKS.get(method) or SHOWN.get({}).get(method) or unknown(method)


@contextmanager
def told_apart(methods: Iterable[str]) -> Iterator[None]:
    """Within it, no two of these methods look alike: for whatever draws them together, in several figures or one."""
    token = SHOWN.set(outside(methods))
    try:
        yield
    finally:
        SHOWN.reset(token)


def outside(methods: Iterable[str]) -> dict[str, Look]:
    """Looks of those that are not ours: up to six with a marker each, up to 24 with a marker and dash each.

    Each keeps the marker of its name where no other has it, and its colour always.
    """
    found: dict[str, Look] = {}
    markers, both = Counter[str](), Counter[tuple[str, str]]()
    for method in sorted(set(methods) - LOOKS.keys()):
        own = unknown(method)
        choices = product(from_there(tuple(OTHER_SHAPES), own.shape), from_there(DASHES, own.dash))
        shape, dash = min(choices, key=lambda pair: (markers[pair[0]], both[pair]))
        markers[shape] += 1
        both[shape, dash] += 1
        found[method] = replace(own, shape=shape, dash=dash)
    return found


def from_there(names: Sequence[str], first: str) -> list[str]:
    """All names in their order, from one of them round to it."""
    at = names.index(first)
    return [*names[at:], *names[:at]]


def unknown(method: str) -> Look:
    """A look that a name alone makes, its colour as bright as those of `LOOKS`."""
    digest = hashlib.sha256(method.encode()).digest()
    turn = 2 * pi * (digest[0] + digest[1] / 256) / 256
    shapes = list(OTHER_SHAPES)
    return Look(
        of_hue(turn, 0.55 + 0.08 * digest[2] / 255), shapes[digest[3] % len(shapes)], DASHES[digest[4] % len(DASHES)]
    )


def of_hue(turn: float, lightness: float) -> str:
    """A colour of Oklab's lightness, as full of its hue as sRGB can show and the table's are."""
    chroma = 0.16
    while True:
        a, b = chroma * cos(turn), chroma * sin(turn)
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        linear = (
            4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
        )
        if all(0 <= x <= 1 for x in linear):
            coded = (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055 for x in linear)
            return "#" + "".join(f"{round(255 * x):02X}" for x in coded)
        chroma -= 0.005

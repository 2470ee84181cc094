"""Every method has a look of its own, also one that no file of ours names."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex

from kvbench.plots import looks, style
from kvbench.plots.looks import LOOKS, OTHER_SHAPES, OWN, SHAPES, Look, look
from kvbench.plots.read import load
from kvbench.plots.site.overview import overview
from kvbench.results.names import known
from kvbench.tests.plots import colour_vision
from kvbench.tests.plots.report_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf" / "method"
OUTSIDE = ["smallest_keys", "mine", "mine-A", "mine-B", "keys", "random_keys", "value_norm", "snapkv_paper"]


VISIONS = ("normal", *colour_vision.DEFICIENT)
FAR = 0.09  # in Oklab; 0.02 is just noticed side by side, white and black are 1 apart
TODAY = sorted({known(file.stem) or file.stem for file in CONF.glob("*.yaml")})
FIRST = (  # which most figures have beside each other
    *("full", "oracle", "snapkv", "pyramidkv", "pyramidinfer", "xkv", "h2o", "streamingllm"),
    *("quest", "infllm", "clusterkv", "pqcache", "sparq", "infinigen"),
)


def distance(one: str, other: str) -> float:
    """Between two colours, in the vision that tells them apart least."""
    return min(colour_vision.distance(one, other, vision) for vision in VISIONS)


def test_the_simulation_is_that_of_its_authors() -> None:
    """Greys stay; red and green come close for those who lack one of both, not for those who lack blue."""
    for vision in VISIONS:
        assert colour_vision.distance("#808080", colour_vision.seen("#808080", vision), "normal") < 0.005
    red, green = "#D03030", "#30A030"
    assert colour_vision.distance(red, green, "deutan") < 0.4 * colour_vision.distance(red, green, "tritan")
    assert colour_vision.seen("#FF0000", "deutan") == "#A39000"


def test_every_method_of_today_and_those_to_come_have_a_look() -> None:
    assert len(LOOKS) >= 40 and set(TODAY) <= set(LOOKS)
    assert len({each.colour for each in LOOKS.values()}) == len(LOOKS)
    assert {each.shape for each in LOOKS.values()} == SHAPES.keys() - OTHER_SHAPES.keys()


def test_methods_that_share_a_marker_differ_in_dash_and_in_colour_for_all_eyes() -> None:
    for (one, first), (other, second) in combinations(LOOKS.items(), 2):
        if first.shape == second.shape:
            assert first.dash != second.dash, (one, other)
            assert distance(first.colour, second.colour) > FAR, (one, other)
    own = [name for name, each in LOOKS.items() if each.shape in OWN]
    assert own == ["full", "oracle"]


def test_the_first_methods_have_a_marker_each_and_colours_apart() -> None:
    assert len({look(name).shape for name in FIRST}) == len(FIRST)
    for one, other in combinations(FIRST, 2):
        assert colour_vision.distance(look(one).colour, look(other).colour, "normal") > 0.05, (one, other)


def test_methods_of_today_whose_colours_are_near_have_different_markers() -> None:
    for one, other in combinations(TODAY, 2):
        apart = colour_vision.distance(look(one).colour, look(other).colour, "normal")
        assert apart > (0.1 if look(one).shape == look(other).shape else 0.03), (one, other)


@pytest.mark.parametrize("paper", ["#FFFFFF", "#fbfbfa", "#14171a", "#1b1f24"])
def test_every_colour_can_be_seen_on_paper_and_on_the_reports_pages(paper: str) -> None:
    css = (ROOT / "plots" / "site" / "app.css").read_text()
    assert paper == "#FFFFFF" or paper in css
    names = [name for name in LOOKS if name != "full"]  # black, and white on the dark page
    for colour in [look(name).colour for name in (*names, *OUTSIDE, *map(str, range(500)))]:
        assert colour_vision.contrast(colour, paper) >= 3, "of WCAG 2.1 for parts of graphics"


def test_the_heat_maps_ends_are_apart_for_all_eyes() -> None:
    """The ends of red, amber and green looked alike in deuteranopia."""
    stops = [to_hex(colormaps[looks.HEAT](i / 9)).upper() for i in range(10)]
    assert distance(stops[0], stops[-1]) > 0.6
    for low, high in pairwise(stops):
        assert distance(low, high) > 0.04
    old = colour_vision.distance("#F0496E", "#0CD79F", "deutan")
    assert old < 0.12


def test_no_look_from_outside_is_one_of_ours() -> None:
    names = [*OUTSIDE, *map(str, range(300))]
    assert not {look(name).shape for name in names} & {each.shape for each in LOOKS.values()}
    assert len({look(name) for name in OUTSIDE}) == len(OUTSIDE)


def test_the_look_of_an_unknown_method_follows_from_its_name() -> None:
    assert look("smallest_keys") == Look("#CB5139", "ell", "-")
    dashes = {style.look("smallest_keys", nth)["linestyle"] for nth in range(4)}
    assert len(dashes) == 4, "lines of one method are told apart"


def test_methods_from_outside_that_are_drawn_together_share_no_marker() -> None:
    """ "keys" and another name have one marker, by their names alone."""
    alike = next(name for name in map(str, range(100)) if look(name).shape == look("keys").shape)
    first, second = sorted(("keys", alike))
    with looks.told_apart(["quest", second, first]):
        together = look(first), look(second)
        assert look("quest") == LOOKS["quest"]
    assert together[0] == look(first), "the first by name keeps what it has alone"
    assert together[1] == replace(look(second), shape=together[1].shape) and together[0].shape != together[1].shape
    six = looks.outside(map(str, range(6)))
    assert {each.shape for each in six.values()} == OTHER_SHAPES.keys()
    many = [str(i) for i in range(24)]
    found = looks.outside(many)
    assert len({(each.shape, each.dash) for each in found.values()}) == 24
    assert found == looks.outside(reversed(many)), "whatever the order"
    assert not looks.outside(LOOKS)


def test_figures_and_report_tell_methods_from_outside_apart(tmp_path: Path) -> None:
    alike = next(name for name in map("m{}".format, range(100)) if look(name).shape == look("mine").shape)
    for method in ("full", "mine", alike):
        write_run(tmp_path / "runs", method, [1, 0, 1])
    shown = overview(load(tmp_path / "runs"), tmp_path)["looks"]
    assert shown["mine"]["shape"] != shown[alike]["shape"]


@pytest.mark.parametrize("name", SHAPES)
def test_a_marker_is_the_same_path_for_figures_and_page(name: str) -> None:
    path = Look("#000000", name, "-").path
    corners = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[-.\de]+,[-.\de]+", path)]
    assert corners == [(pytest.approx(x, abs=0.006), pytest.approx(-y, abs=0.006)) for x, y in SHAPES[name]]


def test_presets_look_like_their_method() -> None:
    assert [known(name) for name in ("h2o_paper", "h2o_decode", "h2o_decode_paper", "mine", "ada_pyramid")] == [
        *("h2o", "h2o_decode", "h2o_decode", None, "ada_pyramid")
    ]


def test_a_file_of_the_users_own_is_no_preset_of_ours(tmp_path: Path) -> None:
    write_run(tmp_path, "h2o_mine", [1, 0, 1])
    (run,) = load(tmp_path)
    assert (run.method, run.is_preset) == ("h2o", True)
    config = {**run.config, "method": {"name": "h2o_mine", "digest": "0123456789abcdef"}}
    outside = replace(run, config=config)
    assert (outside.method, outside.is_preset) == ("h2o_mine", False)
    edited = replace(run, config={**config, "method": {"name": "h2o_mine", "digest": "fedcba9876543210"}})
    labels = [one["label"] for one in overview([outside, edited], tmp_path)["runs"]]
    assert labels == ["H2o_mine file=01234567", "H2o_mine file=fedcba98"]


def test_every_method_of_ours_is_of_a_family_and_no_family_has_more_than_eight() -> None:
    families = [looks.family_of(method) for method in LOOKS.keys() - {"full", "oracle", "full_stopped", "minference"}]
    assert looks.OTHERS not in families and max(map(families.count, families)) <= 8

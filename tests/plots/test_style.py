"""Every method has a look of its own, also one that no file of ours names."""

from dataclasses import replace
from pathlib import Path

from plots import style
from plots.read import load
from plots.report.page import overview
from tests.plots.report_runs import write_run

OUTSIDE = ["smallest_keys", "mine", "mine-A", "mine-B", "keys", "random_keys", "value_norm", "snapkv_paper"]


def pair(method: str) -> tuple[str, str]:
    looks = style.look(method)
    return looks["color"], looks["marker"]


def test_each_method_has_a_colour_and_marker_of_its_own() -> None:
    methods = [*style.METHODS, *OUTSIDE]
    assert len({pair(method) for method in methods}) == len(methods)
    ours = {style.look(method)["color"] for method in style.METHODS}
    theirs = {style.look(method)["color"] for method in OUTSIDE}
    assert len(theirs) == len(OUTSIDE) and not ours & theirs


def test_the_look_of_an_unknown_method_follows_from_its_name() -> None:
    assert pair("smallest_keys") == ("#B16A18", "h")
    dashes = {style.look("smallest_keys", nth)["linestyle"] for nth in range(4)}
    assert len(dashes) == 4, "lines of one method are told apart"


def test_the_report_shows_methods_as_the_figures_do(tmp_path: Path) -> None:
    for method in ("full", "quest", "smallest_keys", "mine"):
        write_run(tmp_path, method, [1, 0, 1])
    looks = overview(load(tmp_path), tmp_path)["looks"]
    assert looks["full"]["colour"] is None  # black, or white on a dark page
    for method in ("quest", "smallest_keys", "mine"):
        assert looks[method]["colour"] == style.look(method)["color"]
    assert len({tuple(look.values()) for look in looks.values()}) == 4


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

from collections.abc import Iterator
from pathlib import Path

import pytest

from plots.figures.command import DRAWINGS, draw, main
from plots.figures.scores import best_so_far, by_dataset
from plots.read import load
from plots.run_sets import lines, run_sets
from tests.plots.made_runs import answers, every_kind, write

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("runs")
    every_kind(root)
    yield root


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.name)
def test_every_figure_is_drawn_and_is_the_same_file_when_drawn_again(drawing, runs: Path, tmp_path: Path) -> None:
    made = load(runs)
    first = draw(drawing, made, tmp_path / "a")
    assert {path.suffix for path in first} == {".pdf", ".png"}
    again = draw(drawing, made[::-1], tmp_path / "b")
    assert [path.name for path in first] == [path.name for path in again]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, again, strict=True))


def test_without_runs_the_commands_are_named_and_exist(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    for drawing in DRAWINGS:
        for name in drawing.experiments:
            assert f"experiment={name}" in said
            assert (CONF / "experiment" / f"{name}.yaml").is_file()
    assert not list((tmp_path / "out").glob("*.p*"))


def test_a_figure_of_earlier_groups_is_removed(runs: Path, tmp_path: Path) -> None:
    drawing = next(one for one in DRAWINGS if one.name == "score_vs_ratio")
    stale, other = tmp_path / "score_vs_ratio_99.pdf", tmp_path / "score_vs_ratio_notes.pdf"
    stale.touch()
    other.touch()
    draw(drawing, load(runs), tmp_path)
    assert other.exists() and not stale.exists()


def test_lines_hold_the_runs_own_scores_and_models_are_apart(tmp_path: Path) -> None:
    scores = {}
    for ratio in ("1/10", "1/5"):
        rows = answers(["a"], 0.3)
        _, result = write(tmp_path, "h2o", "longbench", rows, ratio=ratio)
        assert result.score is not None
        scores[result.ratio] = 100 * result.score
    write(tmp_path, "h2o", "longbench", answers(["a"], 0.9), ratio="2/5", model="other")
    found = run_sets(load(tmp_path))
    assert [run_set.where.model for run_set in found] == ["tiny", "other"]
    (line,) = lines(found[0], lambda run: run.result.ratio, by_dataset("a"))
    assert {point.x: point.y for point in line.points} == scores
    assert all(point.low <= point.y <= point.high for point in line.points)


def test_the_front_has_what_no_cheaper_point_beats() -> None:
    points = [(2.0, 5.0), (1.0, 3.0), (1.0, 4.0), (3.0, 4.5), (4.0, 6.0)]
    assert best_so_far(points) == [(1.0, 4.0), (2.0, 5.0), (4.0, 6.0)]

"""docs/hour.md: what stands on it follows from the runs, all of it, and the same runs make the same bytes."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import results
from kvbench.plots.figures.results import RATIO, by_family, ranked
from kvbench.plots.grids import grid_of
from kvbench.plots.looks import LOOKS, OTHERS, family_of
from kvbench.plots.read import load
from kvbench.plots.results import FIDELITY, SCORES, main, write
from kvbench.plots.scored import Scored
from kvbench.tests.plots import made_runs

DROPPING = {"snapkv", "h2o"}
RATIOS = ("0.1", "0.2", "0.4")


def rows(method: str, ratio: str, n: int, datasets: list[str] | None = None) -> list[dict[str, Any]]:
    """Samples as good as method and ratio; prompts are the same for all."""
    draw = random.Random(f"{method} {ratio}")
    level = 1.0 if method == "full" else 0.4 + float(ratio)
    stays = method == "full" or method in DROPPING
    share = 1.0 if method == "full" else float(ratio)
    bytes_ = {
        "bytes_resident_device": 1e7 * share, "bytes_resident_host": 0.0 if stays else 1e7 * (1 - share),
        "bytes_moved_kv_per_step": 0.0 if stays else 1e6 * share, "bytes_moved_meta_per_step": 0.0 if stays else 1e4,
    }  # fmt: skip
    names = datasets or [""]
    return [
        {
            "score": float(draw.random() < level),
            "ledger": bytes_,
            "fields": {"dataset": name} if datasets else {},
        }
        for name in names
        for _ in range(n)
    ]


def fidelity(method: str, ratio: str) -> list[dict[str, Any]]:
    made = rows(method, ratio, 3)
    for i, row in enumerate(made):
        recall = 1.0 if method == "full" else 0.5 + float(ratio) + i / 100
        row["score"] = recall
        row["fields"] = {"metric": "recall", "measures": {"recall": recall, "mass": recall, "kl": 1 - recall}}
    return made


def make_runs(root: Path, methods: tuple[str, ...] = ("full", "oracle", "pqcache", "snapkv", "h2o")) -> None:
    for method in methods:
        for ratio in RATIOS:
            made_runs.write(root, method, "longbench", rows(method, ratio, 4, ["a", "b"]), ratio=ratio)
            for style in ("own", "own_name"):
                made_runs.write(
                    root, method, "needle", rows(method, ratio, 8), ratio=ratio, task_params={"style": style}
                )
            made_runs.write(root, method, "fidelity", fidelity(method, ratio), ratio=ratio, metric="recall")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_runs(folder)
    for env, cpu in zip(sorted(folder.glob("longbench-*/env.json")), (120.0, 90.0), strict=False):
        times = {"started": "2026-11-22T10:00:00+00:00", "ended": "2026-11-22T10:30:00+00:00", "cpu_s": cpu}
        env.write_text(json.dumps({"cpu": "some processor", "n_cores": 2, "ram_bytes": 2**33} | times))
    return folder


@pytest.fixture(scope="module")
def page(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path, *_) = write(tmp_path_factory.mktemp("docs"), load(root))
    return path


def table_below(text: str, words: str) -> dict[str, list[str]]:
    """The first table behind some words: a line's cells by its first one."""
    lines = text[text.index(words) :].split("| ---")[0].split("\n\n")
    (table, *_) = [part for part in lines if part.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: rest for first, *rest in split}


def test_every_figure_of_a_table_is_of_the_runs(root: Path, page: Path) -> None:
    text, runs = page.read_text(), load(root)
    for measure in SCORES:
        found = table_below(text, f"## {measure.title}")
        assert found["ratio"] == ["0.1", "0.2", "0.4"]
        assert list(found)[2:] == ["Full", "Oracle", "PQCache", "SnapKV (C)", "H2O (C)"]  # below head and rule
        for run in runs:
            if measure.has(run) and not run.is_full:
                said = found[run.result.method_label][RATIOS.index(str(run.result.ratio_exact))]
                assert said.startswith(f"{100 * (run.result.score or 0):.1f} (")
    for measure in FIDELITY:
        found = table_below(text, f"## {measure.title}")
        assert "Full" not in found and len(found) == 2 + 4
    kl = table_below(text, "## KL from full attention")["SnapKV (C)"]
    assert [cell[:5] for cell in kl] == ["0.390", "0.290", "0.090"]
    assert "lower is better" in text


def test_differences_are_paired_and_only_shown_ones_are_marked(root: Path, page: Path) -> None:
    runs = load(root)
    grid = grid_of(SCORES[1], runs)
    assert grid is not None and grid.full is not None
    found = table_below(page.read_text()[page.read_text().index("## Needle, seven digits") :], "Δ: the difference")
    one = grid.cells["snapkv"][0.1].against(grid.full)
    assert one is not None and one.n == 8
    assert found["SnapKV (C)"][0].startswith(f"{100 * one.mean:+.1f} (")
    marked = [cell for cells in found.values() for cell in cells if cell.endswith("*")]
    assert not marked  # eight samples show nothing once twelve comparisons were made
    assert (
        "No * can stand here: with 8 samples no difference can be significant; 9 or more are needed, "
        in page.read_text()
    )
    values = {str(i): 1.0 for i in range(20)}
    full, good, bad = (Scored([]) for _ in range(3))
    full.__dict__["values"] = good.__dict__["values"] = {"": values}
    bad.__dict__["values"] = {"": dict.fromkeys(values, 0.0)}
    better = results.Grid(SCORES[0], "", full, {"snapkv": {0.1: bad, 0.2: good}}, {"snapkv": "SnapKV"})
    (line,) = results.difference_table(better).splitlines()[2:]
    assert re.fullmatch(r"\| SnapKV \| -100\.0 \(.*\) \* \| \+0\.0.* \|", line) and line.count("*") == 1


def test_a_line_keeps_what_one_of_its_runs_warns_of(tmp_path: Path) -> None:
    """PyramidInfer's star is of small ratios; the line of all lost it."""
    for ratio, label in (("0.1", "PyramidInfer* (C)"), ("0.4", "PyramidInfer (C)")):
        made_runs.write(tmp_path, "pyramidinfer", "longbench", [{"score": 0.5}], ratio=ratio, label=label)
    grid = grid_of(SCORES[0], load(tmp_path))
    assert grid is not None and grid.labels == {"pyramidinfer": "PyramidInfer* (C)"}


def test_what_holds_more_bytes_than_its_ratio_is_marked_and_ringed(root: Path, tmp_path: Path) -> None:
    """A method that leaves layers whole has as many tokens as others and more bytes."""
    runs = []
    for run in load(root):
        if (run.result.method, run.result.ratio_exact) == ("snapkv", "0.2") and run.result.task != "fidelity":
            held = {"bytes_resident_device": 4e6}  # of 10 MB, where the ratio says 2
            run = replace(run, rows=tuple(replace(row, ledger=dict(row.ledger) | held) for row in run.rows))
        runs.append(run)
    (path, *figures) = write(tmp_path, runs)
    found = table_below(path.read_text(), f"## {SCORES[0].title}")
    assert [cell.endswith("‡") for cell in found["SnapKV (C)"]] == [False, True, False]
    assert not any("‡" in cell for name, cells in found.items() for cell in cells if name != "SnapKV (C)")
    noted = [figure.stem for figure in figures if "than 1.25 times the ratio" in figure.read_text()]
    assert noted == [f"{name}-families" for name in ("embedded-texts", "needle-seven-digits", "needle-a-name")]


def test_full_attention_may_have_run_once_or_at_each_ratio(root: Path, page: Path, tmp_path: Path) -> None:
    runs = [run for run in load(root) if not run.is_full or run.result.ratio_exact == "0.1"]
    (path, *_) = write(tmp_path, runs)
    first, second = (re.sub(r"## How long.*", "", one.read_text(), flags=re.DOTALL) for one in (page, path))
    assert first == second


def test_bytes_and_times_are_what_the_runs_recorded(page: Path) -> None:
    text = page.read_text()
    device = table_below(text, "On the device, MB")
    assert device["PQCache"] == ["1.0", "2.0", "4.0"] and device["Full"] == ["10.0"] * 3
    moved = table_below(text, "Moved per decode step")
    assert moved["PQCache"] == ["110.0", "210.0", "410.0"] and "H2O (C)" not in moved
    assert "Nothing moves in Full, SnapKV (C), H2O (C)." in text
    line = table_below(text, "## How long it took")["Embedded texts"]
    # 15 runs shared 8 prefills of 0.5 s.
    assert line == ["15", "8", "0.1", "30.0", "2.0"]
    assert "some processor, 2 cores, 8 GB" in text


def test_the_same_runs_make_the_same_small_files(root: Path, page: Path, tmp_path: Path) -> None:
    again = write(tmp_path, load(root))
    assert len(again) == 1 + 3 * 3 + 2 * 3, "of scores three figures each, of fidelity two"
    for path in again:
        assert path.read_bytes() == (page.parent / path.relative_to(tmp_path)).read_bytes()
        assert path.stat().st_size < 150_000
    for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / link).is_file()


def test_runs_of_two_models_and_two_runs_of_a_cell_are_refused(tmp_path: Path, capsys: Any) -> None:
    made_runs.write(tmp_path / "a", "snapkv", "longbench", rows("snapkv", "0.1", 2))
    made_runs.write(tmp_path / "a", "snapkv", "longbench", rows("snapkv", "0.1", 2), model="other")
    made_runs.write(tmp_path / "b", "snapkv", "longbench", rows("snapkv", "0.1", 2), params={"window": 8})
    made_runs.write(tmp_path / "b", "snapkv", "longbench", rows("snapkv", "0.1", 2), params={"window": 16})
    for folder, words in (("a", "runs of 2 sets"), ("b", "several runs of SnapKV (C) at ratio 1/5")):
        assert main([str(tmp_path / folder), "--out", str(tmp_path / "docs")]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert not (tmp_path / "docs").exists()


def test_without_runs_it_says_how_to_make_them(tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "make hour" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_methods_stand_in_the_order_of_their_scores_with_the_ranks_that_they_may_have(root: Path) -> None:
    grid = grid_of(SCORES[1], load(root))
    assert grid is not None
    (panels,) = ranked("order", grid).axes
    assert [panel.get_title() for panel in panels] == ["ratio 0.1", "ratio 0.2", "ratio 0.4"]
    for panel, ratio in zip(panels, (0.1, 0.2, 0.4), strict=True):
        means = {grid.labels[name]: cells[ratio].mean or 0 for name, cells in grid.cells.items()}
        shown = [label.get_text() for label in panel.get_yticklabels()]
        assert [means[label] for label in shown] == sorted(means.values()), "the best is at the top"
        assert [text.get_text() for text in panel.texts].count("1 to 4") == 4, "eight samples tell nothing apart"


def test_a_family_is_coloured_in_its_own_panel_and_grey_in_all_others(root: Path) -> None:
    grid = grid_of(SCORES[0], load(root))
    assert grid is not None
    panels = [ax for ax in by_family("families", grid, RATIO).axes.flat if ax.figure is not None and ax.lines]
    assert [ax.get_title() for ax in panels] == [
        *("drop after the prompt, by its last queries", "drop while decoding", "retrieve single tokens"),
    ]
    for ax, own in zip(panels, ("SnapKV (C)", "H2O (C)", "PQCache"), strict=True):
        assert {text.get_text() for text in ax.get_legend().get_texts()} == {own, "Oracle", "Full"}
        assert sum(line.get_color() == "#999999" for line in ax.lines) == 2
    assert all(
        family_of(method) != OTHERS for method in LOOKS.keys() - {"full", "oracle", "full_stopped", "minference"}
    )
    assert max(Counter(map(family_of, LOOKS)).values()) <= 8


def test_figures_of_the_page_are_read_on_light_and_dark_pages(page: Path) -> None:
    for path in (page.parent / "hour").glob("*.svg"):
        text = path.read_text()
        assert "prefers-color-scheme: dark" in text and text.count("<style>") == 1
        assert "fill: #ffffff" not in text, "it has no ground of its own"

"""What bytes buy: the frontier's points, and the part of docs/hour.md that is made of runs with a byte budget."""

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvbench.plots import frontier
from kvbench.plots.figures.frontier import frontier as figures
from kvbench.plots.read import load
from kvbench.plots.results import main, write
from kvbench.plots.run_sets import FRONT_SAID
from kvbench.plots.style import Canvas
from kvbench.tests.plots import made_runs

LABELS = {"snapkv": "SnapKV", "kivi": "KIVI", "pqcache": "PQCache", "full": "Full"}


def rows(error: float, share: float, n: int = 4) -> list[dict[str, Any]]:
    """Samples of a fidelity run."""
    ledger = {"resident_share": share, "moved_bytes_per_step": 1e4 * share, "bytes_resident_device": 1e7 * share}
    ledger["bytes_searched_per_step"] = 0.0
    measures = [{"output_error": error + 2 * i / 1000, "recall": 1 - error} for i in range(n)]
    return [
        {"ledger": ledger, "fields": {"dataset": "pydoc", "measures": each, "metric": "recall"}} for each in measures
    ]


def make_runs(root: Path) -> None:
    made_runs.write(root, "full", "fidelity", rows(0.0, 1.0), ratio="1", metric="recall")
    for method, errors in {"snapkv": (0.2, 0.4), "kivi": (0.05,), "pqcache": (0.1, 0.3)}.items():
        for memory, error in zip(("1/2", "1/8"), errors, strict=False):
            share = 0.9 * float(Fraction(memory))
            made_runs.write(
                root, method, "fidelity", rows(error, share), ratio=memory, memory=memory, metric="recall",
                label=LABELS[method],
            )  # fmt: skip


def front_of(root: Path) -> list[tuple[float, float]] | None:
    """The band of the only figure; None without one."""
    (picture,) = figures(load(root), Canvas())
    drawn = [each for each in picture.axes[0].lines if each.get_label() == "front"]
    assert bool(drawn) == (FRONT_SAID in picture.said)
    return [*zip(drawn[0].get_xdata(), drawn[0].get_ydata(), strict=True)] if drawn else None


def test_a_point_is_on_the_front_where_it_is_shown_to_be_better_than_all_as_cheap(tmp_path: Path) -> None:
    for method, points in {"snapkv": {"1/8": 0.4, "1/2": 0.2}, "pqcache": {"1/4": 0.41, "3/4": 0.19}}.items():
        for memory, error in points.items():
            share = float(Fraction(memory))
            made_runs.write(
                tmp_path, method, "fidelity", rows(error, share, 12), ratio=memory, memory=memory, metric="recall"
            )
    assert front_of(tmp_path) == [
        (0.125, pytest.approx(0.411)),
        (0.5, pytest.approx(0.211)),
        (0.75, pytest.approx(0.201)),
    ]


def test_runs_with_equal_errors_have_no_front(tmp_path: Path) -> None:
    for method, memory in product(("snapkv", "pqcache"), ("1/8", "1/2")):
        share = float(Fraction(memory))
        made_runs.write(
            tmp_path, method, "fidelity", rows(0.2, share, 12), ratio=memory, memory=memory, metric="recall"
        )
    assert front_of(tmp_path) is None


def test_the_page_has_a_part_by_memory_made_of_its_runs(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs")
    path, *others = write(tmp_path / "docs", load(tmp_path / "runs"))
    text = path.read_text()
    assert text.startswith("# What the harness shows in an hour\n") and [other.name for other in others] == [
        "frontier-1.svg"
    ]
    assert "![output error against bytes](hour/frontier-1.svg)" in text
    lines = {line.split("|")[1].strip(): line for line in reversed(text.splitlines()) if line.startswith("| ")}
    assert lines["memory"] == "| memory | 1/2 | 1/8 |"
    assert lines["PQCache"].split("|")[2:4] == [" 0.103 (0.099 to 0.107) ", " 0.303 (0.299 to 0.307) "]
    assert lines["KIVI"].split("|")[2:4] == [" 0.053 (0.049 to 0.057) ", " - "]
    below = text[text.index("At memory 1/2") :]
    assert "| SnapKV | 200 | 0.450 | 4.5 | 4.5 | 0.0 | 0 | held |" in below


def test_the_part_is_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path / "runs")
    docs = tmp_path / "docs"
    assert frontier.main([str(tmp_path / "runs"), "--out", str(docs)]) == 0
    assert capsys.readouterr().out.split() == [str(docs / "frontier.md"), str(docs / "frontier" / "frontier-1.svg")]
    text = (docs / "frontier.md").read_text()
    assert text.startswith("# What bytes buy\n") and "python -m kvbench.plots.frontier runs/results" in text
    assert "![output error against bytes](frontier/frontier-1.svg)" in text
    assert (docs / "frontier" / "frontier-1.svg").read_text().lstrip().startswith("<?xml")
    (tmp_path / "none").mkdir()
    assert frontier.main([str(tmp_path / "none"), "--out", str(docs)]) == 2


def test_runs_with_a_byte_budget_are_not_taken_for_those_of_a_ratio(tmp_path: Path) -> None:
    """The same method at memory=1/2 and at ratio=1/2 stands once in each part."""
    make_runs(tmp_path / "runs")
    made_runs.write(tmp_path / "runs", "snapkv", "fidelity", rows(0.6, 0.5), ratio="1/2", metric="recall")
    text = write(tmp_path / "docs", load(tmp_path / "runs"))[0].read_text()
    by_tokens, by_bytes = text.split("## What bytes buy")
    assert "| SnapKV (C) |" in by_tokens and "| PQCache |" not in by_tokens
    assert "| SnapKV (C) |" not in by_bytes and "| PQCache |" in by_bytes


def test_two_runs_at_one_share_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path)
    made_runs.write(
        tmp_path, "kivi", "fidelity", rows(0.1, 0.4), ratio="1/2", memory="1/2", metric="recall", label="KIVI",
        params={"group": 64},
    )  # fmt: skip
    assert main([str(tmp_path), "--out", str(tmp_path / "docs")]) == 2
    assert "several runs of KIVI at memory 1/2" in capsys.readouterr().err
    assert not frontier.tables([])

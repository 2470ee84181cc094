"""What becomes of calls: shares, losses by turn and repeated damage, of runs and of what docs/calls.md stands on."""

import csv
import gzip
import io
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvbench.plots.calls import CallAnswer, VariantCalls, calls_of, kind_of, main, sheet_of
from kvbench.plots.pages.asked import page
from kvbench.plots.pages.read import KEPT, keep
from kvbench.plots.pages.write import write
from kvbench.plots.read import load
from kvbench.tasks.calls.damage import KINDS, shares
from kvbench.tests.plots.made_pages import DOCS, frame_of
from kvbench.tests.tiny_run import save_tiny, sweep


def variant(kinds: dict[str, list[str]], label: str = "A", is_full: bool = False) -> VariantCalls:
    answers = [
        CallAnswer(sample, turn, kind, float(kind == "right"), turn == 3)
        for sample, each in kinds.items()
        for turn, kind in enumerate(each, 1)
    ]
    return VariantCalls(label, label, "", "golden", answers, is_full)


FULL = variant({"a": ["right"] * 3, "b": ["right"] * 3, "c": ["wrong_value", "right", "right"]}, "Full", is_full=True)
ONE = variant({
    "a": ["no_call", "right", "broken_json"], "b": ["right"] * 3, "c": ["wrong_value", "right", "right"],
})  # fmt: skip


def test_shares_losses_and_what_stays_are_counted_over_samples() -> None:
    assert sum(ONE.share(kind).mean or 0 for kind in KINDS) == pytest.approx(1)
    assert ONE.share("no_call").mean == pytest.approx(1 / 9) and ONE.share("no_call").n == 3
    assert {turn: pair.mean for turn, pair in ONE.lost(FULL).items()} == pytest.approx({1: -1 / 3, 2: 0, 3: -1 / 3})
    assert ONE.stays == (2, 1) and FULL.stays == (1, 0)
    sheet = sheet_of("x", [FULL, ONE])
    assert sheet.rows[1][-3:] == ["-33", "-33", "1 of 2"] and sheet.rows[0][-3:] == ["-", "-", "0 of 1"]


def test_an_answer_of_which_no_call_was_wanted_has_no_kind() -> None:
    assert kind_of({"fresh": 1.0}) is None and kind_of(shares("no_call")) == "no_call"


def test_runs_become_a_table_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model.id={save_tiny(tmp_path / 'tiny', 1 << 14)}"
    words = ["model=any", model, "task=tool_calls", "task.lengths=[7900]", "task.rows=2", "task.max_new_tokens=3"]
    sweep([*words, "task.output_tokens=10"], [["method=full"], ["method=snapkv", "memory=1/4"]], tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "calls.md").read_text()
    assert "| Full |" in text and "| SnapKV |" in text and (tmp_path / "out" / "calls-1.svg").is_file()
    rows = [*csv.DictReader(io.StringIO((tmp_path / "out" / "calls.csv").read_text()))]
    for run in load(tmp_path / "runs"):
        of = calls_of(run)
        assert of is not None and len(of.answers) == 8
        found = {row["kind"]: float(row["share"]) for row in rows if row["method"] == of.label}
        assert found == pytest.approx({kind: (of.share(kind).mean or 0) for kind in KINDS})
    assert main([str(tmp_path / "tiny")]) == 2 and "should call a tool" in capsys.readouterr().err


# --- docs/calls.md -------------------------------------------------------------------------------


def answers(key: str, n: int) -> Any:
    """Full attention is right; SnapKV's first and last calls are broken in every second conversation."""
    rows = []
    for method, asked in (("full", ""), *((name, "memory 1/4") for name in ("snapkv", "pqcache", "quest", "random"))):
        for i in range(n):
            for turn in range(1, 5):
                damaged = method == "random" or (method == "snapkv" and i % 2 == 0 and turn in (1, 4))
                rows.append({
                    "set": key, "method": method, "asked": asked, "id": f"c-{i}/{turn}", "sample": f"c-{i}",
                    "score": float(not damaged), "damage": "broken_json" if damaged else "right",
                })  # fmt: skip
    return frame_of(rows)


def test_the_page_says_what_the_answers_hold(tmp_path: Path) -> None:
    n = page("register").sets["tools"].n
    keep(tmp_path / "register" / KEPT, answers("tools", n))
    keep(tmp_path / "calls" / KEPT, answers("own", page("calls").sets["own"].n))
    paths = write(["calls"], tmp_path, None)
    assert {path.name for path in paths} == {"calls.md", "calls.svg", "calls.csv"}
    text = (tmp_path / "calls.md").read_text()
    assert "right in 100 of 100 calls, and in 0 there" in text and "SnapKV 75, Random tokens 0." in text
    assert "is still 50 points behind full attention in the last turn (50 in the first)" in text
    assert f"wrong again in {n // 2} of {n // 2} conversations, full attention in 0 of 0" in text


def test_every_share_of_the_committed_page_is_recomputed() -> None:
    """By counting in the scores files alone."""
    rows = [row for name in ("register", "calls") for row in cells_of(DOCS / name / KEPT) if row.get("damage")]
    printed = [*csv.DictReader(io.StringIO((DOCS / "calls" / "calls.csv").read_text(encoding="utf-8")))]
    assert printed and {row["set"] for row in printed} == {row["set"] for row in rows}
    for (key, label), lines in groups(printed, "set", "method").items():
        names = ("method_label", "method") if label != "Full" else ("method",)
        mine = [row for row in rows if row["set"] == key and label.lower() in {row[name].lower() for name in names}]
        by = Counter((row["id"].rpartition("/")[2], row["damage"]) for row in mine)
        for line in lines:
            turns = [line["turn"]] if line["turn"] != "all" else ["1", "2", "3", "4"]
            of_turns = fmean(by[turn, line["kind"]] / int(line["n"]) for turn in turns)
            assert float(line["share"]) == pytest.approx(100 * of_turns, abs=0.051), (key, label, line)


def cells_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return [*csv.DictReader(file)]


def groups(rows: list[dict[str, str]], *keys: str) -> dict[tuple[str, ...], list[dict[str, str]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found

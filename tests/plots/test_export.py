"""`kvbench export`: files that give the same frame again, no formula, and the formats of others."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas
import pytest

from kvbench.plots.export.command import main
from kvbench.plots.export.every_eval import record_of
from kvbench.results.frame import frame
from kvbench.results.read import read_whole
from kvbench.tests.plots import made_runs


def write_run(root: Path, method: str, scores: list[float], fields: dict[str, Any] | None = None, **more: Any) -> None:
    made_runs.write(root, method, "longbench", [{"score": score, "fields": fields} for score in scores], **more)


TEXTS = ("=1+1", "@SUM(A1)", "+cmd", "-2+3")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for method, scores in (("full", [1.0, 1.0, 0.5]), ("snapkv", [1.0, 0.0, 0.5])):
        write_run(tmp_path / "runs", method, scores)
    return tmp_path / "runs"


def said(capsys: Any) -> str:
    return capsys.readouterr().out


def test_parquet_gives_the_same_frame_again(made: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([str(made), "--to", str(tmp_path / "to" / "samples.parquet")]) == 0
    assert "6 samples" in said(capsys)
    again = frame(tmp_path / "to" / "samples.parquet")
    pandas.testing.assert_frame_equal(again, frame(made), check_dtype=False, check_categorical=False)


def test_csv_has_the_same_scores_and_no_text_that_a_spreadsheet_computes(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "full", [1.0, 0.25], fields={"note": TEXTS[0], TEXTS[1]: TEXTS[2]})
    assert main([str(tmp_path / "runs"), "--to", str(tmp_path / "samples.csv")]) == 0
    table = pandas.read_csv(tmp_path / "samples.csv")
    assert [*table.score] == [1.0, 0.25] and {*table.note} == {"'=1+1"} and {*table["'@SUM(A1)"]} == {"'+cmd"}


def test_json_lines_and_runs(made: Path, tmp_path: Path) -> None:
    assert main([str(made), "--to", str(tmp_path / "s.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [*frame(made).score]
    assert main([str(made), "--to", str(tmp_path / "r.csv"), "--level", "runs"]) == 0
    assert len(pandas.read_csv(tmp_path / "r.csv")) == 2


def test_columns_are_written_as_a_table(made: Path, tmp_path: Path) -> None:
    assert main([str(made), "--to", str(tmp_path / "columns.md"), "--level", "columns"]) == 0
    assert "| `prefill_s` | s | time of reading the prompt | 6 |" in (tmp_path / "columns.md").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{runs}", "--to", "{to}/a.xlsx"], "no ending that is known; use .parquet"),
        (["{to}/nowhere", "--to", "{to}/a.csv"], "no finished run in or below"),
        (["{runs}", "--to", "{file}/a.csv"], "cannot be written"),
        (["{runs}", "--to", "{to}/m.json", "--as", "mbe"], "experiment=mbe"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(
    words: list[str], sentence: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    places = {"runs": made, "to": tmp_path, "file": tmp_path / "file"}
    assert main([word.format(**places) for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_damaged_run_is_named_and_left_out(made: Path, tmp_path: Path, capsys: Any) -> None:
    broken = next(path for path in made.iterdir() if "snapkv" in path.name)
    (broken / "samples.jsonl").write_text("{}\n")
    assert main([str(made), "--to", str(tmp_path / "a.parquet")]) == 0
    out = capsys.readouterr()
    assert "3 samples" in out.out and f"left out: {broken}" in out.err


# --- Every Eval Ever -------------------------------------------------------------------------------------


def records(made: Path, to: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    assert main([str(made), "--to", str(to), "--as", "every-eval-ever"]) == 0
    found = []
    for file in sorted(to.glob("data/*/*/*/*.json")):
        record = json.loads(file.read_text())
        lines = (to / record["detailed_evaluation_results"]["file_path"]).read_text().splitlines()
        found.append((record, [json.loads(line) for line in lines]))
    return found


def test_a_record_agrees_with_its_lines_and_its_run(made: Path, tmp_path: Path) -> None:
    found = records(made, tmp_path / "eee")
    assert len(found) == 2
    for record, lines in found:
        label = record["model_info"]["additional_details"]["method"]
        (result,) = record["evaluation_results"]
        scores = [line["evaluation"]["score"] for line in lines]
        assert result["score_details"]["score"] == pytest.approx(sum(scores) / 3)
        assert record["detailed_evaluation_results"]["total_rows"] == 3
        assert {line["evaluation_id"] for line in lines} == {record["evaluation_id"]}
        assert {line["evaluation_result_id"] for line in lines} == {result["evaluation_result_id"]}
        assert label in ("Full", "SnapKV (C)") or label.startswith("SnapKV")
        assert all(isinstance(value, str) for value in record["model_info"]["additional_details"].values())
        assert all(isinstance(value, str) for line in lines for value in line["metadata"].values())


def test_the_same_run_gives_the_same_record(made: Path, tmp_path: Path) -> None:
    one, other = records(made, tmp_path / "one"), records(made, tmp_path / "two")
    assert one == other
    folder = next(made.iterdir())
    assert record_of(folder, read_whole(folder)) == record_of(folder, read_whole(folder))


# --- MBE -------------------------------------------------------------------------------------------------


def test_a_card_has_the_budgets_of_the_ladder_and_no_other(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "full", [1.0, 1.0])
    for memory in ("1/2", "1/16", "1/3"):
        write_run(tmp_path / "runs", "snapkv", [1.0, 0.0], memory=memory, ratio=str(Fraction(memory)))
    assert main([str(tmp_path / "runs"), "--to", str(tmp_path / "mbe.json"), "--as", "mbe"]) == 0
    card = json.loads((tmp_path / "mbe.json").read_text())
    assert card["budget_ladder_percent"] == [50, 25, 12.5, 6.25]
    assert [(line["method"], line["budget_percent"], line["score"]) for line in card["results"]] == [
        ("Full", 100, 1.0), ("SnapKV (C)", 50, 0.5), ("SnapKV (C)", 6.25, 0.5),
    ]  # fmt: skip
    one = card["results"][1]
    assert one["family"] == "drop after the prompt, by its last queries" and one["deployment_prerequisite"] == "none"
    assert one["max_batch_before_oom"] is None and one["n"] == 2

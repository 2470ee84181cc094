"""`results.frame`: every key a documented column, rows as the files have them, and what was read before believed."""

import json
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas
import pytest

from kvbench.engine.errors import ConfigError
from kvbench.engine.foreign import cache_home
from kvbench.results import RunResult, SampleRow, page, read_run
from kvbench.results import frame as module
from kvbench.results.frame import OWN, columns, declared, frame, runs
from kvbench.results.keys import FIELDS, LEDGER
from kvbench.tests.results.made_rows import ROOT, ok_row, oom_row, run

README = ROOT / "runs" / "README.md"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def turn(i: int) -> SampleRow:
    return ok_row(i, fields={"sample": f"talk/{i // 2}", "turn": 1 + i % 2, "measures": {"kl": 0.5}, "model": "own"})


def test_a_row_has_what_its_line_its_result_and_its_configuration_say(tmp_path: Path) -> None:
    result = run(tmp_path / "a", n=3)
    table: Any = frame(tmp_path)
    assert [*table.id] == ["needle/0", "needle/1", "needle/2"] == [*table["sample"]]
    for row, line in zip(table.to_dict("records"), read_run(tmp_path / "a")[1], strict=True):
        for name in ("score", "prefill_s", "prompt_tokens", "prediction", "status", "batch_rows"):
            assert row[name] == getattr(line, name)
        for name, value in line.ledger.items():
            assert value is None or row[name] == value
        assert json.loads(row["references"]) == line.references
    one = table.iloc[0]
    assert (one.method, one.asked, one.protocol, one["method.window"]) == ("snapkv", result.asked, "full_prompt", 32)
    assert (one["task.lengths"], one["config.ratio"], one["config.seed"]) == ("[1024, 2048]", "1/5", 0)
    assert one.prompt == one.prompt_sha256 and one.run == str(tmp_path / "a")
    assert OWN.keys() - {*table.columns} <= {"checkpoint", "nulls"}  # which this run does not have


def test_turns_are_paired_by_their_sample_and_a_tasks_own_column_hides_no_key(tmp_path: Path) -> None:
    run(tmp_path / "a", row=turn)
    table: Any = frame(tmp_path)
    assert [*table["sample"]] == [*table.prompt] == ["talk/0", "talk/0", "talk/1", "talk/1"]
    assert {*table["measures.kl"]} == {0.5}
    assert {*table.model} == {"smollm2-135m"} and {*table["sample.model"]} == {"own"}


def test_what_was_not_measured_is_missing_and_flags_stay_flags(tmp_path: Path) -> None:
    run(tmp_path / "a", row=lambda i: oom_row(i) if i == 1 else ok_row(i))
    table: Any = frame(tmp_path)
    assert pandas.isna(table.score[1]) and table.status[1] == "oom" and pandas.isna(table.within_budget[1])
    assert table.within_budget.dtype == "boolean" and table.method.dtype == "category"
    assert "cache_hit_rate" not in table  # of no sample


def test_every_fixed_column_says_what_it_is() -> None:
    told = declared()
    own = {spec.name for kind in (SampleRow, RunResult) for spec in fields(kind)} - {"fields"}
    assert own | LEDGER.keys() | FIELDS.keys() | OWN.keys() == told.keys()
    for name, key in told.items():
        assert key.about and not key.about.endswith("."), name
        assert key.unit == ("bytes" if name.startswith("bytes_") else key.unit), name


def test_columns_of_a_frame_have_unit_meaning_and_count(tmp_path: Path) -> None:
    run(tmp_path / "a")
    found = columns(frame(tmp_path)).set_index("column")
    assert found.loc["prefill_s", "unit"] == "s" and found.loc["prefill_s", "rows"] == 4
    assert found.loc["bytes_resident_device", "unit"] == "bytes" and found.loc["depth", "about"]


def test_the_page_on_a_runs_folder_has_the_tables_of_today() -> None:
    text = README.read_text(encoding="utf-8")
    assert page.page(text) == text
    named = {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)}
    assert {spec.name for kind in (SampleRow, RunResult) for spec in fields(kind)} - {"fields"} <= named


def test_runs_of_other_types_share_a_column_as_texts(tmp_path: Path) -> None:
    run(tmp_path / "a", n=1, row=lambda i: ok_row(i, fields={"length": 5}))
    run(tmp_path / "b", n=1, row=lambda i: ok_row(i, fields={"length": "long"}))
    run(tmp_path / "c", n=1, row=lambda i: ok_row(i, fields={"length": None}))
    run(tmp_path / "d", n=1, row=lambda i: ok_row(i, fields={"depth": 1}))
    run(tmp_path / "e", n=1, row=lambda i: ok_row(i, fields={"depth": 0.5}))
    table: Any = frame(tmp_path)
    assert [*table.length][:2] == ["5", "long"] and table.length.isna().sum() == 3
    assert [*table.depth][3:] == [1.0, 0.5]


def test_half_a_character_and_a_large_number_are_read(tmp_path: Path) -> None:
    run(tmp_path / "a", n=1, row=lambda i: ok_row(i, prediction="half \ud800", fields={"length": 1 << 70}))
    table: Any = frame(tmp_path)
    assert table.prediction[0] == "half ?" and table.length[0] == float(1 << 70)


def test_a_damaged_run_is_refused_or_named(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    (tmp_path / "b" / "samples.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        frame(tmp_path)
    left_out = list[str]()
    assert len(frame(tmp_path, left_out=left_out)) == 4
    assert len(left_out) == 1 and str(tmp_path / "b") in left_out[0]
    with pytest.raises(ConfigError, match="no finished run in or below"):
        frame(tmp_path / "nowhere")


def test_a_row_a_run_has_the_keys_of_result_json(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "a")
    result, _ = read_run(finished)
    (one,) = runs(tmp_path).to_dict("records")
    assert (one["score"], one["n_samples"], one["method.window"]) == (result.score, 4, 32)
    assert [one["score_low"], one["score_high"]] == result.score_ci95


# --- what was read is kept -----------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that are enough to be kept."""
    monkeypatch.setattr(module, "MANY", 1)
    run(tmp_path / "runs" / "a")
    run(tmp_path / "runs" / "b")
    return tmp_path / "runs"


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are read from now on."""
    seen = list[str]()
    read = module.read_whole

    def watched(folder: Path) -> Any:
        seen.append(folder.name)
        return read(folder)

    monkeypatch.setattr(module, "read_whole", watched)
    return seen


def test_folders_that_did_not_change_are_not_read_again(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: Any = frame(many)
    seen = reads(monkeypatch)
    again: Any = frame(many)
    assert seen == []
    pandas.testing.assert_frame_equal(first, again)


def test_what_changed_is_read_again_and_what_is_gone_has_no_rows(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame(many)
    shutil.rmtree(many / "a")
    run(many / "c", n=2)
    shutil.rmtree(many / "b")
    run(many / "b", row=lambda i: ok_row(i, score=0.25))
    seen = reads(monkeypatch)
    table: Any = frame(many)
    assert sorted(seen) == ["b", "c"]
    assert table.groupby("run", observed=True).score.agg(["size", "mean"]).to_dict("index") == {
        str(many / "b"): {"size": 4, "mean": 0.25}, str(many / "c"): {"size": 2, "mean": 0.75},
    }  # fmt: skip


def test_damage_after_a_first_reading_is_found(many: Path) -> None:
    frame(many)
    line = (many / "a" / "samples.jsonl").read_text()
    (many / "a" / "samples.jsonl").write_text(line.replace('"score": 1.0', '"score": 0.9', 1))
    with pytest.raises(ConfigError, match="cannot be read"):
        frame(many)


@pytest.mark.parametrize("damage", [b"", b"no Parquet", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_kept_file_that_is_damaged_is_as_none(many: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    frame(many)
    (file,) = (cache_home() / f"frames-{os.geteuid()}").iterdir()
    file.write_bytes(damage)
    seen = reads(monkeypatch)
    assert len(frame(many)) == 8 and sorted(seen) == ["a", "b"]


def test_a_cache_folder_that_cannot_be_written_costs_nothing_else(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (many / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(many / "file"))
    assert len(frame(many)) == 8


def test_a_link_in_the_cache_folder_is_not_believed(
    many: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frame(many)
    (file,) = (cache_home() / f"frames-{os.geteuid()}").iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    seen = reads(monkeypatch)
    assert len(frame(many)) == 8 and sorted(seen) == ["a", "b"]


def test_few_rows_are_not_kept(tmp_path: Path) -> None:
    run(tmp_path / "a")
    frame(tmp_path)
    assert not (cache_home() / f"frames-{os.geteuid()}").exists()

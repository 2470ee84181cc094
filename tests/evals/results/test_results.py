import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, RunError
from evals.results import folder as results
from evals.results import (
    LEDGER_MEANS,
    Holder,
    RunFacts,
    RunFolder,
    RunResult,
    SampleRow,
    bootstrap_ci95,
    config_hash,
    environment,
    git_sha,
    peak_rss_bytes,
    prompt_hash,
    read_runs,
    read_samples,
    run_name,
    summarise,
)

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = {
    "method": {"name": "snapkv", "params": {"window": 32}},
    "task": {"name": "needle", "params": {"lengths": [1024, 2048]}},
    "model": {"name": "smollm2-135m"},
    "ratio": "1/5",
    "seed": 0,
    "out": None,
}
FACTS = RunFacts(
    method="snapkv",
    method_label="SnapKV (C)",
    params={"window": 32},
    task="needle",
    task_version=1,
    dataset="own",
    data_source="embedded",
    model="smollm2-135m",
    compressed_layers=[0, 1, 2],
    dtype="float32",
    device="cpu",
    seed=0,
    ratio_exact="1/5",
    budget=None,
    comm_exact="1/64",
    protocol="full_prompt",
    config_hash=config_hash(CONFIG),
    versions={"python": "3.11"},
    git_sha=None,
    peak_rss_bytes=123,
    notes=["own-worded prompts"],
)
FILES = ("config.yaml", "env.json", "ledger.parquet", "result.json", "samples.jsonl")


def ok_row(i: int = 0, **changes: Any) -> SampleRow:
    ledger: dict[str, float | bool | None] = dict.fromkeys(LEDGER_MEANS.values(), i + 0.1)
    row = SampleRow(
        id=f"needle/{i}",
        prompt_sha256=prompt_hash([i, 2, 3]),
        prompt_tokens=1000 + i,
        original_prompt_tokens=1000 + i,
        generated_tokens=5,
        prediction=f"the answer\n{i}",
        references=["an answer"],
        score=1 / (i + 1),
        status="ok",
        error=None,
        prefill_s=0.1 * i,
        decode_s=0.5,
        tpot_s=0.1,
        batch_rows=1,
        ledger={**ledger, "steps": 4, "cache_hit_rate": None, "within_budget": True},
        fields={"length": 1024, "depth": 0.5 * i},
    )
    return replace(row, **changes)


def oom_row(i: int) -> SampleRow:
    return ok_row(i, score=None, status="oom", error="out of memory", ledger={})


def ledger_of(i: int) -> dict[str, Any]:
    return {"step": list(range(i + 1)), "moved_bytes": np.arange(i + 1) * 1000}


def open_folder(path: Path, config: dict[str, Any] | None = None, **options: Any) -> RunFolder:
    config = config or CONFIG
    return RunFolder.open(path, config, yaml.safe_dump(config), **options)


def run(
    path: Path,
    n: int = 4,
    row: Callable[[int], SampleRow] = ok_row,
    order: Iterable[int] | None = None,
    pause_s: float = 0,
    **options: Any,
) -> RunResult:
    """What the runner does with a folder, without a model."""
    with open_folder(path, **options) as folder:
        if folder.finished is not None:
            return folder.finished
        for i in order or range(n):
            new = row(i)
            folder.check_prompt(new.id, new.prompt_sha256)
            if not folder.has(new.id):
                folder.append(new, ledger_of(i) if new.status == "ok" else None)
                time.sleep(pause_s)
        result = summarise(folder.rows, FACTS)
        folder.finish(result, {"cpu": "one"})
        return result


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a folder, less the lock's."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".lock")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four samples; not to be changed."""
    path = tmp_path_factory.mktemp("finished") / "run"
    run(path)
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "copied")


# Rows

texts = st.text(st.characters())  # every code point, lone surrogates included
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
columns = st.dictionaries(texts.filter(lambda key: key not in results.ROW_KEYS), plain, max_size=3)


def joined(value: Any) -> Any:
    """Two surrogates in a row are one character as soon as they have been through JSON."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, list):
        return [joined(v) for v in value]
    if isinstance(value, dict):
        return {joined(k): joined(v) for k, v in value.items()}
    return value


@settings(max_examples=150, deadline=None, derandomize=True)
@given(texts, texts, st.lists(texts, max_size=3), st.floats(0, 1), columns)
def test_a_sample_survives_its_line(
    id: str, prediction: str, references: list[str], score: float, fields: dict[str, Any]
) -> None:
    row = ok_row(id=id, prediction=prediction, references=references, score=score, fields=fields)
    line = row.to_json()
    assert line.isascii() and line.splitlines() == [line]
    back = SampleRow.from_json(line)
    assert back == replace(row, **{k: joined(getattr(row, k)) for k in ("id", "prediction", "references", "fields")})
    assert back.to_json() == SampleRow.from_json(back.to_json()).to_json()


@pytest.mark.parametrize("text", ["\u2028\u2029\x85\x0b", "\ud800", "a\r\nb\n", "\x00", '"\\', "🙂"])
def test_text_that_breaks_lines_elsewhere_breaks_none_here(text: str, tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.append(ok_row(0, prediction=text), ledger_of(0))
        folder.append(ok_row(1), ledger_of(1))
    with open_folder(tmp_path) as folder:
        assert [row.prediction for row in folder.rows] == [text, ok_row(1).prediction]


def test_task_columns_stand_flat_in_the_line() -> None:
    line = json.loads(ok_row(1).to_json())
    assert line["length"] == 1024 and line["depth"] == 0.5 and "fields" not in line
    assert ok_row(1).to_dict() == line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("id", 3),
        ("prompt_sha256", "xyz"),
        ("prompt_tokens", "9"),
        ("prompt_tokens", True),
        ("prompt_tokens", 9.0),
        ("references", "one"),
        ("references", [1]),
        ("score", None),
        ("score", 1.5),
        ("score", float("nan")),
        ("status", "fine"),
        ("ledger", {"tokens_budget": "many"}),
        ("ledger", {}),
        ("decode_s", float("inf")),
        ("prediction", None),
    ],
)
def test_a_row_with_a_wrong_value_is_refused_with_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}|tokens_budget"):
        ok_row(**{key: value})
    line = json.dumps(ok_row().to_dict() | {key: value})
    with pytest.raises(ValueError, match=f"{key}|tokens_budget"):
        SampleRow.from_json(line)


def test_a_line_without_a_key_is_refused_with_the_key() -> None:
    for key in results.ROW_KEYS - {"fields"}:
        line = ok_row().to_dict()
        del line[key]
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            SampleRow.from_json(json.dumps(line))


def test_task_columns_are_plain_json_and_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="'score' is a task's"):
        ok_row(fields={"score": 1})
    for value in (np.float32(1), (1, 2), {1: 2}, float("nan"), Path("x")):
        with pytest.raises(ValueError, match="fields"):
            ok_row(fields={"x": value})


def test_a_sample_out_of_memory_has_no_score() -> None:
    assert SampleRow.from_json(oom_row(1).to_json()) == oom_row(1)
    with pytest.raises(ValueError, match="score"):
        replace(oom_row(1), score=0.0)


def test_a_result_survives_its_file() -> None:
    result = summarise([ok_row(0), ok_row(1), oom_row(2)], FACTS)
    assert RunResult.from_json(result.to_json()) == result


def test_a_result_names_everything_that_tables_need() -> None:
    keys = (
        "method task dataset model ratio budget comm n_samples score score_ci95 "
        "tokens_attended_mean bytes_resident_device bytes_moved_kv_per_step "
        "bytes_moved_meta_per_step within_budget prefill_s tpot_s peak_rss_bytes data_source "
        "compressed_layers dtype device seed versions "
        "git_sha status protocol effective_ratio schema_version n_oom"
    )
    written = json.loads(summarise([ok_row()], FACTS).to_json())
    assert set(keys.split()) <= written.keys()
    assert next(iter(written)) == "schema_version"


def test_a_result_of_another_schema_is_refused_by_its_version() -> None:
    text = json.dumps({"schema_version": 7, "method": "x"})
    with pytest.raises(ValueError, match="schema_version is 7; only 1"):
        RunResult.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "high"}, "'score'"),
        ({"score_ci95": [0.1]}, "'score_ci95'"),
        ({"n_samples": 2.5}, "'n_samples'"),
        ({"status": "partial"}, "'status'"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"versions": {"torch": 2}}, "'versions'"),
    ],
)
def test_a_damaged_result_is_refused_with_its_key(change: dict[str, Any], message: str) -> None:
    data = json.loads(summarise([ok_row()], FACTS).to_json())
    with pytest.raises(ValueError, match=message):
        RunResult.from_json(json.dumps(data | change))
    for key in data:
        rest = {k: v for k, v in data.items() if k != key}
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            RunResult.from_json(json.dumps(rest))


# Summaries


def test_a_summary_is_the_mean_of_its_samples() -> None:
    rows = [ok_row(0), ok_row(1), ok_row(2, tpot_s=None)]
    result = summarise(rows, FACTS)
    assert result.score == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert result.tokens_attended_mean == pytest.approx(1.1)
    assert result.tokens_budget_mean == pytest.approx(1.1)
    assert result.prefill_s == pytest.approx(0.1)
    assert result.tpot_s == pytest.approx(0.1)
    assert result.cache_hit_rate is None
    assert (result.n_samples, result.n_oom, result.status) == (3, 0, "ok")
    assert (result.ratio, result.ratio_exact, result.comm, result.comm_exact) == (
        0.2,
        "1/5",
        1 / 64,
        "1/64",
    )
    assert result.notes == ["own-worded prompts"]


def test_a_summary_does_not_depend_on_the_order_of_samples() -> None:
    rows = [ok_row(i, score=(i * 0.37) % 1) for i in range(30)]
    shuffled = random.Random(1).sample(rows, len(rows))
    assert summarise(rows, FACTS) == summarise(shuffled, FACTS)


def test_one_sample_over_its_budget_marks_the_run() -> None:
    over = ok_row(1, ledger={**ok_row(1).ledger, "within_budget": False})
    assert summarise([ok_row(0)], FACTS).within_budget is True
    assert summarise([ok_row(0), over], FACTS).within_budget is False


def test_samples_out_of_memory_are_counted_and_not_averaged() -> None:
    result = summarise([ok_row(0), oom_row(1)], FACTS)
    assert (result.status, result.n_samples, result.n_oom, result.score) == ("oom", 1, 1, 1.0)


def test_a_run_without_any_score_says_null() -> None:
    result = summarise([oom_row(0), oom_row(1)], FACTS)
    assert (result.score, result.score_ci95, result.within_budget, result.tpot_s) == (None,) * 4
    assert "NaN" not in result.to_json()


def test_an_interval_is_deterministic_and_holds_the_mean() -> None:
    scores = [float(x) for x in np.random.default_rng(3).random(200)]
    interval = bootstrap_ci95(scores)
    assert interval is not None and interval == bootstrap_ci95(scores[::-1])
    low, high = interval
    expected = 1.96 * np.std(scores) / np.sqrt(len(scores))  # of a normal approximation
    assert np.mean(scores) - low == pytest.approx(expected, rel=0.1)
    assert high - np.mean(scores) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("scores", [[0.3], [0.1] * 7, [1.0] * 300, [0.0, 0.0]])
def test_equal_scores_have_an_interval_of_no_width(scores: list[float]) -> None:
    assert bootstrap_ci95(scores) == [scores[0], scores[0]]


# Names


def test_the_hash_ignores_order_and_what_changes_no_result() -> None:
    turned = dict(reversed(CONFIG.items())) | {"out": "elsewhere", "logger": {"name": "wandb"}}
    assert config_hash(turned) == config_hash(CONFIG) and len(config_hash(CONFIG)) == 10
    assert config_hash(CONFIG | {"seed": 1}) != config_hash(CONFIG)
    deep = CONFIG | {"method": {"name": "snapkv", "params": {"window": 33}}}
    assert config_hash(deep) != config_hash(CONFIG)


def test_the_name_of_a_run_is_readable_and_safe() -> None:
    assert run_name(CONFIG) == f"needle-snapkv-smollm2-135m-{config_hash(CONFIG)}"
    hostile = {"task": "../a b", "method": "x/y", "model": "org/Model:1" + "z" * 99}
    name = run_name(hostile)
    assert "/" not in name and " " not in name and not name.startswith(".") and len(name) < 140


# Folders


def test_a_finished_run_has_its_files_and_nothing_else(finished: Path) -> None:
    assert sorted(contents(finished)) == sorted(FILES)
    assert yaml.safe_load((finished / "config.yaml").read_text()) == CONFIG
    assert len((finished / "samples.jsonl").read_text().splitlines()) == 4
    assert json.loads((finished / "env.json").read_text()) == {"cpu": "one"}


def test_the_same_command_again_finds_the_result(copied: Path) -> None:
    before = contents(copied)
    result = RunResult.from_json((copied / "result.json").read_text())
    with open_folder(copied) as folder:
        assert folder.finished == result and folder.notes == []
    assert contents(copied) == before


def test_ledgers_are_merged_in_the_order_of_samples(finished: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(finished / "ledger.parquet")
    assert table.column_names == ["sample_id", "step", "moved_bytes"]
    assert table["sample_id"].to_pylist() == [f"needle/{i}" for i in range(4) for _ in range(i + 1)]
    assert table["step"].to_pylist() == [step for i in range(4) for step in range(i + 1)]


def test_ledgers_of_different_types_are_merged(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    with open_folder(tmp_path) as folder:
        for i, column in enumerate(([], [1, 2], [1.5])):
            folder.append(ok_row(i), {"x": column})
        folder.append(oom_row(3))
        folder.finish(summarise(folder.rows, FACTS), {})
        assert folder.notes == []
    assert pq.read_table(tmp_path / "ledger.parquet")["x"].to_pylist() == [1.0, 2.0, 1.5]


def test_ids_of_any_shape_have_ledgers_of_their_own(tmp_path: Path) -> None:
    ids = ["a/b", "a-b", "../../x", "x" * 300, "ü", "A/B"]
    with open_folder(tmp_path / "run") as folder:
        for id in ids:
            folder.append(ok_row(id=id), {"x": [1]})
        assert len(list((tmp_path / "run" / "ledger").iterdir())) == len(ids)
        folder.finish(summarise(folder.rows, FACTS), {})
        assert folder.notes == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_sample_is_not_appended_twice(tmp_path: Path) -> None:
    with open_folder(tmp_path) as folder:
        folder.append(ok_row(0))
        with pytest.raises(AssertionError, match="already"):
            folder.append(ok_row(0))


def test_a_line_that_cannot_be_written_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_folder(tmp_path) as folder:
        folder.append(ok_row(0))
        said = r"samples\.jsonl cannot be written \(No space left on device\); free space"
        with monkeypatch.context() as patch, pytest.raises(RunError, match=said):
            patch.setattr(results.os, "fsync", full_disk)
            folder.append(ok_row(1))
        folder.append(ok_row(2))
    assert [row.id for row in read_samples(tmp_path)] == ["needle/0", "needle/2"]


@pytest.mark.parametrize("tail", [b'{"id": "needle/9", "promp', b"\x00\x00\n", b"\xff\xfe", b"\n"])
def test_a_torn_last_line_is_cut_off_and_run_again(tail: bytes, copied: Path, finished: Path) -> None:
    for name in ("result.json", "env.json", "ledger.parquet"):
        (copied / name).unlink()
    samples = copied / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole + tail)
    with open_folder(copied) as folder:
        assert len(folder.rows) == 4 and "samples.jsonl" in folder.notes[0]
    assert samples.read_bytes() == whole


@pytest.mark.parametrize("missing", [1, 2, 50])
def test_a_finished_run_with_a_torn_line_is_completed_again(missing: int, copied: Path, finished: Path) -> None:
    samples = copied / "samples.jsonl"
    samples.write_bytes(samples.read_bytes()[:-missing])
    with pytest.raises(ValueError, match=r"samples\.jsonl ends within a line"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None and len(folder.rows) == 3
        assert [any(name in note for note in folder.notes) for name in FILES[-2:]] == [True, True]
    run(copied)
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


@pytest.mark.parametrize("garbage", [b"garbage\n", b"\n", b"\xff\n", b'{"id": 1\n'])
def test_garbage_in_the_middle_is_refused_with_its_line(garbage: bytes, copied: Path) -> None:
    samples = copied / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join([lines[0], garbage, *lines[1:]]))
    with pytest.raises(ConfigError, match=r"samples\.jsonl line 2 is not JSON"):
        open_folder(copied)
    with pytest.raises(ValueError, match=r"samples\.jsonl line 2"):
        read_runs(copied)


def test_a_line_that_is_no_sample_is_refused_even_at_the_end(copied: Path) -> None:
    with (copied / "samples.jsonl").open("a") as file:
        file.write('{"id": "needle/9"}\n')
    with pytest.raises(ConfigError, match=r"line 5 is not a sample \(key '\w+' is missing\)"):
        open_folder(copied)


def test_a_repeated_sample_is_refused_with_its_line(copied: Path) -> None:
    samples = copied / "samples.jsonl"
    samples.write_text(samples.read_text() + ok_row(2).to_json() + "\n")
    with pytest.raises(ConfigError, match="line 5 has sample 'needle/2' a second time"):
        open_folder(copied)


def test_a_result_of_another_schema_is_refused_unchanged(copied: Path) -> None:
    (copied / "result.json").write_text('{"schema_version": 99, "new": 1}')
    (copied / "samples.jsonl").write_bytes((copied / "samples.jsonl").read_bytes() + b"torn")
    before = contents(copied)
    with pytest.raises(ConfigError, match=r"result\.json: schema_version is 99; only 1 can be read;"):
        open_folder(copied)
    with pytest.raises(ValueError, match="read it with the code that wrote it"):
        read_runs(copied)
    assert contents(copied) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": "x"}', "\x00" * 50])
def test_a_corrupt_result_is_moved_aside_and_made_again(text: str, copied: Path, finished: Path) -> None:
    (copied / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json is not the result of a run"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None and "result.json was damaged" in folder.notes[0]
    run(copied)
    assert (copied / "result.json.corrupt").read_text() == text
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


def test_a_missing_result_is_made_again(copied: Path, finished: Path) -> None:
    (copied / "result.json").unlink()
    assert read_runs(copied) == []
    run(copied)
    assert contents(copied) == contents(finished)


@pytest.mark.parametrize("lines", [0, 3])
def test_a_result_that_counts_lost_lines_is_made_again(lines: int, copied: Path, finished: Path) -> None:
    samples = copied / "samples.jsonl"
    kept = samples.read_text().splitlines(keepends=True)[:lines]
    samples.write_text("".join(kept))
    with pytest.raises(ValueError, match="4 samples and 0 oom"):
        read_runs(copied)
    run(copied)
    (copied / "result.json.corrupt").unlink()
    assert contents(copied) == contents(finished)


def test_a_result_with_another_score_than_its_samples_is_made_again(copied: Path) -> None:
    result = RunResult.from_json((copied / "result.json").read_text())
    (copied / "result.json").write_text(replace(result, score=0.99).to_json())
    with pytest.raises(ValueError, match="another score"):
        read_runs(copied)
    with open_folder(copied) as folder:
        assert folder.finished is None


def test_a_lost_ledger_is_noted_and_the_result_stands(copied: Path) -> None:
    (copied / "ledger.parquet").unlink()
    with open_folder(copied) as folder:
        assert folder.finished is not None and "ledger.parquet" in folder.notes[0]


def test_a_damaged_ledger_is_noted_when_the_result_is_made_again(copied: Path) -> None:
    (copied / "result.json").unlink()
    (copied / "ledger.parquet").write_bytes(b"PAR1 nonsense")
    with open_folder(copied) as folder:
        folder.finish(summarise(folder.rows, FACTS), {})
        assert "no rows of 4 of 4 samples" in folder.notes[0]


def test_another_configuration_is_refused_with_the_keys_that_differ(copied: Path) -> None:
    other = CONFIG | {
        "seed": 1,
        "method": {"name": "snapkv", "params": {"window": 16, "new": None}},
    }
    with pytest.raises(ConfigError, match=r"another method\.params\.new, method\.params\.window, seed;"):
        open_folder(copied, other)
    run(copied, config=CONFIG | {"out": "elsewhere"})


@pytest.mark.parametrize("text", ["", "just text", "a: [", "\x00"])
def test_a_damaged_configuration_is_refused(text: str, copied: Path) -> None:
    (copied / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is not the configuration of a run"):
        open_folder(copied)


def test_samples_of_an_unknown_run_are_refused(copied: Path) -> None:
    (copied / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no folder of a run: it has 'env.json' and 3 more"):
        open_folder(copied)


def test_a_changed_prompt_is_refused(copied: Path) -> None:
    with open_folder(copied) as folder:
        folder.check_prompt("needle/0", ok_row(0).prompt_sha256)
        folder.check_prompt("needle/77", "0" * 16)
        with pytest.raises(ConfigError, match="'needle/0' has another prompt now"):
            folder.check_prompt("needle/0", "0" * 16)


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(ConfigError, match=r"cannot be used .*; choose another one with out=DIR"):
            open_folder(path)
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.yaml is no plain file"):
        open_folder(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        open_folder(tmp_path / "run")


def test_a_refusal_lets_go_of_the_folder(copied: Path) -> None:
    with pytest.raises(ConfigError, match="another seed"):
        open_folder(copied, CONFIG | {"seed": 1})
    with open_folder(copied, wait=False) as folder:
        assert folder.finished is not None


def test_samples_out_of_memory_stay_until_they_are_to_be_run_again(tmp_path: Path) -> None:
    first = run(tmp_path, row=lambda i: oom_row(i) if i == 1 else ok_row(i))
    assert (first.status, first.n_oom) == ("oom", 1)
    assert run(tmp_path) == first
    second = run(tmp_path, retry_oom=True)
    assert (second.status, second.n_samples, second.n_oom) == ("ok", 4, 0)
    assert [row.id for row in read_samples(tmp_path)] == [f"needle/{i}" for i in (0, 2, 3, 1)]
    assert second == summarise([ok_row(i) for i in range(4)], FACTS)
    assert run(tmp_path, retry_oom=True) == second
    import pyarrow.parquet as pq

    ids = pq.read_table(tmp_path / "ledger.parquet")["sample_id"].to_pylist()
    assert list(dict.fromkeys(ids)) == [f"needle/{i}" for i in (0, 2, 3, 1)]


# Several processes


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process in the repository's root that has this file's names."""
    head = "import sys; sys.path.insert(0, 'tests/evals/results'); from test_results import *\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 seconds"
        time.sleep(0.002)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_run_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    n = 60
    run(tmp_path / "whole", n)
    stopped, draw = tmp_path / "stopped", random.Random(0)
    samples = stopped / "samples.jsonl"
    for _ in range(4):
        process = start(f"run(Path(sys.argv[1]), {n}, pause_s=0.002)", stopped)
        before = size(samples)
        wait_until(lambda before=before: size(samples) > before)
        time.sleep(draw.uniform(0, 0.04))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.communicate() == ("", None)
        assert not (stopped / "result.json").exists()
    run(stopped, n)
    assert contents(stopped) == contents(tmp_path / "whole")


KILL_AT_EACH_STEP = """
import evals.results, itertools, pyarrow.parquet
base = Path(sys.argv[1])
run(base / "whole", 2)  # imports everything that is imported late

def in_child(path, n_steps):
    # Runs in a fork that is killed just before its n-th file operation below `path`.
    if (pid := os.fork()) == 0:
        left = itertools.count(n_steps, -1)
        def hook(event, arguments):
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.mkdir"):
                if str(arguments[0]).startswith(str(path)) and next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        run(path, 2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for n_steps in itertools.count():
    path = base / str(n_steps)
    path.mkdir()
    if (status := in_child(path, n_steps)) == 0:
        break
    assert status == -signal.SIGKILL
    in_child(path, n_steps // 2)  # stopped a second time, somewhere else
    run(path, 2)
    assert contents(path) == contents(base / "whole"), (n_steps, list(contents(path)))
print(n_steps)
"""


def test_a_kill_before_any_file_operation_changes_nothing(tmp_path: Path) -> None:
    process = start(KILL_AT_EACH_STEP, tmp_path)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert int(out) > 30  # it did stop at the operations of opening, appending and finishing


def test_two_processes_at_once_repeat_and_lose_nothing(tmp_path: Path) -> None:
    run(tmp_path / "whole", 20)
    code = "run(Path(sys.argv[1]), 20, pause_s=0.002)"
    both = [start(code, tmp_path / "run") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    said: list[Holder] = []
    path = tmp_path / "run"
    holding = "folder = open_folder(Path(sys.argv[1])); folder.append(ok_row(0), ledger_of(0))"
    first = start(f"{holding}; print('held', flush=True); sys.stdin.read()", path)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    second = Thread(target=run, args=(path,), kwargs={"on_wait": said.append})
    second.start()
    wait_until(lambda: bool(said))
    assert said[0].pid == first.pid and str(first.pid) in str(said[0])
    time.sleep(0.3)  # longer than the lock is asked for again
    assert len(read_samples(path)) == 1
    first.kill()
    first.communicate()
    second.join(timeout=30)
    run(tmp_path / "whole")
    assert contents(path) == contents(tmp_path / "whole")


def test_a_process_that_does_not_wait_names_the_holder(tmp_path: Path) -> None:
    process = start(
        "folder = open_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)",
        tmp_path,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {process.pid} on"):
            open_folder(tmp_path, wait=False)
    finally:
        process.kill()
        process.communicate()
    with open_folder(tmp_path, wait=False):  # a killed holder holds nothing
        pass


def test_a_command_that_uses_a_folder_twice_is_told_so(tmp_path: Path) -> None:
    with open_folder(tmp_path), pytest.raises(ConfigError, match="in use twice by this command"):
        open_folder(tmp_path)


# Readers and the machine


def test_finished_runs_are_found_and_stopped_ones_are_not(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "sweep" / "b")
    shutil.copytree(finished, tmp_path / "a")
    with open_folder(tmp_path / "stopped") as folder:
        folder.append(ok_row(0))
    found = read_runs(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path, _ in found] == ["a", "sweep/b"]
    assert all(result.n_samples == 4 for _, result in found)
    assert read_runs(tmp_path / "nowhere") == []


def test_a_result_without_its_samples_is_refused(copied: Path) -> None:
    (copied / "samples.jsonl").unlink()
    with pytest.raises(ValueError, match=r"samples\.jsonl cannot be read"):
        read_runs(copied)


def test_the_environment_is_plain_json() -> None:
    env = environment()
    assert json.loads(json.dumps(env)) == env
    assert env["versions"]["numpy"] == np.__version__
    assert env["ram_bytes"] > 2**28 and peak_rss_bytes() > 2**20


def test_git_is_asked_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.cache_clear()
    environment()
    monkeypatch.setattr(results.subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
    assert environment()["git_sha"] == environment()["git_sha"]


def commit(root: Path) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)


def test_the_commit_is_marked_when_code_differs_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "repo" / "evals" / "results" / "machine.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(results, "__file__", str(module))
    assert git_sha() is None  # no checkout
    commit(tmp_path / "repo")
    sha = git_sha()
    assert sha is not None and len(sha) == 40
    (tmp_path / "repo" / "out").mkdir()
    (tmp_path / "repo" / "out" / "config.yaml").write_text("a run")
    assert git_sha() == sha
    module.write_text("changed = True")
    assert git_sha() == sha + "-dirty"


def test_a_copy_within_another_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "lib" / "evals" / "results" / "machine.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    commit(tmp_path)
    monkeypatch.setattr(results, "__file__", str(module))
    assert git_sha() is None


def test_the_reader_needs_neither_torch_nor_pandas() -> None:
    code = "import sys, evals.results\nprint([name for name in ('torch', 'pandas', 'pyarrow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr

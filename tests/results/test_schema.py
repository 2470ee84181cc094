import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.results import RunResult, SampleRow, summarise
from kvbench.results.schema import ROW_KEYS
from kvbench.tests.results.made_rows import FACTS, ledger_of, ok_row, oom_row, open_folder

texts = st.text(st.characters())  # every code point, lone surrogates included
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
columns = st.dictionaries(texts.filter(lambda key: key not in ROW_KEYS), plain, max_size=3)


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
    for key in ROW_KEYS - {"fields"}:
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


def test_a_method_without_a_budget_is_at_what_its_samples_attended_to() -> None:
    usual = summarise([ok_row(i) for i in range(3)], FACTS)
    assert "adapts" not in json.loads(usual.to_json()) and RunResult.from_json(usual.to_json()) == usual
    rows = [replace(ok_row(i), ledger=ok_row(i).ledger | {"effective_ratio": 0.2 * (i + 1)}) for i in range(3)]
    adapts = summarise(rows, replace(FACTS, adapts=True))
    assert adapts.asked == "adaptive 0.200 to 0.600" and adapts.effective_ratio == pytest.approx(0.4)
    assert RunResult.from_json(adapts.to_json()) == adapts


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

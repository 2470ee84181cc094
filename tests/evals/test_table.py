"""The table that ends a run."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals.results import RunResult
from evals.screen.table import number, print_table, remarks, table

FACTS: dict[str, Any] = {"method": "oracle", "method_label": "Oracle", "params": {}}
FACTS |= {"task": "needle", "task_version": 1, "dataset": "d", "data_source": "embedded"}
FACTS |= {"model": "m", "compressed_layers": [0], "dtype": "float32", "device": "cpu", "seed": 0}
FACTS |= {"ratio_exact": "0.2", "comm_exact": "1/64", "protocol": "full_prompt", "comm": 0.1}
FACTS |= {"config_hash": "0123456789", "versions": {}, "peak_rss_bytes": 1}
FACTS |= {"status": "ok", "n_samples": 4, "n_oom": 0, "score": 0.5}


def result(**changes: Any) -> RunResult:
    """Nothing measured, unless said otherwise."""
    nothing: dict[str, Any] = {field.name: None for field in fields(RunResult) if field.name not in FACTS}
    for name in ("schema_version", "notes", "prefill", "prefill_params"):
        del nothing[name]
    return RunResult(**nothing | FACTS | changes)


def text(*results: RunResult) -> str:
    shared, view = table([(Path("runs") / str(i), each) for i, each in enumerate(results)])
    console = Console(width=400)
    with console.capture() as captured:
        console.print(shared)
        console.print(view)
    return captured.get()


def test_what_all_rows_share_stands_once() -> None:
    shown = text(result(), result(method_label="Full"))
    assert shown.count("comm 1/64") == 1
    assert shown.count("ratio 0.2") == 1


def test_what_differs_gets_a_column() -> None:
    shown = text(result(), result(ratio_exact=None, budget=128), result(comm_exact="0"))
    assert shown.count("ratio 0.2") == 2
    assert "128 tokens" in shown
    assert "comm 0" in shown


def test_what_was_not_measured_is_no_zero() -> None:
    assert number(None, 2) == "-"
    assert number(0.0, 2) == "0.00"


def test_a_run_over_its_budget_is_marked() -> None:
    over = result(within_budget=False, tokens_attended_mean=12.0)
    assert "!12.0" in text(over)
    assert any(line.startswith("!") for line in remarks([over]))
    assert "!" not in text(result(within_budget=True, tokens_attended_mean=12.0))


def test_a_legal_excess_is_explained() -> None:
    lines = remarks([result(within_budget=True, tokens_attended_mean=12.0, tokens_budget_mean=9.0)])
    assert any("generated tokens" in line for line in lines)


def test_an_unpriced_search_is_said() -> None:
    (line,) = remarks([result(bytes_searched_per_step=5.0, protocol="context_only")])
    assert "Oracle" in line


def test_where_the_first_token_comes_from_is_said_of_tasks_that_ask_for_an_answer() -> None:
    assert any("first token" in line for line in remarks([result()]))
    assert remarks([result(protocol="context_only")]) == []
    assert not any("first token" in line for line in remarks([result(task="pg19")]))


def test_notes_are_said_once_and_with_a_name_where_others_lack_them() -> None:
    def notes(*both: list[str]) -> list[str]:
        return remarks([result(notes=each, protocol="context_only") for each in both])

    assert notes(["own words"], ["own words"]) == ["own words"]
    assert notes(["own words", "cut"], ["own words"]) == ["own words", "Oracle: cut"]


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_numbers_are_never_cut(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table([(Path("runs/some-folder"), result(score=0.123, tokens_attended_mean=1234.5))])
    shown = capsys.readouterr().out
    assert "0.123" in shown
    assert "1,234.5" in shown
    assert "runs/some-folder" in shown


def test_a_folder_that_looks_like_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table([(Path("runs/a[/b]c:smile:"), result(method_label="[red]Oracle[/x]"))])
    shown = capsys.readouterr().out
    assert "runs/a[/b]c:smile:" in shown
    assert "[red]Oracle[/x]" in shown

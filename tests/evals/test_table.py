"""The table that ends a run."""

from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.engine.budget import show
from kvbench.evals.screen.table import number, print_table, remarks, sheet
from kvbench.results import RunResult
from kvbench.results.intervals import FEW, few_samples
from kvbench.results.sheet import on_terminal
from kvbench.tests.plots.made_runs import write

FACTS: dict[str, Any] = {"method": "oracle", "method_label": "Oracle", "params": {}}
FACTS |= {"task": "needle", "task_version": 1, "dataset": "d", "data_source": "embedded"}
FACTS |= {"model": "m", "compressed_layers": [0], "dtype": "float32", "device": "cpu", "seed": 0}
FACTS |= {"ratio_exact": "0.2", "comm_exact": "1/64", "protocol": "full_prompt", "comm": 0.1}
FACTS |= {"config_hash": "0123456789", "versions": {}, "peak_rss_bytes": 1}
FACTS |= {"status": "ok", "n_samples": 40, "n_oom": 0, "n_failed": 0, "score": 0.5}


def result(**changes: Any) -> RunResult:
    """Nothing measured, unless said otherwise."""
    nothing: dict[str, Any] = {field.name: None for field in fields(RunResult) if field.name not in FACTS}
    for name in ("schema_version", "notes", "prefill", "prefill_params", "simulated", "sampling", "adapts"):
        del nothing[name]
    return RunResult(**nothing | FACTS | changes)


def text(*results: RunResult) -> str:
    made = sheet([(Path("runs") / str(i), each) for i, each in enumerate(results)])
    console = Console(width=400)
    with console.capture() as captured:
        console.print(made.about)
        console.print(on_terminal(made))
    return captured.get()


def test_what_all_rows_share_stands_once() -> None:
    shown = text(result(), result(method_label="Full"))
    assert shown.count("comm 1/64") == 1
    assert shown.count("ratio 0.2") == 1
    assert shown.count("n = 40") == 1


def test_what_differs_gets_a_column() -> None:
    shown = text(result(), result(ratio_exact=None, budget=128), result(comm_exact="0"))
    assert shown.count("ratio 0.2") == 2
    assert "128 tokens" in shown
    assert "comm 0" in shown


def test_what_was_not_measured_is_no_zero() -> None:
    assert number(None, 2) == "-"
    assert number(0.0, 2) == "0.00"
    assert number(1234.5, 1) == "1,234"


FULL: dict[str, Any] = {
    "method": "full", "method_label": "Full", "effective_ratio": 1.0, "bytes_moved_meta_per_step": 0.0,
    "tokens_attended_mean": 2175.9, "tokens_budget_mean": 2170.9, "bytes_resident_device": 50.2e6,
}  # fmt: skip


def test_full_attention_stands_once_whatever_it_was_given() -> None:
    asked = [{"ratio_exact": "0.1"}, {"ratio_exact": "0.2"}, {"ratio_exact": "0.2", "comm_exact": "0"}]
    shown = text(*(result(**FULL, **one) for one in asked), result(ratio_exact="0.1"), result(ratio_exact="0.2"))
    assert shown.count("Full") == 1
    assert shown.count("Oracle") == 2
    (line,) = [line for line in shown.splitlines() if line.startswith("Full")]
    assert "any" in line and "ratio" not in line
    assert "comm 1/64" in shown.splitlines()[0], "what no row needs differs in none"
    twice = text(result(**FULL), result(**FULL | {"score": 0.25}))
    assert twice.count("Full") == 2, "two answers are two rows"


def test_a_share_is_written_as_people_write_it() -> None:
    assert [show(Fraction(exact)) for exact in ("0.125", "1/64", "0.0625", "0.2", "0.5", "1/3", "1", "0")] == [
        "1/8", "1/64", "1/16", "0.2", "0.5", "1/3", "1", "0",
    ]  # fmt: skip
    shown = text(result(comm_exact="0.125"), result(comm_exact="1/64", ratio_exact="0.125"))
    assert "comm 1/8" in shown and "ratio 1/8" in shown and "0.125" not in shown


@pytest.mark.parametrize(
    ("scores", "shown"), [([1.0] * 9 + [0.0], "9 of 10"), ([1.0] * 9 + [0.5], "95.0"), ([1.0] * FEW, "100.0")]
)
def test_few_samples_are_hits_or_a_mean_without_an_interval(
    scores: list[float], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = write(tmp_path, "snapkv", "needle", [{"score": score} for score in scores])
    print_table([made])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SnapKV")]
    assert f" {shown} " in row and (" to 100.0 " in row) == (len(scores) == FEW)


def test_few_samples_are_as_few_as_in_every_other_tool() -> None:
    """The same runs asked for 7, 8 and 9 samples, by who was asked."""
    few, enough = ([result(**FULL | {"n_samples": n}), result(n_samples=n)] for n in (FEW - 1, FEW))
    assert few_samples(FEW - 1) in remarks(few) and few_samples(FEW - 1) in remarks(few[1:])
    assert not any("too few" in line for line in remarks(enough))
    both = [replace(one, task=task) for one in few for task in ("gsm8k", "needle")]
    assert f"gsm8k: {few_samples(FEW - 1)}" in remarks(both)


def test_pass_at_k_says_the_budget_that_it_is_of() -> None:
    """Runs at two ratios were both called "no budget", as only numbers of tokens counted."""
    of_k = {"1": 0.25, "4": 0.5}
    ratios = [result(pass_at_k=of_k, ratio_exact=ratio) for ratio in ("0.1", "0.2")]
    lines = remarks([*ratios, result(pass_at_k=of_k, **FULL), result(pass_at_k=of_k, ratio_exact=None, budget=128)])
    assert [line for line in lines if "pass@" in line] == [
        "Oracle, ratio 0.1: pass@1 0.250, pass@4 0.500",
        "Oracle, ratio 0.2: pass@1 0.250, pass@4 0.500",
        "Full, no budget: pass@1 0.250, pass@4 0.500",
        "Oracle, 128 tokens: pass@1 0.250, pass@4 0.500",
    ]


def test_answers_below_a_budget_are_full_attentions_unless_they_skipped_tokens() -> None:
    counted = {"method": "rkv", "budget": 96, "ratio": None, "budget_counts": "target", "reached_answers": 0.0}
    full, skipped = (remarks([result(**counted, effective_ratio=ratio)])[0] for ratio in (1.0, 0.8))
    assert full.endswith("0% of the answers grew to the budget; the others are full attention's")
    assert skipped.endswith("0% of the answers grew to the budget")


def sweep(n: int, root: Path) -> list[tuple[Path, RunResult]]:
    """As a sweep leaves it: long labels, every number as large as they get."""
    labels = ("StreamingLLM (C)", "Quest (matched)", "PQCache", "Full")
    sizes = {"tokens_attended_mean": 102400.5, "tokens_budget_mean": 102400.0, "bytes_moved_kv_per_step": 12157.3e3,
             "bytes_moved_meta_per_step": 387.1e3, "bytes_resident_device": 5234.5e6, "bytes_resident_host": 234.5e6,
             "prefill_s": 12.34, "tpot_s": 0.123}  # fmt: skip
    return [
        (
            root / f"needle-{labels[i % 4]}-m-{i:010}",
            result(
                method_label=labels[i % 4], ratio_exact=("0.1", "0.2")[i // 4 % 2], score=i / n, n_samples=FEW,
                score_ci95=[i / n / 2, i / n], **{key: value * (1 - i / 1000) for key, value in sizes.items()},
            ),
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [2, 8, 30])
def test_a_sweep_fits_a_hundred_columns(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    done = sweep(n, tmp_path / "runs")
    same = {"prefill_s": 12.34, "tpot_s": 0.123}  # shared in a sweep
    print_table([(path, replace(one, **same)) for path, one in done])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert str(tmp_path) not in shown
    assert done[0][0].name in shown and done[-1][0].name in shown
    assert sum(line.startswith(("Streaming", "Quest", "PQCache", "Full")) for line in shown.splitlines()) == n


@pytest.mark.parametrize("label", ["Expected Attention (C)", "StreamingLLM while decoding"])
def test_a_long_name_is_wrapped_and_no_figure_cut(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    done = sweep(6, tmp_path)
    times = [{"prefill_s": 12.3 + i, "tpot_s": 0.12345 + i, "method_label": label} for i in range(6)]
    print_table([(path, replace(one, **own)) for (path, one), own in zip(done, times, strict=True)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("/token") for line in lines) == 1
    assert [line.split()[-1] for line in lines if line.startswith(label.split()[0])] == [
        f"{0.12345 + i:.3f}" for i in range(6)
    ]
    # A row's budget and figures stand beside the first line of its name.
    assert all("ratio" in line for line in lines if line.startswith(label.split()[0]))


def test_a_single_run_has_its_costs_in_columns_and_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(sweep(1, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    (row,) = [line for line in lines if line.startswith("StreamingLLM")]
    assert "102,400" in row and "12,157" in row and "5,234" in row


def test_a_run_elsewhere_has_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    print_table([(Path("/elsewhere/run"), result())])
    assert "folder: /elsewhere/run" in capsys.readouterr().out


def test_a_run_over_its_budget_is_marked() -> None:
    over = result(within_budget=False, tokens_attended_mean=12.0)
    assert "!12.0" in text(over, over), "what exceeds its budget is marked where it stands"
    assert any(line.startswith("!") for line in remarks([over]))
    assert "!" not in text(result(within_budget=True, tokens_attended_mean=12.0))


def test_a_legal_excess_is_explained() -> None:
    lines = remarks([result(within_budget=True, tokens_attended_mean=12.0, tokens_budget_mean=9.0)])
    assert any("generated tokens" in line for line in lines)


def test_an_unpriced_search_is_said() -> None:
    (line,) = remarks([result(bytes_searched_per_step=5.0, protocol="context_only")])
    assert "Oracle" in line


def test_an_index_on_the_device_is_in_the_column_and_named_where_comm_does_not_price_it() -> None:
    read = {"bytes_moved_meta_per_step": 0.0, "bytes_index_read_per_step": 414_720.0, "bytes_comm_per_step": 151_020.0}
    one = result(**read, method_label="InfLLM", protocol="context_only")
    assert "414.7" in text(one)
    (line,) = remarks([one])
    assert line.endswith("reads more of it on the device: InfLLM 414.7 of 151.0 KB /step")
    assert remarks([result(**read | {"bytes_comm_per_step": 5e5}, protocol="context_only")]) == []
    older = result(bytes_moved_meta_per_step=7000.0, protocol="context_only")
    assert "7.0" in text(older) and remarks([older]) == []


def test_where_the_first_token_comes_from_is_said_of_tasks_that_ask_for_an_answer() -> None:
    assert any("first token" in line for line in remarks([result()]))
    assert remarks([result(protocol="context_only")]) == []
    assert not any("first token" in line for line in remarks([result(metric="perplexity")]))


def test_notes_are_said_once_and_with_a_name_where_others_lack_them() -> None:
    def notes(*both: list[str]) -> list[str]:
        return remarks([result(notes=each, protocol="context_only") for each in both])

    assert notes(["own words"], ["own words"]) == ["own words"]
    assert notes(["own words", "cut"], ["own words"]) == ["own words", "Oracle: cut"]
    names = ["Full", *"ABCDE"]
    several = [result(notes=["cut"] * (name != "Full"), protocol="context_only", method_label=name) for name in names]
    assert remarks(several) == ["A; B; C and 2 others: cut"] and remarks(several[:4]) == ["A; B; C: cut"]


@pytest.mark.parametrize("columns", ["20", "80", "300"])
def test_numbers_are_never_cut(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_table([(Path("runs/some-folder"), result(score=0.123, tokens_attended_mean=1234.5))])
    shown = capsys.readouterr().out
    assert "12.3" in shown
    assert "1,234 " in shown
    assert "runs/some-folder" in shown


def test_a_folder_that_looks_like_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table([(Path("runs/a[/b]c:smile:"), result(method_label="[red]Oracle[/x]"))])
    shown = capsys.readouterr().out
    assert "runs/a[/b]c:smile:" in shown
    assert "[red]Oracle[/x]" in shown

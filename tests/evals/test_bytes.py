"""`memory=24KB`, from the command line to tables: of prompts of two lengths, beside a share and full attention."""

from pathlib import Path

import pytest
import yaml

from kvbench import run
from kvbench.engine.budget import Bytes, token_bytes
from kvbench.evals.rescore import title
from kvbench.evals.submission import frozen
from kvbench.evals.submission.check import Check
from kvbench.plots.pages.asked import page
from kvbench.plots.read import Run, load
from kvbench.plots.run_sets import budget_of
from kvbench.plots.site.overview import overview
from kvbench.plots.site.report import main as report
from kvbench.plots.table import main as table
from kvbench.tests.tiny import tiny
from kvbench.tests.tiny_run import save_tiny

SHAPE = tiny().shape
N = 24_000


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of every run, but for method and budget."""
    return [
        *("model=any", f"model.id={save_tiny(tmp_path_factory.mktemp('model'))}", "model.name=tiny", "dtype=float32"),
        *("task=needle", "task.source=embedded", "task.lengths=[300,500]", "task.depths=[50]", "device=cpu"),
    ]


@pytest.fixture(scope="module")
def root(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    for budget in (["memory=24kb"], ["memory=1MB"], ["memory=0.5"], ["memory=24KB", "ratio=0.5"]):
        assert run.main(["-m", "method=full,snapkv,streamingllm", *budget, *words, f"out={out}"]) == 0
    return out


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    """SnapKV's, by what was asked."""
    return {one.result.asked: one for one in load(root) if one.method == "snapkv"}


def test_a_run_says_the_bytes_that_it_was_given(runs: dict[str, Run]) -> None:
    assert {*runs} == {"memory 24 KB", "memory 1 MB", "memory 0.5", "ratio 0.5 memory 24 KB"}
    one = runs["memory 24 KB"]
    result = one.result
    assert (result.memory_exact, result.memory, result.ratio_exact, result.budget) == ("24KB", Bytes(N), None, None)
    assert (one.config["memory"], one.config["ratio"], budget_of(one)) == ("24KB", None, N)
    assert yaml.safe_load((one.folder / "config.yaml").read_text())["memory"] == "24KB"
    assert title(result) == "SnapKV, memory=24KB, tiny" and result.within_budget
    beside = runs["ratio 0.5 memory 24 KB"].result
    assert (beside.memory_exact, beside.ratio_exact) == ("24KB", "0.5")
    assert title(beside) == "SnapKV, ratio=0.5 memory=24KB, tiny"


def test_each_prompt_has_as_many_tokens_as_the_bytes_hold(runs: dict[str, Run]) -> None:
    each, n_layers = token_bytes(SHAPE), len(SHAPE.attention_layers)
    held = {row.prompt_tokens: row.ledger["tokens_budget"] for row in runs["memory 24 KB"].rows}
    assert len(held) == 2 and {*held.values()} == {N // (n_layers * each)}
    whole = {row.prompt_tokens: row.ledger["tokens_budget"] for row in runs["memory 1 MB"].rows}
    assert all(n == tokens for n, tokens in whole.items())
    few = {row.prompt_tokens: row.ledger["tokens_budget"] for row in runs["ratio 0.5 memory 24 KB"].rows}
    assert all(tokens == min(n // 2, N // (n_layers * each)) for n, tokens in few.items())


def test_a_cache_that_fits_answers_as_full_attention(root: Path, runs: dict[str, Run]) -> None:
    full = next(one for one in load(root) if one.is_full)
    assert [row.prediction for row in runs["memory 1 MB"].rows] == [row.prediction for row in full.rows]


def test_tables_and_the_report_have_bytes_in_their_order(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table([str(root), "--rows", "budget", "--columns", "method"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"| {words} ") for words in ("memory 0.5", "memory 24 KB", "memory 1 MB")]
    assert places == sorted(places)
    shown = {one["budget"]: one["size"] for one in overview(load(root), root)["runs"]}
    assert (shown["memory 24 KB"], shown["memory 0.5"], shown["full"]) == (N, 0.5, None)
    assert report([str(root), "--out", str(tmp_path / "report.html")]) == 0


def test_pages_are_of_shares_alone(runs: dict[str, Run]) -> None:
    sets = page("results").sets.values()
    is_its = {asked: any(one.has(run.config) for one in sets) for asked, run in runs.items()}
    assert not is_its["memory 24 KB"]


@pytest.mark.parametrize("asked", ["memory 24 KB", "memory 0.5", "ratio 0.5 memory 24 KB"])
def test_a_submission_with_bytes_passes(
    asked: str, words: list[str], root: Path, runs: dict[str, Run], tmp_path: Path
) -> None:
    frozen.write(words, tmp_path)
    full = next(one for one in load(root) if one.is_full)
    done = Check(root, runs[asked].folder.name, full.folder.name, tmp_path).all()
    assert not done.findings, done.findings


def test_the_table_that_ends_a_run_says_the_bytes(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["method=snapkv", "memory=24KB", *words, f"out={tmp_path / 'one'}"]) == 0
    assert "memory 24 KB" in capsys.readouterr().out


def test_bytes_that_the_longest_prompt_allowed_would_not_meet_are_asked_of_the_prompts_there_are(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of 300 tokens at most has 164 here, and two layers that stay whole fit."""
    given = ["method=knorm", "memory=24KB", *words, "task.lengths=[300]", f"out={tmp_path / 'one'}"]
    assert run.main(given) == 0
    assert "memory 24 KB" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["4XB", "0GB", "-1GB", "1e3GB", "1/2GB", "GB"])
def test_bytes_that_are_none_are_one_sentence(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["method=snapkv", f"memory={given}"]) == 2
    said = capsys.readouterr()
    assert f"memory={given} is" in said.err and len(said.err.strip().splitlines()) == 1 and not said.out

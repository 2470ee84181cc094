"""A set of ours that stands in for a benchmark has a name of its own wherever its scores are shown."""

import re
from pathlib import Path

import pytest

from kvbench.evals.screen.table import print_table
from kvbench.plots.comparison import compare, name_of, print_comparison
from kvbench.plots.read import Run, load
from kvbench.plots.run_sets import run_sets
from kvbench.plots.site.overview import task_of
from kvbench.plots.table import written
from kvbench.plots.tables.pivot import pivots
from kvbench.plots.tables.words import samples_below
from kvbench.plots.turns import groups
from kvbench.results import RunResult
from kvbench.results.names import STAND_INS, own_tasks, shown_task
from kvbench.tests.plots.made_runs import write

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def made(root: Path, task: str, source: str) -> list[tuple[Path, RunResult]]:
    return [
        write(root, method, task, [{"score": hit, "fields": {"dataset": "a"}}] * 3, source=source, ratio=ratio)
        for method, hit, ratio in (("full", 1.0, "1"), ("snapkv", 0.0, "1/10"))
    ]


def shown(pairs: list[tuple[Path, RunResult]], runs: list[Run], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each place that shows scores says of these runs."""
    print_table(pairs)
    terminal = capsys.readouterr().out
    print_comparison(compare([folder for folder, _ in pairs]))
    return {
        "the terminal's table": terminal,
        "the comparison": capsys.readouterr().out,
        "kvbench.plots.table": written(pivots(samples_below(pairs[0][0].parent)))["md"],
        "figures": run_sets(runs)[0].about,
        "the report": task_of(runs[0]),
        "docs/turns.md": next(iter(groups(runs))),
        "headings": run_sets(runs)[0].name,
    }


@pytest.mark.parametrize("task", STAND_INS)
def test_no_place_calls_a_stand_in_by_the_benchmarks_name(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where, words in shown(made(tmp_path, task, "embedded"), load(tmp_path), capsys).items():
        said = words.partition("\nfolders")[0]  # which are named by the key of the command line
        assert STAND_INS[task] in said, where
        assert not re.search(rf"\b({task}|LongBench)\b", said), where


@pytest.mark.parametrize("task", STAND_INS)
def test_published_rows_keep_the_benchmarks_name(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where, words in shown(made(tmp_path, task, "local"), load(tmp_path), capsys).items():
        said = words.lower()
        assert task in said or own_tasks()[task].title.lower() in said, where
        assert STAND_INS[task] not in words, where


def test_a_table_says_which_datasets_it_is_of_and_is_found_by_either_name(tmp_path: Path) -> None:
    made(tmp_path, "longbench", "embedded")
    samples = samples_below(tmp_path)
    for name in ("longbench", "embedded texts"):
        assert "embedded texts · datasets a · " in written(pivots(samples, keep={"task": name}))["md"]


def test_no_page_gives_embedded_texts_the_name_of_longbench() -> None:
    wrong = re.compile(rf"embedded longbench|EMBEDDED DATA · ({'|'.join(STAND_INS)})", re.IGNORECASE)
    assert [page for page in PAGES if wrong.search(page.read_text())] == []


def test_a_shorter_form_of_a_stand_in_is_no_benchmark_either() -> None:
    assert shown_task("longbench_short", "embedded") == "embedded texts, short"
    assert shown_task("longbench_short", "real") == "longbench_short"
    assert shown_task("longbench_v2", "embedded") == "longbench_v2"  # another benchmark, and no length
    assert [name_of(task) for task in ("embedded texts, short", "needle_brief", "shared_context")] == [
        "embedded texts", "needles", "shared context",
    ]  # fmt: skip


@pytest.mark.parametrize("task", own_tasks())
def test_every_task_says_of_itself_what_the_list_of_tasks_shows(task: str) -> None:
    card = own_tasks()[task]
    assert all((card.title, card.asks, card.lengths, card.answers, card.licence)), card

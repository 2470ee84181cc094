"""The first lines of docs/results.md, docs/which-method.md and docs/cited.md follow from what their scores hold."""

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from kvbench import run
from kvbench.engine.budget import BudgetRequest, resolve
from kvbench.methods.retrieving.quest import matched_page_len
from kvbench.methods.retrieving.sparq import n_components
from kvbench.plots import cited, conditions, which
from kvbench.plots.evidence import FULL, HIDDEN, SHOWN, Scores, gathered, keep, load, read
from kvbench.tests.plots import made_runs
from kvbench.tests.plots.test_findings import DOCS, lines

PAGES = ("results.md", "which-method.md", "cited.md")


@pytest.fixture(scope="module")
def sets() -> list[Scores]:
    return gathered(load(DOCS / "results" / "scores.csv.gz"))


@pytest.mark.parametrize("page", PAGES)
def test_the_second_budget_stands_above_the_first_number(page: str) -> None:
    """All runs had `comm=1/64`, and no page said so."""
    title, empty, *rest = (DOCS / page).read_text().splitlines()
    said = "\n".join(line for line in rest[: rest.index("")])
    assert title.startswith("# ") and not empty
    assert all(line.startswith(">") for line in said.splitlines())
    assert "`comm=1/64`" in said and "KVzip" in said and "collapses at 1/16" in said


def test_prompts_have_the_tokens_that_the_experiment_asks(
    sets: list[Scores], capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages said 1,000, which is what prompt, template and answer may have together."""
    (needle,) = [one for one in sets if one.asked.key == "needle"]
    words = ["-m", "experiment=evidence_needle", "method=full", "memory=1/4", "task.style=own", "--dry-run"]
    assert run.main([*words, "compression_scope=full_prompt"]) == 0
    asked = re.search(r"([\d,]+) samples, ([\d,]+) tokens to read \(([\d,]+) at most\)", capsys.readouterr().out)
    assert asked is not None
    assert [int(n.replace(",", "")) for n in asked.groups()] == [60, sum(needle.prompts), needle.prompts[-1]]
    text = (DOCS / "results.md").read_text()
    assert "prompts of 838 tokens (837 to 840)" in text and "of 1,000 tokens" not in text


@pytest.mark.parametrize("prompt", [838, 1572, 2010, 4096])
@pytest.mark.parametrize("comm", ["1/64", "1/8"])
def test_pages_and_channels_are_those_that_the_methods_plan(comm: str, prompt: int) -> None:
    budget = resolve(BudgetRequest(Fraction(1, 4), None, Fraction(comm)), prompt, False)
    n, length = conditions.pages(Fraction(comm), prompt)
    assert length == matched_page_len(budget) and (n - 1) * length < prompt <= n * length
    said = conditions.second_budget({comm}, {"smollm2-135m"})
    assert f"64 channels it pays for {n_components(Fraction(comm), 64)} (" in said


def test_what_comm_left_is_said_of_the_task_with_the_fewest_pages(sets: list[Scores]) -> None:
    said = conditions.of_comm(sets)
    assert "140 tokens where a prompt has 838: 6 pages, of which a head gets 1 at 1/4 of the bytes" in said
    assert conditions.of_comm([replace(one, comms=frozenset({"0", ""})) for one in sets]) == ""
    assert "channels" not in conditions.second_budget({"1/64"}, {"another"})
    assert conditions.head(["", ""]) == ""


def test_a_collapse_is_said_where_the_scores_show_one() -> None:
    level = {FULL: (0.9, 0.9), "snapkv": (0.5, 0.5), "kvzip": (0.8, 0.8)}
    steady = gathered(lines(level))
    assert conditions.collapse(steady) == ""
    fallen = [replace(one, score=0.0) if one.place == (HIDDEN, "0.125", "kvzip") else one for one in lines(level)]
    said = conditions.collapse(gathered(fallen))
    assert said.startswith("**KVzip collapses at 1/8 on documents**: it scores 0 with the question hidden (83 at 1/4;")
    assert "shown" not in said and conditions.collapse([]) == ""


def test_scores_of_runs_keep_prompts_and_comm(tmp_path: Path) -> None:
    params = {"style": "own", "needles": 1}
    for method, memory in (("full", None), ("quest", "1/4")):
        rows = [{"prompt_tokens": 838 + i, "ledger": {"bytes_resident_device": 50.0}} for i in range(60)]
        made_runs.write(tmp_path / "runs", method, "needle", rows, memory=memory, ratio=None, task_params=params)
    found = read(tmp_path / "runs")
    keep(tmp_path / "kept.csv.gz", found)
    (scores,) = gathered(load(tmp_path / "kept.csv.gz"))
    assert [*scores.prompts] == [838 + i for i in range(60)] and scores.comms == {"1/64"}
    assert {line.place[0] for line in found} == {SHOWN}


def test_the_questions_on_one_context_are_one_sample() -> None:
    """Twelve questions on three dialogues show no loss, however alike they are; on twelve dialogues they do."""
    made = [
        cited.Line("mrcr", "1needle", "m", method, f"1needle-1000-{i // 4}/{i % 4}", 0.5 + level + 0.01 * i, "1/64")
        for method, level in (("full", 0), ("quest", 2))
        for i in range(12)
    ]
    said = cited.section(cited.SETS[1], made)
    assert "one of its kind, n = 3 |" in said and "one of its kind: too few to compare" in said
    assert "`comm=1/64`" in cited.page(made) and "MRCR" not in which.today(made)
    apart = [replace(line, sample=line.sample.replace("/", "-")) for line in made]
    said = cited.section(cited.SETS[1], apart)
    assert "n = 12 |" in said and "Quest shown to lose" in said

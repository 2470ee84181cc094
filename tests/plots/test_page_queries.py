"""What pages ask of answers: who is compared with whom, on which samples, and what is said to be shown."""

import csv
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench import run
from kvbench.engine.budget import BudgetRequest, resolve
from kvbench.methods.retrieving.quest import matched_page_len
from kvbench.methods.retrieving.sparq import n_components
from kvbench.plots.pages.asked import FULL, HIDDEN, ITSELF, SCOPES, SHOWN, At, Comparison, page
from kvbench.plots.pages.columns import Task, values
from kvbench.plots.pages.figure import at_budget, named, picture
from kvbench.plots.pages.fixed import findings, fresh, looked_at, outcomes
from kvbench.plots.pages.methods import fetches, needs, title
from kvbench.plots.pages.queries import budgets, collapses, comms_of, in_front, losses, pages, second_budget, standings
from kvbench.plots.pages.read import KEPT, load, renewed, typed
from kvbench.plots.pages.words import label, row_name
from kvbench.plots.stats import paired
from kvbench.tests.plots import made_pages
from kvbench.tests.plots.made_pages import (
    DOCS,
    LEVELS,
    N,
    answers,
    at,
    changed,
    frame_of,
    labelled,
    task_of,
    tasks_of,
    written,
)

QUARTER, EIGHTH = "memory 0.25", "memory 1/8"
FETCHED = Comparison("docs", HIDDEN, "pqcache", "snapkv", "1/8")
PAGES = ("results.md", "which-method.md", "cited.md")


@pytest.fixture(scope="module")
def committed() -> tuple[Task, ...]:
    return tasks_of(load(DOCS / "results" / KEPT))


def column(task: Task, protocol: str, asked: str) -> Any:
    found = task.at(At(protocol, asked))
    assert found is not None
    return found


def below(frame: Any, n: int) -> Any:
    return frame["id"].astype(int) < n


# --- which samples -------------------------------------------------------------------------------


def test_only_samples_that_all_variants_answered_count(tmp_path: Path) -> None:
    """A sweep that was stopped has answered its last sample for some methods; this leaves other budgets as they are."""
    made = answers()
    made = made[~(at(made, asked=QUARTER, method="kivi") & ~below(made, 20))]
    task = task_of(made)
    assert {one.of[name].n for one in task.columns if one.at.asked == QUARTER for name in one.of} == {20}
    assert {one.of[name].n for one in task.columns if one.at.asked == EIGHTH for name in one.of} == {N}
    assert column(task, SHOWN, QUARTER).mean(FULL) == 1.0
    text = written(tmp_path, pd.concat([made, answers({FULL: (1, 1), "h2o": (1, 1)}, key="shared")]))
    assert f"question hidden: n = 20 at 1/4, n = {N} at 1/8, of 100 that the experiment asks. Not asked: H2O.\n" in text


def test_needles_of_which_only_the_first_depths_were_asked_say_nothing() -> None:
    made = answers(n=60, key="needle")
    assert {one.n for one in task_of(made).columns} == {60}
    stopped = made[~(at(made, protocol=HIDDEN, asked=EIGHTH, method="kvzip") & ~below(made, 19))]
    found = {one.at for one in task_of(stopped).columns}
    assert At(HIDDEN, EIGHTH) not in found and At(HIDDEN, QUARTER) in found


def test_other_methods_are_compared_with_the_first_ones_on_their_own_samples(tmp_path: Path) -> None:
    first = answers({FULL: (1.0, 1.0), "snapkv": (0.5, 0.4)})
    others = answers({"clusterkv": (0.9, 0.2)}, n=20, key="docs-others")
    others = others[others["asked"] == QUARTER]
    alone = others[others["protocol"] == HIDDEN].assign(asked="memory 0.5")
    made = pd.concat([first, others, alone])
    every = next(task for task in tasks_of(made) if task.asked.key == "docs-others")
    assert {*every.methods} == {"snapkv", "clusterkv"} and every.budgets == [QUARTER], "at no budget but the others'"
    assert column(every, SHOWN, QUARTER).n == 20, "on no samples but the others'"
    assert len(standings(tasks_of(made), SHOWN, QUARTER, True)) == 1, "docs/which-method.md"
    text = written(tmp_path, made)
    part = text.partition("## All methods at one budget")[2]
    assert "| ClusterKV | **90** (" in part and "| SnapKV | 60 (" in part and "experiment=evidence_others_docs" in part
    assert "ClusterKV" not in text.partition("## All methods at one budget")[0]


def test_a_method_with_few_answers_is_left_out_and_takes_none_from_the_others(tmp_path: Path) -> None:
    ns = {"full": 8, "quest": 8, "h2o": 5, "kvzip": 6}
    rows = [
        {"set": "helmet", "column": "icl", "method": method, "id": f"{i}", "score": 1.0,
         "asked": "" if method == FULL else "ratio 0.25"}
        for method, n in ns.items() for i in range(n)
    ]  # fmt: skip
    (only,) = task_of(frame_of(rows), "cited").columns
    assert {*only.of} == {"full", "quest", "kvzip"} and only.n == 6


def test_the_questions_on_one_context_are_one_sample(tmp_path: Path) -> None:
    """Twelve questions on three dialogues show no loss, however alike they are; on twelve dialogues they do."""
    rows = [
        {"set": "mrcr", "column": "1needle", "method": method, "id": f"1needle-{i // 4}/{i % 4}",
         "asked": "" if method == FULL else "ratio 0.25", "sample": f"1needle-{i // 4}", "comm_exact": "1/64",
         "measures.piece_nll": 0.5 + level + 0.01 * i}
        for method, level in (("full", 0), ("quest", 2)) for i in range(12)
    ]  # fmt: skip
    said = written(tmp_path / "one", frame_of(rows), "cited")
    assert "one of its kind, n = 3 |" in said and "one of its kind: too few to compare" in said
    assert "`comm=1/64`" in said and not losses(tasks_of(frame_of(rows), "cited"))
    apart = written(tmp_path / "other", frame_of([row | {"sample": row["id"]} for row in rows]), "cited")
    assert "n = 12 |" in apart and "Quest shown to lose" in apart


# --- differences and groups ------------------------------------------------------------------------


def test_a_difference_is_that_of_its_samples_and_turns_with_its_direction() -> None:
    task = task_of(answers())
    found, turned = (looked_at(one, task) for one in (FETCHED, replace(FETCHED, one="snapkv", other="pqcache")))
    ours, theirs = ([*values(column(task, HIDDEN, EIGHTH).of[name]).values()] for name in ("pqcache", "snapkv"))
    alone = paired(ours, theirs)
    assert found is not None and found.sign == 1 and found.family == 6, "four methods make six pairs"
    assert found.paired.mean == pytest.approx(alone.mean) and found.p >= alone.p
    assert turned is not None and turned.paired.mean == -alone.mean
    assert (turned.paired.wins, turned.paired.losses) == (alone.losses, alone.wins)


def test_what_cannot_be_told_apart_is_said_as_a_group(tmp_path: Path) -> None:
    assert column(task_of(answers()), HIDDEN, EIGHTH).groups == (["pqcache", "kivi", "kvzip"], ["snapkv"])
    text = written(tmp_path, answers())
    assert "hidden, 1/8: PQCache, KIVI, KVzip cannot be told apart from the best; one other is behind it." in text
    rows = list(csv.DictReader((tmp_path / "results" / "docs.csv").read_text().splitlines()))
    wanted = ("SnapKV", "0.125", SCOPES[HIDDEN])
    (one,) = [row for row in rows if (row["method"], row["share of bytes"], row["scope"]) == wanted]
    assert (one["best rank"], one["worst rank"], one["n"]) == ("4", "4", str(N))
    assert float(one["bytes held, share of full"]) == 0.125


def test_so_many_losses_are_shown_and_one_fewer_is_not(tmp_path: Path) -> None:
    levels = {FULL: (0.5, 0.5), **dict.fromkeys(("pqcache", "snapkv", "kvzip", "kivi"), (0.5, 0.5))}
    made = answers(levels, 40)
    task = task_of(made)
    least, here = task.least_lost(SHOWN), column(task, SHOWN, QUARTER)
    assert here.answered == 20 and task.has_room(here)
    for n, sign in ((least, -1), (least - 1, 0)):
        lost = at(made, protocol=SHOWN, asked=QUARTER, method="snapkv") & below(made, n)
        assert task_of(changed(made, lost, score=0.0)).against_full[here.at, "snapkv"].sign == sign
    assert "does worse on 9 of those and better on none" in written(tmp_path, answers(levels, 30))


def test_where_full_attention_is_at_chance_nothing_is_compared(tmp_path: Path) -> None:
    low = answers(dict.fromkeys(LEVELS, (0.2, 0.2)))
    text = written(tmp_path, low)
    assert "no comparison is possible" in text and "|" not in text.split("\n## ")[2]
    fixed = [Comparison("docs", SHOWN, "pqcache", "snapkv", "1/8")]
    assert outcomes(fixed, tasks_of(answers())) and not outcomes(fixed, tasks_of(low))
    assert "| too few answers |" in text


@pytest.mark.parametrize("key", [key for key, asked in page("cited").sets.items() if asked.chance])
def test_full_attention_that_may_be_guessing_is_compared_with_nobody(key: str) -> None:
    part, chance = next(iter(page("cited").sets[key].chance.items()))
    for level, is_at_chance in ((chance, True), (1.0, False)):
        rows = [
            {"set": key, "column": part, "method": method, "asked": asked, "id": f"{i}", "score": float(i < 10 * level)}
            for method, asked in (("full", ""), ("h2o", "ratio 0.25"))
            for i in range(10)
        ]
        (only,) = task_of(frame_of(rows), "cited").columns
        assert only.is_at_chance == is_at_chance


def test_a_loss_stands_as_what_is_lost_more_with_its_test(tmp_path: Path) -> None:
    full = [0.5 + 0.01 * i for i in range(12)]
    levels = {"full": (full, ""), "snapkv": ([2.5 + 0.02 * i for i in range(12)], ""), "pqcache": (full, "")}
    text = written(tmp_path, made_pages.losses(levels), "cited")
    assert "| Full | 0.56 |" in text and "| SnapKV | +2.06 (" in text and " * |" in text
    assert "- one of its kind: SnapKV shown to lose." in text


# --- names ---------------------------------------------------------------------------------------


def test_titles_are_the_methods_own() -> None:
    assert [title(name) for name in ("snapkv", "pqcache", "no_such_method")] == ["SnapKV", "PQCache", "no_such_method"]
    assert fetches("pqcache") and not fetches("snapkv") and not fetches("no_such_method")
    signs = page("which-method").more["needs"]
    assert needs("kvzip", signs) == "a second reading of the prompt" and needs("snapkv", signs) == "-"


def test_what_a_label_warns_of_stands_on_the_page_in_its_tables_and_under_its_figure(tmp_path: Path) -> None:
    text = written(tmp_path, labelled())
    assert "| KVzip, whole prompt (question hidden: KVzip) |" in text and "| KIVI 2 bit |" in text
    assert "hidden, 1/8: KVzip, PQCache cannot be told apart from the best; 2 others are behind it." in text
    assert "shown, 1/8: KVzip, whole prompt; PQCache cannot" in text, "its comma is none between two methods"
    assert "methods that fetch (PQCache, Quest (matched)) keep" in text
    assert "documents: KIVI 2 bit against Full" in text and "KVzip, whole prompt against SnapKV" not in text
    assert "| Quest |" not in text and "| KIVI |" not in text
    rows = list(csv.DictReader((tmp_path / "results" / "docs.csv").read_text().splitlines()))
    assert {(row["scope"], row["method"]) for row in rows} >= {
        (SCOPES[SHOWN], "KVzip, whole prompt"), (SCOPES[HIDDEN], "KVzip"), (SCOPES[HIDDEN], "Quest (matched)")
    }  # fmt: skip
    drawn = picture(task_of(labelled()))
    names = {text.get_text() for (ax,) in drawn.axes for text in ax.get_yticklabels()}
    assert names == {"PQCache", "KVzip", "KIVI 2 bit", "Quest (matched)"}
    assert any("Hollow marks of KVzip are KVzip, whole prompt" in note for note in drawn.notes)
    which = written(tmp_path, labelled(), page_name="which-method")
    assert "cannot be told: KVzip, whole prompt (0; " in which
    assert "| KVzip, whole prompt (question hidden: KVzip) | a second" in which and "| KIVI 2 bit |" in which


def test_what_a_label_warns_of_stands_in_the_tables_of_cited_tasks(tmp_path: Path) -> None:
    levels = {"full": (0.5, "Full"), "kvzip": (2.5, "KVzip (C), whole prompt"), "h2o": (2.6, "H2O (C)")}
    made = made_pages.losses({m: ([x + 0.01 * (i % 5) for i in range(12)], name) for m, (x, name) in levels.items()})
    text = written(tmp_path, made, "cited")
    assert "| KVzip (C), whole prompt | +2.00" in text and "| H2O (C) | +2.10" in text
    assert "- one of its kind: KVzip (C), whole prompt; H2O (C) shown to lose." in text
    written(tmp_path, labelled())
    which = written(tmp_path, labelled(), page_name="which-method")
    assert "| KVzip (C), whole prompt | 1 of 1 |" in which


def test_a_budget_that_was_asked_with_the_question_shown_alone_has_its_marks_hollow_beside_one_with_both() -> None:
    made = answers()
    task = task_of(made[~at(made, protocol=HIDDEN, asked=QUARTER)])
    assert [at_budget(task, asked)[-1].at.protocol for asked in task.budgets] == [SHOWN, HIDDEN]
    for (ax,), asked in zip(picture(task).axes, task.budgets, strict=True):
        marks = [line for line in ax.lines if line.get_marker() not in ("None", "", None)]
        hollow = [line for line in marks if line.get_markerfacecolor() == "none"]
        n = len(named(at_budget(task, asked)[-1]))
        assert (len(marks), len(hollow)) == ((n, n) if asked == QUARTER else (2 * n, n))


def test_figures_are_read_on_light_and_dark_pages() -> None:
    for path in (DOCS / "results").glob("*.svg"):
        text = path.read_text()
        assert "prefers-color-scheme: dark" in text and text.count("<style>") == 1
        assert "fill: #ffffff" not in text, "it has no ground of its own"


# --- comparisons fixed beforehand ------------------------------------------------------------------


def test_a_finding_is_left_out_unless_the_test_shows_it(tmp_path: Path) -> None:
    strong, weak = answers(), answers()[answers()["id"].astype(int) % 6 == 0]
    found = {(finding.of.at, finding.of.one, finding.of.other) for finding, *_ in told(strong)}
    assert (At(HIDDEN, EIGHTH), "snapkv", ITSELF) in found and (At(HIDDEN, EIGHTH), "pqcache", "snapkv") in found
    assert not told(weak), "four samples show nothing"
    text = written(tmp_path, strong)
    assert f"n = {N}, p = " in text and "experiment=evidence_docs" in text and "kind, chosen afterwards; " in text
    assert "No comparison is shown." in written(tmp_path / "weak", strong[below(strong, 3)])


def told(frame: Any) -> Any:
    return findings(page("results"), tasks_of(frame))


def test_a_finding_of_two_kinds_needs_both_and_the_opposite_of_the_second() -> None:
    finding = next(one for one in page("results").findings if one.is_turned)

    def asked(one: Comparison | None, ours: float, theirs: float) -> Any:
        assert one is not None
        levels = {("", FULL): 1.0, (one.at.asked, one.one): ours, (one.at.asked, one.other): theirs}
        return frame_of([
            {"set": one.set, "protocol": one.scope, "asked": share, "method": name, "id": f"{i}",
             "score": float(i / 60 < level), "bytes_resident_device": 1}
            for (share, name), level in levels.items() for i in range(60)
        ])  # fmt: skip

    first, same, other = (
        asked(finding.of, 0.9, 0.1), asked(finding.beside, 0.9, 0.1), asked(finding.beside, 0.1, 0.9)
    )  # fmt: skip

    def beside(is_turned: bool, *frames: Any) -> list[bool]:
        """Whether a finding is told, each with its second comparison or without."""
        of = replace(page("results"), findings=[replace(finding, is_turned=is_turned)])
        return [second is not None for _, _, second in findings(of, tasks_of(pd.concat(frames)))]

    assert beside(True, first, other) == [True] and beside(True, first, same) == beside(True, first) == []
    assert beside(False, first, same) == [True] and beside(False, first) == beside(False, first, other) == [False]


def test_samples_that_were_known_when_a_comparison_was_picked_do_not_test_it() -> None:
    """The known half would show a difference; the other half has none."""
    made = answers({FULL: (1, 1), "pqcache": (1, 1), "snapkv": (0, 0)}, 2 * N)
    made = made[made["asked"] != QUARTER]
    made = changed(made, ~below(made, N), score=1.0)
    picked, every = replace(FETCHED, seen=N), tasks_of(made)
    found = outcomes([picked], every)[picked]
    assert (found.paired.n, found.paired.mean, found.p) == (N, 0, 1)
    assert (everything := looked_at(picked, every[0])) is not None and everything.sign == 1
    assert not outcomes([replace(picked, seen=2 * N)], every), "nothing is left that could test it"


def test_samples_known_before_a_comparison_was_picked_stay_the_first_when_they_are_asked_in_another_order() -> None:
    made = answers()
    kept = made[below(made, 10)]
    turned = made.assign(id=[f"{(int(i) + 10) % N}" for i in made["id"]])
    turned["sample"] = turned["id"]
    assert turned["id"].iloc[0] == "10"
    found = fresh(replace(FETCHED, seen=10), tasks_of(renewed(kept, turned, "results")))
    assert found is not None and [one.sample for one in found[0].answers] == [f"{i}" for i in range(10, N)]


def test_the_correction_is_over_the_whole_list_whatever_was_asked_so_far() -> None:
    every = tasks_of(answers(n=60))
    one, other = FETCHED, replace(FETCHED, other=ITSELF)
    unasked = Comparison("sums", SHOWN, "pqcache", "snapkv", "1/4")
    few, all_three = outcomes([one, other], every), outcomes([one, other, unasked], every)
    assert [*all_three] == [one, other] and all_three[one].family == 3
    assert few[one].p == pytest.approx(2 * few[one].paired.p)
    assert all_three[one].p == pytest.approx(3 * few[one].paired.p)
    fixed = page("results").comparisons
    assert len({*fixed}) == len(fixed) == 19


def test_the_page_lists_every_fixed_comparison_and_what_came_of_it(tmp_path: Path) -> None:
    text = written(tmp_path, answers(n=100)).split("## What was tested")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "comparison" not in line]
    assert len(rows) == len(page("results").comparisons)
    (one,) = [row for row in rows if "PQCache against SnapKV, question hidden, 1/8" in row and "documents" in row]
    assert "| 41 | 59 | +" in one and one.endswith("| yes |")
    assert sum(row.endswith("| not yet |") for row in rows) == len(rows) - 4


# --- who is in front -----------------------------------------------------------------------------


def test_only_what_a_machine_can_run_competes() -> None:
    every = tasks_of(answers())
    with_host, alone = (standings(every, HIDDEN, EIGHTH, has_host) for has_host in (True, False))
    assert [*with_host] == [*alone] == ["copying"]
    by_host, near = with_host["copying"], alone["copying"]
    assert {*by_host} == {"kivi", "kvzip", "pqcache", "snapkv"} and {*near} == {"kivi", "kvzip", "snapkv"}
    assert not by_host["snapkv"].is_in_front and by_host["snapkv"].distance == pytest.approx(-80, abs=5)
    assert "kivi" in in_front(by_host) and "snapkv" not in in_front(by_host)


def test_a_method_that_is_best_of_what_may_run_is_in_front_though_another_beats_it(tmp_path: Path) -> None:
    made = answers({FULL: (0.9, 0.9), "pqcache": (0.9, 0.9), "snapkv": (0.5, 0.5), "tova": (0.1, 0.1)})
    assert not standings(tasks_of(made), SHOWN, QUARTER, True)["copying"]["snapkv"].is_in_front
    assert standings(tasks_of(made), SHOWN, QUARTER, False)["copying"]["snapkv"].is_in_front
    written(tmp_path, made)
    text = written(tmp_path, made, page_name="which-method")
    assert "| copying | PQCache (0; " in text and "| copying | SnapKV (-42; " in text


def test_a_skill_counts_once_and_a_method_is_in_front_where_none_of_its_tasks_shows_a_better_one(
    committed: tuple[Task, ...],
) -> None:
    """On the committed scores KVzip collapses on documents at 1/16, whatever three kinds of needles say."""
    found = standings(committed, SHOWN, "memory 1/16", False)
    assert not found["copying"]["kvzip"].is_in_front and found["copying"]["kvzip"].distance < -60
    assert found["finding"]["kvzip"].is_in_front
    docs, shared = (next(task for task in committed if task.asked.key == key) for key in ("docs", "shared"))
    assert found["copying"]["snapkv"].paired.n == column(docs, SHOWN, "memory 1/16").n
    hidden = standings(committed, HIDDEN, QUARTER, True)["copying"]  # documents, and eight questions on a context
    assert "adakv" not in hidden and "snapkv" in hidden  # which was asked one of the two
    both = [column(task, HIDDEN, QUARTER) for task in (docs, shared)]
    assert hidden["snapkv"].paired.n == sum(one.n for one in both)
    means = [100 * (one.mean("snapkv") - one.mean(FULL)) for one in both]
    assert hidden["snapkv"].distance == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize("level", [0.2, 0.5], ids=["cannot do", "does too seldom for half of it to be seen lost"])
def test_a_task_that_full_attention_hardly_does_counts_for_nobody(level: float) -> None:
    (task,) = every = tasks_of(answers({FULL: (level, level), "pqcache": (level, level), "snapkv": (0.1, 0.1)}))
    assert task.has_room(column(task, SHOWN, QUARTER)) == (level == 0.5)
    assert standings(every, SHOWN, QUARTER, True) == {} and budgets(every) == [QUARTER, EIGHTH]


def test_many_ties_are_counted_and_not_all_named(tmp_path: Path) -> None:
    names = ["snapkv", "tova", "kvzip", "kivi", "keydiff", "h2o"]
    made = answers({FULL: (0.9, 0.9), **dict.fromkeys(names, (0.9, 0.9))})
    written(tmp_path, made)
    assert len(names) > page("which-method").more["most"]
    assert f" and {len(names) - 1} more |" in written(tmp_path, made, page_name="which-method")


def test_losses_are_counted_where_full_attention_is_above_chance(tmp_path: Path) -> None:
    levels = {"full": 0.5, "oracle": 0.5, "snapkv": 2.5, "pqcache": 0.5}
    made = made_pages.losses({name: ([x + 0.01 * (i % 3) for i in range(20)], "") for name, x in levels.items()})
    (task,) = every = tasks_of(made, "cited")
    found = losses(every)
    assert {name: (n, len(lost)) for name, (n, lost) in found.items()} == {"pqcache": (1, 0), "snapkv": (1, 1)}
    written(tmp_path, made, "cited")
    written(tmp_path, answers())
    text = written(tmp_path, answers(), page_name="which-method")
    assert "| SnapKV | 1 of 1 | MRCR: one of its kind |" in text and "| PQCache | 0 of 1 | - |" in text
    assert "| Oracle |" not in text and row_name("snapkv", [task]) == label(task, task.columns[0].at, "snapkv")


# --- conditions of all runs ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_the_second_budget_stands_above_the_first_number(name: str) -> None:
    """All runs had `comm=1/64`, and no page said so."""
    heading, empty, *rest = (DOCS / name).read_text().splitlines()
    said = "\n".join(line for line in rest[: rest.index("")])
    assert heading.startswith("# ") and not empty
    assert all(line.startswith(">") for line in said.splitlines())
    assert "`comm=1/64`" in said and "KVzip" in said and "collapses at 1/16" in said


def test_prompts_have_the_tokens_that_the_experiment_asks(
    committed: tuple[Task, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages said 1,000, which is what prompt, template and answer may have together."""
    (needle,) = [task for task in committed if task.asked.key == "needle"]
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
    n, length = pages(Fraction(comm), prompt)
    assert length == matched_page_len(budget) and (n - 1) * length < prompt <= n * length
    found = second_budget({comm}, {"smollm2-135m"})
    assert found is not None and (found.heads, found.channels) == ({64}, n_components(Fraction(comm), 64))


def test_what_comm_left_is_said_of_the_task_with_the_fewest_pages(committed: tuple[Task, ...], tmp_path: Path) -> None:
    found = comms_of(committed)
    assert found is not None
    assert (found.pages, found.prompt, found.chosen, found.memory) == ((6, 140), 838, 1, QUARTER)
    said = "140 tokens where a prompt has 838: 6 pages, of which a head gets 1 at 1/4 of the bytes"
    assert said in (DOCS / "results.md").read_text()
    off = typed(load(DOCS / "results" / KEPT)).assign(comm_exact="0")
    assert second_budget({*off["comm_exact"]}, {"smollm2-135m"}) is None and second_budget({""}, {}) is None
    assert "Before a number" not in written(tmp_path, answers())
    other = second_budget({"1/64"}, {"another"})
    assert other is not None and not other.heads


def test_a_collapse_is_said_where_the_scores_show_one(tmp_path: Path) -> None:
    steady = answers({FULL: (0.9, 0.9), "snapkv": (0.5, 0.5), "kvzip": (0.8, 0.8)})
    assert collapses(tasks_of(steady)) == collapses(()) == []
    fallen = changed(steady, at(steady, protocol=HIDDEN, asked=EIGHTH, method="kvzip"), score=0.0)
    said = written(tmp_path, fallen).partition("How well")[0]
    assert "> - **KVzip collapses at 1/8 on documents**: it scores 0 with the question hidden (83 at 1/4;" in said
    assert "shown" not in said

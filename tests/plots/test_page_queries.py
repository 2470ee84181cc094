"""What pages ask of answers: who is compared with whom, on which samples, and what is said to be shown."""

import csv
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest
from matplotlib.text import Text

from kvbench.plots import style
from kvbench.plots.pages.asked import FLOOR, FULL, HIDDEN, SHOWN, At, page
from kvbench.plots.pages.columns import Task, settings, values
from kvbench.plots.pages.figure import SVG, heat, kept, save
from kvbench.plots.pages.methods import fetches, title
from kvbench.plots.pages.queries import Cost, break_even, in_front, of_skills, table_columns, unlike_floor
from kvbench.plots.pages.words import label, plain_name, standing
from kvbench.plots.stats import paired
from kvbench.tests.plots.made_pages import N, answers, at, changed, frame_of, task_of, tasks_of, written

QUARTER, EIGHTH = "memory 0.25", "memory 1/8"


def column(task: Task, protocol: str, asked: str) -> Any:
    found = task.at(At(protocol, asked))
    assert found is not None
    return found


def below(frame: Any, n: int) -> Any:
    return frame["id"].astype(int) < n


# --- which samples -------------------------------------------------------------------------------


def test_a_column_counts_when_all_of_its_samples_were_answered() -> None:
    made = answers()
    assert {one.n for one in task_of(made).columns} == {N}
    fewer = made[~(at(made, protocol=HIDDEN, asked="", method=FULL) & ~below(made, N - 1))]
    assert {one.at.protocol for one in task_of(fewer).columns} == {SHOWN}


def test_a_method_with_too_few_answers_is_left_out_and_takes_none_from_the_others(tmp_path: Path) -> None:
    made = answers()
    made = made[~(at(made, asked=QUARTER, method="kivi") & ~below(made, 20))]
    task = task_of(made)
    assert "kivi" not in column(task, SHOWN, QUARTER).of and column(task, SHOWN, QUARTER).n == N
    assert "kivi" in column(task, SHOWN, EIGHTH).of
    written(tmp_path, made)
    rows = csv.DictReader((tmp_path / "results" / "budgets.csv").read_text().splitlines())
    shares = {row["share of bytes"] for row in rows if row["method"] == "KIVI"}
    assert shares == {"0.125"}, "and none of its answers at a quarter stands in the table"


def test_the_questions_on_one_context_are_one_sample() -> None:
    rows = [
        {"set": "budgets", "method": method, "asked": asked, "id": f"{i}/{j}", "sample": f"{i}", "score": score}
        for method, asked, score in ((FULL, "", 1), ("snapkv", QUARTER, 0))
        for i in range(N)
        for j in range(4)
    ]
    (one,) = task_of(frame_of(rows)).columns
    assert one.n == N and one.mean("snapkv") == 0


# --- what is shown -------------------------------------------------------------------------------


def test_a_share_is_of_full_attentions_lead_over_random_tokens() -> None:
    one = column(task_of(answers()), HIDDEN, EIGHTH)
    mean = {name: sum(values(one.of[name]).values()) / N for name in one.of}
    for name in ("pqcache", "snapkv"):
        assert one.share(name) == pytest.approx((mean[name] - mean[FLOOR]) / (mean[FULL] - mean[FLOOR]))
        low, high = one.ends(name)
        assert low <= one.share(name) <= high
    assert one.share(FULL) == 1 and one.share(FLOOR) == 0


def test_without_random_tokens_or_without_a_lead_over_them_there_is_no_share() -> None:
    made = answers()
    without = column(task_of(made[made["method"] != FLOOR]), HIDDEN, EIGHTH)
    assert without.share("pqcache") is None and without.ends("pqcache") is None and not without.told_from_floor
    level = column(task_of(changed(made, at(made, method=FULL), score=0.0)), HIDDEN, EIGHTH)
    assert level.share("pqcache") is None and level.ends("pqcache") is None


def test_a_lead_whose_interval_holds_zero_gives_no_share_and_no_column_of_the_table() -> None:
    made = answers({FULL: (0.5, 0.5), "pqcache": (0.45, 0.45), "snapkv": (0.4, 0.4), FLOOR: (0.4, 0.4)})
    task = task_of(made)
    one = column(task, HIDDEN, EIGHTH)
    lead = paired([*values(one.full).values()], [*values(one.of[FLOOR]).values()]).difference
    assert one.mean(FULL) > one.mean(FLOOR) and lead is not None and lead.low < 0
    assert one.share("pqcache") is None and one.ends("pqcache") is None
    asked = replace(
        page("results"), more={"table": [{"set": "budgets", "scope": HIDDEN, "memory": "1/8", "words": ""}]}
    )
    assert table_columns(asked, [task_of(answers())]) and not table_columns(asked, [task])
    assert "not told from random tokens" in standing(one, True, task)


def test_what_cuts_while_it_answers_is_measured_from_what_drops_at_random_meanwhile() -> None:
    made = answers()
    made["method"] = made["method"].replace(FLOOR, "random_decode_unprotected")
    one = column(task_of(made), HIDDEN, EIGHTH)
    assert one.floor == "random_decode_unprotected" and one.share(one.floor) == 0
    assert {*unlike_floor(one)} == {"pqcache", "kvzip", "kivi"}
    assert one.floor not in in_front(one, has_host=True)


def test_who_is_told_from_random_tokens_is_corrected_over_all_of_a_column() -> None:
    one = column(task_of(answers()), HIDDEN, EIGHTH)
    assert {*unlike_floor(one)} == {"pqcache", "kvzip", "kivi"}, "SnapKV answers what random tokens do"
    assert {found.family for found in one.told_from_floor.values()} == {4}
    alone = paired([*values(one.of["pqcache"]).values()], [*values(one.of[FLOOR]).values()])
    assert one.told_from_floor["pqcache"].p == pytest.approx(4 * alone.p, rel=0.01)


def test_a_preset_beside_its_method_has_a_name_and_a_line_of_its_own(tmp_path: Path) -> None:
    levels = {FULL: (1, 1), "snapkv": (0.9, 0.2), "snapkv_paper": (0.9, 0.7), "quest_paper": (0.9, 0.7), FLOOR: (0, 0)}
    made = answers(levels, key="presets")
    made.loc[made["method"].str.startswith("snapkv"), "method_label"] = "SnapKV"
    made.loc[made["method"] == "quest_paper", "method_label"] = "Quest"
    task = task_of(made)
    names = {name: plain_name(task, name) for name in task.methods}
    assert names | {FLOOR: ""} == {
        "snapkv": "SnapKV", "snapkv_paper": "SnapKV (paper)", "quest_paper": "Quest", FLOOR: "",
    }  # fmt: skip
    one = column(task, HIDDEN, EIGHTH)
    assert label(task, one.at, "snapkv_paper") == "SnapKV (paper)"
    assert {pair: round(found.paired.mean, 3) for pair, found in settings(one).items()} == {
        ("snapkv", "snapkv_paper"): 0.5
    }
    written(tmp_path, pd.concat([answers(), made]))
    page = (tmp_path / "results" / "presets.md").read_text()
    assert re.search(r"^\| SnapKV \| `snapkv_paper` \| 20 .* \| 70 .* \| \+50 ", page, re.MULTILINE)


def test_what_takes_more_than_its_budget_says_so_and_does_not_compete(tmp_path: Path) -> None:
    levels = {FULL: (1, 1), "snapkv": (0.9, 0.2), "snapkv_paper": (0.9, 0.7), FLOOR: (0, 0)}
    made = answers(levels, key="presets").assign(within_budget="1")
    made = changed(made, at(made, method="snapkv_paper") & (made["id"] == "3"), within_budget=0)
    task = task_of(made)
    assert in_front(column(task, HIDDEN, EIGHTH), has_host=True) == ["snapkv"]
    texts = [text.get_text() for text in heat(task, "note").figure.findobj(Text)]
    assert "!70" in texts and "20" in texts and any("over its budget" in text for text in texts)
    written(tmp_path, pd.concat([answers(), made]).fillna(""))
    page = (tmp_path / "results" / "presets.md").read_text()
    assert "12 % and 12 %, over its budget |" in page


def test_only_what_a_machine_can_run_competes_and_random_tokens_never_do() -> None:
    task = task_of(answers({FULL: (1, 1), "pqcache": (0.95, 0.95), "snapkv": (0.5, 0.1), FLOOR: (0.1, 0.1)}))
    assert in_front(column(task, SHOWN, EIGHTH), has_host=True) == ["pqcache"]
    assert in_front(column(task, SHOWN, EIGHTH), has_host=False) == ["snapkv"]
    assert FLOOR not in in_front(column(task, HIDDEN, EIGHTH), has_host=False)


def test_a_tie_is_said_by_how_many_and_a_weak_task_says_nothing() -> None:
    task = task_of(answers())
    said = standing(column(task, HIDDEN, EIGHTH), True, task)
    assert re.fullmatch(r".+: -10 \(.* to .*\); 2 more cannot be told from it", said), said
    weak = task_of(answers({FULL: (0.2, 0.2), "snapkv": (0.1, 0.1), FLOOR: (0, 0)}))
    assert standing(column(weak, SHOWN, EIGHTH), True, weak) == standing(None, True, weak) == "-"


def test_a_skill_counts_once_however_many_sets_ask_for_it() -> None:
    every = [*tasks_of(answers()), *tasks_of(answers(n=200, key="docs"), "register")]
    assert {task.asked.skill for task in every} == {"copying"} and len(every) == 2
    assert {skill: task.asked.key for skill, task in of_skills(page("results"), every).items()} == {
        "copying": "budgets"
    }
    assert [(one.words, one.column.at) for one in table_columns(page("results"), every)] == [
        ("copying, hidden, 1/4", At(HIDDEN, QUARTER))
    ]


@pytest.mark.parametrize("twice", [0.9, 1.0, 1.01, 2.5, 3.0])
def test_reading_twice_breaks_even_where_so_many_readings_take_as_long(twice: float) -> None:
    n = break_even(Cost(twice, 1, 1), Cost(1.0, 1, 1))
    assert n * 1.0 >= twice > (n - 1) * 1.0 and n == ceil(twice)


def test_titles_are_the_methods_own() -> None:
    assert [title(name) for name in ("snapkv", "pqcache", "no_such_method")] == ["SnapKV", "PQCache", "no_such_method"]
    assert fetches("pqcache") and not fetches("snapkv") and not fetches("no_such_method")


# --- pictures ------------------------------------------------------------------------------------


def test_a_map_has_a_cell_for_each_answer_and_brackets_where_random_tokens_are_as_good() -> None:
    made = answers()
    task = task_of(made[~at(made, protocol=SHOWN, asked=EIGHTH, method="kivi")])
    ax = heat(task, "note").axes
    rows = [label.get_text() for label in ax.get_yticklabels()]
    cells = {(text.get_position()[0], rows[int(text.get_position()[1])]): text.get_text() for text in ax.texts}
    assert len(cells) == len(ax.patches) == 4 * 6 - 1 and rows[0] == "Full"
    last = len(task.columns) - 1
    assert cells[last, "SnapKV"] == "(10)" and cells[last, "PQCache"] == "80" and cells[last, "Random tokens"] == "10"
    darkness = {name: sum(ax.patches[i].get_facecolor()[:3]) for i, name in enumerate(rows)}
    assert darkness["Full"] < darkness["SnapKV"] < darkness["Random tokens"], "the question shown, 1/4"


def test_the_picture_has_a_panel_a_scope_and_a_mark_a_budget_shaded_by_time() -> None:
    task = task_of(answers())
    costs = {"pqcache": Cost(1, 1, 0.5), "snapkv": Cost(1, 1, 0.9)}
    first, second = kept(task, costs, "note").axes[0]
    assert [label.get_text() for label in first.get_yticklabels()][-1] == "PQCache", "the best on top"
    for ax, protocol in ((first, SHOWN), (second, HIDDEN)):
        marks = [line for line in ax.lines if len(line.get_xdata()) == 1]
        assert len(marks) == 2 * 4
        columns: list[Any] = [one for one in task.columns if one.at.protocol == protocol]
        wanted = {round(100 * one.share(name), 6) for one in columns for name in one.methods if name != FLOOR}
        assert {round(float(line.get_xdata()[0]), 6) for line in marks} == wanted
        assert len({str(line.get_color()) for line in marks}) == 3, "two times, and grey where none was measured"


def test_pictures_are_read_on_light_and_dark_pages(tmp_path: Path) -> None:
    with matplotlib.rc_context({**style.RC, **SVG}):
        save(kept(task_of(answers()), {}, "note"), tmp_path / "kept.svg")
        save(heat(task_of(answers()), "note"), tmp_path / "heat.svg", has_ground=True)
    plain, ground = ((tmp_path / f"{name}.svg").read_text() for name in ("kept", "heat"))
    assert "prefers-color-scheme: dark" in plain and plain.count("<style>") == 1 and "fill: #ffffff" not in plain
    assert "prefers-color-scheme" not in ground and "fill: #ffffff" in ground, "its cells have colours"


# --- the page ------------------------------------------------------------------------------------


def test_a_page_without_times_or_other_skills_says_nothing_of_them(tmp_path: Path) -> None:
    text = written(tmp_path, answers())
    assert "pays from" not in text and "| - | - | - |" in text and "understanding" not in text
    more = written(tmp_path, pd.concat([answers(), answers({FULL: (1, 1), "h2o": (1, 1)}, key="no_such_set")]))
    assert more == text

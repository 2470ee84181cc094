"""Answers of runs as pages keep them: of which set, under which names, and what later runs replace."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.plots.pages.asked import FULL, HIDDEN, SHOWN, page
from kvbench.plots.pages.columns import tasks
from kvbench.plots.pages.read import COLUMNS, keep, load, of_runs, renewed, rows_of, typed, whole
from kvbench.results import SampleRow, frame, read_config
from kvbench.results.frame import frame as frame_of_runs
from kvbench.tasks.oolong.made import KINDS
from kvbench.tests.plots import made_runs
from kvbench.tests.plots.made_pages import LEVELS, N, answers, at, changed, tasks_of

PLACE = {"protocol": HIDDEN, "asked": "memory 1/8", "method": "snapkv"}


def same(one: Any, other: Any) -> bool:
    """Whether two frames have the same rows, in whatever order."""
    sides = (whole(side).apply(tuple, axis=1) for side in (one, other))
    a, b = (sorted(side) for side in sides)
    return a == b


# --- from runs -----------------------------------------------------------------------------------


def test_answers_are_kept_by_sample_whether_a_run_ended_or_not(tmp_path: Path) -> None:
    for method, memory, label in (("full", None, ""), ("snapkv", "1/4", "SnapKV (C)")):
        more = {"fields": {"variant": label}} if label else {}
        rows = [{"score": i / 4, "ledger": {"bytes_resident_device": 50.0}} | more for i in range(4)]
        folder, _ = made_runs.write(
            tmp_path / "runs", method, "needle", rows, memory=memory, ratio=None,
            task_params={"style": "own", "needles": 1},
        )  # fmt: skip
    (folder / "result.json").unlink()
    found = of_runs(tmp_path / "runs", "results")
    places = {*zip(found["protocol"], found["asked"], found["method"], strict=True)}
    assert places == {(SHOWN, "", "full"), (SHOWN, "memory 0.25", "snapkv")}
    assert {*found["method_label"]} == {"Full", "SnapKV (C)"}, "as samples say it, or else result.json"
    assert [*found["score"][:4]] == ["0", "0.25", "0.5", "0.75"] and {*found["set"]} == {"needle"}
    assert not [*rows_of(page("results").sets["docs"], read_config(folder), [], "")]
    keep(tmp_path / "kept.csv.gz", found)
    assert same(load(tmp_path / "kept.csv.gz"), found)
    before = (tmp_path / "kept.csv.gz").read_bytes()
    keep(tmp_path / "kept.csv.gz", found)
    assert (tmp_path / "kept.csv.gz").read_bytes() == before


def test_columns_are_those_of_a_frame_of_runs(tmp_path: Path) -> None:
    """Of a finished run the two agree, name by name and value by value."""
    asked = {"style": "own", "needles": 1}
    for method, memory in (("full", None), ("snapkv", "1/8")):
        rows = [{"score": i / 4, "generated_tokens": 5 + i, "fields": {"variant": method}} for i in range(4)]
        made_runs.write(tmp_path, method, "needle", rows, memory=memory, ratio=None, task_params=asked)
    ours, theirs = typed(of_runs(tmp_path, "results")), frame_of_runs(tmp_path)
    own = {"set", "column"}
    missing = {*COLUMNS} - own - {*frame.declared()} - {name for name in COLUMNS if name.startswith("measures.")}
    assert not missing
    theirs = theirs.sort_values(["method", "id"], ignore_index=True)
    ours = ours.sort_values(["method", "id"], ignore_index=True)
    for name in ("model", "protocol", "method", "id", "sample", "comm_exact"):
        assert [*ours[name]] == [*theirs[name].astype(str)], name
    for name in ("score", "prompt_tokens", "generated_tokens", "bytes_resident_device"):
        assert [*ours[name]] == [*theirs[name].astype(float)], name
    is_full = theirs["method"] == FULL
    assert [*ours["asked"][~is_full]] == [*theirs["asked"][~is_full]] and {*ours["asked"][is_full]} == {""}


def test_a_budget_in_tokens_is_of_draws_whose_mean_counts_with_their_lengths(tmp_path: Path) -> None:
    asked = page("results").sets["generating"]
    rows = [
        {"score": float(i < 5 or draw), "generated_tokens": 100 + 100 * draw,
         "fields": {"sample": f"q{i}", "draw": draw, "cut_off": bool(draw)}}
        for i in range(40) for draw in (0, 1)
    ]  # fmt: skip
    for method, budget in (("full", None), ("rkv", 96)):
        made_runs.write(tmp_path, method, asked.task, rows, budget=budget, ratio=None, task_params=dict(asked.where))
        made_runs.write(tmp_path, method, asked.task, rows, budget=budget, ratio=None, task_params={"thinking": False})
    (task,) = tasks_of(of_runs(tmp_path, "results"))
    (column,) = task.columns
    assert (task.asked.key, column.n, column.at.asked) == ("generating", 40, "96 tokens")
    assert column.mean("rkv") == pytest.approx((5 + 0.5 * 35) / 40)
    assert (column.cost("rkv", "generated_tokens"), column.cost("rkv", "cut_off")) == (150, 0.5)


def test_bits_that_a_byte_budget_chose_stand_behind_the_label(tmp_path: Path) -> None:
    """KIVI at a quarter of the bytes has 2 bits, which nobody asked for by name; short prompts may have fewer."""
    for method, memory, names in (
        ("full", None, ["Full"] * 4),
        ("pqcache", "1/4", [*["KIVI 4 bit"] * 3, "KIVI 2 bit"]),
    ):
        rows = [{"score": i / 4, "fields": {"variant": name}} for i, name in enumerate(names)]
        asked = {"style": "own", "needles": 1}
        made_runs.write(tmp_path, method, "needle", rows, memory=memory, ratio=None, task_params=asked)
    assert {*of_runs(tmp_path, "results")["method_label"]} == {"Full", "KIVI 4 bit or KIVI 2 bit"}


def test_prompts_and_comm_are_kept(tmp_path: Path) -> None:
    params = {"style": "own", "needles": 1}
    for method, memory in (("full", None), ("quest", "1/4")):
        rows = [{"prompt_tokens": 838 + i, "ledger": {"bytes_resident_device": 50.0}} for i in range(60)]
        made_runs.write(tmp_path / "runs", method, "needle", rows, memory=memory, ratio=None, task_params=params)
    keep(tmp_path / "kept.csv.gz", of_runs(tmp_path / "runs", "results"))
    (task,) = tasks(page("results"), typed(load(tmp_path / "kept.csv.gz")))
    assert task.prompts == [838 + i for i in range(60)] and task.comms == {"1/64"}


def test_other_methods_are_a_set_of_their_own(tmp_path: Path) -> None:
    for method, levels in {"full": 4, "snapkv": 2, "clusterkv": 3}.items():
        rows = [{"score": float(i < levels), "ledger": {"bytes_resident_device": 50.0}} for i in range(4)]
        memory = None if method == "full" else "1/4"
        made_runs.write(tmp_path, method, "longbench", rows, memory=memory, ratio=None)
    found = of_runs(tmp_path, "results")
    assert {*found["method"][found["set"] == "docs"]} == {"full", "snapkv"}
    assert {*found["method"][found["set"] == "docs-others"]} == {"clusterkv"}


def test_a_loss_is_kept_under_the_name_of_its_measure_and_no_score_beside_it(tmp_path: Path) -> None:
    asked = page("cited").sets["mrcr"]
    rows = [
        {"score": 0.5, "fields": {"dataset": "1needle", "measures": {"piece_nll": 0.25 + i, "other": 9.0}}}
        for i in range(3)
    ]
    for method in ("full", "snapkv"):
        made_runs.write(tmp_path, method, asked.task, rows, ratio="1/4", task_params={"source": "embedded"})
    found = of_runs(tmp_path, "cited")
    assert [*found["measures.piece_nll"]] == ["0.25", "1.25", "2.25"] * 2 and {*found["score"]} == {""}
    assert {*found["asked"]} == {"", "ratio 0.25"} and {*found["column"]} == {"1needle"}


def test_a_question_is_of_its_dialogue_and_a_list_is_one_answer() -> None:
    def rows(*fields: dict[str, Any]) -> list[SampleRow]:
        return [made_runs.sample(i, score=i / 4, fields=each) for i, each in enumerate(fields)]

    config = {
        "model": {"name": "m"}, "method": {"name": "full"}, "task": {"name": "oolong", "params": {"source": "embedded"}}
    }  # fmt: skip
    lists = rows(*({"kind": kind, "sample": f"drawn-{i // 2}"} for i, kind in enumerate(["user", "date"] * 2)))
    found = [*rows_of(page("cited").sets["oolong"], config, lists, "Full")]
    assert [(row["column"], row["id"], row["sample"], row["score"]) for row in found] == [
        ("named", "drawn-0", "drawn-0", "0.125"), ("named", "drawn-1", "drawn-1", "0.625"),
    ]  # fmt: skip
    asked = page("register").sets["shared"]
    questions = rows(*({"dataset": "docs_qa", "sample": f"docs_qa-3{i // 2}/{i % 2}", "turn": 1} for i in range(4)))
    found = [*rows_of(asked, config | {"task": {"name": asked.task, "params": {}}}, questions, "Full")]
    assert [(row["id"], row["sample"]) for row in found] == [
        (f"sample-{i}", f"docs_qa-3{i // 2}") for i in range(4)
    ] and {row["protocol"] for row in found} == {HIDDEN}  # fmt: skip


def test_every_kind_of_question_on_a_list_and_every_age_has_a_column() -> None:
    sets = page("cited").sets
    assert {sets["oolong"].part({"kind": kind}) for kind in KINDS} == {*sets["oolong"].columns}
    ages = [sets["airline"].part({"age": age}) for age in (1, 500, 501, 10**6, None)]
    assert ages == ["recent", "recent", "older", "older", None]


def test_recorded_traces_are_another_set_than_drawn_ones() -> None:
    agents, airline = (page("cited").sets[key] for key in ("agents", "airline"))
    for source, wanted in (("embedded", [True, False]), ("local", [False, True]), ("auto", [False, True])):
        task = {"name": "agent_forced", "params": {"source": source}}
        config = {"task": task, "method": {"name": "snapkv"}, "model": {"name": "m"}}
        assert [one.has(config) for one in (agents, airline)] == wanted


def test_answers_without_a_sample_are_refused() -> None:
    frame = answers()
    for without in (frame.drop(columns="sample"), frame.assign(sample="")):
        with pytest.raises(ValueError, match="without a sample"):
            typed(without)


def test_an_empty_name_is_no_missing_value_and_a_missing_number_is_one(tmp_path: Path) -> None:
    row = {"set": "docs", "model": "m", "protocol": SHOWN, "asked": "", "method": FULL, "method_label": "NA"}
    more = {"id": "a-1", "sample": "a", "score": "0.5", "index_share": "", "bytes_resident_device": "1e6"}
    keep(tmp_path / "x.csv.gz", pd.DataFrame([row | more]))
    (found,) = typed(load(tmp_path / "x.csv.gz")).to_dict("records")
    assert (found["asked"], found["method_label"], found["score"]) == ("", "NA", 0.5)
    assert found["bytes_resident_device"] == 1e6 and found["index_share"] != found["index_share"]


# --- later runs ----------------------------------------------------------------------------------


def test_runs_of_one_method_at_one_budget_replace_nothing_else() -> None:
    """Of other methods, scopes, budgets, tasks and models everything stays."""
    every = answers()
    others = pd.concat([answers(key="shared"), every.assign(model="other"), every[~at(every, **PLACE)]])
    mine = every[at(every, **PLACE)]
    again = mine.assign(score="0.5")
    found = renewed(pd.concat([others, mine]), again, "results")
    assert same(found, pd.concat([others, again]))


def test_a_place_of_which_one_sample_is_asked_again_is_of_the_later_runs_alone() -> None:
    every = answers()
    again = every[at(every, **PLACE) & (every["id"].astype(int) >= 20)].assign(score="0.5")
    found = renewed(every, again, "results")
    assert same(found[at(found, **PLACE)], again)
    (task,) = tasks_of(found)
    few = {(column.at.protocol, column.at.asked): column.n for column in task.columns if column.n < N}
    assert few == {(HIDDEN, "memory 1/8"): N - 20}


def test_samples_that_are_not_kept_are_added_behind_those_that_are() -> None:
    """A run that went on elsewhere: what was known first stays first, whichever half that is."""
    every = answers()
    is_first = every["id"].astype(int) < 10
    for kept, later in ((every[is_first], every[~is_first]), (every[~is_first], every[is_first])):
        found = renewed(kept, later, "results")
        assert same(found, every)
        known = [*kept["id"][at(kept, method=FULL, protocol=SHOWN)]]
        column = tasks_of(found)[0].columns[0]
        assert [one.sample for one in column.full.answers][: len(known)] == known


def test_what_is_kept_does_not_depend_on_how_many_runs_came_at_once() -> None:
    every, by_method = answers(), answers()[:0]
    for method in reversed(LEVELS):
        by_method = renewed(by_method, every[every["method"] == method], "results")
    assert by_method.equals(renewed(every[:0], every, "results")) and by_method.equals(renewed(every, every, "results"))


def test_a_later_answer_takes_the_place_of_the_same_one() -> None:
    every = answers()
    again = changed(every, at(every, **PLACE), score="0.25")
    found = renewed(every, pd.concat([every, again]), "results")
    assert {*found["score"][at(found, **PLACE)]} == {"0.25"} and len(found) == len(every)
